"""gem gate as a command: what it writes, refuses and exits with; the threshold's way from the declaration."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gate_documents import SUITE, cases, edited, patch_file, timed, write_rounds
from result_rows import row

from gem.cli import main
from gem.errors import RequestError
from gem.harness.gate import compare
from gem.harness.gate_pairs import read_pairs
from gem.harness.results import Row

Rows = Callable[[int], list[Row]]


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")


def same(number: int) -> list[Row]:
    return cases(number, side=1)


def ran(*words: str | Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main(["gate", *map(str, words)])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out + err


# ---- runs one after the other


def test_one_document_a_side_is_honest_about_what_it_cannot_see(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow: Rows = lambda n: cases(n, {"two": 1.1, "three": 2.0}, side=1)  # noqa: E731
    base, new = write_rounds(tmp_path, {"base": cases, "new": slow}, 1, paired=False)
    code, said = ran(base / "000.json", new / "000.json", capsys=capsys)
    assert code == 1
    assert "1 worse, 2 ambiguous" in said
    assert "a drift between both runs is not seen" in said
    assert "1 round: tells only what is beyond" in said
    # And where something else ran, a difference says nothing at all.
    patch_file(new / "000.json", lambda data: data["environment"].update(busy_cores=1.5))
    code, said = ran(base, new, capsys=capsys)
    assert code == 0
    assert "3 ambiguous" in said
    assert "other work kept 1.5 cores busy" in said
    assert ran(base, new, "--strict", capsys=capsys)[0] == 1


# ---- the command


def test_the_command_writes_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow: Rows = lambda n: cases(n, {"two": 1.3}, side=1)  # noqa: E731
    base, new = write_rounds(tmp_path, {"base": cases, "new": slow}, 12)
    files = {name: tmp_path / "out" / name for name in ("gate.md", "gate.json", "suspects")}
    told = ["--markdown", files["gate.md"], "--json", files["gate.json"], "--suspects", files["suspects"]]
    code, said = ran(base, new, *told, capsys=capsys)
    assert code == 1
    assert "gate: FAILED: 3 rows over 12 rounds: 1 worse, 2 same" in said
    page = files["gate.md"].read_text()
    assert page.startswith("### ❌ gate: FAILED")
    assert re.search(r"\| jagged_attention two \| torch fwd \| ms .* ❌ worse \|", page)
    assert "<details><summary>2 rows are the same</summary>" in page
    data = json.loads(files["gate.json"].read_text())
    assert data["passed"] is False
    assert [one["verdict"] for one in data["rows"]].count("worse") == 1
    assert files["suspects"].read_text() == f"{SUITE}::two\n"
    assert ran(base, base, capsys=capsys)[0] == 0


def test_a_reason_cannot_break_the_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nasty = {"status": "error", "reason": "a | b\n<img src=x> `c` @someone", "value": None, "samples": []}
    base, new = write_rounds(tmp_path, {"base": cases, "new": lambda n: edited(same(n), "two", **nasty)})
    ran(base, new, "--markdown", tmp_path / "gate.md", capsys=capsys)
    (line,) = [line for line in (tmp_path / "gate.md").read_text().splitlines() if "failing |" in line]
    assert len(re.findall(r"(?<!\\)\|", line)) == 11
    assert "<img" not in line
    assert "@someone" not in line


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data["environment"].update(torch="2.11.0"), "torch: '2.13.0+cpu' against '2.11.0'"),
        (lambda data: data["environment"].update(device="cuda"), "device: 'cpu' against 'cuda'"),
        (lambda data: data["environment"].update(driver="580.1"), "driver: '570.2' against '580.1'"),
        (lambda data: data["environment"].update(power_limit_w=350.0), "power_limit_w: 700.0 against 350.0"),
        (lambda data: data["environment"].update(cpu_capability="AVX2"), "cpu_capability: 'AVX512' against 'AVX2'"),
        (lambda data: data["environment"].update(git_commit="c" * 40), f"commit of the change: '{'n' * 40}' against"),
        (lambda data: data["request"].update(batch=8), "request.batch: None against 8"),
        (lambda data: data.update(fixtures={"f": {"tokens": 1}}), "fixture f: {'tokens': 2} against {'tokens': 1}"),
        (lambda data: data["request"].update(interrupted=True), "003.json: of a run that was interrupted"),
    ],
)
def test_documents_that_cannot_be_compared_are_refused(
    change: Callable[[dict[str, Any]], None], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, new = write_rounds(tmp_path, {"base": cases, "new": same})
    machine = {"driver": "570.2", "power_limit_w": 700.0, "cpu_capability": "AVX512"}
    patch_file(base / "000.json", lambda data: data.update(fixtures={"f": {"tokens": 2}}))
    patch_file(base / "000.json", lambda data: data["environment"].update(machine))
    patch_file(new / "003.json", change)
    code, text = ran(base, new, capsys=capsys)
    assert code == 2
    assert said in text
    if "interrupted" not in said:
        code, text = ran(base, new, "--allow-different", capsys=capsys)
        assert code == 0
        assert f"DIFFERENT ON BOTH SIDES: {said}" in text


@pytest.mark.parametrize("side", ["base", "new"])
@pytest.mark.parametrize(
    "first", [{"status": "fail", "reason": "wrong", "value": None, "samples": []}, {"value": 100.0}]
)
def test_two_rows_of_one_thing_are_refused(
    side: str, first: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A good row behind a bad one of the same thing hides nothing."""
    write_rounds(tmp_path, {"base": cases, "new": same})

    def spoil(data: dict[str, Any]) -> None:
        data["rows"].insert(0, {**data["rows"][1], **first})

    patch_file(tmp_path / side / "002.json", spoil)
    for more in ([], ["--allow-different"]):
        code, text = ran(tmp_path / "base", tmp_path / "new", *more, capsys=capsys)
        assert code == 2
        assert f"{side}/002.json: more than one row of {SUITE}::two torch forward ms; accepted: one" in text
        assert len(text.strip().splitlines()) == 1


def test_fresh_rounds_are_of_the_same_machine_commit_and_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the documents of the screen must be among themselves; a round that differs from the other fresh ones too."""
    screen = write_rounds(tmp_path / "screen", {"base": cases, "new": same})
    changes: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
        "device": (lambda data: data["environment"].update(device="cuda"), "device: 'cpu' against 'cuda'"),
        "torch": (lambda data: data["environment"].update(torch="2.11.0"), "torch: '2.13.0+cpu' against '2.11.0'"),
        "options": (lambda data: data["request"].update(batch=8), "request.batch: None against 8"),
        "commit": (lambda data: data["environment"].update(git_commit="c" * 40), "commit of the {side}: '"),
    }
    for name, (change, said) in changes.items():
        for sides, rounds in ((("base", "new"), range(2)), (("new",), range(1, 2))):  # all of them, or one alone
            fresh = write_rounds(tmp_path / f"{name}{len(sides)}", {"base": cases, "new": same}, 2)
            for side in sides:
                for number in rounds:
                    patch_file(fresh[side == "new"] / f"{number:03d}.json", change)
            told = said.format(side="base" if "base" in sides else "change")
            code, text = ran(*screen, "--confirm", *fresh, capsys=capsys)
            assert code == 2, (name, sides)
            assert told in text
            assert len(text.strip().splitlines()) == 1
            text = ran(*screen, "--confirm", *fresh, "--allow-different", capsys=capsys)[1]
            assert f"DIFFERENT ON BOTH SIDES: {told}" in text


@pytest.mark.parametrize("side", ["base", "new"])
@pytest.mark.parametrize("left", [{}, {"git_commit": "a" * 40}])
def test_documents_that_say_nothing_of_their_machine_are_refused(
    side: str, left: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, new = write_rounds(tmp_path, {"base": cases, "new": same})
    for file in (tmp_path / side).iterdir():
        patch_file(file, lambda data: data.update(environment=left))
    code, text = ran(base, new, capsys=capsys)
    assert code == 2
    said = f"no environment: 6 of 6 documents of the {'change' if side == 'new' else side} do not say"
    assert said in text
    code, text = ran(base, new, "--allow-different", capsys=capsys)
    assert code == 0
    assert f"DIFFERENT ON BOTH SIDES: {said}" in text


def test_another_host_or_commit_is_no_difference(tmp_path: Path) -> None:
    base, new = write_rounds(tmp_path, {"base": cases, "new": same})
    patch_file(new / "000.json", lambda data: data["environment"].update(host="other", settings={"GEM_COMMIT": "x"}))
    patch_file(base / "000.json", lambda data: data["environment"].update(settings={}))
    assert read_pairs(base, new)[1] == []


def test_one_row_that_hardly_moved_is_one_row_and_moved_by_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row("one", suite=SUITE, metric="ne", value=0.8, better="lower")]
    base, new = write_rounds(tmp_path, {"base": lambda _: rows, "new": lambda _: edited(rows, "one", value=0.79999)})
    code, text = ran(base, new, "--markdown", tmp_path / "gate.md", capsys=capsys)
    assert code == 0 and "gate: passed: 1 row over 6 rounds: 1 same" in text
    page = (tmp_path / "gate.md").read_text()
    assert "+0.0 %" in text + page and "-0.0 %" not in text + page


def test_settings_that_differ_are_told_one_by_one(tmp_path: Path) -> None:
    """Not those that torchrun sets, or that say where a cache lies; of the others each in full."""
    base, new = write_rounds(tmp_path, {"base": cases, "new": same}, 1)
    caches = {"TORCHINDUCTOR_CACHE_DIR": "/a/cache", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    patch_file(base / "000.json", lambda data: data["environment"].update(settings={"OMP_NUM_THREADS": "1"}))
    patch_file(new / "000.json", lambda data: data["environment"].update(settings={"OMP_NUM_THREADS": "1"} | caches))
    assert read_pairs(base, new)[1] == []
    patch_file(new / "000.json", lambda data: data["environment"].update(settings={"GEM_X": "2", "CXX": "g++"}))
    assert read_pairs(base, new, allow_different=True)[1] == [
        "settings.OMP_NUM_THREADS: '1' against not set",
        "settings.GEM_X: not set against '2'",
        "settings.CXX: not set against 'g++'",
    ]


def test_wrong_requests_are_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, new = write_rounds(tmp_path, {"base": cases, "new": same})
    (tmp_path / "none").mkdir()
    (tmp_path / "bad.json").write_text("{")
    for words, said in (
        ((tmp_path / "gone", new), "no such file"),
        ((tmp_path / "none", new), "no *.json in it"),
        ((base / "000.json", new), "has 1 documents"),
        ((tmp_path / "bad.json", new / "000.json"), "accepted: a JSON document"),
        ((base, new, "--declared", tmp_path / "gone"), "cannot be read"),
        ((base, new, "--markdown", tmp_path), "is a directory"),
    ):
        code, text = ran(*words, capsys=capsys)
        assert code == 2, words
        assert said in text
        assert len(text.strip().splitlines()) == 1
    with pytest.raises(RequestError, match="no round"):
        compare([])


def test_a_reader_who_has_had_enough_does_not_change_the_verdict(tmp_path: Path) -> None:
    base, new = write_rounds(tmp_path, {"base": cases, "new": same})
    command = [sys.executable, "-m", "gem", "gate", str(base), str(new)]
    read, write = os.pipe()
    os.close(read)
    try:
        assert subprocess.run(command, stdout=write, stderr=subprocess.DEVNULL).returncode == 0
    finally:
        os.close(write)


def test_a_list_of_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, new = write_rounds(tmp_path, {"base": cases, "new": same}, 3)
    listed = [",".join(str(folder / f"00{n}.json") for n in range(3)) for folder in (base, new)]
    code, text = ran(*listed, capsys=capsys)
    assert code == 0
    assert "over 3 rounds" in text


# ---- the threshold's way from the declaration to the verdict

DECLARED = """
[suite]
kind = "throughput"
subject = "gdpa"
{defaults}
[[case]]
name = "one"
fixture = "cpu_self_s050"
{gate}
"""


def declare(folder: Path, gate: str, defaults: str = "") -> Path:
    (folder / "mine.toml").write_text(DECLARED.format(gate=gate, defaults=defaults))
    return folder / "mine.toml"


def test_a_declared_threshold_reaches_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def mine(factor: float) -> Rows:
        return lambda n: [timed("one", 10.0 * factor, seed=n).model_copy(update={"suite": "mine.toml"})]

    base, new = write_rounds(tmp_path, {"base": mine(1.0), "new": mine(1.08)}, 12)
    for gate, defaults, code in (
        ("gate = { threshold = 0.2 }", "", 0),
        ("[case.gate]\nthreshold = 0.03", "", 1),
        ("", "[suite.defaults]\ngate = { threshold = 0.2 }", 0),
        ("", "", 1),
    ):
        declare(tmp_path, gate, defaults)
        found, text = ran(base, new, capsys=capsys)
        assert found == code, (gate, defaults, text)
    declare(tmp_path, "gate = { threshold = 0.2 }")
    assert "threshold 20.0%" in ran(base, new, capsys=capsys)[1]


def test_the_verdict_says_whose_thresholds_it_went_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And --declarations, not the directory that the command runs in, when it is given."""
    monkeypatch.chdir(tmp_path)

    def mine(factor: float) -> Rows:
        fields = {"suite": "mine.toml"}
        return lambda n: [timed(x, 10.0 * factor, seed=n).model_copy(update=fields) for x in ("one", "two")]

    base, new = write_rounds(tmp_path, {"base": mine(1.0), "new": mine(1.08)}, 12)
    for folder, threshold in (("strict", 0.03), ("lenient", 0.2)):
        (tmp_path / folder).mkdir()
        declare(tmp_path / folder, f"gate = {{ threshold = {threshold} }}")
    declare(tmp_path, "gate = { threshold = 0.5 }")
    out = {"--json": tmp_path / "out" / "gate.json", "--markdown": tmp_path / "out" / "gate.md"}
    written = [word for pair in out.items() for word in pair]
    for place, threshold, verdict, whose in (
        ([], 0.5, "same", "the current directory"),
        (["--declarations", tmp_path / "strict"], 0.03, "worse", "the checkout strict"),
        (["--declarations", "lenient"], 0.2, "same", "the checkout lenient"),
    ):
        text = ran(base, new, *place, *written, capsys=capsys)[1]
        data = json.loads(out["--json"].read_text())
        found = {one["case"]: (one["threshold"], one["threshold_of"], one["verdict"]) for one in data["rows"]}
        assert found == {"one": (threshold, "declaration", verdict), "two": (0.05, "no declaration", "worse")}
        assert data["declarations"] == f"declarations of {whose}"
        said = f"thresholds: declarations of {whose}: 1 of its own, 1 not declared there (5%)"
        assert said in text
        assert said in out["--markdown"].read_text()
        assert str(tmp_path) not in out["--json"].read_text() + out["--markdown"].read_text()
        assert "no declaration: threshold 5.0%" in text
    (tmp_path / "empty").mkdir()
    assert (
        "thresholds: no declarations read: 2 not declared"
        in ran(base, new, "--declarations", "empty", capsys=capsys)[1]
    )
    code, text = ran(base, new, "--declarations", tmp_path / "gone", capsys=capsys)
    assert (code, "no directory; accepted: a checkout" in text) == (2, True)


def test_an_id_is_a_whole_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder's name may have a space."""
    there = "my suites/mine.toml"
    rows: Rows = lambda n: [timed("one", seed=n).model_copy(update={"suite": there})]  # noqa: E731
    base, new = write_rounds(tmp_path, {"base": rows, "new": rows})
    (tmp_path / "ids").write_text(f"{there}::one\r\n\n")
    assert ran(base, new, "--declared", tmp_path / "ids", capsys=capsys)[0] == 0
    (tmp_path / "ids").write_text(f"{there}::one\n{there}::gone\n")
    code, text = ran(base, new, "--declared", tmp_path / "ids", capsys=capsys)
    assert code == 1
    assert "1 missing, 1 same" in text


@pytest.mark.parametrize(
    ("gate", "said"),
    [
        ("gate = { threshold = 0 }", "gate.threshold = 0; accepted: greater than or equal to 0.001"),
        ("gate = { threshold = 3.0 }", "gate.threshold = 3.0; accepted: less than or equal to 1"),
        ("gate = { threshold = '5%' }", "gate.threshold = '5%'; accepted: a valid number"),
        ("gate = { treshold = 0.1 }", "unknown field 'treshold'"),
        ("gate = 0.05", "gate = 0.05"),
    ],
)
def test_a_wrong_threshold_names_file_case_field_and_value(
    gate: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = declare(tmp_path, gate)
    with pytest.raises(SystemExit) as stop:
        main(["list", str(file)])
    text = capsys.readouterr().err
    assert stop.value.code == 2
    assert f"{file}: case 'one': " in text
    assert said in text
