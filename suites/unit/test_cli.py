"""The command line: what it prints, writes and exits with, with a stand-in for the runner."""

import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from result_rows import ROWS, row

import gem
from gem.cli import main
from gem.harness.events import Event
from gem.harness.results import Document, Row, read_document

ROOT = Path(gem.__file__).resolve().parents[1]
SUITE = """
[suite]
kind = "throughput"
subject = "gdpa"
[[case]]
name = "one"
fixture = "cpu_self_s050"
peers = ["flex"]
[[case]]
name = "two"
fixture = "pma_q32"
params = { heads = 2, causal = true, window = [256, 0] }
needs = "cuda:sm990"
"""


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test runners that share out tests tell their processes that 80 columns are all there is."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite of two cases in the working directory; files are asked for by relative names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text(SUITE)
    return tmp_path / "s.toml"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Callable[..., types.ModuleType]:
    """Puts a stand-in for the runner in place, that returns the given rows; `seen` keeps what it was asked."""

    def install(rows: list[Row], interrupt_after: str | None = None) -> types.ModuleType:
        module: Any = types.ModuleType("gem.harness.runner")
        module.seen = []

        def run(cases: list[Any], *, options: Any, on_event: Callable[[Event], None], journal: Any) -> Document:
            module.seen.append((cases, options))
            on_event(Event("run_started", total=len(cases)))
            for index, case in enumerate(cases):
                on_event(Event("case_started", case.id, index, len(cases)))
                on_event(Event("step", case.id, index, len(cases), "checking torch"))
                of_case = tuple(one for one in rows if one.case_id == case.id)
                on_event(Event("case_finished", case.id, index, len(cases), rows=of_case))
                if case.name == interrupt_after:
                    raise KeyboardInterrupt
            return Document(rows=rows, environment={"device": "cpu", "cpu": "Z80", "threads": 1, "torch": "2.13"})

        module.run = run
        module.RunOptions = lambda **given: types.SimpleNamespace(**given)
        monkeypatch.setitem(sys.modules, "gem.harness.runner", module)
        return module

    return install


def call(*arguments: object) -> int:
    """The exit code of the command line in this process."""
    with pytest.raises(SystemExit) as caught:
        main([str(one) for one in arguments])
    code = caught.value.code
    assert isinstance(code, int)
    return code


def gem_process(*arguments: object, **given: Any) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "gem", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60, **given)


# ---- wrong requests

JOURNALS = "*.partial are journals of unfinished runs; accepted: a name without it"
WRONG = {
    "path": (["run", "nowhere"], "nowhere: no such file or directory"),
    "directory": (["list", "empty"], "empty: a directory without suites"),
    "toml": (["run", "bad.toml"], "bad.toml:1:7: bad TOML"),
    "subject": (["run", "subject.toml"], "unknown subject 'gpda'; accepted: jagged_attention, gdpa, block_attention"),
    "field": (["list", "field.toml"], "case 'one': unknown field 'fixtur'"),
    "no case": (["run", "s.toml", "-k", "nothing"], "no case selected: none of 2 case ids matches -k 'nothing'"),
    "expression": (["list", "s.toml", "-k", "a and"], "-k 'a and': the expression ends too early at column 6"),
    "peer": (["run", "s.toml", "--peers", "flex,fex"], "--peers: unknown peer 'fex'"),
    "device": (["run", "s.toml", "--device", "tpu"], "unknown device 'tpu'; accepted: auto, cpu, cuda"),
    "budget": (["run", "s.toml", "--budget", "0"], "--budget 0; accepted: seconds above 0"),
    "budget nan": (["run", "s.toml", "--budget", "nan"], "--budget nan"),
    "batch": (["run", "s.toml", "--batch", "0"], "'--batch'"),
    "column": (["run", "s.toml", "--column", "user"], "--column 'user' without --lengths"),
    "journal json": (["run", "s.toml", "--json", "r.partial"], f"r.partial: {JOURNALS}"),
    "journal html": (["run", "s.toml", "--json", "r", "--html", "r.partial"], f"r.partial: {JOURNALS}"),
    "journal link": (["run", "s.toml", "--json", "link.json"], f"link.json: {JOURNALS}"),
    "journal train": (["train", "none.toml", "--json", "r.partial"], f"r.partial: {JOURNALS}"),
    "journal waterfall": (["train", "none.toml", "--html", "r.partial"], f"r.partial: {JOURNALS}"),
    "journal report": (["report", "r.json", "-o", "r.json.partial"], f"r.json.partial: {JOURNALS}"),
    "journal verdict": (["gate", "r.json", "r.json", "--json", "r.partial"], f"r.partial: {JOURNALS}"),
    "journal summary": (["gate", "r.json", "r.json", "--markdown", "r.partial"], f"r.partial: {JOURNALS}"),
    "journal suspects": (["gate", "r.json", "r.json", "--suspects", "r.partial"], f"r.partial: {JOURNALS}"),
    "resume": (["run", "s.toml", "--resume"], "--resume without --json; accepted: the --json FILE of the unfinished"),
    "json": (["run", "s.toml", "--json", "s.toml/r.json"], "s.toml/r.json: cannot be written"),
    "html": (["run", "s.toml", "--html", "empty"], "empty: is a directory"),
    "option": (["run", "--jsn", "x"], "No such option: --jsn"),
    "command": (["rnu"], "No such command 'rnu'"),
    "document": (["report", "s.toml"], "s.toml: document: Invalid JSON"),
    "no document": (["report", "none.json"], "none.json: cannot be read"),
    "lengths": (["run", "s.toml", "--lengths", "none.csv"], "none.csv"),
    "doctor": (["doctor", "nowhere"], "nowhere: no such file or directory"),
}


@pytest.fixture
def wrong_files(suite: Path) -> Path:
    """Files that the wrong requests name."""
    (suite.parent / "empty").mkdir()
    (suite.parent / "bad.toml").write_text("[suite\n")
    (suite.parent / "r.json").write_text(Document(rows=ROWS).model_dump_json())
    (suite.parent / "link.json").symlink_to("other.json.partial")
    (suite.parent / "subject.toml").write_text(SUITE.replace('"gdpa"', '"gpda"'))
    (suite.parent / "field.toml").write_text(SUITE.replace("fixture =", "fixtur ="))
    return suite


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_request_is_one_line_and_exit_2(
    mistake: str, wrong_files: Path, runner: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = WRONG[mistake]
    module = runner(ROWS)
    assert call(*arguments) == 2
    out, err = capsys.readouterr()
    assert err.startswith("gem: error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert message in err and not out and not module.seen
    assert not list(wrong_files.parent.glob("*.partial"))


@pytest.mark.parametrize("mistake", ["toml", "peer", "option"])
def test_a_wrong_request_of_the_real_command(mistake: str, wrong_files: Path) -> None:
    arguments, message = WRONG[mistake]
    found = gem_process(*arguments, cwd=wrong_files.parent)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("gem: error: ") and found.stderr.count("\n") == 1 and message in found.stderr


# ---- list


def test_list_shows_every_case_and_what_is_lacking(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("list", "s.toml") == 0
    out = capsys.readouterr().out
    assert "s.toml · throughput of gdpa · 2 cases" in out
    one, two = (next(line for line in out.splitlines() if f"│{name} " in line) for name in ("one", "two"))
    assert "cpu_self_s050 · B " in one and "flex" in one and "yes" in one and "H 4 D 64 float32 " in one
    assert "pma_q32 · B 1024" in two and "H 2 D 64 float32 causal window 256,0" in two
    assert "no: needs cuda:sm990" in two
    assert out.rstrip().endswith("2 cases, 1 of them can run here on cpu")


def test_listing_a_thousand_cases_imports_no_torch(tmp_path: Path) -> None:
    cases = "".join(f'[[case]]\nname = "c{n}"\nfixture = "longtail"\n' for n in range(1000))
    (tmp_path / "s.toml").write_text('[suite]\nkind = "correctness"\nsubject = "gdpa"\n' + cases)
    code = (
        "import sys\nfrom gem.cli import main\n"
        "try: main(['list', 's.toml'])\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "False\n")
    assert "│c999 " in found.stdout and "1000 cases, 1000 of them" in found.stdout


def test_a_closed_pipe_is_no_traceback(suite: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"{sys.executable} -m gem list s.toml | true"
    found = subprocess.run(command, shell=True, cwd=suite.parent, env=environment, capture_output=True, text=True)
    assert "Traceback" not in found.stderr


# ---- doctor


def test_doctor_says_what_runs_and_why_the_rest_does_not(suite: Path) -> None:
    found = gem_process("doctor", "s.toml", cwd=suite.parent)
    assert found.returncode == 0, found.stderr
    for text in ("torch", "triton", "threads", "compiler", "jagged_attention", "block_attention", "sdpa_padded", "fa4"):
        assert text in found.stdout
    assert "no: needs cuda:sm90" in found.stdout
    assert "2 declared cases: 1 can run here, 1 would be skipped" in found.stdout
    assert "1 × needs cuda:sm990: " in found.stdout


# ---- run


def test_run_shows_everything_and_writes_the_files(
    suite: Path, runner: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    module = runner(ROWS)
    assert call("run", "s.toml", "--json", "out/r.json", "--html", "out/r.html") == 0
    out, err = capsys.readouterr()
    for text in ("1.00 ± 0.20", "123", "81%", "2.50", "2.5e-07", "× flex", "oom", "out of memory: [malloc] failed"):
        assert text in out
    assert "needs cuda:sm990: no GPU" in out and "Z80, 1 threads" in out
    assert out.rstrip().endswith("1 passed, 0 failed, 0 errored, 1 skipped; 1 of the peers' rows failed or errored")
    assert "[1/2] s.toml::one pass" in err and "[2/2] s.toml::two skipped" in err
    document = read_document("out/r.json")
    assert document.rows == ROWS
    assert document.request["argv"] == ["run", "s.toml", "--json", "out/r.json", "--html", "out/r.html"]
    assert "out of memory: [malloc] failed" in Path("out/r.html").read_text()
    cases, options = module.seen[0]
    assert [case.id for case in cases] == ["s.toml::one", "s.toml::two"]
    wanted = {"device": "cpu", "peers": None, "impls": None, "lengths": None, "batch": None, "budget_s": 3.0}
    assert vars(options) == wanted


def test_options_reach_the_runner(suite: Path, runner: Any) -> None:
    module = runner(ROWS[:1])
    Path("lengths.csv").write_text("length\n3\n0\n12\n")
    options = "--peers none --batch 7 --budget 0.5 --device cpu --lengths lengths.csv --column length"
    call("run", "s.toml::one", *options.split())
    call("run", "s.toml::one", "--peers", "flex, nested,flex")
    first, second = (options for _, options in module.seen)
    assert (first.peers, first.batch, first.budget_s, first.device) == ([], 7, 0.5, "cpu")
    assert list(first.lengths.lengths) == [3, 0, 12]
    assert second.peers == ["flex", "nested"]


@pytest.mark.parametrize(
    ("rows", "code", "summary"),
    [
        ([row(), row("two")], 0, "2 passed, 0 failed, 0 errored, 0 skipped"),
        ([row(), row("two", status="fail", reason="bound")], 1, "1 passed, 1 failed, 0 errored, 0 skipped"),
        ([row(), row("two", status="error")], 1, "1 passed, 0 failed, 1 errored, 0 skipped"),
        ([row(), row("two", status="oom")], 1, "1 passed, 0 failed, 1 errored, 0 skipped"),
        ([row(), row("two", status="skipped")], 0, "1 passed, 0 failed, 0 errored, 1 skipped"),
        ([row()], 1, "1 passed, 0 failed, 1 errored, 0 skipped"),  # nothing is known of the second
        ([], 1, "0 passed, 0 failed, 2 errored, 0 skipped"),
    ],
)
def test_exit_codes(
    rows: list[Row], code: int, summary: str, suite: Path, runner: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    runner(rows)
    assert call("run", "s.toml") == code
    assert capsys.readouterr().out.rstrip().endswith(summary)


def test_an_interrupted_run_keeps_what_is_finished(
    suite: Path, runner: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    runner(ROWS, interrupt_after="one")
    assert call("run", "s.toml", "--json", "r.json") == 130
    document = read_document("r.json")
    assert document.rows == ROWS[:7] and document.request["interrupted"] is True
    assert document.environment["device"] == "cpu"
    out, err = capsys.readouterr()
    assert "gem: interrupted: 1 of 2 cases finished" in err
    assert "1 passed, 0 failed, 0 errored, 0 skipped" in out


def test_ctrl_c_of_the_real_command(suite: Path) -> None:
    """The signal itself, while the runner waits: exit 130, one line, the document written."""
    code = (
        "import sys, time, types\nfrom gem.cli import main\n"
        "m = types.ModuleType('gem.harness.runner'); sys.modules[m.__name__] = m\n"
        "m.RunOptions = dict\n"
        "def run(cases, options, on_event, journal): print('ready', flush=True); time.sleep(60)\n"
        "m.run = run\nmain(['run', 's.toml', '--json', 'r.json'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=suite.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "gem: interrupted: 0 of 2 cases finished\n")
    assert json.loads((suite.parent / "r.json").read_text())["request"]["interrupted"] is True


# ---- report


def test_report_shows_a_saved_document(suite: Path, runner: Any, capsys: pytest.CaptureFixture[str]) -> None:
    runner(ROWS)
    call("run", "s.toml", "--json", "r.json")
    ran = capsys.readouterr().out
    assert call("report", "r.json", "--html", "again.html") == 0
    shown = capsys.readouterr().out
    assert [line for line in ran.splitlines() if "wrote" not in line] == [
        line for line in shown.splitlines() if "wrote" not in line
    ]
    assert "<html" in Path("again.html").read_text()
