"""What turns beside neighbours say: slowdowns in pairs, and what fewer SMs alone would make of work. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gem.harness.measured import Metric
from gem.harness.names import SLOWDOWN_PREFIX
from gem.harness.timing import summarize

ALONE = "alone"
ENGINE = "copy_engine"  # at the rate that SMs copy at
UNPACED = "copy_engine_unpaced"


def held_name(sms: int, moves: bool = True) -> str:
    """``24_sms``, ``24_sms_idle``."""
    return f"{sms}_sm{'' if sms == 1 else 's'}{'' if moves else '_idle'}"


@dataclass(frozen=True)
class Copied:
    """By one neighbour in one turn."""

    copied: int  # bytes
    seconds: float
    late_s: float = 0.0  # how far it was behind its schedule, at most

    @property
    def gbps(self) -> float:
        """GB/s: each byte read once and written once."""
        return self.copied / self.seconds / 1e9 if self.seconds > 0 else 0.0


def slowdowns(alone_ms: Sequence[float], beside_ms: Sequence[float]) -> tuple[float, ...]:
    """Of each round: time beside over time alone, which share clock and heat. What one has more of is left out."""
    return tuple(beside / alone for alone, beside in zip(alone_ms, beside_ms, strict=False))


def ideal(total: int, taken: int) -> float:
    """The slowdown of work that splits evenly over the SMs that are left; infinite where none is."""
    return total / (total - taken) if taken < total else math.inf


def in_waves(tiles: int, total: int, taken: int) -> float:
    """The slowdown of equal tiles, one to an SM at a time: by whole waves."""
    return math.ceil(tiles / (total - taken)) / math.ceil(tiles / total) if taken < total else math.inf


def slowdown_metric(
    name: str, alone_ms: Sequence[float], beside_ms: Sequence[float], copies: Sequence[Copied], told: str = ""
) -> Metric:
    """Median of the rounds' slowdowns; the note has its interval, the time, and what was copied meanwhile."""
    ratios = slowdowns(alone_ms, beside_ms)
    found, ms = summarize(ratios), summarize(beside_ms)
    parts = [f"{found.low:.3f} to {found.high:.3f} ({found.confidence:.0%})", f"{ms.median:.4g} ms"]
    if copies:
        rates = summarize([one.gbps for one in copies])
        parts.append(f"{rates.median:.0f} GB/s copied ({min(rates.samples):.0f} to {max(rates.samples):.0f})")
    if late := max((one.late_s for one in copies), default=0.0):
        parts.append(f"behind its schedule by {late * 1e3:.2g} ms at most")
    parts += filter(None, [told])
    return Metric(f"{SLOWDOWN_PREFIX}{name}", found.median, ratios, "; ".join(parts))


def gain_metrics(slowed: Mapping[str, tuple[float, ...]], sms: Sequence[int]) -> list[Metric]:
    """What fewer SMs (sm_free_gain) or none (engine_gain) give back: time beside the most held over it, minus 1."""
    held = [n for n in sms if n > 0 and held_name(n) in slowed]
    if not held:
        return []
    most, found = held_name(held[-1]), []
    others = [("sm_free_gain", held_name(held[0]))] if len(held) > 1 else []
    others += [("engine_gain", ENGINE)] if ENGINE in slowed else []
    for metric, other in others:
        gains = tuple(a / b - 1 for a, b in zip(slowed[most], slowed[other], strict=False))
        of = summarize(gains)
        note = f"{most} -> {other}: {of.low:.3f} to {of.high:.3f}; claimed for 24 SMs -> 1: up to 0.15"
        found.append(Metric(metric, of.median, gains, note))
    return found
