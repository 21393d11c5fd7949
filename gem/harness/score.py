"""Result rows of one case from what its contestants did: metrics, ratios, expectations. Arithmetic only, no torch."""

from dataclasses import dataclass, field

from gem.data.lengths import Lengths
from gem.efficiency import Direction, attention_bytes, attention_flops, attention_pairs, block_pairs
from gem.harness import names
from gem.harness.case import AnyCase, Case
from gem.harness.params import BlockAttentionParams, GdpaParams, JaggedAttentionParams
from gem.harness.results import Row, Status
from gem.harness.timing import Summary

ELEMENT_SIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass
class Outcome:
    """Of one contestant in one direction, "" in a measured case.

    ``status`` pass = checked right and, in a throughput case, timed.
    """

    impl: str
    direction: str
    status: Status = "pass"
    reason: str = ""
    max_error: float | None = None
    error_note: str = ""
    timing: Summary | None = None
    remarks: list[str] = field(default_factory=list)

    @property
    def peer(self) -> bool:
        """Whether it is a public kernel, not gem's own op."""
        return self.impl in names.PEERS


@dataclass(frozen=True)
class Work:
    """Useful FLOPs and least bytes of a case in one direction; the roofline's time, or why there is none."""

    flops: float
    n_bytes: float
    least_ms: float | None = None
    no_ceilings: str = ""


def useful_work(case: Case, lengths: Lengths, direction: Direction) -> tuple[float, float]:
    """(FLOPs, bytes) that the case's function needs: pairs that its mask keeps; each tensor read or written once."""
    params = case.params
    if isinstance(params, BlockAttentionParams):
        pairs = block_pairs(lengths.q, params.block)
    else:
        assert isinstance(params, JaggedAttentionParams | GdpaParams)
        pairs = attention_pairs(lengths.q, lengths.k, params.causal, params.window)
    shared = lengths.queries if lengths.pattern == "pma" and case.subject == "gdpa" else None
    return (
        attention_flops(pairs, params.heads, params.head_dim, direction),
        attention_bytes(
            lengths.tokens_q, lengths.tokens_k, params.heads, params.head_dim, ELEMENT_SIZE[params.dtype], direction,
            shared_queries=shared,
        ),
    )  # fmt: skip


def row(case: AnyCase, impl: str = "", direction: str = "", metric: str = "", status: Status = "pass", **given) -> Row:
    """A row of ``case`` with the metric's unit and better side."""
    known = names.metric(metric) if metric else None
    unit, better = (known.unit, known.better) if known else ("", "lower")
    return Row(
        suite=case.suite.as_posix(), case=case.name, impl=impl, direction=direction, metric=metric, unit=unit,
        better=better, status=status, **given,
    )  # fmt: skip


def correctness_rows(case: Case, outcomes: list[Outcome]) -> list[Row]:
    """One ``max_error`` row a contestant and direction."""
    return [
        row(case, o.impl, o.direction, "max_error", o.status, value=o.max_error, reason=o.reason or o.error_note)
        for o in outcomes
    ]


def throughput_rows(case: Case, outcomes: list[Outcome], work: dict[str, Work]) -> list[Row]:
    """Metrics of every contestant, then the ratios of gem's implementations to the peers, then expectations applied."""
    rows: list[Row] = []
    for o in outcomes:
        if o.max_error is not None:
            status: Status = o.status if o.status in ("fail", "error") and o.timing is None else "pass"
            reason = o.reason if status != "pass" else o.error_note
            rows.append(row(case, o.impl, o.direction, "max_error", status, value=o.max_error, reason=reason))
        if o.timing is None or o.status != "pass":
            rows.append(row(case, o.impl, o.direction, "ms", o.status, reason=o.reason))
            continue
        rows += _metrics(case, o, o.timing, work[o.direction])
    rows += _ratios(case, outcomes)
    return rows


def _metrics(case: Case, o: Outcome, timing: Summary, work: Work) -> list[Row]:
    reason = "; ".join(o.remarks)
    values = {"tflops": work.flops / timing.median / 1e9, "gbps": work.n_bytes / timing.median / 1e6}
    if work.least_ms is not None:
        values["roofline"] = work.least_ms / timing.median
    rows = [row(case, o.impl, o.direction, "ms", value=timing.median, samples=list(timing.samples), reason=reason)]
    rows += [row(case, o.impl, o.direction, metric, value=value) for metric, value in values.items()]
    if work.least_ms is None:
        rows.append(row(case, o.impl, o.direction, "roofline", "skipped", reason=f"no ceilings: {work.no_ceilings}"))
    return rows


def _ratios(case: Case, outcomes: list[Outcome]) -> list[Row]:
    rows = []
    for o in (one for one in outcomes if not one.peer):
        for peer in (p for p in outcomes if p.peer and p.direction == o.direction):
            metric = f"{names.RATIO_PREFIX}{peer.impl}"
            lacking = next((x for x in (o, peer) if x.status != "pass" or x.timing is None), None)
            if lacking is None and o.timing and peer.timing:
                ratio = peer.timing.median / o.timing.median
                rows.append(row(case, o.impl, o.direction, metric, value=ratio))
            elif lacking is not None:
                reason = f"no ratio: {lacking.impl} {lacking.status}: {lacking.reason}"
                rows.append(row(case, o.impl, o.direction, metric, "skipped", reason=reason))
    return rows


def apply_expectations(case: AnyCase, rows: list[Row], outcomes: list[Outcome]) -> list[Row]:
    """Rows with every bound of ``case.expect`` judged: kept by the best of gem's implementations, or that row fails.

    A bound on a ratio to a peer that was skipped (not installed, not for this device) is not judged: its row stays
    skipped. One to a peer that failed is broken: there is no number that keeps it.
    """
    judged = list(rows)
    for bound in case.expectations:
        at = [
            i for i, r in enumerate(judged)
            if (r.direction, r.metric) == (bound.direction, bound.metric) and r.impl not in names.PEERS
        ]  # fmt: skip
        peer = bound.metric.removeprefix(names.RATIO_PREFIX)
        of_peer = [o for o in outcomes if o.impl == peer and o.direction == bound.direction]
        if any(o.status == "skipped" for o in of_peer):
            continue
        own = [o for o in outcomes if not o.peer and o.direction == bound.direction]
        if own and all(o.status == "skipped" for o in own):
            continue
        valued = [i for i in at if judged[i].value is not None]
        if not valued:
            given = "" if not at else f" ({judged[at[0]].reason})"
            reason = f"expected {bound}, there is no value{given}"
            failed = row(case, judged[at[0]].impl if at else "", bound.direction, bound.metric, "fail", reason=reason)
            judged = [r for i, r in enumerate(judged) if i not in at[:1]] + [failed]
            continue
        sign = 1.0 if judged[valued[0]].better == "higher" else -1.0
        best = max(valued, key=lambda i: sign * (judged[i].value or 0.0))
        if not bound.met(judged[best].value):
            reason = f"expected {bound}, is {judged[best].value:.4g}"
            judged[best] = judged[best].model_copy(update={"status": "fail", "reason": reason})
    return judged
