"""Embedding tables over ranks by TorchRec's DistributedModelParallel, the baseline of gem.sharding.tables.

Its own classes throughout: EmbeddingCollection (a row an id) and EmbeddingBagCollection (a sum a sample), and FBGEMM's
fused kernel with exact row-wise Adagrad on the owner, which updates in the backward. Gradients are sums over ranks.

It cuts as torch.chunk does, but columns in equal parts, by fours: FBGEMM reads four at a time. Of tables cut in columns
each part has Adagrad's sums of its own columns (ShardedTables: ``whole_rows=False``). Its 2D classes run on CUDA alone
(``no_2d_on``).

Legend: N ids of a request, B samples, D columns.
"""

import importlib
import logging
import os
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gem.errors import RequestError
from gem.sharding.placement import Cut, Piece, Placement, Range, Table
from gem.sharding.tables import Weights, sliced


class Shard(NamedTuple):
    """A part of a table that this rank holds: the tensors that are trained."""

    table: str
    piece: Piece
    weight: Tensor
    sums: Tensor  # of row-wise Adagrad, fp32 [rows]


class TorchRecLookups:
    """Tables over the ranks of a group. Every rank makes the same calls.

    features  of a request, by table: each is asked for in every ``fetch``, with as many samples as the others
    pooled    a sum of rows a sample, in the place of a row an id
    RequestError where torchrec cannot be imported, or cannot have such tables.
    """

    def __init__(
        self, tables: Sequence[Table], features: dict[str, str], weights: Weights, *, lr: float, eps: float = 1e-8,
        pooled: bool = False, device: torch.device | None = None, group: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        self.device, self.features = device or torch.device("cpu"), list(features)
        self.pooled = pooled
        if not pooled and len(dims := {table.dim for table in tables}) > 1:
            raise RequestError(f"torchrec: rows of {sorted(dims)} columns; accepted: one width, but for sums")
        group = group or dist.group.WORLD
        rec = _import()
        placement = Placement(tables, dist.get_world_size(group))
        of_table = {t.name: [f for f, table in features.items() if table == t.name] for t in tables}
        fused = {"optimizer": rec.rowwise_adagrad, "learning_rate": lr, "eps": eps}
        config, module, sharder = (
            (rec.configs.EmbeddingBagConfig, rec.modules.EmbeddingBagCollection, rec.bags.EmbeddingBagCollectionSharder)
            if pooled
            else (rec.configs.EmbeddingConfig, rec.modules.EmbeddingCollection, rec.rows.EmbeddingCollectionSharder)
        )
        configs = [
            config(name=_name(t), num_embeddings=t.rows, embedding_dim=t.dim, feature_names=of_table[t.name])
            for t in tables
        ]
        collection = module(tables=configs, device=torch.device("meta"))
        sharders = [sharder(fused_params=fused)]
        plan = rec.plan.construct_module_sharding_plan(
            collection,
            {_name(t): _sharding(rec, t, placement) for t in tables},
            sharder=sharders[0], world_size=placement.ranks, local_size=placement.ranks, device_type=self.device.type,
        )  # fmt: skip
        self.model = rec.parallel.DistributedModelParallel(
            _Holder(collection),
            env=rec.types.ShardingEnv.from_process_group(group),
            device=self.device,
            plan=rec.types.ShardingPlan({"collection": plan}),
            sharders=sharders,
        )
        self._jagged = rec.jagged.KeyedJaggedTensor
        self.shards = self._fill(tables, weights)

    def _fill(self, tables: Sequence[Table], weights: Weights) -> list[Shard]:
        state = self.model.state_dict()
        momenta = self.model.fused_optimizer.state_dict()["state"]
        found = []
        for table in tables:
            name = next(key for key in state if key.endswith(f".{_name(table)}.weight"))
            own = state[name].local_shards()
            sums = next(v for k, v in momenta[name].items() if k.endswith("momentum1")).local_shards() if own else []
            for one, other in zip(own, sums, strict=True):
                (row, column), (rows, columns) = one.metadata.shard_offsets, one.metadata.shard_sizes
                piece = Piece(Range(row, row + rows), Range(column, column + columns))
                with torch.no_grad():
                    one.tensor.copy_(weights(table, piece))
                found.append(Shard(table.name, piece, one.tensor, other.tensor.view(-1)))
        return found

    def fetch(self, requests: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Of (ids [N], lengths [B]) for each feature in order: rows [N, D], or sums [B, D]. A backward updates them."""
        jagged = self._jagged(
            keys=self.features,
            values=torch.cat([ids for ids, _ in requests]),
            lengths=torch.cat([lengths for _, lengths in requests]),
        )
        found = self.model(jagged).wait()
        if self.pooled:
            return [found[feature] for feature in self.features]
        return [found[feature].values() for feature in self.features]

    def memory_bytes(self) -> int:
        """Of weights and optimizer state."""
        return sum(shard.weight.nbytes + shard.sums.nbytes for shard in self.shards)


class TorchRecTables:
    """A contestant of the race of tables: steps that pool ids by sum and learn from squared distances to targets.

    tables  rows and columns by name; whole: what each begins with, the same on every rank
    cut     "table", "row" or "column", of all of them
    """

    def __init__(
        self, tables: dict[str, tuple[int, int]], whole: dict[str, Tensor], *, lr: float, eps: float, cut: Cut
    ) -> None:
        self.tables = {name: Table(name, rows, dim, cut) for name, (rows, dim) in tables.items()}
        features = {name: name for name in tables}
        self.lookups = TorchRecLookups(list(self.tables.values()), features, sliced(whole), lr=lr, eps=eps, pooled=True)

    def step(self, lookups: Sequence[tuple[str, Tensor, Tensor, Tensor]]) -> Tensor:
        """Learn from (table, ids [N], offsets [B + 1], target [B, D]); this rank's loss before it, [].

        Half the squared distances' sum. A table has one lookup at most, and all have as many samples.
        """
        samples = {len(offsets) - 1 for _, _, offsets, _ in lookups}
        by_name = {name: (ids, offsets, target) for name, ids, offsets, target in lookups}
        if len(samples) != 1 or len(by_name) < len(lookups):
            raise RequestError(
                f"torchrec: lookups of {sorted(samples)} samples in {[x[0] for x in lookups]}; "
                "accepted: as many samples in each, a table once"
            )
        none, zeros = torch.empty(0, dtype=torch.int64), torch.zeros(*samples, dtype=torch.int64)
        jagged = [
            (by_name[name][0], by_name[name][1].diff()) if name in by_name else (none, zeros) for name in self.tables
        ]
        found = dict(zip(self.tables, self.lookups.fetch(jagged), strict=True))
        loss = torch.stack([(found[name] - target).square().sum() for name, (*_, target) in by_name.items()]).sum() / 2
        loss.backward()
        return loss.detach()

    def memory_bytes(self) -> int:
        """Of weights and optimizer state on this rank."""
        return self.lookups.memory_bytes()

    def weights(self) -> dict[str, Tensor]:
        """Whole tables, on every rank; all ranks call it."""
        own = [(shard.table, shard.piece, shard.weight.detach()) for shard in self.lookups.shards]
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, own)
        found = {name: torch.empty(table.rows, table.dim) for name, table in self.tables.items()}
        for name, piece, weight in (part for of_rank in everybody for part in of_rank):
            rows, columns = piece.rows, piece.columns
            found[name][rows.start : rows.stop, columns.start : columns.stop] = weight
        return found


def no_2d_on(device: torch.device) -> str:
    """Why TorchRec's 2D (DMPCollection, also with ShardingStrategy.FULLY_SHARDED) cannot run there; or nothing."""
    parallel = _import().parallel
    try:
        parallel.DMPCollection(
            nn.Module(), device=device, plan=None, world_size=1, sharding_group_size=1, global_pg=dist.group.WORLD
        )
    except AssertionError as error:
        return str(error)
    except Exception:  # it went on, to what an empty module lacks
        return ""
    return ""


class _Holder(nn.Module):
    """DistributedModelParallel shards modules that are inside of one."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, features: Any) -> Any:
        return self.collection(features)


def _name(table: Table) -> str:
    """What it is called in torch's dicts, which have methods called items and keys."""
    return f"of_{table.name}"


def _sharding(rec: Any, table: Table, placement: Placement) -> Any:
    kernel = {"compute_kernel": "fused"}  # on a CPU its own choice would be dense gradients
    if table.cut == "table":
        return rec.plan.table_wise(rank=placement.owner[table.name], **kernel)
    if table.cut == "row":
        return rec.plan.row_wise(**kernel)
    if table.dim % (4 * placement.ranks):
        accepted = f"a multiple of {4 * placement.ranks}"
        raise RequestError(
            f"torchrec: table {table.name!r} of {table.dim} columns cut in columns; accepted: {accepted}"
        )
    return rec.plan.column_wise(ranks=list(range(placement.ranks)), **kernel)


_MODULES = {
    "parallel": "distributed.model_parallel", "rows": "distributed.embedding", "bags": "distributed.embeddingbag",
    "plan": "distributed.sharding_plan", "types": "distributed.types", "configs": "modules.embedding_configs",
    "modules": "modules.embedding_modules", "jagged": "sparse.jagged_tensor", "comm": "distributed.comm_ops",
}  # fmt: skip


def _import() -> Any:
    """TorchRec's modules by short names, as sums over ranks."""
    # It asks the environment how many ranks a host has.
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(dist.get_world_size()))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = {name: importlib.import_module(f"torchrec.{module}") for name, module in _MODULES.items()}
            optimizers = importlib.import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType
    except ImportError as error:
        raise RequestError(
            f"torchrec: {error}; accepted: pip install --no-deps -r ci/requirements-torchrec.txt"
        ) from None
    found["comm"].set_gradient_division(False)
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    return SimpleNamespace(**found, rowwise_adagrad=optimizers.EXACT_ROWWISE_ADAGRAD)
