"""What the tests of tables share: the update in float64; and, run as a program, two ranks, forked, in a gloo group."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.nn import Parameter

from gem.train.optimizers import RowwiseAdagrad, lookup

EPS = 1e-8


def table_of(rows: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Parameter:
    return Parameter(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype))


def adagrad_f64(
    weight: Tensor, sums: Tensor, ids: Tensor, rows: Tensor, lr: float, scale: float = 1.0, eps: float = EPS
) -> tuple[Tensor, Tensor]:
    """The definition, row by row, over a dense float64 gradient."""
    weight, sums = weight.detach().double().clone(), sums.double().clone()
    dense = torch.zeros_like(weight)
    for i, row in zip(ids.flatten().tolist(), rows.reshape(-1, weight.shape[1]).double(), strict=True):
        dense[i] += row * scale
    for i in set(ids.flatten().tolist()):
        sums[i] += (dense[i] ** 2).sum() / weight.shape[1]
        weight[i] -= lr * dense[i] / (sums[i].sqrt() + eps)
    return weight, sums


def batches_of(sizes: list[int], rows: int, columns: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randint(rows, (n,), generator=draw), torch.randn(n, columns, generator=draw)) for n in sizes]


def on_rank(rank: int, folder: Path, sizes: list[list[int]]) -> None:
    """Steps with so many ids on each rank; keeps the table and its accumulators."""
    dist.init_process_group("gloo", store=FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    table = table_of(30, 4)
    optimizer = RowwiseAdagrad([table], lr=0.1)
    for step, counts in enumerate(sizes):
        draw = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(30, (counts[rank],), generator=draw)
        optimizer.zero_grad()
        lookup(ids, table).backward(torch.randn(counts[rank], 4, generator=draw))
        optimizer.average_gradients()
        optimizer.step()
    torch.save((table.detach(), optimizer.sums["0"]), folder / f"{rank}.pt")
    dist.destroy_process_group()


def main(folder: Path, sizes: list[list[int]]) -> None:
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                on_rank(rank, folder, sizes)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), [[int(n) for n in pair.split(",")] for pair in sys.argv[2:]])
