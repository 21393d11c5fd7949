"""Where a run took place and what this machine offers, found without importing torch: `gem list` cannot afford it."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Set
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gem import __version__, paths
from gem.errors import RequestError
from gem.harness import needs

DEVICES = ("auto", "cpu", "cuda")

# nvidia-smi's field → ours. Clocks move with load: they are read when asked, the limits say what they could be.
_GPU_FIELDS = {
    "index": "index",
    "uuid": "uuid",
    "name": "name",
    "compute_cap": "capability",
    "driver_version": "driver",
    "memory.total": "memory_mib",
    "clocks.sm": "sm_clock_mhz",
    "clocks.max.sm": "max_sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "power.limit": "power_limit_w",
}


_PEERS = (
    "flash-attn", "flash-attn-3", "flash-attn-4", "tokenspeed-fa3", "nvidia-cutlass-dsl", "ads-mkl",
    "generative-recommenders", "fbgemm-gpu",
)  # fmt: skip


def capture(device: str = "auto") -> dict[str, Any]:
    """The `environment` of a results document: a flat dict of plain values, None for what could not be found.

    Keys: time (UTC, ISO 8601), gem, git_commit, git_dirty, device, gpu, gpu_count, gpu_memory_mib, capability, driver,
    sm_clock_mhz, max_sm_clock_mhz, memory_clock_mhz, power_limit_w, torch, triton, cuda, numpy, python, host, platform,
    cpu, cpu_capability (the instructions that torch's CPU kernels use), cores (usable by this process), threads (of
    torch's CPU ops), memory_gib, settings (variables that change what is measured), and peers (versions of the packages
    that peers come from).
    """
    gpus = visible_gpus()
    gpu = gpus[0] if gpus else {}
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "gem": __version__,
        **git_state(),
        "device": facts(device).device,
        "gpu": gpu.get("name"),
        "gpu_count": len(gpus),
        "gpu_memory_mib": _number(gpu.get("memory_mib")),
        "capability": gpu.get("capability"),
        "driver": gpu.get("driver"),
        **{key: _number(gpu.get(key)) for key in ("sm_clock_mhz", "max_sm_clock_mhz", "memory_clock_mhz")},
        "power_limit_w": _number(gpu.get("power_limit_w")),
        "torch": version("torch"),
        "triton": version("triton"),
        "cuda": torch_cuda(),
        "numpy": version("numpy"),
        "python": platform.python_version(),
        "host": platform.node(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cpu_capability": cpu_capability(),
        "cores": usable_cores(),
        "threads": torch_threads(),
        "memory_gib": memory_gib(),
        "settings": settings(),
        "peers": {name: found for name in _PEERS if (found := version(name)) is not None},
    }


def facts(device: str = "auto") -> needs.Facts:
    """What a run on `device` ("auto": the GPU where torch can use one, else the CPU) finds here.

    Raises RequestError for an unknown device, and for "cuda" where there is none.
    """
    if device not in DEVICES:
        raise RequestError(f"unknown device {device!r}; accepted: {', '.join(DEVICES)}")
    capabilities, no_cuda = _cuda()
    if device == "cuda" and not capabilities:
        raise RequestError(f"device 'cuda': {no_cuda}; accepted here: auto, cpu")
    compiler, no_compiler = cxx_compiler()
    return needs.Facts(
        device="cuda" if capabilities and device != "cpu" else "cpu",
        capabilities=capabilities,
        no_cuda=no_cuda,
        triton=needs.importable("triton"),
        compiler=compiler,
        no_compiler=no_compiler,
    )


def _cuda() -> tuple[tuple[int, ...], str]:
    """Compute capabilities of the GPUs that torch could use, and why there are none."""
    if version("torch") is None:
        return (), "torch is not installed"
    if torch_cuda() is None:
        return (), f"torch {version('torch')} is built without CUDA"
    gpus = visible_gpus()
    if not gpus:
        if shutil.which("nvidia-smi") is None:
            return (), "no NVIDIA GPU here (no nvidia-smi)"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        return (), "nvidia-smi lists no GPU" if hidden is None else f"no GPU visible (CUDA_VISIBLE_DEVICES={hidden!r})"
    return tuple(int(gpu["capability"].replace(".", "")) for gpu in gpus), ""


def visible_gpus() -> list[dict[str, str]]:
    """The GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves, in CUDA's order; fields as in `_GPU_FIELDS`."""
    gpus = [gpu for gpu in _nvidia_smi() if re.fullmatch(r"\d+\.\d", gpu["capability"])]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    chosen = []
    for entry in visible.split(","):
        entry = entry.strip()
        if entry.startswith("MIG-"):  # a slice of a GPU; which one nvidia-smi's query does not tell
            match = gpus[0] if gpus else None
        else:
            match = next((g for g in gpus if entry and (g["index"] == entry or g["uuid"].startswith(entry))), None)
        if match is None:  # as CUDA does: the list ends at the first entry that is no device
            break
        chosen.append(match)
    return chosen


@functools.cache
def _nvidia_smi() -> tuple[dict[str, str], ...]:
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()  # a driver that does not answer is no GPU for us; facts() says "nvidia-smi lists no GPU"
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip()]
    names = tuple(_GPU_FIELDS.values())
    return tuple(dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names))


def _number(text: str | None) -> float | None:
    with contextlib.suppress(TypeError, ValueError):
        return float(text)  # type: ignore[arg-type]
    return None  # "[N/A]", or no GPU


@functools.cache
def version(package: str) -> str | None:
    """Version of an installed package without importing it, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def torch_cuda() -> str | None:
    """The CUDA version that the installed torch is built for ("13.0"), read from its version file; None without."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        with contextlib.suppress(OSError):
            text = (Path(folder) / "version.py").read_text(encoding="utf-8")
            found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
            return found[1] if found else None
    return None


def cxx_compiler() -> tuple[str | None, str]:
    """The C++ compiler that torch's inductor would call, or None and what is missing: it needs Python's headers too."""
    wanted = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    found = shutil.which(wanted)
    if found is None:
        return None, f"no C++ compiler ({wanted})"
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.is_file():
        return None, f"no Python headers ({headers})"
    return found, ""


def git_state() -> dict[str, Any]:
    """`git_commit` and `git_dirty` (tracked files changed) of the checkout that runs; None outside one.

    Sources that travelled without their repository, or into another one (to a GPU machine, say), learn from GEM_COMMIT
    which commit they are.
    """
    root = paths.checkout_root()
    told = os.environ.get("GEM_COMMIT")
    nothing = {"git_commit": told, "git_dirty": None}
    if told or root is None or shutil.which("git") is None:
        return nothing
    try:
        commit, status = (
            subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20, check=True
            ).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return nothing  # an archive of the sources, or a repository owned by another user
    return {"git_commit": commit.strip(), "git_dirty": bool(status.strip())}


def cpu_model() -> str:
    """The CPU's name as the system gives it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith(("model name", "cpu model")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_capability() -> str | None:
    """``AVX512``: what torch's CPU kernels were chosen for. Asked from torch when it is loaded, else foretold.

    The rule is that of ATen's DispatchStub.cpp for x86: a known ATEN_CPU_CAPABILITY, else the best that there is.
    None elsewhere while torch is not loaded.
    """
    if "torch" in sys.modules:
        return str(sys.modules["torch"].backends.cpu.get_cpu_capability())
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    asked = os.environ.get("ATEN_CPU_CAPABILITY")
    if asked in ("avx512", "avx2", "default"):
        return asked.upper()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    if {"avx512vl", "avx512bw", "avx512dq", "fma"} <= flags:
        return "AVX512"
    return "AVX2" if {"avx2", "fma"} <= flags else "DEFAULT"


def usable_cores() -> int:
    """Cores that this process may use: its affinity mask, cut by the container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        cores = min(cores, max(1, -(-int(quota) // int(period))))  # "max" is no number: no quota
    return cores


def busy_cores(seconds: float = 0.3) -> float | None:
    """Cores that other work keeps busy just now, watched for so long while this process sleeps; None where unknown.

    On a CPU it decides what is measured: one of two cores taken made a forward of many parallel loops 11 times slower.
    """
    if not hasattr(os, "sched_getaffinity") or usable_cores() < len(os.sched_getaffinity(0)):
        return None  # of a quota on shared cores one cannot tell whose work it is
    try:
        before, start = Path("/proc/stat").read_text(encoding="utf-8"), time.monotonic()
        time.sleep(seconds)
        after, end = Path("/proc/stat").read_text(encoding="utf-8"), time.monotonic()
    except OSError:
        return None
    busy = _busy_ticks(after, os.sched_getaffinity(0)) - _busy_ticks(before, os.sched_getaffinity(0))
    return round(busy / os.sysconf("SC_CLK_TCK") / (end - start), 2)


def _busy_ticks(stat: str, cores: Set[int]) -> int:
    """Of /proc/stat: everything but idle (4th) and waiting for disks (5th), without guests, who are in user already."""
    lines = (line.split() for line in stat.splitlines())
    counts = {words[0]: [int(word) for word in words[1:9]] for words in lines if words and words[0].startswith("cpu")}
    found = (counts.get(f"cpu{core}", []) for core in cores)
    return sum(sum(ticks) - sum(ticks[3:5]) for ticks in found)


def torch_threads() -> int:
    """Threads of torch's CPU ops: asked from torch when it is loaded, else what it will choose."""
    if "torch" in sys.modules:
        return int(sys.modules["torch"].get_num_threads())
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if os.environ.get(variable, "").isdigit():
            return int(os.environ[variable])
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gib() -> float | None:
    """Main memory of the machine in GiB."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def settings() -> dict[str, str]:
    """The variables set that change what is measured."""
    return dict(sorted(_settings()))


def _settings() -> Iterator[tuple[str, str]]:
    exact = (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
        "CXX",
        "TRITON_INTERPRET",
        "CUDA_LAUNCH_BLOCKING",
        # Which instructions torch's own kernels, MKL and oneDNN (of two names) may use.
        "ATEN_CPU_CAPABILITY",
        "MKL_ENABLE_INSTRUCTIONS",
        "MKL_CBWR",
        "DNNL_MAX_CPU_ISA",
        "ONEDNN_MAX_CPU_ISA",
    )
    for key, value in os.environ.items():
        if key in exact or key.startswith(("GEM_", "PYTORCH_", "TORCHINDUCTOR_", "TORCH_NCCL_")):
            yield key, value
