"""One object in one process of its own: a crash, a hang or an out-of-memory there is an answer here, not the end.

A ``Worker`` forks from a small server process that has imported torch already (multiprocessing's "forkserver"), so it
starts in some 10 ms instead of the second that ``import torch`` takes. It builds one object there and calls its
methods, one at a time. Whatever goes wrong comes back as a ``WorkerFailure`` with the status that the result row gets
(``error``, ``oom``, ``skipped``) and a one-line reason. The server itself never touches CUDA: a CUDA context does not
survive a fork.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import getpass
import importlib
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable
from multiprocessing import connection, current_process, forkserver, get_context, util
from pathlib import Path
from typing import Any, NoReturn

from gem.harness import janitor

__all__ = ["Unsupported", "Worker", "WorkerFailure", "is_out_of_memory", "load", "report", "start_server", "stop_all"]

# What the server has imported, every worker has: gem's ops and all that contestants need, and what torch imports at the
# first call of a custom op (1.2 s a worker otherwise). None of it may initialise CUDA.
PRELOAD = ["torch", "torch._dynamo", "gem.harness.contestant"]
LONGEST_FOLDER = 60  # bytes of a folder that pymp-12345678/listener-12345678 still fits behind, and some to spare
REPORT_EVERY_S = 0.1  # how often a long call tells how far it is
REASON_LENGTH = 300  # characters of an exception's message that a table row or a log line can still carry
_OOM_TEXT = ("can't allocate memory", "out of memory", "cannot allocate memory", "cuda_error_out_of_memory")
# An idle OpenMP thread spins before it sleeps, by default some 10 ms (measured, libgomp): time stolen from the next
# contestant's turn where cores are few. 30,000 spins are under 3 ms. Sleeping at once (OMP_WAIT_POLICY=PASSIVE) would
# instead add 40 us to every parallel operation (5 -> 45 us measured), which no user of the operation would see.
_SERVER_ENV = {"GOMP_SPINCOUNT": "30000", "TORCHINDUCTOR_COMPILE_THREADS": "1"}

_CONTEXT = get_context("forkserver")
_LIVE: "weakref.WeakSet[Worker]" = weakref.WeakSet()


class WorkerFailure(Exception):
    """What ended a call in a worker: ``status`` error, oom or skipped; ``reason`` one line; ``details`` a traceback."""

    def __init__(self, status: str, reason: str, details: str = "") -> None:
        super().__init__(reason)
        self.status, self.reason, self.details = status, reason, details


class Unsupported(Exception):
    """Raised inside a worker by a contestant that cannot run this case here: the row is *skipped* with this reason."""


def start_server() -> None:
    """Start the server that workers fork from, unless it runs. Returns at once; the imports go on in the background."""
    _CONTEXT.set_forkserver_preload(PRELOAD)
    # The server finds modules as this process does (a checkout on sys.path that is not installed included).
    env = {**_SERVER_ENV, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    # A worker that is killed leaves the semaphores that torch's compiler made. multiprocessing's tracker removes them
    # at the end, which is all right, and says so on the terminal, which is not.
    warnings = ["ignore:resource_tracker", os.environ.get("PYTHONWARNINGS", "")]
    env["PYTHONWARNINGS"] = ",".join(part for part in warnings if part)
    _shorten_socket_paths()
    with _environment(env), _without_main():
        forkserver.ensure_running()
    janitor.keep_folder(util.get_temp_dir())  # of the server's socket; multiprocessing removes it at a proper end


def _shorten_socket_paths() -> None:
    """Multiprocessing's sockets go to /tmp where the temporary folder's path is long: their own has 107 bytes."""
    settings = current_process()._config  # type: ignore[attr-defined]  # where multiprocessing keeps its choice
    if settings.get("tempdir") is None and len(tempfile.gettempdir()) > LONGEST_FOLDER and os.path.isdir("/tmp"):
        folder = settings["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
        util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)  # as multiprocessing's own


def stop_all() -> None:
    """End every live worker now. Runs by itself at exit; safe to call twice."""
    for worker in list(_LIVE):
        worker.kill()


atexit.register(stop_all)


class Worker:
    """An object in a new process: ``target`` = "module:callable" builds it there, from ``args``; ``call`` a method.

    ``memory_bytes`` bounds the data it may allocate on the host (not for CUDA: its address space is no measure of use).
    Starting is asynchronous: a failure to build the object is raised by the first ``call``. Use as a context manager,
    or ``close`` it.
    """

    def __init__(self, name: str, target: str, *args: Any, memory_bytes: int | None = None) -> None:
        self.name = name
        self._failure: WorkerFailure | None = None
        self._built = self._group_ended = False
        # All that it may leave on disk, its log first: the folder is the worker's temporary one, and goes with it.
        self._folder = tempfile.mkdtemp(prefix="gem-worker-")
        janitor.keep_folder(self._folder)
        log = os.path.join(self._folder, "log")
        self._log_fd: int | None = os.open(log, os.O_RDWR | os.O_CREAT, 0o600)
        start_server()
        self._conn, child = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(
            target=_serve, args=(child, log, target, args, memory_bytes), name=f"gem {name}"
        )
        try:
            with _without_main():
                self._process.start()
        except (EOFError, ConnectionError, OSError) as error:
            self._forget_folder()
            raise RuntimeError(f"worker server did not start ({error}): does `import torch` work here?") from error
        child.close()
        janitor.keep_group(self.pid)
        _LIVE.add(self)

    @property
    def pid(self) -> int:
        """Process id, also its process group's."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once it died, hung or was closed: later calls repeat that failure, or find it."""
        return self._failure is None and self._process.is_alive()

    def call(
        self, method: str, *args: Any, timeout_s: float, on_report: Callable[[int, int], None] | None = None
    ) -> Any:
        """``object.method(*args)`` in the worker, or ``WorkerFailure``. An exception there leaves the worker usable.

        ``on_report`` gets (done, total) while the call goes on, as the worker's ``report`` tells them.
        """
        deadline = time.monotonic() + timeout_s
        if not self._built:
            self._receive(deadline, timeout_s)
            self._built = True
        if self._failure:
            raise self._failure
        try:
            self._conn.send((method, args))
        except (BrokenPipeError, ConnectionResetError):
            self._died()
        return self._receive(deadline, timeout_s, on_report)

    def _receive(self, deadline: float, timeout_s: float, on_report: Callable[[int, int], None] | None = None) -> Any:
        if self._failure:
            raise self._failure
        kind, *payload = self._message(deadline, timeout_s)
        while kind == "report":
            if on_report is not None:
                on_report(*payload)
            kind, *payload = self._message(deadline, timeout_s)
        if kind == "ok":
            return payload[0]
        failure = WorkerFailure(*payload)
        if not self._built:  # no object, no further calls
            self._failure = failure
            self.kill()
        raise failure

    def _message(self, deadline: float, timeout_s: float) -> Any:
        ready = connection.wait([self._conn, self._process.sentinel], max(0.0, deadline - time.monotonic()))
        if not ready:
            self._fail("error", f"hung: no answer within {timeout_s:g} s")
        try:
            # Also when only the sentinel is ready: an answer may have been sent just before the end.
            if not self._conn.poll(0):
                self._died()
            return self._conn.recv()
        except (EOFError, ConnectionResetError):
            self._died()

    def _died(self) -> NoReturn:
        self._process.join(5)
        code = self._process.exitcode
        if code is None:
            self._fail("error", "closed its pipe and went on running")
        if code == -signal.SIGKILL:
            self._fail("oom", "killed by SIGKILL, most likely out of memory")
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            self._fail("error", f"killed by {name}{_crash_site(self._read_log())}")
        self._fail("error", f"ended by itself with exit code {code}")

    def _fail(self, status: str, reason: str) -> NoReturn:
        log = self._read_log()
        last = [line.strip() for line in log.splitlines() if line.strip()][-2:]
        if last and "Fatal Python error" not in log:
            reason += f"; its last output: {_one_line(' | '.join(last))}"
        self._failure = WorkerFailure(status, reason, log)
        self.kill()
        raise self._failure

    def _read_log(self, limit: int = 16384) -> str:
        if self._log_fd is None:
            return ""
        start = max(0, os.fstat(self._log_fd).st_size - limit)
        return os.pread(self._log_fd, limit, start).decode(errors="replace")

    def _forget_folder(self) -> None:
        if self._log_fd is not None:
            os.close(self._log_fd)
            self._log_fd = None
            shutil.rmtree(self._folder, ignore_errors=True)
            if not os.path.exists(self._folder):  # else something of the group still wrote there: later, then
                janitor.let_folder(self._folder)

    def close(self) -> None:
        """Ask it to end, then make sure."""
        if self.alive:
            with contextlib.suppress(OSError):
                self._conn.send(None)
            self._process.join(1.0)
        self.kill()

    def kill(self) -> None:
        """End it and everything it started, at once."""
        if self._failure is None:
            self._failure = WorkerFailure("error", "the worker was closed")
        if not self._group_ended:
            # Its group first (compilers and readers that it started, which may be there when it is not), then itself:
            # it may not have made its group yet.
            self._group_ended = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join(5)
            janitor.let_group(self.pid)
        self._conn.close()
        self._forget_folder()
        _LIVE.discard(self)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.close()
        else:  # on Ctrl-C nobody waits for a contestant to finish its turn
            self.kill()


# ---- in the worker

_parent: connection.Connection | None = None  # of the process that this worker answers
_reported = 0.0  # when it was last told how far a call is


def report(done: int, total: int) -> None:
    """Tell the parent that the call under way is at ``done`` of ``total``. Cheap: all but one in 0.1 s is dropped."""
    global _reported
    if _parent is not None and (done >= total or time.monotonic() - _reported >= REPORT_EVERY_S):
        _reported = time.monotonic()
        _parent.send(("report", int(done), int(total)))


def load(target: str) -> Any:
    """What ``"module:attribute"`` names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _serve(conn: connection.Connection, log: str, target: str, args: tuple[Any, ...], memory: int | None) -> None:
    global _parent
    _isolate(log, memory)
    _parent = conn
    try:
        subject = load(target)(*args)
    except BaseException as error:
        conn.send(("failed", *_describe(error)))
        _leave()
    conn.send(("ok", None))
    while True:
        try:
            message = conn.recv()
        except EOFError:  # the parent is gone
            _leave()
        if message is None:
            _leave()
        method, arguments = message
        try:
            answer = ("ok", getattr(subject, method)(*arguments))
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a contestant too are only its own end
            answer = ("failed", *_describe(error))
        try:
            conn.send(answer)
        except BrokenPipeError:
            _leave()
        except Exception as error:
            reason = f"its answer cannot be sent: {_one_line(str(error))}"
            conn.send(("failed", "error", reason, traceback.format_exc()))


def _isolate(log: str, memory: int | None) -> None:
    """Own process group, own output, first in line for the out-of-memory killer, gone when the server is gone."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        # The server ends when the last write end of its "alive" pipe closes, and a worker is handed one: without this
        # close, a worker that hangs would keep the server, and so itself, alive after the harness was killed.
        alive_fd = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
        if alive_fd is not None:
            os.close(alive_fd)
            forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C ends
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=sys.stderr)
    _stay_in(os.path.dirname(log))
    if memory is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (memory if hard < 0 else min(memory, hard), hard))


def _stay_in(folder: str) -> None:
    """Temporary files go where they are removed with the worker; what inductor compiled stays where it always is."""
    with contextlib.suppress(KeyError, OSError):  # a user without a name: inductor then has its own difficulties
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"torchinductor_{user}"))
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def _leave() -> NoReturn:
    sys.stdout.flush()
    os._exit(0)  # without the teardown of torch, which takes longer than the start


def _describe(error: BaseException) -> tuple[str, str, str]:
    text = str(error)
    details = traceback.format_exc()
    if isinstance(error, Unsupported):
        return "skipped", _one_line(text), details
    if is_out_of_memory(error):
        facts, _, _ = text.partition("If reserved but unallocated")  # torch's advice, which pushes out who has how much
        return "oom", f"out of memory: {_one_line(facts) or type(error).__name__}", details
    return "error", f"{type(error).__name__}: {_one_line(text)}", details


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the exception says that memory ran out, on the host or on a device."""
    torch = sys.modules.get("torch")
    known = isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError))
    return known or any(sign in str(error).lower() for sign in _OOM_TEXT)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    if len(line) <= REASON_LENGTH:
        return line
    half = (REASON_LENGTH - 3) // 2  # both ends: a compiler quotes a whole kernel before it says what is wrong
    return f"{line[:half]} … {line[-half:]}"


def _crash_site(log: str) -> str:
    """The innermost Python line of faulthandler's report, if there is one."""
    _, _, stack = log.partition("(most recent call first):")
    site = next((line.strip() for line in stack.splitlines() if line.strip().startswith("File ")), "")
    return f" at {site}" if site else ""


# ---- starting the server


@contextlib.contextmanager
def _environment(values: dict[str, str]):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _without_main():
    """Hide ``__main__`` from multiprocessing, which would import it again in every worker: slow, and wrong for a script
    that has no ``if __name__ == "__main__"`` around its call."""
    main = sys.modules["__main__"]
    saved = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    for name in saved:
        delattr(main, name)
    main.__spec__ = None
    try:
        yield
    finally:
        del main.__spec__
        for name, value in saved.items():
            setattr(main, name, value)
