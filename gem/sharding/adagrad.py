"""Row-wise Adagrad on the rows that a rank holds, in fp32, fp64, or bf16 whose updates are rounded stochastically.

For each row with gradient g: sum += mean(g²); w -= lr · g / (sqrt(sum) + eps), as gem.train.optimizers.RowwiseAdagrad.

bf16 weights keep 8 bits of precision. Rounded to nearest, an update of less than 1/512 of a weight is lost, each time:
late in training, when Adagrad's steps are small, tables stand still. So the exact result is rounded up with the
probability that makes its expectation exact. The random bits are a hash of the row, the column, the row's sum and the
exact result: copies of a row on other ranks, and a run that goes on from a checkpoint, round alike with nothing to be
kept in step. (RowwiseAdagrad of one process keeps the lower halves of fp32 instead: exact, and as large as fp32.)

Legend: R rows held, V rows to be updated, W columns held.
"""

import torch
from torch import Tensor


def update(
    weight_RW: Tensor, sums_R: Tensor, ids_V: Tensor, g_VW: Tensor, mean_V: Tensor | None = None, *, lr: float,
    eps: float, scale: float | Tensor = 1.0, numbers_V: Tensor | None = None, column: int = 0,
) -> None:  # fmt: skip
    """In place. ``scale``: of g. ``mean``: of g² over whole rows, where some columns are elsewhere.

    For bf16: ``numbers``, which tell rows of all tables apart, whoever holds them (None: the ids); first ``column``.
    """
    sum_V = sums_R.index_select(0, ids_V)
    if mean_V is None:
        norm_V = torch.linalg.vector_norm(g_VW, dim=1) * scale
        sum_V.addcmul_(norm_V, norm_V, value=1 / g_VW.shape[1])
    else:
        sum_V += mean_V * scale**2
    sums_R.index_copy_(0, ids_V, sum_V)
    factor_V1 = (sum_V.sqrt().add_(eps).reciprocal_() * (-lr * scale))[:, None]
    if weight_RW.dtype == torch.bfloat16:
        exact_VW = weight_RW.index_select(0, ids_V).float().addcmul_(g_VW, factor_V1)
        found_VW = rounded(exact_VW, sum_V, ids_V if numbers_V is None else numbers_V, column)
        weight_RW.index_copy_(0, ids_V, found_VW)
    elif weight_RW.device.type == "cpu":  # half the time of index_add_
        weight_RW.numpy()[ids_V.numpy()] = picked(weight_RW, ids_V).addcmul_(g_VW, factor_V1).numpy()
    else:
        weight_RW.index_add_(0, ids_V, g_VW * factor_V1)


def picked(table_RW: Tensor, ids_N: Tensor) -> Tensor:
    """Rows [N, W], any type of ids."""
    if table_RW.device.type == "cpu" and table_RW.dtype == torch.float32 and table_RW.numel() and ids_N.shape[0]:
        # Sums of one row each: it fetches rows ahead, which index_select does not.
        each_N = torch.arange(ids_N.shape[0], dtype=ids_N.dtype)
        return torch.embedding_bag(table_RW, ids_N, each_N)[0]
    if not table_RW.shape[1]:
        return table_RW.new_empty(ids_N.shape[0], 0)
    return table_RW.index_select(0, ids_N)


def rounded(exact_VW: Tensor, sum_V: Tensor, numbers_V: Tensor, column: int = 0) -> Tensor:
    """fp32 as bf16, up or down with the probability that makes its expectation exact; what is not finite stays so."""
    bits = exact_VW.view(torch.int32)
    seed_V = _mixed(numbers_V.int() ^ _mixed(sum_V.float().view(torch.int32)))
    columns_W = torch.arange(column, column + exact_VW.shape[1], dtype=torch.int32, device=bits.device) * -1640531527
    noise = _mixed(bits ^ (seed_V[:, None] + columns_W)) & 0xFFFF
    found = ((bits + noise) & -0x10000).view(torch.float32)
    return torch.where(exact_VW.isfinite(), found, exact_VW).to(torch.bfloat16)


def _mixed(x: Tensor) -> Tensor:
    """A bijection of int32 in which each bit hangs on all others: the finaliser of MurmurHash3 (Austin Appleby)."""
    for shift, factor in ((16, -2048144789), (13, -1028477387)):
        x = (x ^ ((x >> shift) & ((1 << (32 - shift)) - 1))) * factor
    return x ^ ((x >> 16) & 0xFFFF)
