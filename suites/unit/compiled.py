"""Compile kernels for a GPU that is not there: the real launchers run on CPU tensors; Triton compiles, nothing runs.

What is compiled is what a call on that GPU would compile: same arguments, same specialisation, same configuration.
"""

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from gem.kernels import config
from gem.kernels.launch import PLANS

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448}  # bytes of shared memory that one block may ask for
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}


@dataclass
class Resources:
    """Of one compiled kernel, as ptxas reports them."""

    name: str
    constants: dict[str, Any]
    registers: int
    spilled: int  # bytes stored to local memory
    shared: int  # bytes
    ptx: str
    cubin: bytes
    warnings: list[str]  # "Potential Performance Loss: wgmma … are serialized" too, which ptxas files under info


class _Driver:
    """As much of a driver as compiling asks for."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_for(arch: int) -> Iterator[list[Resources]]:
    """Inside, launches compile for compute capability ``arch`` / 10 and are recorded instead of run."""
    found: list[Resources] = []
    launch = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        with redirect_stdout(io.StringIO()) as said:
            kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        assert kernel is not None
        constants = {name: value for name, value in kwargs.items() if isinstance(value, (int, str, bool))}
        found.append(_resources(self.__name__, constants, kernel, arch, said.getvalue()))
        return kernel

    before = driver._active
    driver.set_active(cast(Any, _Driver(arch)))
    _forget_kernels()
    try:
        with (
            knobs.nvidia.scope(),
            mock.patch.object(JITFunction, "run", compile_only),
            mock.patch.object(config, "architecture", lambda device: arch),
            mock.patch("gem.kernels.tuning._read", dict),
            mock.patch("gem.kernels.launch._hooked", lambda: True),
            mock.patch("gem.kernels.launch.multiprocessors", lambda device: MULTIPROCESSORS[arch]),
        ):
            knobs.nvidia.dump_ptxas_log = True
            yield found
    finally:
        driver._active = before
        _forget_kernels()


def _forget_kernels() -> None:
    """A kernel keeps what it was compiled to by device number, not by what the device is."""
    PLANS.clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("gem.kernels"):
            for kernel in vars(module).values():
                if isinstance(kernel, JITFunction):
                    kernel.device_caches.clear()


def _resources(name: str, constants: dict[str, Any], kernel: Any, arch: int, log: str) -> Resources:
    """``log``: of the ptxas that Triton ran, which takes seconds; it ran none where its cache had the kernel."""
    ptx = kernel.asm["ptx"]
    if not re.search(r"Used \d+ registers", log):
        tool = "ptxas-blackwell" if arch >= 100 else "ptxas"
        suffix = "a" if arch >= 90 else ""
        command = [str(TOOLS / tool), "-v", f"-arch=sm_{arch}{suffix}", "-o", "/dev/null", "-"]
        log = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    used = re.search(r"Used (\d+) registers", log)
    spilled = re.search(r"(\d+) bytes spill stores", log)
    assert used and spilled, log
    warnings = [line for line in log.splitlines() if "warning" in line.lower() or "Performance Loss" in line]
    return Resources(
        name, constants, int(used[1]), int(spilled[1]), kernel.metadata.shared, ptx, kernel.asm["cubin"], warnings
    )


def product_loops(kernel: Resources, folder: Path) -> list[int]:
    """Instructions from each jump back in sm_90a's machine code to where it goes, if wgmma is among them; ascending.

    The first ones are innermost loops. Files go to ``folder``.
    """
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.cubin)
    sass = subprocess.run([TOOLS / "cuobjdump", "-sass", binary], capture_output=True, text=True, check=True).stdout
    code = [
        (int(at, 16), operation, rest)
        for at, operation, rest in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\d+ )?([A-Z][\w.]*)(.*?);", sass)
    ]
    sizes = []
    for at, operation, rest in code:
        to = re.search(r"0x([0-9a-f]+)", rest) if operation == "BRA" else None
        if to is None:
            continue
        body = [op for place, op, _ in code if int(to[1], 16) <= place <= at]
        sizes += [len(body)] * any(op.startswith("HGMMA") for op in body)
    return sorted(sizes)
