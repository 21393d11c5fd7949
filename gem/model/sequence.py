"""The sequence tower: events to tokens, self attention, cross attention user × ads, and pooled summaries.

Per layer (pre-norm, residual): tokens are scaled by what the non-sequence features say of the sample; self attention
in blocks or a causal window with rotary positions; GDPA with these long queries on a short sequence's keys; an MLP.
Pooling is GDPA with learnt queries that all samples share (PMA) and with each sample's own tokens as queries. Queries
and keys are normalised per head (QK-norm), which bounds the scores to ±SCORE_BOUND, where the Taylor GELU is good.

Legend: B samples, … events in their layout (gem.model.layout), E width of a token, H heads, D head_dim, N shared
queries, M tokens of non-sequence features.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem.data.schema import SequenceSchema
from gem.model.config import ModelConfig
from gem.model.layout import Layout, rope_tables
from gem.model.norms import RMSNorm, head_norm
from gem.model.work import Work, attend, linear

SCORE_BOUND = 2.0
# GDPA adds up over the keys, and its weights are not made to sum to 1. Divided by their number it says which share of
# the keys a query found; a norm in that place would forget the share.


class EventEmbedding(nn.Module):
    """Looked-up rows of an event's features, and its age, to one token […, E].

    ``project``: the linear layer of each feature's table. It is the model's, one for all places that read the table, so
    that an item at hand and the same item in a history look alike from the first step on.
    """

    edges: Tensor

    def __init__(self, schema: SequenceSchema, project: list[nn.Linear], config: ModelConfig) -> None:
        super().__init__()
        self.sequence, self._project = schema.name, project  # in a list: not registered here a second time
        self.bias = nn.Parameter(torch.zeros(config.dim))
        self.times = config.times if schema.timed else 0
        if self.times:
            self.age = nn.Parameter(torch.randn(self.times, config.dim) * 0.02)
            # Of the buckets of age + 1, in seconds: from 2 up, in powers of two; the last one takes what is older.
            self.register_buffer("edges", 2 ** torch.arange(1, self.times), persistent=False)

    def forward(self, rows: list[Tensor], layout: Layout) -> Tensor:
        """``rows``: one […, table_dim] a feature."""
        tokens = torch.stack([project(x) for project, x in zip(self._project, rows, strict=True)]).sum(0)
        tokens = tokens + self.bias.to(tokens.dtype)
        if self.times:
            assert layout.ages is not None
            # Whole numbers throughout: a logarithm would be rounded at the edges.
            bucket = torch.bucketize(layout.ages.clamp_min(0) + 1, self.edges, right=True)
            tokens = tokens + F.embedding(bucket, self.age).to(tokens.dtype)
        return tokens

    def flops(self, work: Work) -> float:
        """Forward."""
        return sum(linear(work.events(self.sequence), one.in_features, one.out_features) for one in self._project)


class SelfAttention(nn.Module):
    """Softmax attention among the events of a sample."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, schema: SequenceSchema, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.sequence = config, schema.name
        inner = config.heads * config.head_dim
        self.norm = RMSNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * inner, bias=False)
        self.out = nn.Linear(inner, config.dim, bias=False)
        cos, sin = rope_tables(schema.longest, config.head_dim)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """[…, E] to […, E]."""
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, self.config.heads, self.config.head_dim))
        q, k, v = heads.unbind(-3)
        # Softmax of sqrt(D) q k / (|q| |k|): as sharp as unit-variance inputs make it.
        q, k, rope = head_norm(q), head_norm(k), (self.rope_cos, self.rope_sin)
        if self.config.self_attention == "block":
            out = layout.blocks(q, k, v, rope, self.config.block)
        else:
            out = layout.window(q, k, v, rope, self.config.window)
        return self.out(out.flatten(-2))

    def flops(self, work: Work) -> float:
        """Forward."""
        c, events = self.config, work.events(self.sequence)
        blocks = c.block if c.self_attention == "block" else None
        pairs = work.self_pairs(self.sequence, blocks, c.window)
        inner = c.heads * c.head_dim
        return 4 * linear(events, c.dim, inner) + attend(pairs, c.heads, c.head_dim)


class CrossAttention(nn.Module):
    """GDPA of the long sequence's events on the short sequence's, divided by the number of keys: user × ads."""

    def __init__(self, queries: str, keys: str, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.queries, self.keys = config, queries, keys
        inner = config.heads * config.head_dim
        self.norm = RMSNorm(config.dim)
        self.q = nn.Linear(config.dim, inner, bias=False)
        self.kv = nn.Linear(config.dim, 2 * inner, bias=False)
        self.out = nn.Linear(inner, config.dim, bias=False)

    def forward(self, x: Tensor, layout: Layout, short: Tensor, short_layout: Layout) -> Tensor:
        """[…, E] to […, E]; ``short``: the normed tokens of the short sequence."""
        c = self.config
        q = head_norm(self.q(self.norm(x)).unflatten(-1, (c.heads, c.head_dim)))
        k, v = self.kv(short).unflatten(-1, (2, c.heads, c.head_dim)).unbind(-3)
        out = layout.cross(q, head_norm(k), v, short_layout, c.activation, SCORE_BOUND / c.head_dim)
        share = layout.spread(short_layout.share_B[:, None])
        return self.out(out.flatten(-2) * share.to(out.dtype))

    def flops(self, work: Work) -> float:
        """Forward."""
        c, inner = self.config, self.config.heads * self.config.head_dim
        events, short = work.events(self.queries), work.events(self.keys)
        pairs = work.cross_pairs(self.queries, self.keys)
        return 2 * linear(events, c.dim, inner) + linear(short, c.dim, 2 * inner) + attend(pairs, c.heads, c.head_dim)


class Pooling(nn.Module):
    """Summaries of a sequence by GDPA: of queries that all samples share (PMA), and of each sample's own tokens.

    The latter are how the features at hand look up what of the history concerns them.
    """

    def __init__(self, sequence: str, queries: int, asking: int, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.sequence, self.queries, self.asking = config, sequence, queries, asking
        inner = config.heads * config.head_dim
        self.seeds = nn.Parameter(torch.randn(queries, config.heads, config.head_dim))
        # What an answer is added to. Later norms look at a token alone: beside it the size of the answer stays seen.
        self.base = nn.Parameter(torch.randn(queries, config.dim))
        self.norm = RMSNorm(config.dim)
        self.kv = nn.Linear(config.dim, 2 * inner, bias=False)
        if asking:
            self.ask_norm = RMSNorm(config.dim)
            self.ask = nn.Linear(config.dim, inner, bias=False)
            with torch.no_grad():  # what is alike attracts, to begin with
                self.ask.weight.copy_(self.kv.weight[:inner])
        self.out = nn.Linear(inner, config.dim, bias=False)

    def forward(self, x: Tensor, layout: Layout, asking_BME: Tensor | None = None) -> Tensor:
        """[…, E], and the tokens that ask, to [B, N + M, E]."""
        c = self.config
        k, v = self.kv(self.norm(x)).unflatten(-1, (2, c.heads, c.head_dim)).unbind(-3)
        k, scale = head_norm(k), SCORE_BOUND / c.head_dim
        found = [layout.pooled(head_norm(self.seeds).to(k.dtype), k, v, c.activation, scale)]
        if self.asking:
            assert asking_BME is not None
            q = self.ask(self.ask_norm(asking_BME)).unflatten(-1, (c.heads, c.head_dim))
            found.append(layout.pooled(head_norm(q).to(k.dtype), k, v, c.activation, scale))
        out = torch.cat(found, 1).flatten(-2)
        answers = self.out(out * layout.share_B[:, None, None].to(out.dtype))
        base = self.base.to(answers.dtype).expand(out.shape[0], -1, -1)
        if self.asking:
            assert asking_BME is not None
            base = torch.cat([base, asking_BME.to(answers.dtype)], 1)
        return base + answers

    def flops(self, work: Work) -> float:
        """Forward."""
        c, events = self.config, work.events(self.sequence)
        inner, queries = c.heads * c.head_dim, self.queries + self.asking
        return (
            linear(events, c.dim, 2 * inner)
            + linear(work.samples * self.asking, c.dim, inner)
            + attend(queries * events, c.heads, c.head_dim)
            + linear(work.samples * queries, inner, c.dim)
        )


class FeedForward(nn.Module):
    """An MLP on each event."""

    def __init__(self, sequence: str, config: ModelConfig) -> None:
        super().__init__()
        self.sequence, self.dim, self.hidden = sequence, config.dim, round(config.feed_forward * config.dim)
        self.norm = RMSNorm(config.dim)
        self.up = nn.Linear(config.dim, self.hidden)
        self.down = nn.Linear(self.hidden, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        return self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))

    def flops(self, work: Work) -> float:
        """Forward."""
        return 2 * linear(work.events(self.sequence), self.dim, self.hidden)


class SequenceLayer(nn.Module):
    """One layer of the tower and the summaries of its result."""

    def __init__(self, history: SequenceSchema, keys: str | None, asking: int, config: ModelConfig) -> None:
        super().__init__()
        self.dim = config.dim
        self.gate = nn.Linear(config.dim, config.dim)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)
        self.self_attention = SelfAttention(history, config)
        self.cross_attention = None if keys is None else CrossAttention(history.name, keys, config)
        self.feed_forward = FeedForward(history.name, config) if config.feed_forward else None
        self.pooling = Pooling(history.name, config.pooled, asking, config)

    def forward(
        self, x: Tensor, layout: Layout, features_BME: Tensor, short: Tensor | None, short_layout: Layout | None
    ) -> tuple[Tensor, Tensor]:
        """(tokens […, E], summaries [B, N + M, E]). ``features_BME``: what is known of each sample besides."""
        x = x + x * layout.spread(self.gate(features_BME.mean(1))).to(x.dtype)
        x = x + self.self_attention(x, layout)
        if self.cross_attention is not None:
            assert short is not None and short_layout is not None
            x = x + self.cross_attention(x, layout, short, short_layout)
        if self.feed_forward is not None:
            x = x + self.feed_forward(x)
        return x, self.pooling(x, layout, features_BME)

    def flops(self, work: Work) -> float:
        """Forward."""
        parts = [self.self_attention, self.cross_attention, self.feed_forward, self.pooling]
        own = linear(work.samples, self.dim, self.dim)
        return own + sum(part.flops(work) for part in parts if part is not None)
