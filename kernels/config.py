"""Tile sizes, warps and pipeline stages of a launch, by the *class* of its shape.

A class holds what decides which tiles are fast and is known on the host without reading device memory: kernel, GPU
architecture, dtype, head dim, activation, mask, and mean lengths to a power of two. Another batch of the same model is
in the same class, so neither compilation nor tuning ever depends on a batch.

The defaults below were chosen on an H200 (docs/measured.md); ``GEM_AUTOTUNE=1`` measures the candidates once a class
and keeps the choice on disk (``gem.kernels.tuning``).
"""

import functools
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from gem.kernels.device import INTERPRETED
from gem.kernels.schedule import Batch


@dataclass(frozen=True)
class Config:
    """Of one launch. ``persistent``: programs per multiprocessor of a grid dealt in zigzag, 0 = the hardware deals."""

    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    warps: int
    stages: int
    _: KW_ONLY
    persistent: int = 0
    warm: bool = False  # have the first tiles brought into L2 at the start
    registers: int | None = None  # at most, a thread: fewer let more programs share a multiprocessor


@dataclass(frozen=True)
class Shape:
    """The class of a launch."""

    kernel: str  # "forward", "dq", "dkv", …
    arch: int  # compute capability times 10; 0 = interpreted
    dtype: str
    head_dim: int  # rounded up to a power of two
    activation: str
    bias: str
    mask: str  # "full", "causal", "window<=N"
    q_len: int  # mean lengths, rounded up to a power of two
    k_len: int
    tma: bool  # whether the copy engine loads the tiles of the loop

    @classmethod
    def of(cls, kernel: str, q_THD: Tensor, batch: Batch, activation: str, bias: str, tma: bool = False) -> "Shape":
        """The class of a call."""
        samples = max(batch.size, 1)
        q_mean = batch.shared if batch.q_offsets is None else batch.q_rows // samples
        return _shape(
            kernel, architecture(q_THD.device), q_THD.dtype, q_THD.shape[2], activation, bias, batch.left, batch.right,
            _power(q_mean), _power(batch.k_rows // samples), tma,
        )  # fmt: skip

    def key(self) -> str:
        """As a line of text."""
        return (
            f"{self.kernel} sm{self.arch} {self.dtype} d{self.head_dim} {self.activation}"
            f"{self.bias and '+' + self.bias} {self.mask} q{self.q_len} k{self.k_len}{' tma' if self.tma else ''}"
        )


@functools.lru_cache(4096)
def _shape(kernel, arch, dtype, head_dim, activation, bias, left, right, q_len, k_len, tma) -> Shape:
    mask = "full" if right < 0 else "causal"
    if left >= 0:
        mask = f"window<={_power(left + max(right, 0) + 1)}"
    name = str(dtype).removeprefix("torch.")
    return Shape(kernel, arch, name, max(16, _power(head_dim)), activation, bias, mask, q_len, k_len, tma)


def has_tma(device: torch.device) -> bool:
    """Whether the GPU has the tensor memory accelerator (Hopper and later)."""
    return architecture(device) >= 90


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def architecture(device: torch.device) -> int:
    """Compute capability times 10 of a GPU; 0 under the interpreter."""
    if device.type != "cuda" or INTERPRETED:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.lru_cache(4096)
def default(shape: Shape) -> Config:
    """What a launch of this class uses when nothing was tuned: from a sweep of ``ci/tune`` on an H200."""
    if shape.arch == 0:  # interpreted: the cost is by operation, not by element
        return Config(128, 128, 4, 1) if max(shape.q_len, shape.k_len) > 128 else Config(32, 32, 4, 1)
    if shape.dtype == "float32":
        return _default_fp32(shape)
    if shape.bias:
        return _default_bias(shape)
    tiles = _DEFAULT[shape.kernel][min(max(shape.head_dim, 64), 256)]
    chosen = next(tiles[kind] for kind in _kinds(shape) if kind in tiles)
    if shape.kernel == "dkv" and shape.head_dim == 16 and shape.arch >= 90:
        chosen = Config(64, 128, 8, 2)  # of those tried the one whose products ptxas does not serialise
    return chosen


_LOGISTIC = ("silu", "gelu", "gelu_tanh")  # gem.kernels.activations


def _kinds(shape: Shape) -> list[str]:
    """Rows of ``_DEFAULT`` that are for a class, the best first; with "gdpa" in front for pointwise activations.

    "logistic": those that wait for the special-function unit, which more and smaller programs hide better.
    """
    kind = "long"
    if shape.mask.startswith("window"):
        kind = "window"
    elif shape.q_len <= 64 < shape.k_len:
        kind = "few queries"
    elif shape.k_len <= 512:
        kind = "short keys"
    elif shape.mask == "causal":
        kind = "causal"
    kinds = [f"{kind}, 32", kind, "long"] if shape.q_len <= 32 else [kind, "long"]
    if shape.activation == "softmax":
        return kinds
    logistic = ["logistic long"] if shape.activation in _LOGISTIC and kind == "long" else []
    return logistic + [f"gdpa {kind}" for kind in kinds] + kinds


def _default_bias(shape: Shape) -> Config:
    """The compiler pipelines a bias like keys: a dense tile a stage, and for buckets each gather of the search.

    Half a megabyte of shared memory at the tiles that are best without one; buckets get no pipeline at all.
    """
    stages = 2 if shape.bias == "dense" else 1
    if shape.head_dim > 128:
        return Config(32, 64, 8, 1) if shape.kernel == "dkv" else Config(64, 32, 4, stages)
    return Config(32, 64, 4, stages) if shape.kernel == "dkv" else Config(64, 64, 4, stages)


def _default_fp32(shape: Shape) -> Config:
    """Products in full fp32 run on the ordinary ALUs: small tiles, for the registers and an A100's shared memory."""
    stages = 1 if shape.bias else 2
    if shape.head_dim > 128:
        return Config(16, 32, 4, stages) if shape.kernel == "forward" else Config(16, 16, 4, stages)
    return Config(32, 32, 4, stages)


_DEFAULT: dict[str, dict[int, dict[str, Config]]] = {
    "forward": {
        64: {"long": Config(128, 64, 4, 3), "short keys": Config(64, 32, 4, 4), "few queries": Config(64, 64, 4, 3),
             "window": Config(64, 32, 4, 3)},
        128: {"long": Config(128, 64, 8, 3), "short keys": Config(64, 32, 4, 2), "few queries": Config(64, 64, 4, 3),
              "window": Config(64, 32, 4, 3), "gdpa short keys": Config(64, 32, 4, 3, persistent=3),
              "gdpa causal": Config(64, 32, 4, 3), "logistic long": Config(64, 32, 4, 3)},
        256: {"long": Config(128, 32, 8, 2)},
    },
    "dq": {
        64: {"long": Config(64, 64, 4, 3), "short keys": Config(64, 32, 4, 3),
             "few queries, 32": Config(32, 64, 4, 3)},
        128: {"long": Config(128, 64, 8, 3), "short keys": Config(128, 32, 8, 3), "few queries": Config(64, 32, 4, 3),
              "few queries, 32": Config(32, 64, 4, 3), "window": Config(64, 32, 4, 2),
              "gdpa short keys": Config(64, 32, 4, 2)},
        256: {"long": Config(64, 32, 4, 2)},
    },
    "dkv": {
        64: {"long": Config(64, 64, 4, 2), "short keys": Config(64, 64, 4, 3), "gdpa long": Config(64, 64, 4, 3),
             "few queries, 32": Config(32, 64, 4, 2)},
        128: {"long": Config(64, 64, 4, 2), "few queries": Config(64, 64, 4, 2, warm=True),
              "gdpa few queries, 32": Config(32, 64, 4, 2, warm=True),
              "window": Config(64, 64, 4, 2, warm=True), "gdpa causal": Config(32, 64, 4, 3)},
        256: {"long": Config(32, 64, 8, 2)},
    },
}  # fmt: skip
