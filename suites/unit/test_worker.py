"""A worker survives everything its contestant does, and leaves no process behind.

Kinds: a public kernel's illegal access took the process and every later case with it; one out-of-memory shape ended a
sweep or counted as a success; a hung peer.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from gem.harness.worker import Unsupported, Worker, WorkerFailure

HERE = str(Path(__file__).parent)


class Victim:
    """What a contestant can do to its process."""

    def __init__(self, broken: bool = False) -> None:
        if broken:
            raise ImportError("no module named flash_attn")

    def add(self, a, b):
        return a + b

    def fail(self, text):
        raise ValueError(text)

    def refuse(self):
        raise Unsupported("needs a CUDA device")

    def signal(self, number):
        os.kill(os.getpid(), number)
        time.sleep(30)

    def segfault(self):
        import ctypes

        print("about to read address 0")
        ctypes.string_at(0)

    def leave(self, code):
        print("giving up", file=sys.stderr)
        os._exit(code)

    def system_exit(self):
        sys.exit("no licence")

    def hang(self, spawn_child=False):
        if spawn_child:
            subprocess.Popen(["sleep", "300"])
        print("waiting for a lock")
        time.sleep(300)

    def child(self):
        return subprocess.Popen(["sleep", "300"]).pid

    def allocate(self, n_bytes):
        import torch

        return torch.empty(n_bytes, dtype=torch.uint8).fill_(1).numel()

    def cuda_oom(self):
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    def memory_error(self):
        raise MemoryError

    def unpicklable(self):
        return lambda: None

    def has_main_of_parent(self):
        # multiprocessing puts the parent's script here when it imports it again
        return sys.modules["__mp_main__"] is not sys.modules["__main__"]

    def group(self):
        return os.getpgid(0)


@pytest.fixture
def worker():
    sys.path.insert(0, HERE)
    with Worker("victim", "test_worker:Victim") as one:
        one.call("add", 0, 0, timeout_s=30)
        yield one
    sys.path.remove(HERE)


def failure(worker, *call, timeout_s=20.0):
    with pytest.raises(WorkerFailure) as caught:
        worker.call(*call, timeout_s=timeout_s)
    assert "\n" not in caught.value.reason
    return caught.value


def running(pid: int) -> bool:
    """A live process: neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def gone(pids, within_s=5.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(running(pid) for pid in pids)


def test_answers_and_stays_usable_after_an_exception(worker):
    assert worker.call("add", 2, 3, timeout_s=10) == 5
    error = failure(worker, "fail", "head_dim 24 is\nnot a power of two")
    assert (error.status, error.reason) == ("error", "ValueError: head_dim 24 is not a power of two")
    assert "in fail" in error.details  # the traceback is kept
    assert worker.call("add", 2, 4, timeout_s=10) == 6


def test_refusal_is_skipped(worker):
    error = failure(worker, "refuse")
    assert (error.status, error.reason) == ("skipped", "needs a CUDA device")


def test_failing_to_build_is_reported_by_every_call():
    sys.path.insert(0, HERE)
    with Worker("victim", "test_worker:Victim", True) as one:
        for _ in range(2):
            error = failure(one, "add", 1, 1)
            assert (error.status, error.reason) == ("error", "ImportError: no module named flash_attn")
        assert gone([one.pid])
    sys.path.remove(HERE)


def test_segfault_names_the_signal_and_the_line(worker):
    error = failure(worker, "segfault")
    assert error.status == "error" and error.reason.startswith("killed by SIGSEGV at File")
    assert "ctypes" in error.reason
    assert failure(worker, "add", 1, 1).reason == error.reason  # dead stays dead, without waiting


def test_sigkill_reads_as_out_of_memory(worker):
    error = failure(worker, "signal", signal.SIGKILL)
    assert (error.status, error.reason) == ("oom", "killed by SIGKILL, most likely out of memory")


@pytest.mark.parametrize("method", ["cuda_oom", "memory_error"])
def test_out_of_memory_exceptions(worker, method):
    assert failure(worker, method).status == "oom"
    assert worker.call("add", 1, 1, timeout_s=10) == 2


def test_out_of_memory_on_the_host(worker):
    error = failure(worker, "allocate", 1 << 50)
    assert error.status == "oom" and error.reason.startswith("out of memory: ")


def test_memory_limit_turns_a_machine_killer_into_a_row():
    sys.path.insert(0, HERE)
    with Worker("victim", "test_worker:Victim", memory_bytes=1 << 30) as one:
        assert one.call("allocate", 1 << 24, timeout_s=20) == 1 << 24
        assert failure(one, "allocate", 2 << 30).status == "oom"
    sys.path.remove(HERE)


def test_exit_of_a_contestant_is_its_own(worker):
    assert failure(worker, "system_exit").reason == "SystemExit: no licence"
    error = failure(worker, "leave", 0)
    assert error.status == "error"
    assert error.reason == "ended by itself with exit code 0; its last output: giving up"


def test_hang_is_killed_with_its_children(worker):
    group = worker.call("group", timeout_s=10)
    assert group == worker.pid
    start = time.monotonic()
    error = failure(worker, "hang", True, timeout_s=0.5)
    assert time.monotonic() - start < 3
    assert error.status == "error"
    assert error.reason == "hung: no answer within 0.5 s; its last output: waiting for a lock"
    members = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and pgid(int(p.name)) == group]
    assert gone(members)


@pytest.mark.parametrize("end", ["closed", "died"])
def test_what_it_started_ends_with_it(worker, end):
    """Readers of a race's contestant, compilers: also where it ended as it was asked to, or by itself."""
    child = worker.call("child", timeout_s=10)
    assert running(child)
    if end == "died":
        failure(worker, "leave", 3, timeout_s=10)
    worker.close()
    assert gone([child])


def pgid(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def test_answer_that_cannot_be_sent(worker):
    assert "cannot be sent" in failure(worker, "unpicklable").reason
    assert worker.call("add", 1, 1, timeout_s=10) == 2


def test_output_never_reaches_the_terminal(worker, capfd):
    failure(worker, "hang", timeout_s=0.3)
    out, err = capfd.readouterr()
    assert out == "" and err == ""


def test_leaving_by_an_exception_does_not_wait_for_a_busy_worker(worker):
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt), Worker("victim", "test_worker:Victim") as one:
        one.call("add", 1, 1, timeout_s=10)
        one._conn.send(("hang", ()))
        raise KeyboardInterrupt
    assert time.perf_counter() - start < 0.8 and gone([one.pid])


def test_ctrl_c_is_the_parents_affair(worker):
    os.kill(worker.pid, signal.SIGINT)
    assert worker.call("add", 1, 1, timeout_s=10) == 2


def test_start_is_fast_and_does_not_import_main(worker):
    assert worker.call("has_main_of_parent", timeout_s=10) is False
    start = time.perf_counter()
    with Worker("victim", "test_worker:Victim") as one:
        one.call("add", 1, 1, timeout_s=10)
        took = time.perf_counter() - start
    assert took < 0.5, f"{took:.2f} s: torch is not preloaded"


PARENT = """
    import sys, time
    sys.path[:0] = [{here!r}, {root!r}]
    import gem.harness.worker
    gem.harness.worker.PRELOAD[:] = ["gem.harness.worker"]  # no torch: not needed here, and seconds a time
    from gem.harness.worker import Worker
    workers = [Worker(str(i), "test_worker:Victim") for i in range(2)]
    for w in workers: w.call("add", 1, 1, timeout_s=60)
    print(*[w.pid for w in workers], flush=True)
    {end}
"""


@pytest.mark.parametrize(
    ("end", "send"),
    [
        ("sys.exit(0)", None),
        ("raise RuntimeError('lost')", None),
        ("workers[0].call('hang', timeout_s=300)", signal.SIGINT),
        ("workers[0].call('hang', timeout_s=300)", signal.SIGTERM),
        ("workers[0].call('hang', timeout_s=300)", signal.SIGKILL),
    ],
    ids=["exit", "exception", "ctrl-c", "terminated", "killed"],
)
def test_no_worker_outlives_its_parent(end, send, tmp_path):
    # A script without a __main__ guard: the natural way to call the harness in a one-off. Workers must not import it.
    script = tmp_path / "one_off.py"
    script.write_text(textwrap.dedent(PARENT).format(here=HERE, root=str(Path(HERE).parents[1]), end=end))
    command = [sys.executable, str(script)]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    if send is not None:
        assert all(running(pid) for pid in pids)
        time.sleep(0.1)
        parent.send_signal(send)
    parent.wait(20)
    assert gone(pids)
    assert list(tmp_path.glob("gem-worker-*")) == []  # their logs neither


def test_a_long_temporary_folder_does_not_keep_it_from_starting(tmp_path):
    """A socket's address has 107 bytes, and a test runner's folders alone may take as many."""
    long = tmp_path / ("x" * 60) / ("y" * 60)
    long.mkdir(parents=True)
    code = (
        f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        "import gem.harness.worker as w; w.PRELOAD[:] = ['gem.harness.worker']\n"
        "with w.Worker('one', 'collections:deque', [1, 2]) as one: print(one.call('pop', timeout_s=60))\n"
    )
    env = os.environ | {"TMPDIR": str(long)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "2\n", done.stderr
    assert not list(long.iterdir())
