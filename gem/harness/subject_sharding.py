"""One model trained by several ranks, as a measured subject: what each rank works, sends and holds, beside one process.

Real processes over gloo, on the CPU. Where they share fewer cores than they are, wall clock times would tell how the
cores are shared, and no more; so what is measured is work: CPU time, useful FLOPs, bytes. ``work_ratio`` is the Scaling
Ratio in CPU time: of what the rank that needs most spends on a step, the part that one process alone would spend on
that rank's share. Collectives, FSDP's bookkeeping and smaller matrices eat it. It does not know waiting, nor a network:
it is no speed-up and no forecast of one.
"""

import math
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence

from gem.harness.measured import Metric, Report
from gem.harness.names import SENT_PREFIX
from gem.harness.sharding_params import ShardingParams
from gem.harness.sharding_rank import Alone, Found, RankOfPlan, together
from gem.harness.sharding_ranks import Ranks
from gem.sharding.mesh import Cluster


class Sharding:
    """Ranks on the CPU, whatever the run's device."""

    def measure(self, params: ShardingParams, device: str, report: Report) -> list[Metric]:
        """Losses of five steps against one process's (max_error), then work, traffic and memory of the ranks."""
        folder = tempfile.mkdtemp(prefix="gem-samples-")
        report(0, 2)
        with Ranks(1, Alone, params, folder) as one:
            alone: Found = one.call("run")[0]
        report(1, 2)
        with Ranks(params.ranks, RankOfPlan, params, folder, gpus=params.plan()["gpus"]) as ranks:
            found: list[Found] = ranks.call("run")
        report(2, 2)
        return [*_agreement(alone, found), *_work(params, alone, found), *_traffic(params, found), *_memory(found)]


def _agreement(alone: Found, found: Sequence[Found]) -> list[Metric]:
    worst, where = 0.0, ""
    for rank, one in enumerate(found):
        for what, mine, wanted in (("loss", one.losses, alone.losses), ("norm", one.norms, alone.norms)):
            for step, (a, b) in enumerate(zip(mine, wanted, strict=True)):
                gap = abs(a - b) / max(abs(b), 1e-300)
                told = f"{what} of step {step + 1} on rank {rank}: {a:.12g} against {b:.12g}"
                if not math.isfinite(gap):  # the largest of all, which no comparison with it says
                    return [Metric("max_error", gap, note=told)]
                if gap > worst:
                    worst, where = gap, told
    return [Metric("max_error", worst, note=where)]


def _work(params: ShardingParams, alone: Found, found: Sequence[Found]) -> list[Metric]:
    cpu = [statistics.median(one.cpu_s) for one in found]
    heaviest = max(range(len(cpu)), key=lambda rank: cpu[rank])
    share = statistics.median(alone.cpu_s) / (1 if params.scaling == "weak" else params.ranks)
    flops = together(found, "flops")
    mean = sum(flops) / len(flops)
    collectives = statistics.mean(together(found, "collectives_s"))
    wall = statistics.mean(together(found, "wall_s"))
    of = "a rank's batch" if params.scaling == "weak" else f"the batch, shared by {params.ranks}"
    return [
        Metric("ranks", params.ranks),
        Metric(
            "work_ratio", share / cpu[heaviest],
            note=f"work_ratio: one process {1e3 * share:.1f} ms for {of}; of CPU time, so no speed-up",
        ),
        Metric(
            "cpu_ms", 1e3 * cpu[heaviest], tuple(1e3 * s for s in found[heaviest].cpu_s),
            note=f"cpu_ms: mean of ranks {1e3 * statistics.mean(cpu):.1f}",
        ),
        Metric("flops_per_rank", mean),
        Metric("max_over_mean", max(flops) / mean),
        Metric(
            "collectives_ms", 1e3 * collectives,
            note=f"collectives_ms: of {1e3 * wall:.0f} ms on the wall, most of it waiting for ranks without a core"
            if params.ranks > 1 else "",
        ),
    ]  # fmt: skip


def _traffic(params: ShardingParams, found: Sequence[Found]) -> list[Metric]:
    """Of the first step. Each rank's counts must be the formula's and the senders' own, purpose by purpose."""
    plan = params.plan()
    cluster = Cluster(plan["zones"], params.ranks // plan["zones"] // plan["gpus"], plan["gpus"])
    worst, where = 0, ""
    by_kind: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0] * len(found))
    for rank, one in enumerate(found):
        counted: dict[str, int] = defaultdict(int)
        for kind, count in one.sent.items():
            counted[kind.what] += count
            by_kind[kind.what, cluster.tier_of(kind.ranks)][rank] += count
        for what in {*counted, *one.formula, *one.traffic}:
            told = [counted.get(what, 0), one.formula.get(what, 0), one.traffic.get(what, 0)]
            if (gap := max(told) - min(told)) > worst:
                worst = gap
                where = f"{what} on rank {rank}: counted {told[0]}, formula {told[1]}, senders {told[2]}"
    totals = [sum(counts[rank] for counts in by_kind.values()) for rank in range(len(found))]
    metrics = [
        Metric("bytes_sent", max(totals)),
        Metric("bytes_unexplained", worst, note=where),
    ]
    for (what, tier), counts in sorted(by_kind.items()):
        if max(counts):
            metrics.append(Metric(f"{SENT_PREFIX}{what.replace(chr(39), '').replace(' ', '_')}.{tier}", max(counts)))
    return metrics


def _memory(found: Sequence[Found]) -> list[Metric]:
    tables = [one.tables + one.sums for one in found]
    v1 = max(together(found, "tables_v1"))
    return [
        Metric("memory_tables", max(tables)),
        Metric("tables_over_v1", max(tables) / v1),
        Metric("memory_dense", max(together(found, "dense"))),
        Metric("memory_optimizer", max(together(found, "moments"))),
    ]
