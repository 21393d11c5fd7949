"""Learned attention biases by bucket of relative position or of time difference.

One mechanism serves both: an integer distance between a query and a key is sorted into buckets by ascending
``boundaries``, and each bucket has one learned value per head. Integers make the bucket of a pair the same on every
device (a rounded logarithm does not). T5's and HSTU's bias tables are such tables with other boundaries.

Legend: N buckets, H heads (or 1, shared by all heads), TQ / TK rows of q / k.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def _check_table(owner: str, table_NH: Tensor, boundaries: Tensor) -> None:
    if not isinstance(table_NH, Tensor) or not isinstance(boundaries, Tensor):
        raise ValueError(f"{owner}: table and boundaries must be tensors, got {type(table_NH).__name__} and others")
    if table_NH.dim() != 2:
        raise ValueError(f"{owner}: table must be [buckets, heads or 1], got shape {tuple(table_NH.shape)}")
    if boundaries.dim() != 1 or boundaries.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{owner}: boundaries must be a 1-D int32 or int64 tensor, got {boundaries.dim()}-D {boundaries.dtype}"
        )
    if not table_NH.is_floating_point() or table_NH.shape[0] < 1:
        raise ValueError(
            f"{owner}: table must be floating with a row or more, got {table_NH.dtype}, {table_NH.shape[0]}"
        )
    if boundaries.shape[0] != table_NH.shape[0] - 1:
        raise ValueError(
            f"{owner}: {table_NH.shape[0]} buckets need {table_NH.shape[0] - 1} boundaries, got {boundaries.shape[0]}"
        )


def _check_ascending(owner: str, boundaries: Tensor) -> None:
    """Reads memory: on the CPU alone, and not while torch.compile traces."""
    if boundaries.device.type != "cpu" or torch.compiler.is_compiling() or boundaries.numel() < 2:
        return
    if bool((boundaries.long().diff() <= 0).any()):
        raise ValueError(f"{owner}: boundaries must ascend, got {boundaries.tolist()[:8]}")


@dataclass(frozen=True)
class PositionBias:
    """Bias by relative position: ``table[bucket(q_position - k_position), head]``.

    Positions are aligned bottom-right like causal masks: query i of a sample stands at ``i + k_len - q_len``, key j at
    j. A distance d falls into bucket "number of boundaries <= d"; ``boundaries`` ascend, one fewer than buckets.

    Shapes: table [N, H] or [N, 1], boundaries int32/int64 [N - 1]. Gradients flow to ``table``.
    """

    table: Tensor
    boundaries: Tensor

    def __post_init__(self) -> None:
        _check_table("PositionBias", self.table, self.boundaries)
        _check_ascending("PositionBias", self.boundaries)

    @classmethod
    def clipped(cls, table: Tensor) -> "PositionBias":
        """One bucket per distance in [-m, m], 2 m + 1 rows; farther pairs share the end buckets (HSTU)."""
        if table.shape[0] % 2 == 0:
            raise ValueError(
                f"PositionBias.clipped: table needs an odd number of rows (2 m + 1 distances), got {table.shape[0]}"
            )
        reach = table.shape[0] // 2
        return cls(table, torch.arange(1 - reach, reach + 1, device=table.device))


@dataclass(frozen=True)
class TimeBias:
    """Bias by time difference: ``table[bucket(q_times - k_times), head]``.

    Shapes: table [N, H] or [N, 1]; q_times int64 [TQ] and k_times int64 [TK], one time stamp a row of q and of k (any
    unit); boundaries int32/int64 [N - 1], ascending, in that unit. Gradients flow to ``table``.
    """

    table: Tensor
    q_times: Tensor
    k_times: Tensor
    boundaries: Tensor

    def __post_init__(self) -> None:
        _check_table("TimeBias", self.table, self.boundaries)
        _check_ascending("TimeBias", self.boundaries)
        for name, times in (("q_times", self.q_times), ("k_times", self.k_times)):
            if times.dim() != 1 or times.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f"TimeBias: {name} must be a 1-D int32 or int64 tensor, got {times.dim()}-D {times.dtype}"
                )

    @classmethod
    def log2(cls, table: Tensor, q_times: Tensor, k_times: Tensor) -> "TimeBias":
        """Buckets that double: differences below 1, below 2, below 4, below 8 and so on, one per row of ``table``."""
        rows = table.shape[0]
        if not 1 <= rows <= 64:
            raise ValueError(f"TimeBias.log2: table needs 1 to 64 rows (powers of two in int64), got {rows}")
        powers = torch.tensor([2**i for i in range(rows - 1)], dtype=torch.int64, device=table.device)
        return cls(table, q_times, k_times, powers)


Bias = Tensor | PositionBias | TimeBias
