"""A run that is killed keeps what was finished, leaves nothing else behind, and can be gone on with.

Kinds: hours of measurement lost to a full disk or a reboot; two runs that wrote one file; a document put together from
two machines or two versions of the code.
"""

import json
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
    descendants,
    entries,
    environment,
    finished,
    run,
    start,
    suite,
    until,
)

from gem.errors import RequestError
from gem.harness import journal as journals
from gem.harness.journal import Journal
from gem.harness.results import Document, Row, WaterfallPart, read_document

CASES = 8
IDS = [f"s.toml::c-{seed}" for seed in range(CASES)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a suite of some cheap cases, and a folder for temporary files."""
    (tmp_path / "s.toml").write_text(suite(CHECKS, CASES))
    (tmp_path / "tmp").mkdir()
    return tmp_path


def left(folder: Path) -> list[str]:
    """Names in the folder of temporary files, without what compilers keep there for the next time."""
    return [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith("torchinductor_")]


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


def mounted(folder: Path, *options: str) -> bool:
    """Whether this user may mount, and did."""
    command = ["mount", *options, str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


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


def test_what_a_full_disk_did_not_take_is_written_when_there_is_room(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    if not mounted(folder, "-t", "tmpfs", "-o", "size=8k", "tmpfs"):
        pytest.skip("this user may not mount a small disk")
    try:
        warnings: list[str] = []
        journal = begun(folder / "r.json", warn=warnings.append)
        filler = folder / "filler"
        filler.write_bytes(b"x" * 4096)
        for number in range(12):
            journal.keep(f"case-{number}", rows("case", 3), {}, {}, {})
        assert len(warnings) == 1 and "No space left on device" in warnings[0]
        before = finished(journal.path)
        assert 0 < len(before) < 12
        filler.unlink()
        mounted(folder, "-o", "remount,size=1m")
        journal.keep("case-12", rows("case", 1), {}, {}, {})
        journal.close()
        assert finished(folder / "r.json.partial") == [f"case-{number}" for number in range(13)]
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


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


# ---- the journal itself


def rows(case: str, count: int = 1) -> list[Row]:
    """Rows as a case leaves them."""
    return [
        Row(
            suite="s.toml",
            case=case,
            impl="torch",
            direction="forward",
            metric="ms",
            value=n,
            samples=[n],
            status="pass",
        )
        for n in range(count)
    ]


IDENTITY: dict[str, Any] = {
    "request": {"device": "cpu", "peers": None, "impls": ["torch"], "lengths": None, "batch": 7, "budget_s": 3.0},
    "cases": {"s.toml::one": "1", "s.toml::two": "2"},
    "code": "abc",
    "environment": {"torch": "2.13.0", "git_commit": "f00", "git_dirty": False, "device": "cpu", "gpu": None},
}


def begun(
    target: Path, resume: bool = False, warn: Any = pytest.fail, identity: Any = None, time: str = "t1"
) -> Journal:
    journal = Journal(target, resume, warn)
    try:
        journal.begin(identity or IDENTITY, {"time": time, "host": "h"})
    except BaseException:
        journal.close()
        raise
    return journal


def unfinished(target: Path) -> None:
    """Leave a run behind of which one case was finished."""
    journal = begun(target)
    parts = [WaterfallPart(part="attention", ms=3.0, of="model")]
    keys = {"s.toml::one/torch": parts, "s.toml::two/torch": parts}  # the second is not of this case
    journal.keep("s.toml::one", rows("one", 2), {"fix": {"B": 3}}, {"tflops": {"float32": 0.5}, "gbps": 9.0}, keys)
    os.close(journal._fd)  # killed


def test_everything_of_a_finished_case_comes_back(tmp_path: Path) -> None:
    unfinished(tmp_path / "r.json")
    journal = begun(tmp_path / "r.json", resume=True, time="t2")
    assert journal.finished == {"s.toml::one": rows("one", 2)}
    assert journal.fixtures == {"fix": {"B": 3}} and journal.ceilings == {"tflops": {"float32": 0.5}, "gbps": 9.0}
    assert {key: parts[0].ms for key, parts in journal.waterfalls.items()} == {"s.toml::one/torch": 3.0}
    assert journal.earlier() == [{"time": "t1", "host": "h", "cases": ["s.toml::one"]}]
    assert journal.progress == "1 of 2 cases finished"
    journal.keep("s.toml::two", rows("two"), {"fix": {"B": 3}}, {}, {})
    journal.close()
    third = begun(tmp_path / "r.json", resume=True, time="t3")
    assert [one["cases"] for one in third.earlier()] == [["s.toml::one"], ["s.toml::two"]]
    third.close()


@pytest.mark.parametrize(
    ("part", "key", "value", "told"),
    [
        ("request", "batch", 8, "batch 7, this one 8"),
        ("request", "impls", None, 'impls ["torch"], this one null'),
        ("environment", "torch", "2.14.0", "torch 2.13.0, this one 2.14.0"),
        ("environment", "git_commit", "f01", "git_commit f00, this one f01"),
        ("environment", "git_dirty", True, "git_dirty false, this one true"),
        ("environment", "device", "cuda", "device cpu, this one cuda"),
        ("environment", "gpu", "H200", "gpu null, this one H200"),
        ("cases", "s.toml::two", "3", "for s.toml::two the declaration 2, this one 3"),
        ("cases", "s.toml::three", "3", "for s.toml::three the declaration none, this one 3"),
        ("code", None, "abd", "gem's sources of digest abc, this one abd"),
    ],
)
def test_another_run_is_refused_in_one_line(part: str, key: str | None, value: Any, told: str, tmp_path: Path) -> None:
    unfinished(tmp_path / "r.json")
    before = (tmp_path / "r.json.partial").read_bytes()
    other = {**IDENTITY, part: {**IDENTITY[part], key: value} if key else value}
    with pytest.raises(RequestError) as caught:
        begun(tmp_path / "r.json", resume=True, identity=other)
    text = str(caught.value)
    assert text.startswith(f"r.json.partial: the unfinished run there has {told}; accepted with --resume: ")
    assert "\n" not in text and (tmp_path / "r.json.partial").read_bytes() == before


def test_a_torn_end_is_dropped_and_what_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    target, path = tmp_path / "r.json", tmp_path / "r.json.partial"
    unfinished(target)
    whole = path.read_bytes()
    for torn in (b'{"case": "s.toml::two", "ro', b"\x00\x00\x00\x00\n", b'{"case"', b'{"case": "x\n'):
        path.write_bytes(whole + torn)
        journal = begun(target, resume=True, time="t2")
        assert list(journal.finished) == ["s.toml::one"]
        journal.close()
        assert [next(iter(entry)) for entry in entries(path)] == ["journal", "case", "session"]
    for nothing in (b"", b"{", b'{"journal": 1, "ident'):  # killed while it wrote the first line
        path.write_bytes(nothing)
        begun(target).close()
        assert not path.exists()
    header, case = whole.splitlines(keepends=True)
    for alien, told in (
        (b"my own notes", ":1: no journal of gem run"),
        (b"my own notes\n", ":1: no JSON"),
        (header.replace(b'"journal": 1', b'"journal": 2'), ":1: not as this gem run writes it"),
        (header + b"lost\n" + case, ":2: no JSON"),
        (header + case.replace(b'"rows"', b'"lines"') + case, ":2: not as this gem run writes it"),
        (case, ":1: not as this gem run writes it"),
    ):
        for resume in (False, True):
            path.write_bytes(alien)
            with pytest.raises(RequestError, match="accepted: a journal of gem run") as caught:
                Journal(target, resume, pytest.fail)
            assert f"r.json.partial{told}" in str(caught.value) and path.read_bytes() == alien


def test_a_run_without_a_finished_case_leaves_no_journal_and_stray_parts_go(tmp_path: Path) -> None:
    for name in (".r.json.x1.part", ".r.jsonl.x1.part", ".other.json.x1.part"):
        (tmp_path / name).write_text("half")
    journal = begun(tmp_path / "r.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".other.json.x1.part", ".r.jsonl.x1.part", "r.json.partial",
    ]  # fmt: skip
    with pytest.raises(RequestError, match="another run writes it now"):
        Journal(tmp_path / "r.json", True, pytest.fail)
    journal.close()
    assert not (tmp_path / "r.json.partial").exists()
    journal = begun(tmp_path / "r.json")
    (tmp_path / "r.json").write_text("{}")
    journal.done()
    later = begun(tmp_path / "r.json")  # before the first has closed: a file of its own
    journal.close()
    assert later.path.exists()
    later.close()


def test_what_is_declared_and_what_the_code_is_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gem.data.lengths import list_profiles
    from gem.harness.suites import load_suite

    def identity(text: str) -> dict[str, Any]:
        (tmp_path / "s.toml").write_text(text)
        asked = {"device": "cpu", "lengths": None}
        return journals.identity(load_suite(tmp_path / "s.toml"), asked, {"torch": "2", "time": "now", "threads": 3})

    assert "empty_middle" in list_profiles()
    text = suite(CHECKS, 1)
    one, again, other = identity(text), identity(text), identity(text.replace("heads = 2", "heads = 4"))
    assert one == again and one["cases"].keys() == other["cases"].keys() and one["cases"] != other["cases"]
    assert one["environment"]["torch"] == "2" and not {"time", "threads"} & set(one["environment"])
    (tmp_path / "own.toml").write_text('description = "x"\npattern = "self"\n[q]\nkind = "explicit"\nvalues = [3, 4]\n')
    text = text.replace("empty_middle", "own.toml")
    drawn = identity(text)
    (tmp_path / "own.toml").write_text('description = "x"\npattern = "self"\n[q]\nkind = "explicit"\nvalues = [3, 5]\n')
    assert identity(text)["cases"] != drawn["cases"]  # the same name, other lengths
    assert json.loads(json.dumps(one)) == one
    before = journals.code_digest()
    package = tmp_path / "gem"
    package.mkdir()
    (package / "paths.py").write_text("x = 1\n")
    monkeypatch.setattr(journals.paths, "__file__", str(package / "paths.py"))
    monkeypatch.setattr(journals.paths, "checkout_root", lambda: None)
    mine = journals.code_digest()
    (package / "paths.py").write_text("x = 2\n")
    assert len({before, mine, journals.code_digest()}) == 3


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
