"""Sizes of the GEM model, from ``tiny`` (tests, seconds on a CPU) to what fills one GPU.

Figures of the seed model are not public; the presets are ours, chosen so that a step's FLOPs lie where GEM's do: in the
sequence tower and the experts.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gem.errors import RequestError

Positive = Annotated[int, Field(ge=1)]
Interaction = Literal["mlp", "cross", "products", "attention"]


class ModelConfig(BaseModel):
    """All sizes. Widths in elements, lengths in events."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    table_dim: Positive = 16  # of every embedding row
    dim: Positive = 64  # of every token
    heads: Positive = 2
    head_dim: Annotated[int, Field(ge=2, le=256, multiple_of=2)] = 32
    layers: Positive = 2  # each: a layer of the sequence tower, its pooling, a layer of interaction
    history: str | None = "history"  # the long sequence: self attention, pooling, queries of the cross attention
    keys: str | None = "audience"  # the short one: keys and values of the cross attention; None = no cross attention
    self_attention: Literal["block", "window"] = "block"
    block: Positive = 64
    window: Annotated[int, Field(ge=0)] = 256  # earlier events that an event sees; for "window"
    feed_forward: Annotated[float, Field(ge=0)] = 2.0  # hidden width of an event's MLP over dim; 0 = none
    pooled: Positive = 4  # shared queries that summarise the history in each layer
    asking: bool = True  # the non-sequence tokens too summarise the history, each with a query of the sample's own
    pooled_keys: Annotated[int, Field(ge=0)] = 2  # … that summarise the short sequence, once
    activation: Literal["gelu", "gelu_tanh", "gelu_taylor", "silu"] = "gelu_taylor"  # of cross attention and pooling
    experts: Positive = 2
    interactions: Annotated[list[Interaction], Field(min_length=1)] = ["mlp", "cross", "products", "attention"]
    expert_hidden: Positive = 128  # hidden width of an expert's MLP
    rank: Positive = 32  # of the low-rank cross network
    head_hidden: Positive = 64
    times: Annotated[int, Field(ge=0, le=62)] = 32  # buckets, in powers of two seconds, of an event's age; 0 = unused

    @model_validator(mode="after")
    def _parts_agree(self) -> "ModelConfig":
        if self.keys is not None and self.history is None:
            raise ValueError("keys: there is no history to query them; accepted: None, or a history")
        if len(set(self.interactions)) != len(self.interactions):
            raise ValueError("interactions: one is named twice; accepted: each once")
        return self


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "small": dict(
        table_dim=32, dim=128, heads=2, head_dim=64, layers=2, pooled=8, expert_hidden=512, rank=64, head_hidden=128
    ),
    "base": dict(
        table_dim=128, dim=512, heads=4, head_dim=128, layers=3, pooled=32, pooled_keys=8, feed_forward=4.0, experts=2,
        expert_hidden=4096, rank=512, head_hidden=512,
    ),
    # 3.5 G dense parameters with synthetic data's features: 56 GB with gradients and AdamW's moments in fp32. The rest
    # of an H200's 141 GB is for the events of a batch, or of a piece of one.
    "large": dict(
        table_dim=256, dim=1024, heads=8, head_dim=128, layers=4, pooled=32, pooled_keys=8, feed_forward=4.0,
        experts=2, expert_hidden=4096, rank=512, head_hidden=1024,
    ),
}  # fmt: skip


def preset(name: str, **changes: Any) -> ModelConfig:
    """A preset with some sizes changed; RequestError for a name that is none."""
    if name not in PRESETS:
        raise RequestError(f"model preset {name!r}; accepted: {', '.join(PRESETS)}")
    return ModelConfig.model_validate(PRESETS[name] | changes)
