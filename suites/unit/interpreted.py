"""Shared by the tests of impl="triton" that Triton's interpreter runs: small jagged batches, and the ops by name.

Interpreting costs by operation and not by element, so batches are small and tiles too (32 x 32 for these).
"""

import os
from typing import Any

import pytest
import torch
from attention_laws import offsets, rows
from torch import Tensor

import gem

if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
    pytest.skip("runs in ci/test's second pass, under TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed: there is nothing to interpret")

# Tiles that are full, one row, one row too many; samples without queries, without keys, without either; rows behind.
Q_LENS, K_LENS, TAIL = [0, 5, 70, 33, 1, 0], [3, 40, 0, 65, 100, 0], 3
HEADS, DIM = 2, 16

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "left": {"window": (16, -1)},
    "window": {"window": (7, 9)},
    "itself": {"window": (0, 0)},
    "beyond": {"window": (2**31 - 1, 2**31 - 1)},
    "beyond_causal": {"window": (400, 400), "causal": True},
}

# numpy, on whose arrays everything runs, speaks of each NaN and infinity that a test puts in, and of a scalar's shape.
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")


def batch(
    dim: int = DIM, dtype: torch.dtype = torch.float32, heads: int = HEADS, q_lens=Q_LENS, k_lens=K_LENS
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """((q, k, v), q_offsets, k_offsets)."""
    q = rows(sum(q_lens) + TAIL, heads, dim, dtype, 1)
    k, v = (rows(sum(k_lens) + TAIL, heads, dim, dtype, seed) for seed in (2, 3))
    return (q, k, v), offsets(q_lens), offsets(k_lens)


def attention(*args: Any, **how: Any) -> Tensor:
    """gem.jagged_attention on the kernels."""
    return gem.jagged_attention(*args, impl="triton", **how)


def gdpa(*args: Any, **how: Any) -> Tensor:
    """gem.gdpa on the kernels."""
    return gem.gdpa(*args, impl="triton", **how)


def blocks(*args: Any, **how: Any) -> Tensor:
    """gem.block_attention on the kernels."""
    return gem.block_attention(*args, impl="triton", **how)
