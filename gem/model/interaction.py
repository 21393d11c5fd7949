"""Cross-feature learning: DHEN experts over the tokens of the non-sequence features and the summaries of sequences.

DHEN (Zhang et al., 2022): each expert holds several interaction modules of different kinds and averages them; experts
are combined by a gate, and a residual goes around all of it. Tokens of sequences and of features meet here; the way
back, features to sequences, is the gate of gem.model.sequence.SequenceLayer (both directions, as in InterFormer, 2024).

Legend: B samples, M tokens in, O tokens out, E width of a token.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem.model.config import ModelConfig
from gem.model.norms import RMSNorm
from gem.model.work import Work, attend, linear


class MlpInteraction(nn.Module):
    """All tokens at once through an MLP."""

    def __init__(self, tokens: int, out: int, config: ModelConfig) -> None:
        super().__init__()
        self.sizes = (tokens * config.dim, config.expert_hidden, out * config.dim)
        self.up = nn.Linear(self.sizes[0], self.sizes[1])
        self.down = nn.Linear(self.sizes[1], self.sizes[2])
        self.out = out

    def forward(self, x_BME: Tensor) -> Tensor:
        """[B, O, E]."""
        return self.down(F.gelu(self.up(x_BME.flatten(1)), approximate="tanh")).unflatten(1, (self.out, -1))

    def flops(self, work: Work) -> float:
        """Forward."""
        first, hidden, last = self.sizes
        return linear(work.samples, first, hidden) + linear(work.samples, hidden, last)


class CrossInteraction(nn.Module):
    """A low-rank cross layer (DCN-V2, Wang et al., 2021): x0 * (U V x0 + b), then fewer tokens."""

    def __init__(self, tokens: int, out: int, config: ModelConfig) -> None:
        super().__init__()
        width = tokens * config.dim
        self.tokens, self.out, self.width, self.rank, self.dim = tokens, out, width, config.rank, config.dim
        self.v = nn.Linear(width, config.rank, bias=False)
        self.u = nn.Linear(config.rank, width)
        self.fewer = nn.Linear(tokens, out, bias=False)

    def forward(self, x_BME: Tensor) -> Tensor:
        """[B, O, E]."""
        crossed = x_BME * self.u(self.v(x_BME.flatten(1))).unflatten(1, (self.tokens, -1))
        return self.fewer(crossed.transpose(1, 2)).transpose(1, 2)

    def flops(self, work: Work) -> float:
        """Forward."""
        low_rank = 2 * linear(work.samples, self.width, self.rank)
        return low_rank + linear(work.samples * self.dim, self.tokens, self.out)


class ProductInteraction(nn.Module):
    """Inner products of all pairs of tokens (as in DLRM, Naumov et al., 2019), through a linear layer."""

    def __init__(self, tokens: int, out: int, config: ModelConfig) -> None:
        super().__init__()
        self.tokens, self.out, self.dim = tokens, out, config.dim
        self.project = nn.Linear(tokens * tokens, out * config.dim)

    def forward(self, x_BME: Tensor) -> Tensor:
        """[B, O, E]."""
        products = torch.bmm(x_BME, x_BME.transpose(1, 2)) * self.dim**-0.5
        return self.project(products.flatten(1)).unflatten(1, (self.out, -1))

    def flops(self, work: Work) -> float:
        """Forward."""
        products = 2.0 * work.samples * self.tokens**2 * self.dim
        return products + linear(work.samples, self.tokens**2, self.out * self.dim)


class AttentionInteraction(nn.Module):
    """Self attention among a sample's tokens, then fewer of them."""

    def __init__(self, tokens: int, out: int, config: ModelConfig) -> None:
        super().__init__()
        self.tokens, self.out, self.config = tokens, out, config
        self.inner = config.heads * config.head_dim
        self.qkv = nn.Linear(config.dim, 3 * self.inner, bias=False)
        self.project = nn.Linear(self.inner, config.dim)
        self.fewer = nn.Linear(tokens, out, bias=False)

    def forward(self, x_BME: Tensor) -> Tensor:
        """[B, O, E]."""
        c = self.config
        q, k, v = self.qkv(x_BME).unflatten(-1, (3, c.heads, c.head_dim)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.fewer(self.project(attended).transpose(1, 2)).transpose(1, 2)

    def flops(self, work: Work) -> float:
        """Forward."""
        c, rows = self.config, work.samples * self.tokens
        projections = 4 * linear(rows, c.dim, self.inner)
        pairs = attend(work.samples * self.tokens**2, c.heads, c.head_dim)
        return projections + pairs + linear(work.samples * c.dim, self.tokens, self.out)


KINDS: dict[str, type[MlpInteraction | CrossInteraction | ProductInteraction | AttentionInteraction]] = {
    "mlp": MlpInteraction, "cross": CrossInteraction, "products": ProductInteraction,
    "attention": AttentionInteraction,
}  # fmt: skip


class Expert(nn.Module):
    """Interaction modules of different kinds on the same tokens, averaged."""

    def __init__(self, tokens: int, out: int, config: ModelConfig) -> None:
        super().__init__()
        self.interactions = nn.ModuleDict({kind: KINDS[kind](tokens, out, config) for kind in config.interactions})
        self.norms = nn.ModuleDict({kind: RMSNorm(config.dim) for kind in config.interactions})

    def forward(self, x_BME: Tensor) -> Tensor:
        """[B, O, E]."""
        found = [self.norms[kind](module(x_BME)) for kind, module in self.interactions.items()]
        return torch.stack(found).mean(0)

    def flops(self, work: Work) -> float:
        """Forward."""
        return sum(module.flops(work) for module in self.interactions.values())  # type: ignore[operator]


class Mixture(nn.Module):
    """Experts, weighed sample by sample."""

    def __init__(self, tokens: int, out: int, config: ModelConfig) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Expert(tokens, out, config) for _ in range(config.experts)])

    def forward(self, x_BME: Tensor, share_BX: Tensor) -> Tensor:
        """[B, O, E]."""
        found = torch.stack([expert(x_BME) for expert in self.experts], 1)
        return (found * share_BX[:, :, None, None].to(found.dtype)).sum(1)

    def flops(self, work: Work) -> float:
        """Forward."""
        return sum(expert.flops(work) for expert in self.experts)  # type: ignore[operator]


class InteractionLayer(nn.Module):
    """Experts, a gate that weighs them sample by sample, and a residual.

    ``mixture`` is a module of its own so that another may stand in its place, whose experts lie on several ranks.
    """

    def __init__(self, tokens: int, out: int, config: ModelConfig) -> None:
        super().__init__()
        self.tokens, self.out, self.dim = tokens, out, config.dim
        self.norm = RMSNorm(config.dim)
        self.mixture: nn.Module = Mixture(tokens, out, config)
        self.gate = nn.Linear(config.dim, config.experts)
        self.shortcut = nn.Linear(tokens, out, bias=False)

    def forward(self, x_BME: Tensor) -> Tensor:
        """[B, M, E] to [B, O, E]."""
        x = self.norm(x_BME)
        share_BX = self.gate(x.mean(1)).softmax(-1)
        mixed = self.mixture(x, share_BX)
        # Contiguous, or the next layer, whose input would have other strides, is compiled anew.
        return (self.shortcut(x_BME.transpose(1, 2)).transpose(1, 2) + mixed).contiguous()

    def flops(self, work: Work) -> float:
        """Forward."""
        own = linear(work.samples, self.dim, self.gate.out_features)
        own += linear(work.samples * self.dim, self.tokens, self.out)
        return own + self.mixture.flops(work)  # type: ignore[operator]
