"""The parameters of each subject: what a `params = {...}` table of a declared case may say.

A model is strict (no string passes for a number) and closed (an unknown name is an error), because a misspelt parameter
that is ignored measures something else than was asked for. Here: the public ops. What is measured otherwise, a whole
training step say, has its parameters in measured_params.py.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Activation = Literal["gelu", "gelu_tanh", "gelu_taylor", "silu", "relu", "relu_squared", "identity"]
Bias = Literal["none", "dense", "dense_broadcast", "position", "time"]
DType = Literal["float64", "float32", "bfloat16", "float16"]
Layout = Literal["packed", "fused_qkv", "strided"]


def as_tuple(value: object) -> object:
    """TOML knows only arrays: make one a tuple, which is what a frozen model holds."""
    return tuple(value) if isinstance(value, list) else value


Side = Annotated[int, Field(ge=-1)]  # -1: unlimited
Finite = Annotated[float, Field(allow_inf_nan=False)]
Window = Annotated[tuple[Side, Side], BeforeValidator(as_tuple)]


class Params(BaseModel):
    """The parameters of a subject, whichever it is: strict, closed, and fixed once they are read."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SubjectParams(Params):
    """What every op takes: the shape of a head, the dtypes and how the inputs lie in memory."""

    heads: Annotated[int, Field(ge=1, le=1024)] = 4
    head_dim: Annotated[int, Field(ge=1, le=4096)] = 64
    dtype: DType = "float32"
    offsets_dtype: Literal["int32", "int64"] = "int64"
    # packed: [T, H, D] contiguous; fused_qkv: slices of one projection, row stride 3·H·D; strided: rows with gaps.
    layout: Layout = "packed"
    nested: bool = False  # pass nested tensors instead of values + offsets
    compile: bool = False  # call the op under torch.compile(fullgraph=True)
    seed: int = 0  # of the values; the lengths have their own seed in the fixture

    @property
    def masked(self) -> bool:
        """Whether a mask hides keys of a query's own sample."""
        return False

    @property
    def biased(self) -> bool:
        """Whether something is added to scores."""
        return False


class MaskedParams(SubjectParams):
    """Subjects with a causal mask and a window, both aligned at the bottom right; -1 = unlimited."""

    causal: bool = False
    window: Window = (-1, -1)

    @property
    def masked(self) -> bool:
        """Whether a mask hides keys of a query's own sample."""
        return self.causal or max(self.window) >= 0


class JaggedAttentionParams(MaskedParams):
    """`gem.jagged_attention`; scale None = head_dim ** -0.5."""

    bias: Bias = "none"
    scale: Finite | None = None

    @property
    def biased(self) -> bool:
        """Whether something is added to scores."""
        return self.bias != "none"


class GdpaParams(MaskedParams):
    """`gem.gdpa`; a fixture whose pattern is "pma" is run with broadcast_q=True."""

    activation: Activation = "gelu"
    qk_scale: Finite = 1.0
    out_scale: Finite = 1.0


class BlockAttentionParams(SubjectParams):
    """`gem.block_attention`: softmax inside blocks of `block` tokens, with rotary positions when `rope`."""

    block: Annotated[int, Field(ge=1)] = 64
    rope: bool = True
    scale: Finite | None = None

    @model_validator(mode="after")
    def _rope_needs_pairs(self) -> "BlockAttentionParams":
        if self.rope and self.head_dim % 2:
            raise ValueError(
                f"head_dim = {self.head_dim} with rope = true; accepted: an even head_dim, or rope = false"
            )
        return self


SUBJECTS: dict[str, type[SubjectParams]] = {
    "jagged_attention": JaggedAttentionParams,
    "gdpa": GdpaParams,
    "block_attention": BlockAttentionParams,
}
