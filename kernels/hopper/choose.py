"""Which of the Gluon forwards a call of GDPA runs on, from its shapes alone: nothing is read back from the device.

"long": a program's two consumers take 64 queries each and walk the keys together (one lane), or each walks the keys of
its own 64 queries (two lanes: for a few queries a sample, which fill no tile of 128). "short": keys stay in shared
memory while up to ``rows`` queries of the sample pass.
"""

from dataclasses import dataclass

from gem.kernels.schedule import Batch

_FEW_QUERIES = 64  # a sample, on average: a consumer's tile
_SHORT_KEYS = 160  # a sample, on average


@dataclass(frozen=True)
class Variant:
    """A kernel and its tiles."""

    kernel: str  # "long" or "short"
    rows: int  # queries of an entry of the tile list
    q_tile: int  # queries that one copy brings in
    keys: int  # of a tile
    stages: int  # tiles of keys and values that are under way, a lane
    lanes: int = 1  # walks at a time in a program


def choose(batch: Batch, head_dim: int) -> Variant:
    """The variant for a batch's mean lengths."""
    samples = max(batch.size, 1)
    queries = batch.shared if batch.q_offsets is None else batch.q_rows / samples
    if queries <= _FEW_QUERIES:
        return _FEW[head_dim]
    return (_SHORT if batch.k_rows / samples <= _SHORT_KEYS else _LONG)[head_dim]


_LONG = {64: Variant("long", 128, 128, 128, 4), 128: Variant("long", 128, 128, 128, 2)}
_FEW = {64: Variant("long", 64, 64, 64, 4, lanes=2), 128: Variant("long", 64, 64, 64, 2, lanes=2)}
_SHORT = {64: Variant("short", 512, 128, 64, 4), 128: Variant("short", 512, 128, 64, 4)}
