"""Completion in shells: the words that `gem` offers, through the protocol that the shells' scripts speak."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gem import paths
from gem.commands.completion import COMPLETERS, mend_bash_words
from gem.harness import names
from gem.harness.suites import load_suites

HOME = paths.suites_dir()
GDPA = "suites/throughput/gdpa.toml"
# What a Tab may import: 390 modules where cases are read, numpy for their lengths among them; torch has two thousand.
MOST_MODULES = 450
HEAVY = {"torch", "triton", "pyarrow", "sklearn", "scipy", "pandas", "jinja2", "deepspeed", "torchrec"}


def ask(*words: str, cwd: Path, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """bash's question at the end of `words`."""
    env = {**os.environ, "_GEM_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(("gem", *words))}
    env |= {"COMP_CWORD": str(len(words)), "PYTHONPATH": str(HOME.parent)}
    return subprocess.run(
        [sys.executable, *python, "-m", "gem"], cwd=cwd, env=env, capture_output=True, text=True, timeout=60
    )


def offers(*words: str, cwd: Path) -> list[str]:
    done = ask(*words, cwd=cwd)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.split()


def case_names(path: str) -> list[str]:
    return list(dict.fromkeys(case.name for case in load_suites([path])))


def test_commands(tmp_path: Path) -> None:
    assert {"run", "list", "doctor", "train", "report"} <= set(offers("", cwd=tmp_path))
    assert offers("rep", cwd=tmp_path) == ["report"]


def test_suites_of_the_project_from_anywhere(tmp_path: Path) -> None:
    found = offers("run", "suites/thr", cwd=tmp_path)
    files = sorted((HOME / "throughput").glob("*.toml"))
    assert found == ["suites/throughput", *(f"suites/throughput/{file.name}" for file in files)]


def test_own_suites_and_what_is_in_a_lone_folder(tmp_path: Path) -> None:
    (tmp_path / "mine" / "deep").mkdir(parents=True)
    for file in ("mine/a.toml", "mine/b.toml", "mine/notes.txt", "other.toml", ".hidden.toml"):
        (tmp_path / file).touch()
    assert offers("list", "mi", cwd=tmp_path) == ["mine/", "mine/a.toml", "mine/b.toml", "mine/deep/"]
    assert offers("run", "o", cwd=tmp_path) == ["other.toml"]
    assert offers("run", "mine/a", cwd=tmp_path) == ["mine/a.toml"]
    assert offers("run", "nowhere/a", cwd=tmp_path) == []


def test_cases_behind_the_colons(tmp_path: Path) -> None:
    """bash makes FILE, :: and the name three words; one behind nothing is the one under the cursor."""
    known = case_names(GDPA)
    assert offers("run", GDPA, "::", "cpu_p", cwd=tmp_path) == [n for n in known if n.startswith("cpu_p")]
    assert offers("run", GDPA, "::", cwd=tmp_path) == known
    # A shell whose words are not cut at colons (zsh, fish, or a bash that was told so).
    assert offers("run", f"{GDPA}::cpu_p", cwd=tmp_path) == [f"{GDPA}::{n}" for n in known if n.startswith("cpu_p")]


def test_expressions_offer_the_cases_of_the_suites_named(tmp_path: Path) -> None:
    assert offers("run", GDPA, "-k", "cpu_", cwd=tmp_path) == [n for n in case_names(GDPA) if n.startswith("cpu_")]
    assert offers("list", GDPA, "::", "cpu_pma_q32_d64", "-k", "", cwd=tmp_path) == ["cpu_pma_q32_d64"]
    assert "small_learns" in offers("list", "-k", "sm", cwd=tmp_path)


def test_lists_go_on_behind_the_comma(tmp_path: Path) -> None:
    assert offers("run", "--peers", "", cwd=tmp_path) == [*names.PEERS, "none"]
    assert offers("run", "--peers", "flex,fa", cwd=tmp_path) == ["flex,fa3", "flex,fa4"]
    assert offers("run", "--peers", "fa3,fa", cwd=tmp_path) == ["fa3,fa4"]  # once is enough
    assert offers("run", "--impls", "torch,t", cwd=tmp_path) == ["torch,triton"]


@pytest.mark.parametrize(
    "words, found",
    [
        (("run", "--device", "c"), ["cpu", "cuda"]),
        (("run", "--format", "movielens"), ["movielens", "movielens_dat"]),
        (("run", "--json", ""), []),  # nothing: the shell offers files
        (("report", "re"), []),
    ],
)
def test_other_arguments(tmp_path: Path, words: tuple[str, ...], found: list[str]) -> None:
    assert offers(*words, cwd=tmp_path) == found


def test_a_broken_suite_is_no_noise(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text("[suite]\nkind = 1")
    assert offers("run", "s.toml", "-k", "", cwd=tmp_path) == []


@pytest.mark.parametrize(
    "words", [("run", "su"), ("run", "-k", "cpu"), ("run", GDPA, "::", "c"), ("run", "--peers", "")]
)
def test_a_tab_imports_little(tmp_path: Path, words: tuple[str, ...]) -> None:
    traced = ask(*words, cwd=tmp_path, python=("-X", "importtime"))
    imported = [line.rpartition("|")[2].strip() for line in traced.stderr.splitlines() if "|" in line]
    assert "gem.commands.completion" in imported
    assert HEAVY.isdisjoint(name.partition(".")[0] for name in imported)
    assert len(imported) < MOST_MODULES


def test_every_completer_has_its_parameter() -> None:
    """A parameter that is renamed would lose its completion in silence."""
    from gem import cli

    named = {name for info in cli.app.registered_commands if info.callback for name in info.callback.__annotations__}
    assert set(COMPLETERS) <= named


def test_words_of_other_shells_stay() -> None:
    given = {"_GEM_COMPLETE": "complete_zsh", "COMP_WORDS": "gem\nrun\na.toml\n::", "COMP_CWORD": "3"}
    kept = dict(given)
    mend_bash_words(given)
    assert given == kept


@pytest.mark.parametrize(
    "shell, told",
    [("zsh", '"flex":"FlexAttention, compiled'), ("fish", "flex\tFlexAttention, compiled")],
)
def test_other_shells_are_told_what_a_word_is(tmp_path: Path, shell: str, told: str) -> None:
    env = {**os.environ, "_GEM_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": "gem run --peers f"}
    env |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "PYTHONPATH": str(HOME.parent)}
    done = subprocess.run(
        [sys.executable, "-m", "gem"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert told in done.stdout and "sdpa_padded" not in done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_the_script_for_bash_defines_a_completion(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = subprocess.run(
        [sys.executable, "-m", "gem", "--show-completion", "bash"], env=env, capture_output=True, text=True, timeout=60
    )
    if "complete -o default" not in script.stdout:
        script = subprocess.run(
            [sys.executable, "-m", "gem"], env={**env, "_GEM_COMPLETE": "source_bash"}, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
    assert "complete -o default -F" in script.stdout
    # The script as bash runs it, for the words of a command line, the cursor at the last.
    driver = f'{script.stdout}\nCOMP_WORDS=(gem run "{GDPA}" :: cpu_pm) COMP_CWORD=4\n_gem_completion gem\n'
    done = subprocess.run(
        ["bash", "-c", driver + 'printf "%s\\n" "${COMPREPLY[@]}"'], cwd=tmp_path, env=env, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["cpu_pma_q32_d64"], done.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_tab_in_a_real_bash(tmp_path: Path) -> None:
    """Keys at a terminal: bash itself cuts the words at the colons, and puts the answer behind them."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TERM": "dumb", "PS1": "$ "}
        env |= {"PYTHONPATH": str(HOME.parent), "COLUMNS": "200"}
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], env)
    try:
        os.write(terminal, b'eval "$(gem --show-completion bash)"; echo rea""dy\n')
        assert "ready" in read_until(terminal, "ready")
        os.write(terminal, f"gem run {GDPA}::cpu_p\t".encode())
        assert f"{GDPA}::cpu_pma_q32_d64 " in read_until(terminal, "q32_d64 ")
    finally:
        os.write(terminal, b"\x15exit\n")
        os.close(terminal)
        os.waitpid(pid, 0)


def read_until(terminal: int, wanted: str, seconds: float = 30) -> str:
    """What the terminal shows until `wanted` is in it, or the time is up."""
    found, end = "", time.monotonic() + seconds
    while wanted not in found and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            found += os.read(terminal, 65536).decode(errors="replace")
    return found.replace("\r", "")
