"""Declarations: what a suite file may say; each mistake is one line naming file, case, field and what is accepted."""

import pickle
from pathlib import Path

import pytest

from gem.errors import RequestError
from gem.harness import names
from gem.harness.case import Case, ops_only
from gem.harness.expect import Expectation, parse_expectation
from gem.harness.measured_params import MEASURED
from gem.harness.needs import Facts, check_needs, importable, parse_needs
from gem.harness.params import SUBJECTS, GdpaParams
from gem.harness.select import compile_expression
from gem.harness.suites import fixture_names, load_suite, load_suites, suite_label

HEAD = '[suite]\nkind = "throughput"\nsubject = "gdpa"\n'
CASE = '[[case]]\nname = "one"\nfixture = "cpu_self_s050"\n'


def write(folder: Path, text: str, name: str = "suite.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def load(folder: Path, text: str) -> list[Case]:
    """The cases of ops that a suite file of this text declares."""
    return ops_only(load_suites([write(folder, text)]))


def error_of(folder: Path, text: str) -> str:
    """The one line that loading `text` ends in."""
    path = write(folder, text)
    with pytest.raises(RequestError) as caught:
        load_suites([path])
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def test_a_full_case_says_what_it_said(tmp_path: Path) -> None:
    text = (
        HEAD
        + CASE
        + 'params = { heads = 2, head_dim = 128, dtype = "bfloat16", window = [256, 0], qk_scale = 2 }\n'
        + 'directions = ["forward"]\nimpls = ["torch"]\npeers = ["flex", "padded"]\nneeds = "cuda:sm90, triton"\n'
        + 'timeout_s = 5\n[case.expect]\n"forward.ratio_to.flex" = ">= 3.4"\n"forward.roofline" = "<0.85"\n'
    )
    (case,) = load(tmp_path, text)
    assert (case.name, case.kind, case.subject, case.fixture) == ("one", "throughput", "gdpa", "cpu_self_s050")
    assert isinstance(case.params, GdpaParams)
    assert (case.params.heads, case.params.head_dim, case.params.dtype) == (2, 128, "bfloat16")
    assert (case.params.window, case.params.qk_scale, case.params.causal) == ((256, 0), 2.0, False)
    assert (case.directions, case.impls, case.peers) == (["forward"], ["torch"], ["flex", "padded"])
    assert (case.needs, case.timeout_s) == ("cuda:sm90, triton", 5.0)
    assert case.expectations == [
        Expectation("forward", "ratio_to.flex", ">=", 3.4),
        Expectation("forward", "roofline", "<", 0.85),
    ]
    assert pickle.loads(pickle.dumps(case)) == case  # cases travel to worker processes


def test_defaults_are_merged_and_the_case_wins(tmp_path: Path) -> None:
    text = (
        HEAD
        + '[suite.defaults]\nfixture = "pma_q32"\npeers = ["flex"]\nparams = { heads = 2, activation = "silu" }\n'
        + '[[case]]\nname = "a"\n[[case]]\nname = "b"\nfixture = "longtail"\npeers = []\nparams = { heads = 8 }\n'
    )
    a, b = load(tmp_path, text)
    assert (a.fixture, a.peers, a.params.heads) == ("pma_q32", ["flex"], 2)
    assert (b.fixture, b.peers, b.params.heads) == ("longtail", [], 8)
    assert isinstance(b.params, GdpaParams) and b.params.activation == "silu"


def test_a_matrix_is_every_combination_in_order(tmp_path: Path) -> None:
    text = (
        HEAD
        + '[[case]]\nname = "m"\nparams = { heads = 2 }\n'
        + 'matrix = { fixture = ["pma_q32", "longtail"], causal = [false, true], window = [[4, 0]] }\n'
    )
    cases = load(tmp_path, text)
    assert [case.name for case in cases] == [
        "m-pma_q32-no_causal-4_0",
        "m-pma_q32-causal-4_0",
        "m-longtail-no_causal-4_0",
        "m-longtail-causal-4_0",
    ]
    assert [(case.fixture, getattr(case.params, "causal")) for case in cases][1:3] == [  # noqa: B009 - gdpa has it
        ("pma_q32", True),
        ("longtail", False),
    ]
    assert all(case.params.heads == 2 for case in cases)


WRONG = {
    "kind": ('[suite]\nkind = "troughput"\nsubject = "gdpa"\n' + CASE, "unknown kind 'troughput'", "'throughput'?"),
    "kind of another subject": (
        '[suite]\nkind = "scaling"\nsubject = "gdpa"\n' + CASE,
        "kind = 'scaling'",
        "throughput",
    ),
    "kind without runner": ('[suite]\nkind = "claim"\nsubject = "gdpa"\n' + CASE, "no runner yet", "correctness"),
    "subject": ('[suite]\nkind = "throughput"\nsubject = "gpda"\n' + CASE, "unknown subject 'gpda'", "'gdpa'?"),
    "no subject": ('[suite]\nkind = "throughput"\n' + CASE, "missing field 'subject'", "[suite]"),
    "suite field": (HEAD + 'owner = "me"\n' + CASE, "unknown field 'owner'", "description"),
    "table": (HEAD + CASE + '[[cases]]\nname = "x"\n', "unknown table [cases]", "'case'?"),
    "no suite": (CASE, "no [suite] table", "kind and subject"),
    "no case": (HEAD, "no cases", "[[case]]"),
    "field": (HEAD + CASE + "param = { heads = 4 }\n", "case 'one': unknown field 'param'", "'params'?"),
    "default": (HEAD + '[suite.defaults]\npeer = ["flex"]\n' + CASE, "unknown field 'peer'", "'peers'?"),
    "param": (HEAD + CASE + "params = { head = 4 }\n", "case 'one': unknown param 'head' of gdpa", "'heads'?"),
    "param of another subject": (
        HEAD + CASE + 'params = { bias = "time" }\n',
        "unknown param 'bias' of gdpa",
        "qk_scale",
    ),
    "param type": (HEAD + CASE + 'params = { heads = "4" }\n', "case 'one': params.heads = '4'", "a valid integer"),
    "bool for a number": (HEAD + CASE + "params = { heads = true }\n", "params.heads = True", "a valid integer"),
    "param range": (HEAD + CASE + "params = { heads = 0 }\n", "params.heads = 0", "greater than or equal to 1"),
    "param name": (HEAD + CASE + 'params = { dtype = "float8" }\n', "params.dtype = 'float8'", "bfloat16"),
    "window": (HEAD + CASE + "params = { window = [-2, 0] }\n", "params.window.0 = -2", "greater than or equal to -1"),
    "params no table": (HEAD + CASE + "params = 3\n", "case 'one': params = 3", "a table"),
    "direction": (HEAD + CASE + 'directions = ["forwards"]\n', "directions.0 = 'forwards'", "'forward'?"),
    "no direction": (HEAD + CASE + "directions = []\n", "directions = []", "at least 1 item"),
    "direction twice": (HEAD + CASE + 'directions = ["forward", "forward"]\n', "names 'forward' twice", "each once"),
    "implementation": (HEAD + CASE + 'impls = ["tritn"]\n', "unknown implementation 'tritn'", "'triton'?"),
    "peer": (HEAD + CASE + 'peers = ["flexx"]\n', "unknown peer 'flexx'", "'flex'?"),
    "needs": (HEAD + CASE + 'needs = "cuda:h100"\n', "unknown need 'cuda:h100'", "cuda:smNN"),
    "fixture": (HEAD + '[[case]]\nname = "one"\nfixture = "longtale"\n', "unknown fixture 'longtale'", "'longtail'?"),
    "fixture path": (
        HEAD + '[[case]]\nname = "one"\nfixture = "my/own.toml"\n',
        "unknown fixture 'my/own.toml'",
        "path",
    ),
    "fixture misspelt": (
        HEAD + '[[case]]\nname = "one"\nfixtur = "longtail"\n',
        "unknown field 'fixtur'",
        "'fixture'?",
    ),
    "no fixture": (HEAD + '[[case]]\nname = "one"\n', "case 'one': missing field 'fixture'", ""),
    "no name": (HEAD + '[[case]]\nfixture = "longtail"\n', "case number 1: missing field 'name'", ""),
    "name": (HEAD + '[[case]]\nname = "a b"\nfixture = "longtail"\n', "name = 'a b'", "letters, digits"),
    "name twice": (HEAD + CASE + CASE, "duplicate case name 'one' (cases number 1 and 2)", "once a file"),
    "timeout": (HEAD + CASE + "timeout_s = 0\n", "timeout_s = 0", "greater than 0"),
    "expect key": (HEAD + CASE + '[case.expect]\n"roofline" = ">= 1"\n', "expect key 'roofline'", "forward|backward"),
    "expect metric": (HEAD + CASE + '[case.expect]\n"forward.rooflin" = ">= 1"\n', "'rooflin'", "'roofline'?"),
    "expect bound": (HEAD + CASE + '[case.expect]\n"forward.ms" = "=> 1"\n', "'forward.ms' = '=> 1'", ">= 1.5"),
    "expect type": (HEAD + CASE + '[case.expect]\n"forward.ms" = 1.5\n', "expect.forward.ms = 1.5", "a valid string"),
    "expect of no peer": (
        HEAD + CASE + 'peers = ["flex"]\n[case.expect]\n"forward.ratio_to.nested" = "> 1"\n',
        "'nested' is not among the case's peers",
        "flex",
    ),
    "expect of no direction": (
        HEAD + CASE + 'directions = ["forward"]\n[case.expect]\n"backward.ms" = "< 1"\n',
        "the case runs only forward",
        "backward.ms",
    ),
    "matrix param": (HEAD + CASE + "matrix = { head = [1] }\n", "matrix: unknown param 'head'", "'heads'?"),
    "matrix values": (HEAD + CASE + "matrix = { heads = 4 }\n", "matrix.heads = 4", "a list"),
    "matrix twice": (
        HEAD + CASE + "params = { heads = 1 }\nmatrix = { heads = [4] }\n",
        "'heads' is in matrix and in the case",
        "one of them",
    ),
    "matrix value": (HEAD + CASE + "matrix = { heads = [4, -1] }\n", "params.heads = -1", "case 'one'"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_one_line(mistake: str, tmp_path: Path) -> None:
    text, what, accepted = WRONG[mistake]
    message = error_of(tmp_path, text)
    assert what in message and accepted in message, message


def test_a_peer_of_another_subject_is_refused(tmp_path: Path) -> None:
    text = (HEAD + CASE).replace('"gdpa"', '"jagged_attention"') + 'peers = ["padded"]\n'
    assert "'padded' does not compute jagged_attention" in error_of(tmp_path, text)


def test_block_attention_with_rope_wants_an_even_head_dim(tmp_path: Path) -> None:
    text = (HEAD + CASE).replace('"gdpa"', '"block_attention"') + "params = { head_dim = 33 }\n"
    assert "head_dim = 33 with rope" in error_of(tmp_path, text)


def test_bad_toml_is_named_by_line_and_column(tmp_path: Path) -> None:
    assert error_of(tmp_path, HEAD + '[[case]]\nname = "a" b\n').startswith(":5:12: bad TOML: ")
    # Where the file ends inside a string, tomllib tells no position: the last line is it.
    assert error_of(tmp_path, HEAD + '[[case]]\nname = "a').startswith(":5: bad TOML: ")
    path = tmp_path / "suite.toml"
    path.write_bytes(b"[suite]\nkind = '\xff'\n")
    with pytest.raises(RequestError, match=r"suite\.toml:2: not UTF-8"):
        load_suites([path])


def test_wrong_paths_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError, match="empty: a directory without suites"):
        load_suites([tmp_path / "empty"])
    with pytest.raises(RequestError, match="nowhere: no such file or directory"):
        load_suites([tmp_path / "nowhere"])
    path = write(tmp_path, HEAD + CASE)
    with pytest.raises(RequestError, match=r"no case 'oen'; accepted: one; did you mean 'one'\?"):
        load_suites([f"{path}::oen"])
    with pytest.raises(RequestError, match="no case selected: none of 1 case ids matches -k 'other'"):
        load_suites([path], "other")


def test_paths_choose_files_directories_and_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = '[[case]]\nname = "two"\nfixture = "longtail"\n'
    write(tmp_path, HEAD + CASE + two, "b.toml")
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep", HEAD + CASE, "a.toml")
    (tmp_path / ".hidden").mkdir()
    write(tmp_path / ".hidden", "not a suite", "c.toml")
    monkeypatch.chdir(tmp_path)
    everything = [case.id for case in load_suites(["."])]
    assert everything == ["b.toml::one", "b.toml::two", "deep/a.toml::one"]
    assert [case.id for case in load_suites(["b.toml::two", "deep"])] == ["b.toml::two", "deep/a.toml::one"]
    assert len(load_suites(["b.toml", "./b.toml", tmp_path / "b.toml"])) == 2  # one file, named thrice
    assert [case.id for case in load_suites(["."], "ONE and not deep")] == ["b.toml::one"]


def test_the_projects_suites_have_one_label_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "checkout" / "suites"
    (home / "throughput").mkdir(parents=True)
    file = write(home / "throughput", HEAD + CASE, "gdpa.toml")
    monkeypatch.setattr("gem.paths.suites_dir", lambda: home)
    (tmp_path / "elsewhere").mkdir()
    for folder in (tmp_path, home, tmp_path / "elsewhere"):
        monkeypatch.chdir(folder)
        assert suite_label(file).as_posix() == "suites/throughput/gdpa.toml"
        for given in ("suites/throughput", "throughput/gdpa", "suites/throughput/gdpa.toml::one", file):
            assert [case.id for case in load_suites([given])] == ["suites/throughput/gdpa.toml::one"]
    assert len(load_suites([])) == 1


def test_a_profile_of_ones_own_is_found_beside_the_suite(tmp_path: Path) -> None:
    write(tmp_path, 'description = "mine"\npattern = "self"\n[q]\nkind = "explicit"\nvalues = [3, 0]\n', "mine.toml")
    (tmp_path / "s").mkdir()
    suite = write(tmp_path / "s", HEAD + '[[case]]\nname = "one"\nfixture = "../mine.toml"\n')
    (case,) = ops_only(load_suites([suite]))
    assert Path(case.fixture).resolve() == tmp_path / "mine.toml"


def test_a_thousand_cases_load(tmp_path: Path) -> None:
    cases = "".join(
        f'[[case]]\nname = "c{n}"\nfixture = "longtail"\nparams = {{ heads = 2 }}\npeers = ["flex"]\n'
        f'[case.expect]\n"forward.ratio_to.flex" = ">= {n}.5"\n'
        for n in range(1000)
    )
    loaded = load_suite(write(tmp_path, HEAD + cases))
    assert len({case.id for case in loaded}) == 1000
    assert loaded[999].expectations[0].bound == 999.5


def test_every_bound_keeps_its_direction() -> None:
    for op, kept in ((">=", {1.0, 2.0}), (">", {2.0}), ("<=", {0.0, 1.0}), ("<", {0.0}), ("==", {1.0})):
        bound = parse_expectation("backward.ms", f"{op} 1.0")
        assert {value for value in (0.0, 1.0, 2.0) if bound.met(value)} == kept
        assert not bound.met(None) and not bound.met(float("nan"))  # no value keeps no bound
    assert parse_expectation("forward.ms", "<=1e-3").bound == 1e-3


def test_every_declared_name_has_code_behind_it() -> None:
    """The lists that declarations are checked by, without torch, are those of the code that runs them."""
    from gem import dispatch
    from gem.harness import peers

    racers = {name for subject in MEASURED.values() for name in subject.racers} - {"gem"}
    assert set(names.PEERS) == set(peers.REGISTRY) | racers
    assert set(names.IMPLEMENTATIONS) == set(dispatch.IMPLEMENTATIONS)
    assert set(SUBJECTS) == set(dispatch.OPS)


def test_names_agree_with_each_other() -> None:
    assert all(set(peer.subjects) <= set(SUBJECTS) | set(MEASURED) for peer in names.PEERS.values())
    for peer in names.PEERS.values():
        assert peer.needs is None or parse_needs(peer.needs)
    assert {"longtail", "cpu_self_s050", "pma_q32"} <= fixture_names()
    assert names.metric("ratio_to.fa4") and not names.metric("ratio_to.")
    # A ratio is peer's time / subject's time: more is better, as for a rate; a time is the reverse.
    assert [names.metric(m).better for m in ("ratio_to.x", "tflops", "ms", "max_error")] == [  # type: ignore[union-attr]
        "higher",
        "higher",
        "lower",
        "lower",
    ]


@pytest.mark.parametrize(
    ("expression", "kept"),
    [
        ("gdpa", ["gdpa-x", "gdpa-y"]),
        ("not gdpa", ["block-x"]),
        ("gdpa and x or block", ["gdpa-x", "block-x"]),  # and binds tighter than or
        ("gdpa and (x or block)", ["gdpa-x"]),
        ("not x and not y", []),
        ("GDPA-Y", ["gdpa-y"]),
        ("not not block", ["block-x"]),
    ],
)
def test_expressions_choose_as_pytest_does(expression: str, kept: list[str]) -> None:
    ids = ["gdpa-x", "gdpa-y", "block-x"]
    assert list(filter(compile_expression(expression), ids)) == kept


@pytest.mark.parametrize(
    ("expression", "column"),
    [("", 1), ("a and", 6), ("(a", 3), ("a)", 2), ("a b", 3), ("or a", 1), ("a and and b", 7), ("a & b", 3)],
)
def test_a_wrong_expression_is_named_by_its_column(expression: str, column: int) -> None:
    with pytest.raises(RequestError, match=f"at column {column};"):
        compile_expression(expression)


def test_needs_give_reasons() -> None:
    cpu = Facts(no_cuda="no GPU here", no_compiler="no g++", importable=lambda package: package == "there")
    h200 = Facts(device="cuda", capabilities=(90,), triton=True, compiler="/usr/bin/g++")
    assert check_needs(None, cpu) is None
    assert check_needs("cpu", cpu) is None and check_needs("cuda:sm90, triton, compiler", h200) is None
    assert check_needs("cuda:sm80", h200) is None  # newer will do
    assert check_needs("cuda:sm100", h200) == "needs cuda:sm100: the GPU is sm90"
    assert check_needs("cuda:sm90", cpu) == "needs cuda:sm90: no GPU here"
    assert check_needs("compiler", cpu) == "needs compiler: no g++"
    assert check_needs("triton", cpu) == "needs triton: triton is not installed"
    assert check_needs("package:there", cpu) is None
    assert "absent is not installed" in str(check_needs("package:there, package:absent", cpu))
    assert "--device cpu" in str(check_needs("cpu", h200))
    on_cpu = Facts(device="cpu", capabilities=(90,))
    assert "--device cuda" in str(check_needs("cuda", on_cpu))


def test_packages_are_found_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    for package in ("outer", "outer/inner"):
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert importable("outer") and importable("outer.inner")
    assert not importable("outer.other") and not importable("outer.inner.deep") and not importable("no_such_thing.x")
