"""Which of the Gluon forwards a call of GDPA runs on, from its shapes alone: nothing is read back from the device.

"long": a program's consumers take 64 queries each and walk the keys together (one lane), or each walks the keys of its
own 64 queries (two lanes: for a few queries a sample, which fill no larger tile). "short": keys stay in shared memory
while up to ``rows`` queries of the sample pass.
"""

from dataclasses import dataclass

from gem.kernels.schedule import Batch

FEW_QUERIES = 64  # a sample, on average: a consumer's tile
SHORT_KEYS = 160  # a sample, on average


@dataclass(frozen=True)
class Variant:
    """A kernel and its tiles."""

    kernel: str  # "long" or "short"
    rows: int  # queries of an entry of the tile list
    keys: int  # of a tile
    stages: int  # tiles of keys and values that are under way, a lane
    consumers: int = 2  # warpgroups with 64 queries each
    lanes: int = 1  # walks at a time in a program
    q_slots: int = 2  # blocks of 64 queries in shared memory, a consumer
    q_registers: bool = False  # "long": queries are copied to registers before their products
    turns: int = 0  # "long": consumers issue products in turns, handed on behind both (1) or between them (2)
    values_first: bool = False  # "short": between two blocks of queries, the old one's last product goes first
    claims: bool = True  # of jobs, as lanes become free; else, and without zigzag, they are dealt beforehand
    # What only suites/throughput/gdpa_ablation.toml turns off.
    zigzag: bool = True  # else jobs are dealt in the batch's own order, round after round the same way; none is claimed
    pipelined: bool = True  # else a job (in "short" a block of queries) ends before the next one's products begin


def choose(batch: Batch, head_dim: int) -> Variant:
    """The variant for a batch's mean lengths."""
    samples = max(batch.size, 1)
    queries = batch.shared if batch.q_offsets is None else batch.q_rows / samples
    if queries <= FEW_QUERIES:
        return _FEW[head_dim]
    return (_SHORT if batch.k_rows / samples <= SHORT_KEYS else _LONG)[head_dim]


_LONG = {
    64: Variant("long", 192, 128, 5, consumers=3, q_slots=1, turns=1),
    128: Variant("long", 128, 128, 2, q_slots=1, q_registers=True, turns=2),
}
_FEW = {64: Variant("long", 64, 64, 4, lanes=2), 128: Variant("long", 64, 64, 2, lanes=2)}
_SHORT = {64: Variant("short", 1024, 64, 6, consumers=3), 128: Variant("short", 1024, 64, 4, values_first=True)}
