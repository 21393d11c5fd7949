"""What this machine can do at most, measured in the run itself: a matrix product and a copy, timed as contestants are.

Ceilings move with the protocol (one card gave 667 to 790 TFLOP/s for one GEMM), so a share of a ceiling means something
only when both come from the same run. On a CPU a contestant that beats them has them measured again: other work may
have slowed the first measurement.
"""

from typing import Any

import torch

from gem.harness.timing import Timer, interleave, last_level_cache_bytes

BUDGET_S = 1.0


class Ceilings:
    """Lives in a worker. GEMM rates by dtype in TFLOP/s, the copy rate in GB/s (bytes read + bytes written)."""

    def measure(self, device: str, dtype: str, with_copy: bool) -> dict[str, float]:
        """{"tflops": of a square GEMM in ``dtype``, "gbps": of a copy, if asked for}."""
        found = self._measure(device, dtype, with_copy)
        if device == "cuda":  # this worker lives on beside the contestants
            torch.cuda.empty_cache()
        return found

    def _measure(self, device: str, dtype: str, with_copy: bool) -> dict[str, float]:
        calls: dict[str, Any] = {}
        size = self._gemm_size(device, dtype)
        a, b = (_normal(size, device, dtype) for _ in range(2))
        calls["gemm"] = lambda: a @ b
        if with_copy:
            count = (1 << 30 if device == "cuda" else min(1 << 30, max(1 << 27, 4 * last_level_cache_bytes()))) // 4
            source = torch.ones(count, device=device)
            target = torch.zeros(count, device=device)
            calls["copy"] = lambda: target.copy_(source)
        timers = {name: Timer(device) for name in calls}
        for name, call in calls.items():
            timers[name].warm_up(call, cap_s=0.3)
        turns = {name: (lambda name=name, call=call: timers[name].turn(call)) for name, call in calls.items()}
        summaries = interleave(turns, BUDGET_S).summaries()
        found = {"tflops": 2.0 * size**3 / summaries["gemm"].median / 1e9}
        if with_copy:
            found["gbps"] = 2.0 * 4 * count / summaries["copy"].median / 1e6
        return found

    @staticmethod
    def _gemm_size(device: str, dtype: str) -> int:
        """8192 on a GPU; on a CPU the power of two from 512 that takes some 10 ms, at most 4096."""
        if device == "cuda":
            return 8192
        timer = Timer(device)
        size = 512
        while size < 4096:
            a = _normal(size, device, dtype)
            if min(timer.time(lambda a=a: a @ a, lambda: None, 2)) > 8.0:
                break
            size *= 2
        return size


def _normal(size: int, device: str, dtype: str) -> torch.Tensor:
    # Random values: zeros run up to 13 % faster on a GPU, for they draw less power.
    return torch.randn(size, size, device=device, dtype=getattr(torch, dtype))


def least_ms(flops: float, n_bytes: float, tflops: float, gbps: float) -> float:
    """The roofline's time in ms: the longer of arithmetic at the GEMM's rate and least traffic at the copy's."""
    return max(flops / tflops / 1e9, n_bytes / gbps / 1e6)
