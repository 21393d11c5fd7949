"""The command beside a copied number is what a shell takes apart into the case and its run's options; gem report."""

import shlex
import subprocess
from pathlib import Path

import pytest
from result_rows import ROWS
from typer.core import TyperOption
from typer.main import get_command

from gem.cli import app, main
from gem.harness.report_commands import VALUED, Commands, case_command, run_command
from gem.harness.results import Document, write_document
from gem.harness.suites import load_suites

SUITE = "suites/throughput/gdpa.toml"


@pytest.mark.parametrize(
    "argv, kept",
    [
        (["run"], []),
        (["run", "suites/throughput", "-k", "not cpu_", "--budget", "2", "--json", "x.json"], ["--budget", "2"]),
        (["gem", "run", "-kcpu", "--html=x.html", "--budget=2", "-v", "suites"], ["--budget=2"]),
        (["run", "--lengths", "my log.csv", "--column", "id", SUITE], ["--lengths", "my log.csv", "--column", "id"]),
        (["run", "--impls", "triton", "--peers", "none", "--device", "cpu", "--", "-x.toml"],
         ["--impls", "triton", "--peers", "none", "--device", "cpu"]),
        # Options that are not known here: a suite is no value of theirs, another word is.
        (["run", "--quick", "suites/unit", "--limit", "30", "--resume", "--fast"],
         ["--quick", "--limit", "30", "--fast"]),
    ],
)  # fmt: skip
def test_options_that_bear_on_a_case_are_kept(argv: list[str], kept: list[str]) -> None:
    words = shlex.split(case_command({"argv": argv}, SUITE, "name"))
    assert words == ["gem", "run", f"{SUITE}::name", *kept]


@pytest.mark.parametrize(
    "case", ["plain", "with space", "it's", '"$HOME`id`"', "a;b|c&d", "\\n", "é ✕", "-dash", "a\nb"]
)
def test_a_shell_reads_back_what_was_quoted(case: str) -> None:
    command = case_command({"argv": ["run", "--lengths", case]}, SUITE, case)
    script = f'gem() {{ printf "%s\\0" "$@"; }}; {command}'
    read = subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout.decode()
    assert read.split("\0")[:-1] == ["run", f"{SUITE}::{case}", "--lengths", case]


def test_the_command_chooses_that_case_alone() -> None:
    words = shlex.split(case_command({"argv": ["run", SUITE, "-k", "self_long"]}, SUITE, "self_long_d128"))
    assert [case.id for case in load_suites(words[2:])] == [f"{SUITE}::self_long_d128"]


@pytest.mark.parametrize("request_", [{}, {"argv": None}, {"argv": "run"}, {"argv": []}, {"argv": ["pytest", "-x"]}])
def test_a_document_that_tells_no_command_still_has_one(request_: dict) -> None:
    assert case_command(request_, SUITE, "name") == f"gem run {SUITE}::name"


def test_a_training_run_is_run_as_it_was() -> None:
    request = {"argv": ["train", "my config.toml", "--json", "x.json"]}
    assert case_command(request, "train", "x") == "gem train 'my config.toml' --json x.json" == run_command(request)
    assert case_command({}, "train", "x") == "gem train"
    assert run_command({}) == ""
    on_ranks = request | {"ranks": 4}
    assert case_command(on_ranks, "train", "x") == run_command(on_ranks)
    assert run_command(on_ranks) == "torchrun --nproc-per-node 4 -m gem train 'my config.toml' --json x.json"
    assert run_command(request | {"ranks": 1}) == run_command(request)


def test_cases_are_numbered_once() -> None:
    commands = Commands([{"argv": ["run"]}, {"argv": ["run", "--budget", "1"]}], ["a", "b"])
    first = commands.of_case(0, SUITE, "x", "gdpa x")
    assert commands.of_case(0, SUITE, "x", "gdpa x") == first
    assert commands.of_case(1, SUITE, "x", "gdpa x") != first
    assert commands.listed[first] == ("a: gdpa x", f"gem run {SUITE}::x")
    second = commands.of_run(1, "gdpa")
    assert commands.listed[second] == ("b: gdpa", "gem run --budget 1")


# ---- gem report


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(one) for one in arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def saved(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name / "throughput.json" for name in ("cpu", "h200")]
    for path in paths:
        write_document(Document(rows=ROWS, request={"argv": ["run"]}), path)
    return paths


@pytest.mark.parametrize("option", ["-o", "--html", "--output"])
def test_several_documents_become_one_report(
    saved: list[Path], option: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = saved[0].parent.parent / "r.html"
    assert call("report", *saved, option, file) == 0
    html = file.read_text()
    assert "cpu/throughput" in html and "h200/throughput" in html
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"wrote {file}" and said[0].startswith("cpu/throughput: 1 passed") and len(said) == 3


def test_without_a_file_the_tables_are_shown(saved: list[Path], capsys: pytest.CaptureFixture) -> None:
    assert call("report", *saved) == 0
    assert capsys.readouterr().out.count("flex") >= 4
    assert sorted(path.name for path in saved[0].parent.parent.iterdir()) == ["cpu", "h200"]


def test_a_report_never_replaces_what_it_reads(saved: list[Path], capsys: pytest.CaptureFixture) -> None:
    before = saved[1].read_text()
    assert call("report", *saved, "-o", saved[1]) == 2
    assert "is a document to read; accepted: another file" in capsys.readouterr().err
    assert saved[1].read_text() == before
    assert call("report", saved[0], saved[0].parent / "none.json", "-o", saved[0].parent / "r.html") == 2
    assert not (saved[0].parent / "r.html").exists()


def test_every_option_of_gem_run_is_known_here() -> None:
    command = get_command(app).commands["run"]  # type: ignore[attr-defined]
    options = [one for one in command.params if isinstance(one, TyperOption)]
    valued = {name for one in options if not one.is_flag for name in (*one.opts, *one.secondary_opts)}
    assert valued == VALUED
