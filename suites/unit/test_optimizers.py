"""Row-wise Adagrad against float64 written out, torch's Adagrad and FBGEMM; what its step touches; clipping."""

import copy
import math
import os
import subprocess
import sys
from typing import Any, cast

import pytest
import tables_program
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tables_program import EPS, adagrad_f64, batches_of, table_of
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from gem.errors import RequestError
from gem.train.optimizers import (
    RowwiseAdagrad,
    clip,
    dense_optimizer,
    joined,
    lookup,
    recorded,
    schedule,
    split,
)


def train(
    optimizer: RowwiseAdagrad, table: Parameter, batches: list[tuple[Tensor, Tensor]], scale: float = 1.0
) -> None:
    """One step a batch of (ids, the gradient of their rows)."""
    for ids, rows in batches:
        optimizer.zero_grad()
        lookup(ids, table).backward(rows)
        optimizer.step(scale)


# -- the update --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 30), st.integers(1, 9), st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(0, 99),
    st.sampled_from([1.0, 0.25]), st.sampled_from([0.0, 0.1]), st.sampled_from([EPS, 0.3]),
)  # fmt: skip
def test_updates_are_the_definition_in_float64(rows, columns, sizes, seed, scale, initial, eps):
    table = table_of(rows, columns, seed)
    optimizer = RowwiseAdagrad({"t": table}, lr=0.1, eps=eps, initial=initial)
    weight, sums = table.detach().double(), torch.full((rows,), initial, dtype=torch.float64)
    for ids, gradient in batches_of(sizes, rows, columns, seed):
        train(optimizer, table, [(ids, gradient)], scale)
        weight, sums = adagrad_f64(weight, sums, ids, gradient, 0.1, scale, eps)
    torch.testing.assert_close(table.detach().double(), weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(optimizer.sums["t"].double(), sums, rtol=1e-5, atol=1e-6)


def test_one_column_is_adagrad_of_torch():
    """Where a row has one column, its mean of squares is the square. torch's Adagrad leaves rows without gradient."""
    table = table_of(20, 1)
    other = Parameter(table.detach().clone())
    judge = torch.optim.Adagrad([other], lr=0.3, eps=EPS)
    batches = batches_of([30, 5, 17], 20, 1)
    train(RowwiseAdagrad([table], lr=0.3, eps=EPS), table, batches)
    for ids, rows in batches:
        judge.zero_grad()
        F.embedding(ids, other).backward(rows)
        judge.step()
    torch.testing.assert_close(table, other, rtol=1e-6, atol=1e-6)


def test_fbgemm_agrees():
    pytest.importorskip("fbgemm_gpu", reason="fbgemm_gpu is not installed (ci/requirements-torchrec.txt)")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    rows, columns = 40, 8
    theirs = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, columns, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.1, eps=EPS,
    )  # fmt: skip
    table = table_of(rows, columns)
    weight = theirs.split_embedding_weights()[0]
    weight.data.copy_(table.detach())
    optimizer = RowwiseAdagrad([table], lr=0.1)
    batches = batches_of([100, 3, 50], rows, columns)
    train(optimizer, table, batches)
    for ids, gradient in batches:
        theirs(indices=ids, offsets=torch.arange(len(ids) + 1)).backward(gradient)
    torch.testing.assert_close(table.detach(), weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(optimizer.sums["0"], theirs.split_optimizer_states()[0][0], rtol=1e-5, atol=1e-6)
    assert not torch.equal(table.detach(), table_of(rows, columns).detach())


def test_rows_never_looked_up_keep_their_bits():
    table = table_of(100, 6)
    before, optimizer = table.detach().clone(), RowwiseAdagrad([table], lr=0.5)
    train(optimizer, table, [(torch.tensor([3, 7, 3]), torch.randn(3, 6)), (torch.tensor([7]), torch.randn(1, 6))])
    others = [i for i in range(100) if i not in (3, 7)]
    assert torch.equal(table.detach()[others], before[others])
    assert not optimizer.sums["0"][others].any()
    assert (table.detach()[[3, 7]] != before[[3, 7]]).all()


def test_nothing_looked_up_changes_nothing():
    table = table_of(5, 3)
    before, optimizer = table.detach().clone(), RowwiseAdagrad([table], lr=0.5)
    optimizer.step()
    train(optimizer, table, [(torch.empty(0, dtype=torch.int64), torch.empty(0, 3))])
    assert torch.equal(table.detach(), before) and float(optimizer.sparse_grad_norm()) == 0.0


@pytest.mark.parametrize("accumulated", [torch.float32, torch.bfloat16])
def test_two_runs_are_bitwise_equal(accumulated):
    def run() -> Tensor:
        table = table_of(50, 16, dtype=accumulated)
        batches = batches_of([5000, 3000], 50, 16)
        train(RowwiseAdagrad([table], lr=0.1), table, [(i, g.to(accumulated)) for i, g in batches])
        return table.detach()

    assert torch.equal(run(), run())


def test_rows_of_equal_ids_are_summed_in_the_order_of_their_lookup():
    """1e8 + 1 - 1e8 is 0 in fp32 from left to right, and 1 where the two large ones meet first."""
    table = table_of(2, 1)
    optimizer = RowwiseAdagrad([table], lr=0.1)
    for values, total in (([1e8, 1.0, -1e8], 0.0), ([1e8, -1e8, 1.0], 1.0)):
        optimizer.zero_grad()
        lookup(torch.tensor([1, 1, 1]), table).backward(torch.tensor(values)[:, None])
        assert optimizer.gradient("0").rows_ND.tolist() == [[total]]


# -- bf16 tables -------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_split_weights_join_to_the_same_bits(values):
    weight = torch.tensor(values, dtype=torch.float32)
    upper, lower = split(weight)
    assert torch.equal(joined(upper, lower).view(torch.int32), weight.view(torch.int32))
    # Rounded to nearest: torch's own rounding differs only where two are equally near.
    own, finite = weight.bfloat16(), weight.bfloat16().isfinite() & upper.isfinite()
    torch.testing.assert_close(
        (upper.double() - weight.double()).abs()[finite], (own.double() - weight.double()).abs()[finite], rtol=0, atol=0
    )


def test_split_keeps_nan_a_nan():
    """0x7fffffff, which GPUs make, plus half an upper bit would be -0."""
    weight = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    upper, lower = split(weight)
    assert upper.isnan().all() and joined(upper, lower).isnan().all()


def test_a_bf16_table_trains_as_its_fp32_weights():
    """Updates far below bf16's resolution add up as in fp32, whose rounding the table is after every step."""
    narrow = table_of(30, 4, dtype=torch.bfloat16)
    wide = Parameter(narrow.detach().float())
    batches = batches_of([60] * 40, 30, 4)
    optimizer = RowwiseAdagrad([narrow], lr=1e-4)
    reference = RowwiseAdagrad([wide], lr=1e-4)
    for ids, rows in batches:
        rows = rows.bfloat16()  # what a bf16 lookup hands back
        train(optimizer, narrow, [(ids, rows)])
        train(reference, wide, [(ids, rows.float())])
        assert torch.equal(joined(narrow.detach(), optimizer.rests["0"]), wide.detach())
    assert (wide.detach() - table_of(30, 4, dtype=torch.bfloat16)).abs().max() > 1e-4


# -- what lookups record -----------------------------------------------------------------------------------------------


def test_rows_and_gradients_are_those_of_a_dense_embedding():
    table, ids = table_of(11, 5), torch.tensor([[1, 4, 4], [10, 1, 0]], dtype=torch.int32)
    other = Parameter(table.detach().clone())
    weights = torch.randn(2, 3, 5)
    found, wanted = lookup(ids, table), F.embedding(ids, other)
    assert torch.equal(found, wanted)
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    gradient = RowwiseAdagrad([table], lr=0.1).gradient("0")
    assert other.grad is not None and table.grad is None
    torch.testing.assert_close(torch.zeros(11, 5).index_add(0, gradient.ids_N, gradient.rows_ND), other.grad)
    assert gradient.ids_N.tolist() == [0, 1, 4, 10]


def loss_of(table: Parameter, history: Tensor, target: Tensor) -> Tensor:
    """Two lookups of one table: a history of items, and the item in question."""
    return (lookup(history, table).mean(1) * lookup(target, table)).sum(1).sigmoid().sum()


def test_several_lookups_are_one_update():
    table, dense = table_of(20, 4), table_of(20, 4)
    history, target = torch.randint(20, (6, 5)), torch.randint(20, (6,))
    loss_of(table, history, target).backward()
    (F.embedding(history, dense).mean(1) * F.embedding(target, dense)).sum(1).sigmoid().sum().backward()
    assert dense.grad is not None
    touched = torch.cat([history.flatten(), target]).unique()
    weight, sums = adagrad_f64(table, torch.zeros(20), touched, dense.grad[touched], 0.1)
    optimizer = RowwiseAdagrad([table], lr=0.1)
    optimizer.step()
    torch.testing.assert_close(table.detach().double(), weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(optimizer.sums["0"].double(), sums, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("between", [False, True])
def test_micro_batches_are_one_big_batch(between):
    """Bitwise, since rows are added in the same order; also when they are summed after each micro-batch."""
    (ids, rows), whole, parts = batches_of([64], 9, 4)[0], table_of(9, 4), table_of(9, 4)
    train(RowwiseAdagrad([whole], lr=0.1), whole, [(ids, rows)])
    optimizer = RowwiseAdagrad([parts], lr=0.1)
    for low in range(0, 64, 16):
        lookup(ids[low : low + 16], parts).backward(rows[low : low + 16])
        if between:
            assert len(optimizer.gradient("0").ids_N) <= 9 and len(recorded(parts)) == 1
    optimizer.step()
    assert torch.equal(whole.detach(), parts.detach())


def test_a_sparse_embedding_of_torch_is_consumed_too():
    table = table_of(9, 4)
    embedding = nn.Embedding(9, 4, sparse=True, _weight=table.detach().clone())
    ids, rows = batches_of([40], 9, 4)[0]
    train(RowwiseAdagrad([table], lr=0.1), table, [(ids, rows)])
    optimizer = RowwiseAdagrad([cast(Parameter, embedding.weight)], lr=0.1)
    embedding(ids).backward(rows)
    optimizer.step()
    assert torch.equal(table.detach(), embedding.weight.detach())


def test_nothing_is_recorded_without_gradients():
    table = table_of(9, 4)
    with torch.no_grad():
        assert not lookup(torch.tensor([1]), table).requires_grad
    with torch.inference_mode():
        lookup(torch.tensor([1]), table)
    table.requires_grad_(False)
    assert not lookup(torch.tensor([1]), table).requires_grad
    assert recorded(table) == []


def test_recomputation_records_once():
    table = table_of(9, 4)
    out = checkpoint(lambda i: lookup(i, table).exp(), torch.tensor([1, 2]), use_reentrant=False)
    out.sum().backward()
    assert [x.ids_N.tolist() for x in recorded(table)] == [[1, 2]]


def test_under_autocast_with_rows_in_bf16():
    table = table_of(9, 4)
    ids, linear = torch.tensor([1, 2, 1]), nn.Linear(4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        rows = lookup(ids, table, torch.bfloat16)
        loss = linear(rows).float().square().sum()
    loss.backward()
    assert rows.dtype == torch.bfloat16 and recorded(table)[0].rows_ND.dtype == torch.bfloat16
    optimizer = RowwiseAdagrad([table], lr=0.1)
    assert optimizer.gradient("0").rows_ND.dtype == torch.float32
    wanted, sums = adagrad_f64(table, torch.zeros(9), ids, recorded_rows(ids, table, linear), 0.1)
    optimizer.step()
    torch.testing.assert_close(table.detach().double(), wanted, rtol=0.02, atol=0.02)
    torch.testing.assert_close(optimizer.sums["0"].double(), sums, rtol=0.05, atol=1e-3)


def recorded_rows(ids: Tensor, table: Parameter, linear: nn.Linear) -> Tensor:
    rows = table.detach()[ids].requires_grad_()
    F.linear(rows, linear.weight.detach(), linear.bias.detach()).square().sum().backward()
    assert rows.grad is not None
    return rows.grad


class Shapes(TorchDispatchMode):
    """Records the largest first dimension of every strided tensor that an operation returns and that is new."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known, self.most, self.elements = {x.untyped_storage().data_ptr() for x in known}, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.dim() and x.untyped_storage().data_ptr() not in self.known:
                self.most, self.elements = max(self.most, x.shape[0]), self.elements + x.numel()
        return out


def test_no_step_allocates_with_the_table():
    """A step over 2 M rows makes tensors of the same sizes as one over 20 k: of the batch, not of the table."""

    def of(rows: int, dtype: torch.dtype) -> tuple[int, int]:
        table = Parameter(torch.zeros(rows, 4, dtype=dtype))
        optimizer = RowwiseAdagrad([table], lr=0.1)
        ids, gradient = batches_of([500], 1000, 4)[0]
        with Shapes([table, *optimizer.sums.values(), *optimizer.rests.values()]) as shapes:
            optimizer.zero_grad()
            lookup(ids * (rows // 1000), table).backward(gradient.to(dtype))
            optimizer.step(1.0 / float(optimizer.sparse_grad_norm()))
        assert table.detach().count_nonzero() > 1000
        return shapes.most, shapes.elements

    for dtype in (torch.float32, torch.bfloat16):
        small, large = of(20_000, dtype), of(2_000_000, dtype)
        assert small == large and large[0] <= 500 and large[1] < 100_000

    dense = Parameter(torch.zeros(20_000, 4))
    with Shapes([dense]) as shapes:  # what this guards against is seen
        F.embedding(torch.tensor([1]), dense).sum().backward()
    assert shapes.most == 20_000


def test_ranks_apply_the_mean_of_their_gradients_and_keep_the_same_bits(tmp_path):
    """Also where ranks look up different numbers of rows, or one of them or both none."""
    sizes = [(50, 20), (0, 9), (0, 0), (7, 0)]
    command = [sys.executable, tables_program.__file__, str(tmp_path), *(f"{a},{b}" for a, b in sizes)]
    subprocess.run(command, check=True, timeout=60, env=os.environ | {"OMP_NUM_THREADS": "1"})
    (first, first_sums), (second, second_sums) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert torch.equal(first, second) and torch.equal(first_sums, second_sums)
    weight, sums = table_of(30, 4).detach().double(), torch.zeros(30).double()
    for step, counts in enumerate(sizes):
        draws = [torch.Generator().manual_seed(10 * step + rank) for rank in (0, 1)]
        both = [(torch.randint(30, (n,), generator=d), torch.randn(n, 4, generator=d))
                for n, d in zip(counts, draws, strict=True)]  # fmt: skip
        ids, rows = (torch.cat([pair[i] for pair in both]) for i in (0, 1))
        weight, sums = adagrad_f64(weight, sums, ids, rows, 0.1, scale=0.5)
    torch.testing.assert_close(first.double(), weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(first_sums.double(), sums, rtol=1e-5, atol=1e-6)


# -- norms, clipping, state --------------------------------------------------------------------------------------------


def test_norm_and_clipping_are_those_of_dense_gradients():
    tables, linear = {"a": table_of(9, 4), "b": table_of(5, 3, 1)}, nn.Linear(7, 2)
    plain = [Parameter(t.detach().clone()) for t in (*tables.values(), *linear.parameters())]
    ids = torch.tensor([1, 1, 4, 0])

    rows = torch.cat([lookup(ids, tables["a"]), lookup(ids, tables["b"])], 1)
    linear(rows).square().sum().backward()
    F.linear(
        torch.cat([F.embedding(ids, plain[0]), F.embedding(ids, plain[1])], 1), *plain[2:]
    ).square().sum().backward()
    wanted = nn.utils.clip_grad_norm_(plain, 0.5)

    optimizer = RowwiseAdagrad(tables, lr=0.1)
    norm, scale = clip(linear.parameters(), 0.5, optimizer)
    torch.testing.assert_close(norm, wanted)
    for ours, theirs in zip(linear.parameters(), plain[2:], strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    a = plain[0].grad
    assert a is not None
    touched = ids.unique()
    weight, _ = adagrad_f64(tables["a"], torch.zeros(9), touched, a[touched], 0.1)
    optimizer.step(scale)
    torch.testing.assert_close(tables["a"].detach().double(), weight, rtol=1e-4, atol=1e-5)

    assert float(clip(linear.parameters(), 1e9)[1]) == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_goes_on_where_it_was(dtype):
    table = table_of(9, 4, dtype=dtype)
    batches = [(i, g.to(dtype)) for i, g in batches_of([20, 20, 20], 9, 4)]
    first = RowwiseAdagrad({"t": table}, lr=0.1)
    train(first, table, batches[:2])
    other = Parameter(table.detach().clone())
    second = RowwiseAdagrad({"t": other}, lr=0.1)
    owned = second.sums["t"]
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(first, table, batches[2:])
    train(second, other, batches[2:])
    assert torch.equal(table.detach(), other.detach()) and second.sums["t"] is owned


def test_state_that_does_not_match_is_refused_untouched():
    optimizer = RowwiseAdagrad({"t": table_of(9, 4)}, lr=0.1)
    for wrong in (
        {"sums": {"t": torch.ones(8)}, "rests": {}}, {"sums": {"u": torch.ones(9)}, "rests": {}}, {},
        {"sums": {"t": torch.ones(9)}, "rests": {"t": torch.ones(9, 4, dtype=torch.int16)}},
    ):  # fmt: skip
        with pytest.raises(RequestError, match="accepted"):
            optimizer.load_state_dict(wrong)
    assert not optimizer.sums["t"].any()


def test_bad_requests_say_what_is_accepted():
    table = table_of(9, 4)
    for act, words in (
        (lambda: lookup(torch.tensor([1, 9]), table), "id 9; accepted: 0 to 8"),
        (lambda: lookup(torch.tensor([-1]), table), "id -1"),
        (lambda: lookup(torch.tensor([1.0]), table), "int32, int64"),
        (lambda: lookup(torch.tensor([1]), table * 2), "accepted: a Parameter"),
        (lambda: RowwiseAdagrad([table], lr=math.nan), "lr nan"),
        (lambda: RowwiseAdagrad([table], lr=0.1, eps=0.0), "eps 0.0"),
        (lambda: RowwiseAdagrad([Parameter(torch.zeros(3))], lr=0.1), "table '0'"),
        (lambda: RowwiseAdagrad([Parameter(torch.zeros(3, 2).half())], lr=0.1), "float16"),
        (lambda: schedule(5, 2, None, "cosine"), "total None"),
        (lambda: dense_optimizer([], lr=0.1), "no parameter"),
    ):
        with pytest.raises(RequestError) as error:
            act()
        assert words in str(error.value) and "\n" not in str(error.value)
    F.embedding(torch.tensor([1]), table).sum().backward()
    with pytest.raises(RequestError, match="a dense gradient"):
        RowwiseAdagrad([table], lr=0.1).step()
