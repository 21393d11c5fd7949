"""Rank processes of a case: they answer together, one that fails ends all with its message, none outlives a worker."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from gem.harness.worker import Worker, WorkerFailure


@pytest.fixture(scope="module")
def host():
    with Worker("host", "ranks_victims:Host") as one:
        yield one


def running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def gone(pids: list[int], within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not any(map(running, pids)):
            return True
        time.sleep(0.02)
    return False


def children(pid: int) -> list[int]:
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_ranks_answer_in_their_order_call_after_call(host):
    first, second = host.call("add", 3, timeout_s=60)
    assert [total for _, _, total in first] == [6] * 3 and [total for _, _, total in second] == [33] * 3
    assert [local for _, local, _ in first] == [0, 1, 0]  # two to a host
    assert [pid for pid, _, _ in first] == [pid for pid, _, _ in second] and len({pid for pid, _, _ in first}) == 3
    assert gone([pid for pid, _, _ in first])


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "RankFailure: rank 1 of 3: ValueError: a table has no rows"),
        ("die", "out of memory: rank 1 of 3: killed by SIGKILL, most likely out of memory"),
        ("exit", "RankFailure: rank 1 of 3: ended by itself with exit code 3"),
    ],
)
def test_one_that_fails_ends_all_with_its_own_message(how, reason, host):
    start = time.monotonic()
    with pytest.raises(WorkerFailure) as caught:
        host.call("fail", how, 3, 1, timeout_s=60)
    assert caught.value.reason == reason
    assert time.monotonic() - start < 15  # and not what a collective may take
    assert children(host.pid) == []


def test_one_that_hangs_is_named_by_those_who_waited(host):
    with pytest.raises(WorkerFailure) as caught:
        host.call("fail", "hang", 3, 2, 3.0, timeout_s=60)
    assert "rank 2 of 3 hung: rank " in caught.value.reason and "imed out" in caught.value.reason
    assert children(host.pid) == []


def test_one_that_cannot_be_built_says_so(host):
    with pytest.raises(WorkerFailure) as caught:
        host.call("built_ill", timeout_s=60)
    assert caught.value.reason == "RankFailure: rank 1 of 2: ValueError: rank 1 cannot be built"


@pytest.mark.parametrize("end", ["timeout", "the worker alone is killed"])
def test_none_outlives_its_worker(end, tmp_path, monkeypatch):
    with Worker("host", "ranks_victims:Host") as one:
        if end != "timeout":
            monkeypatch.setattr(os, "killpg", lambda *group: None)  # as if who does that were gone too

            def kill() -> None:
                while not (tmp_path / "pids").exists():
                    time.sleep(0.02)
                os.kill(one.pid, signal.SIGKILL)

            threading.Thread(target=kill).start()
        with contextlib.suppress(WorkerFailure):
            one.call("pids", str(tmp_path), timeout_s=5 if end == "timeout" else 60)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 2 and gone(pids)
