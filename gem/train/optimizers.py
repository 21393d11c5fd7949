"""Optimizers: row-wise Adagrad for embedding tables, whose cost grows with the rows touched, and AdamW for the rest.

A table's gradient never exists as a tensor of the table's size. ``lookup`` records, in its backward, the ids and the
gradient rows on the table; ``RowwiseAdagrad`` sums the rows of equal ids and updates each touched row once.

Legend: R rows of a table, D columns, N ids looked up, U of them distinct.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from gem.errors import RequestError

_RECORDS = "_gem_gradient_rows"  # attribute of a table


class GradientRows(NamedTuple):
    """What one lookup's backward, or the sum of several, left on a table."""

    ids_N: Tensor  # int64
    rows_ND: Tensor
    distinct: bool = False  # no id occurs twice, and the rows are fp32


class TableLookup(torch.autograd.Function):
    """Rows of a table; the backward records (ids, gradient rows) on the table and gives it no dense gradient."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
        flat_N = ids.reshape(-1).long()
        ctx.table = table
        ctx.save_for_backward(flat_N)
        rows_ND = table.detach().index_select(0, flat_N)
        # As it is where it can be: compiled code takes a view for another kind of tensor.
        return (rows_ND if ids.dim() == 1 else rows_ND.view(*ids.shape, table.shape[1])).to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        (flat_N,) = ctx.saved_tensors
        _records(ctx.table).append(GradientRows(flat_N, gradient.reshape(flat_N.shape[0], gradient.shape[-1])))
        return None, None, None


def lookup(ids: Tensor, table: Parameter | Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Rows [*ids.shape, D] of ``table`` [R, D]; arguments as of torch's embedding, in whose place it can stand.

    ids: any shape, int32 or int64, from 0 to R - 1 (else RequestError; on a GPU a device assertion, as of torch's own).
    dtype: of the rows handed out and of their gradient; None: the table's. With gradients disabled nothing is recorded.
    """
    if table.dim() != 2 or not isinstance(table, Parameter):
        found = f"{type(table).__name__} {tuple(table.shape)}"
        raise RequestError(f"lookup: table {found}; accepted: a Parameter [rows, columns]")
    if ids.dtype not in (torch.int64, torch.int32):
        raise RequestError(f"lookup: ids of {ids.dtype}; accepted: int32, int64")
    try:
        return TableLookup.apply(ids, table, dtype or table.dtype)  # type: ignore[no-any-return]
    except IndexError:
        wrong = ids[(ids < 0) | (ids >= table.shape[0])]
        raise RequestError(f"lookup: id {int(wrong[0])}; accepted: 0 to {table.shape[0] - 1}") from None


def recorded(table: Tensor) -> list[GradientRows]:
    """What lookups' backwards have recorded on a table since its gradients were last cleared."""
    return list(_records(table))


def _records(table: Tensor) -> list[GradientRows]:
    if not hasattr(table, _RECORDS):
        setattr(table, _RECORDS, [])
    return getattr(table, _RECORDS)


def summed(parts: Sequence[GradientRows]) -> GradientRows:
    """Distinct ids [U], ascending, and the sum [U, D] of the rows of each, added in the order of the parts; in fp32, or
    fp64 of fp64.

    embedding_dense_backward, with "U embeddings", adds rows of equal index: in order on a CPU, which tests
    hold to the same bits in every run. On a GPU torch's source sorts and adds pieces of fixed length; not tried there.
    """
    if len(parts) == 1 and parts[0].distinct:
        return parts[0]
    ids_N = torch.cat([part.ids_N for part in parts])
    rows_ND = torch.cat([part.rows_ND for part in parts])
    if rows_ND.dtype != torch.float64:
        rows_ND = rows_ND.float()
    if not ids_N.numel():
        return GradientRows(ids_N, rows_ND, True)
    ids_U, which_N = torch.unique(ids_N, return_inverse=True)
    rows_UD = torch.ops.aten.embedding_dense_backward(rows_ND, which_N, ids_U.shape[0], -1, False)
    return GradientRows(ids_U, rows_UD, True)


# -- tables ------------------------------------------------------------------------------------------------------------


class RowwiseAdagrad:
    """Adagrad with one accumulator a row, for tables read by ``lookup`` (or by ``nn.Embedding(sparse=True)``).

    For each row touched since ``zero_grad``, with g the sum of its gradients times ``scale``:
    sum += mean(g²) over the row; w -= lr · g / (sqrt(sum) + eps). This is EXACT_ROWWISE_ADAGRAD of FBGEMM and TorchRec
    (pytorch/FBGEMM, fbgemm_gpu/codegen/genscript/optimizers.py, ``rowwise_adagrad``), without weight decay.

    tables   parameters [R, D] by name, or in a sequence (named by position); fp32 or bf16, each with a row dimension of
             its own. A bf16 table is the upper half of fp32 weights whose lower half, ``rests`` (int16 [R, D]), is kept
             here: updates are exact to fp32 and nothing is stored twice
    lr       of the next step; a plain attribute, for schedules
    initial  what every row's accumulator begins with
    """

    def __init__(
        self, tables: Mapping[str, Parameter] | Sequence[Parameter], lr: float, eps: float = 1e-8, initial: float = 0.0
    ) -> None:
        named = tables if isinstance(tables, Mapping) else {str(i): table for i, table in enumerate(tables)}
        for what, value, least in (("lr", lr, 0.0), ("eps", eps, 1e-30), ("initial", initial, 0.0)):
            if not (math.isfinite(value) and value >= least):
                raise RequestError(f"RowwiseAdagrad: {what} {value}; accepted: finite, {least} or more")
        for name, table in named.items():
            if table.dim() != 2 or table.dtype not in (torch.float32, torch.bfloat16, torch.float64):
                found = f"{table.dtype} {tuple(table.shape)}"
                raise RequestError(f"table {name!r}: {found}; accepted: fp32, bf16 or fp64 [rows, columns]")
        self.tables, self.lr, self.eps = dict(named), lr, eps
        self.sums = {n: accumulators(t, initial) for n, t in self.tables.items()}
        self.rests = {
            n: torch.zeros_like(t, dtype=torch.int16, requires_grad=False)
            for n, t in self.tables.items() if t.dtype == torch.bfloat16
        }  # fmt: skip

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for table in self.tables.values():
            _records(table).clear()
            table.grad = None

    @torch.no_grad()
    def gradient(self, name: str) -> GradientRows:
        """The gradient of a table so far: distinct ids and their rows in fp32, none where nothing was looked up.

        The sum takes the place of what it was made of: called after each micro-batch, it bounds what is held.
        """
        table = self.tables[name]
        records = _records(table)
        if table.grad is not None:
            if table.grad.layout is not torch.sparse_coo:
                raise RequestError(
                    f"table {name!r}: a dense gradient; accepted: rows, of lookup or nn.Embedding(sparse=True)"
                )
            records.append(GradientRows(table.grad._indices()[0], table.grad._values()))
            table.grad = None
        if not records:
            none = torch.empty(0, dtype=torch.int64, device=table.device)
            records.append(GradientRows(none, table.new_empty(0, table.shape[1])))
        total = summed(records)
        records[:] = [total]
        return total

    def sparse_grad_norm(self) -> Tensor:
        """fp32 []: the norm of all tables' gradients together, as if they were dense; for clipping (``clip``)."""
        norms = [torch.linalg.vector_norm(self.gradient(name).rows_ND) for name in self.tables]
        if not norms:
            return torch.zeros(())
        return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))

    @torch.no_grad()
    def average_gradients(self, group: dist.ProcessGroup | None = None) -> None:
        """Replace each rank's gradients by the ranks' mean, for tables that every rank holds whole. All ranks call it.

        What moves is each rank's distinct rows. They are summed in the order of the ranks: replicas keep the same bits.
        """
        ranks = dist.get_world_size(group)
        for name, table in self.tables.items():
            own = self.gradient(name)
            counts = [torch.zeros(1, dtype=torch.int64, device=table.device) for _ in range(ranks)]
            dist.all_gather(counts, torch.tensor([len(own.ids_N)], device=table.device), group=group)
            most = max(int(count) for count in counts)
            ids_N, rows_ND = (x.new_zeros(most, *x.shape[1:]) for x in own[:2])
            ids_N[: len(own.ids_N)], rows_ND[: len(own.ids_N)] = own[:2]
            all_ids, all_rows = ([torch.empty_like(x) for _ in range(ranks)] for x in (ids_N, rows_ND))
            dist.all_gather(all_ids, ids_N, group=group)
            dist.all_gather(all_rows, rows_ND, group=group)
            parts = [GradientRows(i[: int(n)], r[: int(n)]) for i, r, n in zip(all_ids, all_rows, counts, strict=True)]
            total = summed(parts)
            _records(table)[:] = [GradientRows(total.ids_N, total.rows_ND / ranks, True)]

    @torch.no_grad()
    def step(self, scale: float | Tensor = 1.0) -> None:
        """Update the touched rows by their gradients times ``scale``, as of ``clip``; no other row is read."""
        for name, table in self.tables.items():
            ids_U, rows_UD, _ = self.gradient(name)
            if not ids_U.numel():
                continue
            update_rows(table, self.sums[name], self.rests.get(name), ids_U, rows_UD * scale, self.lr, self.eps)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's own tensors, not copies of them. The gradients and lr are no part of it."""
        return {"sums": dict(self.sums), "rests": dict(self.rests)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy into the tensors that are there; RequestError, before anything is changed, where they do not match."""
        own = self.state_dict()
        for kind, tensors in own.items():
            given = state.get(kind, {})
            found, wanted = ({n: (t.dtype, tuple(t.shape)) for n, t in x.items()} for x in (given, tensors))
            if found != wanted:
                raise RequestError(f"RowwiseAdagrad state {kind!r}: {found}; accepted: {wanted}")
        for kind, tensors in own.items():
            for name, tensor in tensors.items():
                tensor.copy_(state[kind][name])


def accumulators(table: Tensor, initial: float) -> Tensor:
    """[R] for a table [R, D]: fp32, of an fp64 table fp64."""
    dtype = torch.float64 if table.dtype == torch.float64 else torch.float32
    return torch.full((table.shape[0],), initial, dtype=dtype, device=table.device)


@torch.no_grad()
def update_rows(
    table: Tensor, sums_R: Tensor, rest: Tensor | None, ids_U: Tensor, g_UD: Tensor, lr: float, eps: float,
    mean_U: Tensor | None = None,
) -> None:  # fmt: skip
    """RowwiseAdagrad's update of rows ``ids_U``, in place. ``rest``: the lower half of a bf16 table's weights.

    ``mean_U``: of g² over whole rows, where ``table`` holds some columns of them only.
    """
    sum_U = sums_R.index_select(0, ids_U) + (g_UD.square().mean(1) if mean_U is None else mean_U)
    sums_R.index_copy_(0, ids_U, sum_U)
    update_UD = g_UD * (lr / (sum_U.sqrt() + eps))[:, None]
    weight_UD = table.index_select(0, ids_U)
    if rest is None:
        table.index_copy_(0, ids_U, weight_UD - update_UD)
        return
    upper_UD, lower_UD = split(joined(weight_UD, rest.index_select(0, ids_U)) - update_UD)
    table.index_copy_(0, ids_U, upper_UD)
    rest.index_copy_(0, ids_U, lower_UD)


def split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 weights as bf16, rounded to nearest, and the int16 that ``joined`` needs to give back the same bits.

    A NaN becomes the one whose upper half is a NaN too: rounding others up would make a number of them.
    """
    bits = torch.where(weight.isnan(), torch.nan, weight).view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def joined(upper: Tensor, lower: Tensor) -> Tensor:
    """The fp32 weights that ``split`` took apart."""
    return ((upper.view(torch.int16).int() << 16) + lower.int()).view(torch.float32)


# -- the dense part ----------------------------------------------------------------------------------------------------


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay is for it: matrices, but no biases, whatever their shape, and no scales of norms."""
    return parameter.dim() >= 2 and not name.rpartition(".")[2].endswith("bias")


def dense_optimizer(
    parameters: Iterable[tuple[str, Parameter]],
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.01,
    eps: float = 1e-8,
    decay: Callable[[str, Tensor], bool] = decays,
) -> torch.optim.AdamW:
    """torch's AdamW over named parameters (``model.named_parameters()`` without the tables), fused on CPU and CUDA."""
    named = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    if not named:
        raise RequestError("dense_optimizer: no parameter that takes a gradient; accepted: one or more")
    groups: list[dict[str, Any]] = [
        {"params": [pair for pair in named if decay(*pair) is wanted], "weight_decay": weight_decay if wanted else 0.0}
        for wanted in (True, False)
    ]
    fused = all(parameter.device.type in ("cpu", "cuda") for _, parameter in named)
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=betas, eps=eps, fused=fused)


class DenseState:
    """State of a ``dense_optimizer`` for checkpoints: moments and step counts by parameter name, to be loaded in place.

    Moments that do not exist before the first step are made, as zeros: a fresh optimizer can be loaded into. Learning
    rate, betas and the like are the configuration's and no part of it.
    """

    def __init__(self, optimizer: torch.optim.AdamW) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """By parameter: step [], exp_avg and exp_avg_sq; the optimizer's own tensors."""
        found = {}
        for group in self.optimizer.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                state = self.optimizer.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), device=parameter.device if group["fused"] else "cpu")
                    for key in ("exp_avg", "exp_avg_sq"):
                        state[key] = torch.zeros_like(parameter, requires_grad=False)
                found[name] = {key: state[key] for key in ("step", "exp_avg", "exp_avg_sq")}
        return found

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy into the tensors that are there; RequestError where the names differ, and nothing changed."""
        own = self.state_dict()
        if own.keys() != state.keys():
            odd = sorted(own.keys() ^ state.keys())[:5]
            raise RequestError(f"AdamW state: {', '.join(odd)} on one side only; accepted: the same parameters")
        for name, tensors in own.items():
            for key, tensor in tensors.items():
                tensor.copy_(state[name][key])


Shape = Literal["constant", "cosine"]


def schedule(step: int, warmup: int, total: int | None = None, shape: Shape = "constant", floor: float = 0.0) -> float:
    """What to multiply the learning rate by in step 0, 1, …: a rise in a line, ``warmup`` long, then 1 or a cosine.

    Step 0 has 1 / (warmup + 1), step ``warmup`` has 1. The cosine falls to ``floor`` at ``total`` and stays there.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if shape == "constant":
        return 1.0
    if shape != "cosine" or total is None or total <= warmup:
        accepted = f"constant, or cosine with total > warmup = {warmup}"
        raise RequestError(f"schedule: shape {shape!r}, total {total}; accepted: {accepted}")
    done = min(1.0, (step - warmup) / (total - warmup))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))


@torch.no_grad()
def clip(parameters: Iterable[Parameter], most: float, tables: RowwiseAdagrad | None = None) -> tuple[Tensor, Tensor]:
    """(global norm, scale), fp32 []: multiply gradients by scale = min(1, most / norm). Nothing waits for a GPU.

    Dense gradients are multiplied here, tables' rows by ``tables.step(scale)``. The norm is of both together.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=None)
    if tables is not None:
        norm = torch.hypot(norm, tables.sparse_grad_norm().to(norm.device))
    scale = (most / norm).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm, scale
