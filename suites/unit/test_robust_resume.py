"""A run that is killed keeps what was finished, leaves nothing else behind, and can be gone on with.

Kinds: hours of measurement lost to a full disk or a reboot; two runs that wrote one file; a document put together from
two machines or two versions of the code.
"""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from robust_process import (
    CHECKS,
    SKIPS,
    alive,
    begun,
    descendants,
    environment,
    finished,
    left,
    mounted,
    run,
    start,
    suite,
    until,
)

from gem.harness.results import Document, read_document

CASES = 8
IDS = [f"s.toml::c-{seed}" for seed in range(CASES)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a suite of some cheap cases, and a folder for temporary files."""
    (tmp_path / "s.toml").write_text(suite(CHECKS, CASES))
    (tmp_path / "tmp").mkdir()
    return tmp_path


def test_killed_interrupted_and_gone_on_with(folder: Path) -> None:
    """kill -9, then --resume and Ctrl-C, then --resume to the end: three sessions, every case once."""
    env = environment(TMPDIR=str(folder / "tmp"))
    command = ("run", "s.toml", "--device", "cpu", "--json", "r.json")
    journal = folder / "r.json.partial"

    first = start(*command, cwd=folder, env=env)
    until(lambda: len(finished(journal)) >= 2, "two cases are finished")
    first.send_signal(signal.SIGSTOP)
    began = descendants(first.pid)
    assert len(began) >= 4 and left(folder)  # the server, the oracle, a contestant, the janitor; their files

    # Meanwhile: not a second one into the same file, under any name; into another one, yes.
    (folder / "link.json").symlink_to("r.json")
    for name in ("r.json", "link.json"):
        code, out, err = run("run", "s.toml", "--json", name, "--resume", cwd=folder)
        assert (code, out) == (2, "") and err.count("\n") == 1
        assert f"{name}: another run writes it now (r.json.partial is locked); accepted: another file" in err
    (folder / "skips.toml").write_text(suite(SKIPS, 2))
    assert run("run", "skips.toml", "--json", "other.json", cwd=folder)[0] == 1  # all skipped
    assert len(read_document(folder / "other.json").rows) == 2

    first.kill()
    first.communicate()
    until(lambda: not any(map(alive, began)), "its processes are gone", 20)
    until(lambda: not left(folder), f"its temporary files are gone: {left(folder)}", 10)
    assert not (folder / "r.json").exists()
    done = finished(journal)
    assert done == IDS[: len(done)]

    code, out, err = run(*command, cwd=folder, env=env)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert (
        f"an unfinished run, {len(done)} of {CASES} cases finished, is in r.json.partial" in err and "--resume" in err
    )
    code, _, err = run(*command, "--budget", "2", "--resume", cwd=folder, env=env)
    assert code == 2 and "has budget_s 3.0, this one 2.0" in err and err.count("\n") == 1
    assert finished(journal) == done  # neither cost anything

    with journal.open("a") as torn:  # as if the kill had come in the middle of a line
        torn.write('{"case": "s.toml::c-7", "rows": [{"suite"')
    second = start(*command, "--resume", cwd=folder, env=env)
    until(lambda: len(finished(journal)) >= len(done) + 2, "two more cases are finished")
    second.send_signal(signal.SIGINT)
    _, err = second.communicate(timeout=60)
    assert second.returncode == 130
    assert "gem: resuming the run of 20" in err and f"{len(done)} of {CASES} cases finished\n" in err
    both = finished(journal)
    assert err.endswith(
        f"gem: interrupted: {len(both)} of {CASES} cases finished; the same command with --resume goes on\n"
    )
    partial = read_document(folder / "r.json")
    assert partial.request["interrupted"] is True and ids(partial) == both
    assert not left(folder)

    code, out, err = run(*command, "--resume", cwd=folder, env=env)
    assert code == 0, err
    assert f"{CASES} passed, 0 failed" in out and f"[{CASES}/{CASES}] " in err and f"[{len(both)}/" not in err
    assert not journal.exists() and not left(folder)
    document = read_document(folder / "r.json")
    assert ids(document) == IDS and len(document.rows) == 2 * CASES  # each once, in the order declared
    assert document.rows[: len(partial.rows)] == partial.rows  # as they were measured the first time
    assert "interrupted" not in document.request
    sessions = document.request["resumed"]
    assert [one["cases"] for one in sessions] == [done, both[len(done) :]]
    assert all(one["time"] and one["host"] for one in sessions)
    assert set(document.fixtures) == {"empty_middle"}


def ids(document: Document) -> list[str]:
    """Of its cases, each once, in order."""
    return list(dict.fromkeys(row.case_id for row in document.rows))


# ---- disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """(folder, what its processes are started with, what makes room): a disk that takes 16 KiB, or a limit on files."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not mounted(folder, "-t", "tmpfs", "-o", "size=16k", "tmpfs"):
        limit = (16384, 16384)
        yield folder, {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)}, lambda: None
        return
    try:
        yield folder, {}, lambda: mounted(folder, "-o", "remount,size=1m")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_costs_neither_the_table_nor_what_was_finished(small_disk: Any, tmp_path: Path) -> None:
    folder, limited, make_room = small_disk
    (tmp_path / "s.toml").write_text(suite(SKIPS, 120))
    target = folder / "r.json"
    target.write_text("old\n")
    code, out, err = run("run", "s.toml", "--json", target, cwd=tmp_path, **limited)
    assert code == 2 and "Traceback" not in err
    assert out.count("elsewhere-") == 120 and "wrote" not in out  # the table
    warning, error = [line for line in err.splitlines() if line.startswith("gem:")]
    assert "warning" in warning and "what finishes from here on is lost if the run is killed" in warning
    assert f"gem: error: {target}: cannot be written: " in error
    assert target.read_text() == "old\n"  # not half a new one
    journal = target.with_name("r.json.partial")
    assert sorted(path.name for path in folder.glob("r*")) == ["r.json", "r.json.partial"]
    assert not list(folder.glob(".*"))
    kept = finished(journal)
    assert 10 < len(kept) < 120 and journal.read_bytes().endswith(b"}\n")  # whole lines, while there was room

    make_room()
    code, out, err = run("run", "s.toml", "--json", target, "--resume", cwd=tmp_path)
    assert code == 1 and "120 skipped" in out, err  # all skipped is no success
    document = read_document(target)
    assert len(document.rows) == 120 and document.request["resumed"][0]["cases"] == kept
    assert not journal.exists()


def read_only_folder(tmp_path: Path) -> Path:
    """Where not even root may write."""
    folder = tmp_path / "there"
    folder.mkdir()
    if os.getuid():
        folder.chmod(0o555)
    elif not mounted(folder, "--bind", str(folder)) or not mounted(folder, "-o", "remount,bind,ro"):
        pytest.skip("root may write everywhere, and may not mount here")
    return folder


def test_a_read_only_folder_is_refused_before_anything_runs(tmp_path: Path) -> None:
    folder = read_only_folder(tmp_path)
    try:
        (tmp_path / "s.toml").write_text(suite(SKIPS, 1))
        for target in (folder / "r.json", folder / "new" / "r.json", tmp_path / "s.toml" / "r.json"):
            code, out, err = run("run", "s.toml", "--json", target, cwd=tmp_path)
            assert (code, out) == (2, "") and err.count("\n") == 1
            assert err.startswith(f"gem: error: {target}: cannot be written: ")
    finally:
        if not os.getuid():
            subprocess.run(["umount", "-l", str(folder)], check=False)


# ---- in the runner


def test_ceilings_of_the_first_session_serve_the_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One document has one roofline; and what was finished is not run again."""
    from gem.harness import runner
    from gem.harness.results import Interrupted
    from gem.harness.suites import load_suite

    text = CHECKS.replace("correctness", "throughput") % "1, 2"
    (tmp_path / "s.toml").write_text(text)
    cases = load_suite(tmp_path / "s.toml")
    options = runner.RunOptions(device="cpu", budget_s=0.05)

    def stop(event: Any) -> None:
        if event.kind == "case_started" and event.index == 1:
            raise KeyboardInterrupt

    journal = begun(tmp_path / "r.json")
    with pytest.raises(Interrupted) as stopped:
        runner.run(cases, options=options, on_event=stop, journal=journal)
    journal.close()
    first = stopped.value.document

    real = runner.Session.helper

    def helper(self: Any, name: str, target: str) -> Any:
        assert name != "ceilings", "measured again"
        return real(self, name, target)

    monkeypatch.setattr(runner.Session, "helper", helper)
    journal = begun(tmp_path / "r.json", resume=True)
    events: list[Any] = []
    second = runner.run(cases, options=options, on_event=events.append, journal=journal)
    journal.close()
    assert [event.case for event in events if event.kind == "case_started"] == [cases[1].id]
    assert second.ceilings == first.ceilings and second.ceilings["gbps"] > 0
    assert second.rows[: len(first.rows)] == first.rows and ids(second) == [case.id for case in cases]
    assert [row.status for row in second.rows if row.metric == "roofline"] == ["pass"] * 4


# ---- the janitor


def test_the_janitor_ends_what_a_killed_worker_had_started(tmp_path: Path) -> None:
    """Not the workers alone, which die with their server: their children too, whose parent is dead already."""
    script = tmp_path / "one_off.py"
    script.write_text(
        "import sys\n"
        f"sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        "import gem.harness.worker as w\n"
        "w.PRELOAD[:] = ['gem.harness.worker']\n"
        "victim = w.Worker('victim', 'test_worker:Victim')\n"
        "print(victim.call('child', timeout_s=60), flush=True)\n"
        "victim.call('hang', True, timeout_s=300)\n"
    )
    (tmp_path / "tmp").mkdir()
    env = environment(TMPDIR=str(tmp_path / "tmp"))
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=env, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    everyone = until(lambda: (found := descendants(parent.pid)) and len(found) >= 5 and found, "all are started")
    assert alive(child) and child in everyone
    parent.kill()
    parent.communicate()
    until(lambda: not any(map(alive, everyone)), "all are gone", 10)
    until(lambda: not left(tmp_path), "their files too", 10)


def test_the_janitor_spares_what_was_let_go_and_a_number_that_is_another_ones() -> None:
    from gem.harness.janitor import _start_of, clear

    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        try:
            start_of = _start_of(process.pid)
            assert start_of
            clear([f"+ group {process.pid} {start_of}\n", f"- group {process.pid} \n"])
            clear([f"+ group {process.pid} {int(start_of) - 100}\n"])
            assert alive(process.pid)
            clear([f"+ group {process.pid} {start_of}\n"])
            assert process.wait(10) == -signal.SIGKILL
        finally:
            process.kill()
