"""The journal of a run: what comes back from it, what it refuses, what of a torn or a strange file it leaves alone."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from robust_process import CHECKS, IDENTITY, begun, entries, finished, mounted, rows, suite

from gem.errors import RequestError
from gem.harness import journal as journals
from gem.harness.journal import Journal
from gem.harness.results import WaterfallPart


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


def test_all_that_is_known_of_the_machine_counts_but_what_moves_or_follows() -> None:
    """A fact more or less of environment.capture is to be thought about here."""
    from gem.harness import environment

    known = environment.capture("cpu")
    held = journals.identity([], {"device": "cpu"}, known)["environment"]
    moving = {"time", "sm_clock_mhz", "max_sm_clock_mhz", "memory_clock_mhz"}
    following = {"gpu_count", "gpu_memory_mib", "platform", "threads"}  # from the GPU's name, the host, the settings
    assert set(known) - set(held) == moving | following and set(held) <= set(known)
    assert {"peers", "settings", "cpu_capability"} <= set(held)


def test_what_is_kept_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line is written before it is synced, and synced before the call ends; the document before the journal goes.

    A power cut cannot be had here: what is counted are the real calls, and what the file held at each of them.
    """
    real, synced = os.fsync, []

    def fsync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        there = len(entries(tmp_path / "r.json.partial")) if (tmp_path / "r.json.partial").exists() else None
        synced.append((path.name, there))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    journal = begun(tmp_path / "r.json")
    assert synced == [("r.json.partial", 1)]
    for number, case in enumerate(("s.toml::one", "s.toml::two"), start=2):
        journal.keep(case, rows(case), {}, {}, {})
        assert len(synced) == number and synced[-1] == ("r.json.partial", number)
    (tmp_path / "r.json").write_text("{}")
    journal.done()
    assert synced[3:] == [("r.json", 3), (tmp_path.name, 3)] and not journal.path.exists()
    journal.close()


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


WITHOUT = object()
DEEP = '{"a":' * 300 + "1" + "}" * 300  # read, and never written again


@pytest.mark.parametrize(
    ("line", "path", "value"),
    [
        (1, "identity", WITHOUT),
        (1, "identity", None),
        (1, "identity", []),
        (1, "identity request", WITHOUT),
        (1, "identity request", ["batch"]),
        (1, "identity environment", WITHOUT),
        (1, "identity cases", ["s.toml::one"]),
        (1, "identity cases", {"s.toml::one": 1}),
        (1, "identity code", WITHOUT),
        (1, "identity request batch", json.loads(DEEP)),
        (1, "session", WITHOUT),
        (1, "session", ["t1"]),
        (1, "session time", WITHOUT),
        (1, "session time", 3),
        (1, "session host", WITHOUT),
        (1, "session host", "\ud800"),
        (2, "case", WITHOUT),
        (2, "case", ["s.toml::one"]),
        (2, "case", 3),
        (2, "rows", {}),
        (2, "rows", [3]),
        (2, "fixtures", []),
        (2, "fixtures fix", json.loads(DEEP)),
        (2, "ceilings", None),
        (2, "ceilings", 3),
        (2, "waterfalls", []),
        (2, "waterfalls s.toml::one/torch", 3),
        (3, "session", None),
        (3, "session time", WITHOUT),
    ],
)
def test_an_edited_journal_is_refused_in_one_line(line: int, path: str, value: Any, tmp_path: Path) -> None:
    unfinished(tmp_path / "r.json")
    os.close(begun(tmp_path / "r.json", resume=True, time="t2")._fd)
    journal = tmp_path / "r.json.partial"
    lines = entries(journal)
    assert len(lines) == 3
    *way, last = path.split(" ")
    part = lines[line - 1]
    for key in way:
        part = part[key]
    assert last in part
    part.pop(last) if value is WITHOUT else part.update({last: value})
    journal.write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert_refused(tmp_path / "r.json", f":{line}: not as this gem run writes it")


@pytest.mark.parametrize("alien", ["3", "null", "[]", '"journal"', "[" * 100_000, '{"journal": ' * 100_000])
def test_json_that_is_no_journal_is_refused_in_one_line(alien: str, tmp_path: Path) -> None:
    told = "JSON nested too deeply" if len(alien) > 99 else "not as this gem run writes it"
    unfinished(tmp_path / "r.json")
    (tmp_path / "r.json.partial").write_text(f"{alien}\n")
    assert_refused(tmp_path / "r.json", f":1: {told}")


def assert_refused(target: Path, told: str) -> None:
    """With --resume and without, and left as it was."""
    path = target.with_name("r.json.partial")
    before = path.read_bytes()
    for resume in (False, True):
        with pytest.raises(RequestError, match="accepted: a journal of gem run") as caught:
            begun(target, resume)
        assert f"r.json.partial{told}; accepted" in str(caught.value) and "\n" not in str(caught.value)
        assert path.read_bytes() == before


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
