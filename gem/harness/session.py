"""What the cases of a run share: its options, the machine's facts, the oracle's worker, ceilings, lengths."""

import contextlib
import copy
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gem.data.lengths import Lengths, load_profile, with_history
from gem.data.logs import LogLengths
from gem.errors import RequestError
from gem.harness import environment, janitor
from gem.harness.case import Case
from gem.harness.needs import Facts
from gem.harness.results import WaterfallPart
from gem.harness.timing import last_level_cache_bytes
from gem.harness.worker import Worker, start_server

# Run in workers: the oracle, and the measurement of what the machine can do at most.
ORACLE = "gem.harness.check:Oracle"
CEILINGS = "gem.harness.ceilings:Ceilings"
CEILINGS_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class RunOptions:
    """What a run was asked for. ``peers``, ``impls`` None: as declared. ``budget_s``: timing a case and direction."""

    device: str = "auto"
    peers: list[str] | None = None
    impls: list[str] | None = None
    lengths: LogLengths | None = None
    batch: int | None = None
    budget_s: float = 3.0


@dataclass
class Session:
    """What the cases of a run share: facts, the oracle's worker; ceilings, lengths and waterfalls found so far."""

    options: RunOptions
    facts: Facts
    folder: Path
    fixtures: dict[str, dict[str, Any]] = field(default_factory=dict)
    ceilings: dict[str, Any] = field(default_factory=dict)
    waterfalls: dict[str, list[WaterfallPart]] = field(default_factory=dict)
    _lengths: dict[str, Lengths] = field(default_factory=dict)
    _helpers: dict[str, Worker] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return self.facts.device

    def lengths(self, case: Case) -> Lengths:
        """The case's lengths: as its profile draws them, or with the history of the run's log in it."""
        if case.fixture not in self._lengths:
            self._lengths[case.fixture] = self._draw(case.fixture)
        return self._lengths[case.fixture]

    def take_over(
        self, fixtures: dict[str, Any], ceilings: dict[str, Any], waterfalls: dict[str, list[WaterfallPart]]
    ) -> None:
        """What an earlier session of the same run found. Its ceilings serve the rest: one machine, one roofline."""
        self.fixtures |= fixtures
        self.ceilings |= copy.deepcopy(ceilings)
        self.waterfalls |= waterfalls

    def check(self, case: Case) -> None:
        """RequestError unless the case's lengths suit its subject."""
        lengths = self.lengths(case)
        if case.subject == "block_attention" and lengths.pattern != "self":
            raise RequestError(
                f"{case.file}: case {case.name!r}: fixture {case.fixture!r} has pattern {lengths.pattern}; "
                "accepted for block_attention: a fixture of pattern self"
            )

    def _draw(self, fixture: str) -> Lengths:
        profile, log = load_profile(fixture), self.options.lengths
        if log is None:
            return profile.draw(self.options.batch)
        chosen = log.draw(self.options.batch if self.options.batch is not None else profile.size)
        return with_history(profile, chosen.lengths, f"{profile.name}+{log.name}", chosen.source)

    def helper(self, name: str, target: str) -> Worker:
        """A worker for the run's own code (the oracle, the ceilings), started again after it died."""
        worker = self._helpers.get(name)
        if worker is not None and not worker.alive:  # also one that was killed while nobody asked it anything
            worker.close()
            worker = None
        if worker is None:
            worker = self._helpers[name] = Worker(name, target, memory_bytes=self.memory_bytes())
        return worker

    def memory_bytes(self) -> int | None:
        """What a worker may allocate on a CPU: less than is free, so that it fails and the machine does not."""
        return None if self.device == "cuda" else int(0.9 * available_memory())

    def measured(self, dtype: str, again: bool = False) -> tuple[float, float]:
        """(TFLOP/s of a GEMM in ``dtype``, GB/s of a copy), measured once a run. WorkerFailure when they cannot be.

        ``again``: measure anew and keep what is more. Other work may have slowed the first measurement.
        """
        rates = self.ceilings.setdefault("tflops", {})
        if again or dtype not in rates:
            worker, copy = self.helper("ceilings", CEILINGS), again or "gbps" not in self.ceilings
            found = worker.call("measure", self.device, dtype, copy, timeout_s=CEILINGS_TIMEOUT_S)
            rates[dtype] = max(found["tflops"], rates.get(dtype, 0.0))
            if copy:
                self.ceilings["gbps"] = max(found["gbps"], self.ceilings.get("gbps", 0.0))
        return rates[dtype], self.ceilings["gbps"]

    def close(self) -> None:
        """End the shared workers."""
        for worker in self._helpers.values():
            worker.close()


@contextlib.contextmanager
def open_session(options: RunOptions, ahead: bool = True) -> Iterator[Session]:
    """A session; its workers and files are gone when the block is left, however it is left.

    ``ahead``: start the workers' server now, for its imports take seconds; else the first worker does.
    """
    last_level_cache_bytes()  # a wrong GEM_LLC_MIB is told here once, and not by each worker
    if ahead:
        start_server()
    folder = tempfile.mkdtemp(prefix="gem-run-")
    janitor.keep_folder(folder)
    session = Session(options, environment.facts(options.device), Path(folder))
    try:
        yield session
    finally:
        session.close()
        shutil.rmtree(folder, ignore_errors=True)
        janitor.let_folder(folder)


def available_memory() -> int:
    """Bytes that processes here may still allocate: free memory of the machine, cut by the container's limit."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        free = 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="utf-8"))  # "max" is no number: no limit
        free = min(free, limit - int((group / "memory.current").read_text(encoding="utf-8")))
    return max(free, 1 << 28)
