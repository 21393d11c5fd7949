"""`expect = { "forward.ratio_to.flex" = ">= 1.5" }`: the bounds that a case's metrics must keep. No torch."""

import re
from dataclasses import dataclass

from gem.harness import names

_BOUND = re.compile(r"\s*(>=|<=|==|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


@dataclass(frozen=True)
class Expectation:
    """``"forward.ratio_to.flex" = ">= 1.5"``: a bound that a metric of the subject must keep.

    `direction` is "" where a case has none: ``"max_over_mean" = "<= 1.05"``.
    """

    direction: str
    metric: str
    op: str
    bound: float

    @property
    def key(self) -> str:
        """As it is declared: ``forward.ms``, or ``max_over_mean`` where there are no directions."""
        return f"{self.direction}.{self.metric}" if self.direction else self.metric

    def met(self, value: float | None) -> bool:
        """Whether `value` keeps the bound; None and NaN never do."""
        if value is None or value != value:
            return False
        return {
            ">=": value >= self.bound,
            "<=": value <= self.bound,
            "==": value == self.bound,
            ">": value > self.bound,
            "<": value < self.bound,
        }[self.op]

    def __str__(self) -> str:
        return f"{self.key} {self.op} {self.bound:g}"


def parse_expectation(key: str, text: str, directed: bool = True) -> Expectation:
    """The bound that `key` = `text` declares; the key begins with a direction where the case has such (`directed`).

    Raises ValueError naming what is wrong and what is accepted.
    """
    direction, _, metric = key.partition(".") if directed else ("", "", key)
    if directed and (direction not in names.DIRECTIONS or not metric):
        raise ValueError(f"expect key {key!r}; accepted: <forward|backward>.<metric>, as in 'forward.roofline'")
    if not directed and metric.partition(".")[0] in names.DIRECTIONS:
        raise ValueError(f"expect key {key!r}: the case has no directions; accepted: <metric>, as in 'max_over_mean'")
    if names.metric(metric) is None:
        known = [*names.METRICS, "ratio_to.<peer>", "slowdown.<neighbour>", "sent.<what>.<tier>"]
        raise ValueError(
            f"expect key {key!r}: unknown metric {metric!r}; accepted: {', '.join(known)}{names.nearest(metric, known)}"
        )
    match = _BOUND.fullmatch(text)
    if match is None:
        raise ValueError(
            f"expect {key!r} = {text!r}; accepted: a comparison (>=, <=, >, <, ==) and a number, as in '>= 1.5'"
        )
    return Expectation(direction, metric, match[1], float(match[2]))
