"""The whole model: samples in, a logit a task out.

Legend: B samples, M tokens of non-sequence features, N summaries of the history (of shared queries and of tokens that
ask), E width of a token.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem.data.samples import Events, Samples
from gem.data.schema import Feature, Schema
from gem.errors import RequestError
from gem.model.config import ModelConfig
from gem.model.interaction import InteractionLayer
from gem.model.layout import Layout, Packed
from gem.model.norms import RMSNorm
from gem.model.sequence import EventEmbedding, Pooling, SequenceLayer
from gem.model.work import Work, linear

Lookup = Callable[[Tensor, Tensor], Tensor]  # (ids […], table [rows, E]) to […, E]
Read = Callable[[list[tuple[str, Tensor]]], list[Tensor]]  # (table's name, ids […]) to […, E], for each
_BLOCK = 2**20  # rows of a table that are drawn at once
Rows = dict[tuple[str, str], Tensor]  # by sequence ("" where there is none) and feature


@dataclass(frozen=True, eq=False)
class Losses:
    """Sums and counts apart, so that ranks and micro-batches of different sizes add up."""

    logits: dict[str, Tensor]  # by task, fp32 [B]
    sums: dict[str, Tensor]  # by task: binary cross-entropy added up over the samples where the label is defined
    counts: dict[str, Tensor]  # by task: how many these are

    def mean(self) -> Tensor:
        """The tasks' mean losses added up; a task without a label in the batch adds nothing."""
        return torch.stack([self.sums[task] / self.counts[task].clamp_min(1) for task in self.sums]).sum()


class GemModel(nn.Module):
    """Tables, sequence tower, interaction layers, heads, as ``config`` sizes them for data of ``schema``.

    ``layout`` decides how sequences lie in memory: packed by default. ``lookup`` reads a table: torch's embedding by
    default, whose gradient is as large as the table; a trainer puts a sparse one in its place. ``read`` reads all that
    a batch needs at once, from wherever tables are: the model then has none.
    """

    def __init__(
        self, schema: Schema, config: ModelConfig, *, layout: Callable[[Events], Layout] = Packed,
        lookup: Lookup = F.embedding, read: Read | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.schema, self.config, self.layout, self.lookup = schema, config, layout, lookup
        self.compiled = False
        self.read = read or self._read_own
        own = schema.tables if read is None else ()
        self.tables = nn.ParameterDict({key(t.name): nn.Parameter(_table(t.rows, config.table_dim)) for t in own})
        self.project = nn.ModuleDict(
            {key(table.name): nn.Linear(config.table_dim, config.dim, bias=False) for table in schema.tables}
        )
        self.features = nn.ParameterDict(
            {key(f.name): nn.Parameter(torch.randn(config.dim) * 0.05) for f in schema.ids}
        )
        self.floats = _two_layers(len(schema.floats), config.dim) if schema.floats else None
        wanted = {name: schema.sequence(name) for name in (config.history, config.keys) if name is not None}
        self.events = nn.ModuleDict(
            {
                key(name): EventEmbedding(s, [self._projects(f) for f in s.features], config)
                for name, s in wanted.items()
            }
        )
        tokens = len(schema.ids) + bool(schema.floats)
        self.short_norm = self.short_pooling = None
        if config.keys is not None:
            self.short_norm = RMSNorm(config.dim)
            if config.pooled_keys:
                self.short_pooling = Pooling(config.keys, config.pooled_keys, 0, config)
                tokens += config.pooled_keys
        if not tokens:
            raise RequestError("schema: no ids, floats or pooled keys; accepted: at least one of them")
        self.tokens = tokens
        asking = tokens if config.asking else 0
        summaries = config.pooled + asking if config.history is not None else 0
        self.tower = nn.ModuleList(
            [SequenceLayer(wanted[config.history], config.keys, asking, config) for _ in range(config.layers)]
            if config.history is not None
            else []
        )
        self.interactions = nn.ModuleList(
            [InteractionLayer(tokens + summaries, tokens, config) for _ in range(config.layers)]
        )
        width = (tokens + summaries) * config.dim
        self.head_norm = RMSNorm(config.dim)
        self.heads = nn.ModuleDict({key(task.name): _Head(width, config.head_hidden) for task in schema.tasks})

    def forward(self, samples: Samples) -> dict[str, Tensor]:
        """fp32 logits [B] by task."""
        layouts = {one.sequence: self.layout(samples.sequences[one.sequence]) for one in self._embeddings()}
        rows = self._rows(samples, layouts)
        short, pooled = self._short(layouts, rows)
        x_BME = self._non_sequence(samples, rows, pooled)
        self._varies(x_BME)
        history = self.config.history
        summaries: list[Tensor] = []
        events = None if history is None else self._tokens(history, layouts[history], rows)
        for number, interaction in enumerate(self.interactions):
            if history is not None:
                assert events is not None
                keys = layouts.get(self.config.keys or "")
                # In the events' type: interactions give fp32 where the first layer is given bf16, and each type is
                # compiled for.
                asking_BME = x_BME.to(events.dtype)
                self._varies(asking_BME)
                events, found_BNE = self.tower[number](events, layouts[history], asking_BME, short, keys)
                self._varies(events, layout=layouts[history])
                summaries = [found_BNE]
            x_BME = interaction(torch.cat([x_BME, *summaries], 1))
            self._varies(x_BME)
        flat = self.head_norm(torch.cat([x_BME, *summaries], 1)).flatten(1)
        return {task.name: self.heads[key(task.name)](flat) for task in self.schema.tasks}

    def losses(self, samples: Samples) -> Losses:
        """Logits and binary cross-entropy; where a label is NaN its task learns nothing (CVR: ads not clicked)."""
        logits = self(samples)
        sums, counts = {}, {}
        for task, logit in logits.items():
            label = samples.labels[task]
            defined = ~label.isnan()
            wanted = label.nan_to_num().to(logit.dtype)
            loss = F.binary_cross_entropy_with_logits(logit, wanted, reduction="none")
            sums[task] = torch.where(defined, loss, 0.0).sum()
            counts[task] = defined.sum()
        return Losses(logits, sums, counts)

    def dense_parameters(self) -> list[nn.Parameter]:
        """All parameters but the tables."""
        return [p for name, p in self.named_parameters() if not name.startswith("tables.")]

    def parts(self) -> dict[str, nn.Module]:
        """The layers that efficiency is told of, by name, in order; each has ``flops``, and together they are all."""
        found: dict[str, nn.Module] = {f"events.{one.sequence}": one for one in self._embeddings()}
        if self.short_pooling is not None:
            found["short_pooling"] = self.short_pooling
        found |= {f"tower.{number}": layer for number, layer in enumerate(self.tower)}
        found |= {f"interaction.{number}": layer for number, layer in enumerate(self.interactions)}
        return found | {f"head.{task.name}": self.heads[key(task.name)] for task in self.schema.tasks}

    def compile_parts(self) -> None:
        """torch.compile, in place, the parts that work on events, whose norms and activations are bound by memory.

        Each by itself: equal layers share what was compiled for the first, and a part is the same code alone, where
        Local MFU is measured, as in a step. Interactions and heads are products of large matrices on few rows.
        """
        self.compiled = True
        for part in (*self.events.values(), *self.tower):
            # Widths are multiples of 64 here; to pad products for the number of rows would be compiled for each case.
            part.compile(options={"shape_padding": False})

    def flops(self, work: Work) -> float:
        """Useful FLOPs of a forward."""
        own_layers = [*(self._projects(f) for f in self.schema.ids), *_linears(self.floats)]
        own = work.samples * sum(linear(1, f.in_features, f.out_features) for f in own_layers)
        return own + sum(part.flops(work) for part in self.parts().values())  # type: ignore[operator]

    def _embeddings(self) -> list[EventEmbedding]:
        return [cast(EventEmbedding, one) for one in self.events.values()]

    def _projects(self, feature: Feature) -> nn.Linear:
        return cast(nn.Linear, self.project[key(feature.table)])

    def _rows(self, samples: Samples, layouts: dict[str, Layout]) -> Rows:
        """Of all tables, for all features of a batch, in one go: tables that lie elsewhere are asked once a batch."""
        wanted = [("", f, samples.ids[f.name]) for f in self.schema.ids]
        for name, layout in layouts.items():
            wanted += [(name, f, layout.ids[f.name]) for f in self.schema.sequence(name).features]
        found = self.read([(f.table, ids) for _, f, ids in wanted])
        return {(sequence, f.name): rows for (sequence, f, _), rows in zip(wanted, found, strict=True)}

    def _read_own(self, requests: list[tuple[str, Tensor]]) -> list[Tensor]:
        return [self.lookup(ids, self.tables[key(table)]) for table, ids in requests]

    def _tokens(self, sequence: str, layout: Layout, rows: Rows) -> Tensor:
        own = [rows[sequence, f.name] for f in self.schema.sequence(sequence).features]
        self._varies(*own, layout=layout)
        tokens = self.events[key(sequence)](own, layout)
        self._varies(tokens, layout=layout)
        return tokens

    def _varies(self, *tensors: Tensor, layout: Layout | None = None) -> None:
        """Tell torch.compile that samples and events will be others: else it compiles for the first batch's first."""
        if not self.compiled:
            return
        along = 0 if layout is None else layout.along
        of_layout = [] if layout is None else [x for x in vars(layout).values() if isinstance(x, Tensor)]
        for x in (*tensors, *of_layout):
            for dim in {0, min(along, x.dim() - 1)}:
                torch._dynamo.maybe_mark_dynamic(x, dim)

    def _short(self, layouts: dict[str, Layout], rows: Rows) -> tuple[Tensor | None, list[Tensor]]:
        """Normed tokens of the short sequence, and its summaries."""
        name = self.config.keys
        if name is None:
            return None, []
        assert self.short_norm is not None
        tokens = self._tokens(name, layouts[name], rows)
        pooled = [] if self.short_pooling is None else [self.short_pooling(tokens, layouts[name])]
        normed = self.short_norm(tokens)
        self._varies(normed, layout=layouts[name])
        return normed, pooled

    def _non_sequence(self, samples: Samples, rows: Rows, pooled: list[Tensor]) -> Tensor:
        """[B, M, E]."""
        tokens = [self._projects(f)(rows["", f.name]) for f in self.schema.ids]
        # In one type, autocast's: layers that get another one would be compiled anew.
        tokens = [x + self.features[key(f.name)].to(x.dtype) for x, f in zip(tokens, self.schema.ids, strict=True)]
        if self.floats is not None:
            tokens.append(self.floats(samples.floats.to(next(self.floats.parameters()).dtype)))
        found = [torch.stack(tokens, 1)] if tokens else []
        return torch.cat([*found, *(one.to(found[0].dtype) if found else one for one in pooled)], 1)


class _Head(nn.Module):
    """One task's logit."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, 1))

    def forward(self, flat: Tensor) -> Tensor:
        return widened(self.layers(flat)).squeeze(-1)

    def flops(self, work: Work) -> float:
        return work.samples * sum(linear(1, f.in_features, f.out_features) for f in _linears(self.layers))


def initial_rows(rows: int, dim: int) -> Iterator[tuple[int, Tensor]]:
    """(first row, [N, dim]): what a table begins with, block by block: who keeps a part has no room for the whole."""
    for first in range(0, rows, _BLOCK):
        yield first, torch.randn(min(_BLOCK, rows - first), dim).mul_(0.05)


def _table(rows: int, dim: int) -> Tensor:
    found = torch.empty(rows, dim)
    for first, block in initial_rows(rows, dim):
        found[first : first + len(block)] = block
    return found


def widened(x: Tensor) -> Tensor:
    """fp32 of what has fewer bits; fp64, which is for tests, stays."""
    return x if x.dtype == torch.float64 else x.float()


def key(name: str) -> str:
    """What a table, feature, sequence or task is called in torch's dicts, which have methods called items and keys."""
    return f"of_{name}"


def _two_layers(fan_in: int, dim: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(fan_in, dim), nn.GELU(), nn.Linear(dim, dim))


def _linears(*modules: nn.Module | None) -> list[nn.Linear]:
    return [m for module in modules if module is not None for m in module.modules() if isinstance(m, nn.Linear)]
