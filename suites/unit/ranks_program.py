"""Ranks of `gem train` that are started one by one, watched, and made to fail; what the tests of faults share.

They fork from a process that has imported all they need: a rank costs no import. Each has torchrun's environment, its
own standard error in a file of all of them, and ends as a process does; the kernel's word is its exit code.
"""

import atexit
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

SIZES = {"dim": 16, "heads": 2, "layers": 1, "experts": 2, "expert_hidden": 16, "head_hidden": 16}
CONFIG: dict[str, Any] = {
    "steps": 10, "log_every": 2, "checkpoint_every": 2, "warmup": 2, "timeout_s": 6.0, "keep": 100,
    "data": {
        "kind": "synthetic", "valid_samples": 64,
        # Three categories over four ranks: one has none of them.
        "train": {"samples": 256, "chunk": 64, "items": 60, "users": 40, "cohorts": 2, "categories": 3,
                  "history": {"kind": "uniform", "min": 0, "max": 24, "seed": 0}},
    },
    "reader": {"batch": 8, "base": 4, "pool": 4}, "model": SIZES,
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What befalls a rank when it reads the batch of a step: see ``_Befallen``."""

    kind: str
    rank: int = 1
    step: int = 6


def main(config: dict[str, Any], out: str, fault: Fault | None = None, more: Sequence[str] = ()) -> None:
    """`gem train` on this rank, its files in ``out``; does not come back."""
    import gem.train.loop
    from gem import cli

    if fault is not None:
        _befall(gem.train.loop, fault)
    text, rank = "".join(f"{name} = {_toml(value)}\n" for name, value in config.items()), os.environ["RANK"]
    path = Path(f"{out}.{zlib.crc32(text.encode())}.toml")  # of all ranks, or of those with this configuration
    part = path.with_suffix(f".{rank}")
    part.write_text(text)
    part.rename(path)
    cli.main(["train", str(path), "--out", out, "--device", "cpu", *more])


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value)


def _befall(loop: Any, fault: Fault) -> None:
    """Batches come from the run's own reader, until the fault."""
    from gem.data.samples import merge

    rank = int(os.environ["RANK"])
    gives = fault.kind == "empty" and rank == 0

    class Befallen(loop.Lanes):
        def __iter__(self) -> Iterator[Any]:
            # "empty": what the rank would have had is rank 0's, so that the step learns from the same samples.
            given = iter(loop.Lanes.__mro__[1](self._batches[0].reader, fault.rank, self.lanes)) if gives else None
            for step, batch in enumerate(super().__iter__(), self.delivered + 1):
                other = next(given) if given is not None else None
                if step == fault.step and rank == fault.rank:
                    yield self.befallen(batch)
                elif step == fault.step and other is not None:
                    yield merge([batch, other])
                else:
                    yield batch
                if fault.kind == "short" and (step + 1, rank) == (fault.step, fault.rank):
                    return

        def befallen(self, batch: Any) -> Any:
            if fault.kind in ("SIGKILL", "SIGSTOP", "SIGTERM"):  # after the last one it goes on, as if it had not heard
                os.kill(os.getpid(), getattr(signal, fault.kind))
            if fault.kind == "hang":
                time.sleep(10_000)
            if fault.kind == "raise":
                raise LookupError("a shelf is empty")
            if fault.kind == "empty":
                print(f"rank {rank} gets none of its {len(batch)} samples of step {fault.step}", file=sys.stderr)
                return batch.take(0, 0)
            return batch

    loop.Lanes = Befallen


# -- starting them -----------------------------------------------------------------------------------------------------


@dataclass
class Ranks:
    """Ranks that are running. ``codes``: what each has ended with, None where it has not."""

    processes: list[ForkServerProcess]
    errors: Path
    began: float = field(default_factory=time.monotonic)

    @property
    def codes(self) -> list[int | None]:
        return [process.exitcode for process in self.processes]

    def wait(self, within_s: float, but: int | None = None) -> list[int | None]:
        """The exit codes when all (``but`` one) have ended; who has not in time is killed, and its code is None."""
        deadline = time.monotonic() + within_s
        waited = [process for rank, process in enumerate(self.processes) if rank != but]
        for process in waited:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = self.codes
        self.kill()
        return codes

    def kill(self) -> None:
        """Whoever is left: one that is stopped would outlive us."""
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
                process.join()

    @property
    def said(self) -> str:
        """On standard error, by all."""
        return self.errors.read_text(errors="replace") if self.errors.exists() else ""

    @property
    def lines(self) -> list[str]:
        """What was said to people."""
        return [line for line in self.said.splitlines() if line.startswith(("gem: error: ", "gem: interrupted: "))]


def _rank(rank: int, ranks: int, port: int, errors: str, work: Callable[..., Any], arguments: tuple) -> None:
    told = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in told.items()} | {"COLUMNS": "200"})
    for target, path in ((2, errors), (1, os.devnull)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), target)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    work(*arguments)


def start(count: int, errors: Path, work: Callable[..., Any], *arguments: Any) -> Ranks:
    """Have so many ranks do ``work(*arguments)``; a tuple among the arguments has one for each rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranks_program", "gem.train.loop", "gem.sharding.start", "gem.harness.training"])
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # read when torch is imported, by the server
    errors.unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(count):
        own = tuple(x[rank] if isinstance(x, tuple) else x for x in arguments)
        process = context.Process(target=_rank, args=(rank, count, port, str(errors), work, own), daemon=True)
        process.start()
        processes.append(process)
    atexit.register((ranks := Ranks(processes, errors)).kill)
    return ranks
