"""The GEM model in plain numpy: float64, one sample at a time, loops over events and heads; meant to be read.

Written from what the model's docstrings say and the papers that they name. It shares no code with gem.model, gem.ops or
gem.reference: of the model it takes the parameters, by their names, and the sizes.

Legend, all of one sample: T events, M tokens of non-sequence features, N summaries, E width of a token, D head_dim.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from gem.data.samples import Events, Samples
from gem.data.schema import Schema, SequenceSchema
from gem.model.config import ModelConfig

Array = np.ndarray
ROPE_BASE = 10000.0
SCORE_BOUND = 2.0  # QK-norm: |q| = |k| = sqrt(D), so that q k / D is a cosine; GDPA takes twice the cosine


@dataclass(eq=False)
class Oracle:
    """``logits`` of a model with these parameters; ``read`` afterwards holds the names of those that were needed."""

    schema: Schema
    config: ModelConfig
    parameters: dict[str, Array]
    eps: float = 2.0**-23  # added to the mean square in the norms of tokens
    head_eps: float = 1e-6  # … of queries and keys
    read: set[str] = field(default_factory=set)

    def logits(self, samples: Samples) -> dict[str, Array]:
        """By task, [B]."""
        found = [self._sample(samples, b) for b in range(len(samples))]
        return {task.name: np.array([one[task.name] for one in found]) for task in self.schema.tasks}

    def _sample(self, samples: Samples, b: int) -> dict[str, float]:
        c = self.config
        features = [
            self._row(f.table, int(samples.ids[f.name][b])) + self._of(f"features.of_{f.name}") for f in self.schema.ids
        ]
        if self.schema.floats:
            hidden = gelu(self._linear("floats.0", samples.floats[b].numpy().astype(np.float64)))
            features.append(self._linear("floats.2", hidden))
        short: list[Array] | None = None
        if c.keys is not None:
            tokens = self._events(self.schema.sequence(c.keys), samples.sequences[c.keys], b)
            if c.pooled_keys:
                features += self._pooling("short_pooling", tokens, c.pooled_keys, [])
            short = [self._norm("short_norm", x) for x in tokens]
        events: list[Array] = []
        if c.history is not None:
            events = self._events(self.schema.sequence(c.history), samples.sequences[c.history], b)
        summaries: list[Array] = []
        for layer in range(c.layers):
            if c.history is not None:
                events = self._tower(f"tower.{layer}", events, features, short)
                asking = features if c.asking else []
                summaries = self._pooling(f"tower.{layer}.pooling", events, c.pooled, asking)
            features = self._interaction(f"interactions.{layer}", np.array(features + summaries))
        flat = np.concatenate([self._norm("head_norm", x) for x in features + summaries])
        return {task.name: self._head(f"heads.of_{task.name}", flat) for task in self.schema.tasks}

    def _head(self, name: str, flat: Array) -> float:
        return float(self._linear(f"{name}.layers.2", gelu(self._linear(f"{name}.layers.0", flat)))[0])

    # -- sequences: a list of T tokens [E] -----------------------------------------------------------------------------

    def _events(self, schema: SequenceSchema, events: Events, b: int) -> list[Array]:
        """Each event's rows, projected by the linear layer of their table, added up; and the bucket of its age."""
        rows = range(int(events.offsets[b]), int(events.offsets[b + 1]))
        tokens = []
        for t in rows:
            token = self._of(f"events.of_{schema.name}.bias")
            for f in schema.features:
                token = token + self._row(f.table, int(events.ids[f.name][t]))
            if schema.timed and self.config.times:
                assert events.times is not None
                age = int(events.times[rows[-1]]) - int(events.times[t])
                # Bucket n: an age + 1 of 2^n … 2^(n + 1) - 1 seconds.
                bucket = min((age + 1).bit_length() - 1, self.config.times - 1)
                token = token + self._of(f"events.of_{schema.name}.age")[bucket]
            tokens.append(token)
        return tokens

    def _tower(self, name: str, x: list[Array], features: list[Array], short: list[Array] | None) -> list[Array]:
        """Scaled by the features; then, each pre-norm with a residual: self attention, cross attention, an MLP."""
        scale = 1 + self._linear(f"{name}.gate", np.mean(features, 0))
        x = [token * scale for token in x]
        x = [token + found for token, found in zip(x, self._self_attention(f"{name}.self_attention", x), strict=True)]
        if short is not None:
            found = self._cross_attention(f"{name}.cross_attention", x, short)
            x = [token + one for token, one in zip(x, found, strict=True)]
        if self.config.feed_forward:
            part = f"{name}.feed_forward"
            normed = [self._norm(f"{part}.norm", token) for token in x]
            hidden = [gelu_tanh(self._linear(f"{part}.up", token)) for token in normed]
            x = [token + self._linear(f"{part}.down", h) for token, h in zip(x, hidden, strict=True)]
        return x

    def _self_attention(self, name: str, x: list[Array]) -> list[Array]:
        c = self.config
        q, k, v = self._split(f"{name}.qkv", [self._norm(f"{name}.norm", token) for token in x], 3)
        out = []
        for i in range(len(x)):
            if c.self_attention == "block":
                seen = [j for j in range(len(x)) if j // c.block == i // c.block]
            else:
                seen = [j for j in range(i + 1) if i - j <= c.window]
            heads = []
            for h in range(c.heads):
                query = rotated(self._head_norm(q[i][h]), i)
                keys = [rotated(self._head_norm(k[j][h]), j) for j in seen]
                weights = softmax(np.array([query @ key / math.sqrt(c.head_dim) for key in keys]))
                heads.append(sum(w * v[j][h] for w, j in zip(weights, seen, strict=True)))
            out.append(self._linear(f"{name}.out", np.concatenate(heads)))
        return out

    def _cross_attention(self, name: str, x: list[Array], short: list[Array]) -> list[Array]:
        """GDPA of every event on the short sequence's (normed) tokens, over the number of these."""
        q = self._split(f"{name}.q", [self._norm(f"{name}.norm", token) for token in x], 1)[0]
        k, v = self._split(f"{name}.kv", short, 2)
        return [self._linear(f"{name}.out", self._gdpa(query, k, v)) for query in q]

    def _pooling(self, name: str, x: list[Array], queries: int, asking: list[Array]) -> list[Array]:
        """N summaries: GDPA of learnt queries and of the tokens that ask, added to a learnt base or to that token."""
        k, v = self._split(f"{name}.kv", [self._norm(f"{name}.norm", token) for token in x], 2)
        seeds, base = self._of(f"{name}.seeds"), self._of(f"{name}.base")
        found = [base[n] + self._linear(f"{name}.out", self._gdpa(seeds[n], k, v)) for n in range(queries)]
        if asking:
            asks = self._split(f"{name}.ask", [self._norm(f"{name}.ask_norm", token) for token in asking], 1)[0]
            for token, query in zip(asking, asks, strict=True):
                found.append(token + self._linear(f"{name}.out", self._gdpa(query, k, v)))
        return found

    def _gdpa(self, query: Array, keys: list[Array], values: list[Array]) -> Array:
        """out_scale * act(scale * q k^T) v of one query; all [heads, D]; [heads * D]. Of no key: 0."""
        c = self.config
        act = {"gelu": gelu, "gelu_tanh": gelu_tanh, "gelu_taylor": gelu_taylor, "silu": silu}[c.activation]
        out = np.zeros((c.heads, c.head_dim))
        for key, value in zip(keys, values, strict=True):
            for h in range(c.heads):
                cosine = self._head_norm(query[h]) @ self._head_norm(key[h]) / c.head_dim
                out[h] += act(SCORE_BOUND * cosine) * value[h]
        return out.reshape(-1) / max(len(keys), 1)

    # -- interactions: x [M + N, E] ------------------------------------------------------------------------------------

    def _interaction(self, name: str, x: Array) -> list[Array]:
        """DHEN: experts that average unlike modules, weighed by a gate, beside a linear shortcut over the tokens."""
        c = self.config
        normed = np.array([self._norm(f"{name}.norm", token) for token in x])
        weights = softmax(self._linear(f"{name}.gate", normed.mean(0)))
        out = self._of(f"{name}.shortcut.weight") @ x
        kinds = {"mlp": self._mlp, "cross": self._cross, "products": self._products, "attention": self._attention}
        for number in range(c.experts):
            expert = f"{name}.mixture.experts.{number}"
            for kind in c.interactions:
                found = kinds[kind](f"{expert}.interactions.{kind}", normed)
                found = np.array([self._norm(f"{expert}.norms.{kind}", token) for token in found])
                out = out + weights[number] * found / len(c.interactions)
        return list(out)

    def _mlp(self, name: str, x: Array) -> Array:
        hidden = gelu_tanh(self._linear(f"{name}.up", x.reshape(-1)))
        return self._linear(f"{name}.down", hidden).reshape(-1, x.shape[1])

    def _cross(self, name: str, x: Array) -> Array:
        """DCN-V2's low-rank layer, x0 * (U V x0 + b), then fewer tokens."""
        x0 = x.reshape(-1)
        crossed = x0 * self._linear(f"{name}.u", self._linear(f"{name}.v", x0))
        return self._of(f"{name}.fewer.weight") @ crossed.reshape(x.shape)

    def _products(self, name: str, x: Array) -> Array:
        """DLRM's inner products of all pairs, as large as unit-variance tokens' E elements make one."""
        products = np.array([a @ b / math.sqrt(x.shape[1]) for a in x for b in x])
        return self._linear(f"{name}.project", products).reshape(-1, x.shape[1])

    def _attention(self, name: str, x: Array) -> Array:
        """Self attention among all tokens, without positions and QK-norm, then fewer tokens."""
        c = self.config
        q, k, v = self._split(f"{name}.qkv", list(x), 3)
        attended = []
        for query in q:
            heads = []
            for h in range(c.heads):
                weights = softmax(np.array([query[h] @ key[h] / math.sqrt(c.head_dim) for key in k]))
                heads.append(sum(w * value[h] for w, value in zip(weights, v, strict=True)))
            attended.append(self._linear(f"{name}.project", np.concatenate(heads)))
        return self._of(f"{name}.fewer.weight") @ np.array(attended)

    # -- parameters ----------------------------------------------------------------------------------------------------

    def _of(self, name: str) -> Array:
        self.read.add(name)
        return self.parameters[name].astype(np.float64)

    def _linear(self, name: str, x: Array) -> Array:
        out = self._of(f"{name}.weight") @ x
        return out + self._of(f"{name}.bias") if f"{name}.bias" in self.parameters else out

    def _split(self, name: str, x: list[Array], parts: int) -> list[list[Array]]:
        """A linear layer's output for each token, cut into as many parts (q, k, v), each [heads, D]."""
        shape = (parts, self.config.heads, self.config.head_dim)
        found = [self._linear(name, token).reshape(shape) for token in x]
        return [[one[part] for one in found] for part in range(parts)]

    def _row(self, table: str, row: int) -> Array:
        return self._linear(f"project.of_{table}", self._of(f"tables.of_{table}")[row])

    def _norm(self, name: str, x: Array) -> Array:
        return x / math.sqrt((x**2).mean() + self.eps) * self._of(f"{name}.weight")

    def _head_norm(self, x: Array) -> Array:
        return x / math.sqrt((x**2).mean() + self.head_eps)


def rotated(x: Array, position: int) -> Array:
    """Rotary embedding, GPT-NeoX form: element i and element i + D/2 are a point, turned by its own frequency."""
    out, half = x.copy(), len(x) // 2
    for i in range(half):
        angle = position * ROPE_BASE ** (-i / half)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i] * math.sin(angle) + x[i + half] * math.cos(angle)
    return out


def softmax(x: Array) -> Array:
    """Of a vector."""
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def gelu(x: Array | float) -> Array:
    """x Phi(x)."""
    return np.asarray(x) * 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(np.asarray(x) / math.sqrt(2)))


def gelu_tanh(x: Array | float) -> Array:
    """Hendrycks and Gimpel's approximation."""
    x = np.asarray(x)
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_taylor(x: Array | float) -> Array:
    """GELU's Taylor polynomial around 0 to x^6; Phi(x) = 1/2 + sum of (-1)^n x^(2n+1) / (n! 2^n (2n+1) sqrt(2 pi))."""
    x = np.asarray(x)
    terms = [(-1) ** n * x ** (2 * n + 1) / (math.factorial(n) * 2**n * (2 * n + 1)) for n in range(3)]
    return x * (0.5 + sum(terms) / math.sqrt(2 * math.pi))


def silu(x: Array | float) -> Array:
    """x over 1 + e^-x."""
    x = np.asarray(x)
    return x / (1 + np.exp(-x))
