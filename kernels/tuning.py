"""Which tiles are fastest here: measured once a class of shapes when ``GEM_AUTOTUNE=1``, kept on disk.

The file lies in ``$GEM_CACHE`` (default ~/.cache/gem), named by GPU, Triton version and the kernels' sources; it holds
every candidate's median, so that it is also the record of a sweep. Without the variable a choice that was kept is used
and nothing is measured: no call is ever slow by surprise.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import triton

from gem.kernels.config import Config, Shape, default
from gem.kernels.launch import compiling_only

log = logging.getLogger("gem")
_FAST_ENOUGH = 1.02  # of the fastest: among those the first candidate, so that noise does not decide


def choose(shape: Shape, launch: Callable[[Config], Any]) -> Config:
    """The configuration of a launch. ``launch(config)`` runs it, for measuring."""
    found = _known(shape)
    if found is None and os.environ.get("GEM_AUTOTUNE", "0") not in ("", "0") and shape.arch:
        found = _measure(shape, launch)
        _known.cache_clear()
    return found or default(shape)


@functools.lru_cache(4096)
def _known(shape: Shape) -> Config | None:
    entry = _read().get(shape.key()) if shape.arch else None
    try:
        return None if entry is None else Config(**entry["config"])
    except (TypeError, KeyError):  # written by other hands: as good as nothing
        return None


def candidates(shape: Shape) -> list[Config]:
    """What is measured for a class: the default first, then tiles that fit it."""
    tiles = _TILES[shape.kernel][min(max(shape.head_dim, 64), 256)]
    found = [default(shape)]
    for m, n, warps, stages in tiles:
        if shape.dtype == "float32":
            m, n, stages = m // 2, n // 2, 2
        found.append(Config(m, n, warps, stages))
    few = shape.q_len <= 32
    if few and shape.kernel != "dkv":
        found += [Config(32, 64, 4, 3), Config(32, 128, 4, 2), Config(32, 128, 4, 3), Config(32, 64, 2, 3)]
    if few and shape.kernel == "dkv":
        found += [Config(32, 128, 8, 2), Config(32, 64, 4, 2), Config(32, 32, 4, 2)]
    if shape.k_len <= 512 or shape.mask.startswith("window"):  # a few tiles each: what stands around the loop counts
        found += [Config(*tile, persistent=p) for tile in _SHORT[shape.kernel] for p in (0, 2, 3, 4)]
    found += [Config(*tile, registers=registers) for *tile, registers in _SQUEEZED[shape.kernel]]
    if shape.k_len <= 512 or shape.mask.startswith("window") or shape.q_len <= 64:
        found += [replace(config, warm=True) for config in found if not config.persistent]
    return list(dict.fromkeys(found))


_TILES: dict[str, dict[int, list[tuple[int, int, int, int]]]] = {
    "forward": {
        64: [(128, 64, 4, 2), (128, 64, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 2),
             (64, 64, 4, 3), (64, 128, 4, 2), (128, 128, 4, 2), (128, 32, 4, 4)],
        128: [(128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2),
              (64, 32, 4, 3), (128, 32, 8, 4), (128, 64, 4, 2)],
        256: [(64, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2), (128, 32, 8, 3)],
    },
    "dq": {
        64: [(128, 64, 8, 3), (128, 64, 4, 2), (128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3),
             (64, 128, 4, 2), (128, 32, 4, 3)],
        128: [(128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (64, 128, 8, 2),
              (64, 32, 4, 3), (128, 32, 8, 3), (128, 128, 8, 2)],
        256: [(64, 32, 4, 2), (64, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2)],
    },
    "dkv": {
        64: [(64, 128, 8, 2), (64, 128, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2),
             (64, 128, 4, 2), (32, 128, 4, 3)],
        128: [(64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (32, 128, 8, 3), (128, 64, 8, 2),
              (32, 64, 4, 3), (32, 64, 4, 2), (64, 64, 8, 2)],
        256: [(32, 64, 8, 2), (64, 64, 8, 1), (32, 32, 4, 2), (32, 64, 8, 1)],
    },
}  # fmt: skip


_SHORT: dict[str, list[tuple[int, int, int, int]]] = {
    "forward": [(64, 32, 4, 2), (64, 32, 4, 3), (64, 32, 4, 4), (128, 32, 4, 3), (128, 32, 8, 3), (64, 64, 4, 2)],
    "dq": [(64, 32, 4, 2), (64, 32, 4, 3), (128, 32, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2)],
    "dkv": [(64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 3), (64, 32, 4, 2), (64, 64, 4, 3)],
}


# So many registers that one program more fits on a multiprocessor.
_SQUEEZED: dict[str, list[tuple[int, int, int, int, int]]] = {
    "forward": [(64, 32, 4, 2, 128), (64, 64, 4, 2, 168)],
    "dq": [(64, 32, 4, 2, 128), (64, 32, 4, 2, 168), (64, 64, 4, 2, 168)],
    "dkv": [(32, 64, 4, 2, 168), (32, 64, 4, 3, 168), (64, 64, 4, 2, 168)],
}


def _measure(shape: Shape, launch: Callable[[Config], Any]) -> Config:
    tried = candidates(shape)
    _compile(tried, launch)
    medians: dict[Config, float] = {}
    failures: dict[str, str] = {}
    for config in tried:
        try:
            found: Any = triton.testing.do_bench(lambda c=config: launch(c), 5, 25, return_mode="median")
            medians[config] = found
        except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError) as error:
            failures[repr(config)] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if not medians:
        raise RuntimeError(f"autotune: no configuration runs for {shape.key()}: {failures}")
    fastest = min(medians.values())
    best = next(config for config, ms in medians.items() if ms <= _FAST_ENOUGH * fastest)
    _keep(shape, best, medians, failures)
    return best


def _compile(tried: list[Config], launch: Callable[[Config], Any]) -> None:
    """All candidates at once, on as many threads as there are cores; one that fails fails again when it is measured."""
    from triton.runtime._async_compile import AsyncCompileMode

    pool = ThreadPoolExecutor(min(16, os.cpu_count() or 1))
    with pool, AsyncCompileMode(pool, ignore_errors=True), compiling_only():
        for config in tried:
            with contextlib.suppress(Exception):
                launch(config)


# -- the file ----------------------------------------------------------------------------------------------------------


def cache_file() -> Path:
    """Where choices for this GPU are kept."""
    folder = Path(os.environ.get("GEM_CACHE") or Path.home() / ".cache" / "gem")
    name = torch.cuda.get_device_name().replace(" ", "-")
    return folder / f"autotune-{name}-triton{triton.__version__}-{_sources()}.json"


@functools.cache
def _sources() -> str:
    """Of all kernels: a choice made for other code is no choice."""
    text = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.sha256(text).hexdigest()[:12]


def _read() -> dict[str, Any]:
    try:
        found = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # RuntimeError: there is no home directory
        return {}
    return found if isinstance(found, dict) else {}


def _keep(shape: Shape, best: Config, medians: dict[Config, float], failures: dict[str, str]) -> None:
    ms = {repr(config): round(value, 5) for config, value in sorted(medians.items(), key=lambda item: item[1])}
    entries = _read() | {shape.key(): {"config": asdict(best), "ms": ms, "failed": failures}}
    try:
        file = cache_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False, encoding="utf-8") as part:
            json.dump(entries, part, indent=1)
        Path(part.name).replace(file)
    except (OSError, RuntimeError) as error:
        log.warning("gem: autotune: the choice for %s could not be kept: %s", shape.key(), error)
