"""Faults put into copies of the Gluon kernels, each of which an emulated run must show in some order.

What no order can show is not among them: a turn that is not waited for, or programs dealt otherwise, cost time alone;
barriers between the warps of one partition (gl.thread_barrier), which runs as one here.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

Change = Callable[[list[str]], list[str]]


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def drop(text: str) -> Change:
    """Lines that begin so do nothing."""
    return lambda lines: [_indent(x) + "pass" if x.lstrip().startswith(text) else x for x in lines]


def put(old: str, new: str) -> Change:
    return lambda lines: [x.replace(old, new) for x in lines]


def drop_below(above: str, text: str) -> Change:
    """Lines that begin so below one in which ``above`` stands."""
    return lambda lines: [
        _indent(x) + "pass" if x.lstrip().startswith(text) and above in y else x
        for y, x in zip(["", *lines], lines, strict=False)
    ]


def swap(first: str, second: str) -> Change:
    """Two lines that begin so, one below the other."""

    def change(lines: list[str]) -> list[str]:
        lines = list(lines)
        for i in range(len(lines) - 1):
            if lines[i].lstrip().startswith(first) and lines[i + 1].lstrip().startswith(second):
                lines[i], lines[i + 1] = lines[i + 1], lines[i]
        return lines

    return change


def before(text: str, new: str) -> Change:
    """A line more above those that begin so."""
    return lambda lines: [y for x in lines for y in ([_indent(x) + new] if x.lstrip().startswith(text) else []) + [x]]


def after(text: str, new: str) -> Change:
    return lambda lines: [y for x in lines for y in [x] + ([_indent(x) + new] if x.lstrip().startswith(text) else [])]


@dataclass(frozen=True)
class Fault:
    """``case``: of the test's, which runs it. ``changes``: of the text of kernels/hopper/``module``.py."""

    case: str
    module: str
    changes: tuple[Change, ...]


def fault(case: str, module: str, *changes: Change) -> Fault:
    return Fault(case, module, changes)


def with_changes(module: ModuleType, changes: tuple[Change, ...], folder: Path) -> ModuleType:
    """A copy of the module with changes, each of which must find its place."""
    lines = Path(str(module.__file__)).read_text().splitlines()
    for number, change in enumerate(changes):
        changed = change(lines)
        assert changed != lines, f"{module.__name__} has no place for change {number}"
        lines = changed
    path = folder / f"{module.__name__.split('.')[-1]}_with_fault.py"
    path.write_text("\n".join(lines))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


_ACC = "acc = warpgroup_mma_wait(0, deps=[acc_f])"
_GIVE = "mbarrier.arrive(empty.index(stage), count=1)"
_SCORES = "s = warpgroup_mma_wait(0, deps=[s_f])"
_Q_GIVE = "mbarrier.arrive(q_empty.index(slot), count=1)"
_Q_LOAD = "q = q_s.index(slot).reshape([M, D]).load(Q_L)"
_FULL = "mbarrier.wait(full.index(stage), (it // STAGES) & 1"
_EMPTY = "mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)"

FORWARD = {
    "first queries not waited for": fault("long", "gdpa_long", drop("mbarrier.wait(q_full.index(W * SLOTS), 0)")),
    "queries not waited for": fault("long", "gdpa_long", drop("mbarrier.wait(q_full.index(slot)")),
    "first keys not waited for": fault("lanes", "gdpa_long", drop("mbarrier.wait(full.index(lane * STAGES), 0)")),
    "keys and values not waited for": fault("long", "gdpa_long", drop(_FULL)),
    "wrong phase of keys and values": fault("long", "gdpa_long", put(_FULL, _FULL + " ^ 1")),
    "stage given back before its product": fault("long, no turns", "gdpa_long", swap(_ACC, _GIVE)),
    "stage given back before a job's first product": fault(
        "long", "gdpa_long", drop(_SCORES), after(_GIVE, _SCORES)
    ),
    "scores used too early": fault("long", "gdpa_long", put("wait(1, deps=[s_f])", "wait(2, deps=[s_f])")),
    "output used too early": fault("long", "gdpa_long", put("wait(1, deps=[acc_f])", "wait(2, deps=[acc_f])")),
    "queries given back before their last scores": fault(
        "long", "gdpa_long", drop("mbarrier.arrive(q_empty.index(W * SLOTS + t % SLOTS)"),
        before("acc = gl.zeros", "mbarrier.arrive(q_empty.index(W * SLOTS + t % SLOTS), count=1)"),
    ),
    "registers given back before their product": fault(
        "long, registers", "gdpa_long", drop(_Q_GIVE), after(_Q_LOAD, _Q_GIVE)
    ),
    "stage filled while it is read": fault("long, no turns", "gdpa_long", drop(_EMPTY)),
    "queries filled while they are read": fault("long", "gdpa_long", drop("mbarrier.wait(q_empty.index(slot)")),
    "wrong phase of an empty stage": fault("long", "gdpa_long", put(_EMPTY, _EMPTY.replace(" ^ 1", ""))),
    "too few bytes expected": fault("long", "gdpa_long", put("2 * k_desc.block_type", "1 * k_desc.block_type")),
    "too many bytes expected": fault("long", "gdpa_long", put("2 * k_desc.block_type", "3 * k_desc.block_type")),
    "one consumer's word is enough": fault("long, three", "gdpa_long", put("count=CONSUMERS // LANES", "count=1")),
    "barriers not fenced": fault("long", "gdpa_long", drop("fence_async_shared()")),
    "turn not handed on": fault("long", "gdpa_long", put("    if TURNS == 1:", "    if False:")),
    "stores not waited for at the end": fault("long", "gdpa_long", drop("tma.store_wait(0)")),
    "values of the wrong tile": fault("long", "gdpa_long", put("END, v_end, v_x, v_column", "END, v_end, x, v_column")),
    "output overwritten on its way": fault("long", "parts", drop("tma.store_wait(0)")),
    "output not fenced": fault("short", "parts", drop("fence_async_shared()")),
    "output a row too late": fault("long", "parts", put("END - last + at, column]", "END - last + at + 1, column]")),
    "queries given back unused": fault("short, few stages", "gdpa_short", drop(_Q_GIVE), after(_Q_LOAD, _Q_GIVE)),
    "first queries given back unused": fault(
        "short, few stages", "gdpa_short", drop("mbarrier.arrive(q_empty.index(W * SLOTS)"),
        before("mbarrier.wait(full.index(0), 0)", "mbarrier.arrive(q_empty.index(W * SLOTS), count=1)"),
    ),
    "kept keys given back": fault("short, few stages", "gdpa_short", put("pred=leaving", "pred=True")),
    "more keys kept than fit": fault(
        "short, few stages", "gdpa_short", put("n <= STAGES", "n <= STAGES + 1"), put("n > STAGES", "n > STAGES + 1")
    ),
    "values given back before their product": fault(
        "short, values first", "gdpa_short",
        swap("acc = warpgroup_mma_wait(1, deps=[acc_f])", "mbarrier.arrive(empty.index(before)"),
    ),
    "the wrong stage given back": fault(
        "short, three", "gdpa_short", put("empty.index(before), count=1, pred", "empty.index(0), count=1, pred")
    ),
    "keys of the next block not waited for": fault(
        "short, few stages", "gdpa_short", drop("mbarrier.wait(full.index(stage), (base // STAGES) & 1)")
    ),
    "next job not waited for": fault("short", "gdpa_short", drop("mbarrier.wait(full.index(base % STAGES)")),
    "next keys not waited for where jobs are dealt": fault(
        "short, dealt", "gdpa_short", drop("mbarrier.wait(full.index(stage), (base // STAGES) & 1)")
    ),
    "every second job claimed": fault("long", "claims", put("gl.atomic_add(claimed, 1", "gl.atomic_add(claimed, 2")),
    "blocks counted for another consumer": fault(
        "short, three", "gdpa_short", put("before_2 += blocks_of(2,", "before_2 += blocks_of(1,")
    ),
    "stage asked for before its product": fault("plain", "gdpa_plain", swap(_ACC, "ahead = _load")),
    "plain queries not waited for": fault("plain, two stages", "gdpa_plain", drop("mbarrier.wait(q_full.index(slot)")),
}  # fmt: skip

_DS = "ds_s.index(slot * 2 + W).store(d_scores)"
_FENCE = "fence_async_shared()"
_LEFT = "mbarrier.arrive(empty.index(it % STAGES), count=1)"
_OUT = "tma.store_wait(0)"

BACKWARD = {
    "queries not waited for": fault("long", "backward_long", drop("mbarrier.wait(full.index(stage), (it")),
    "next queries not waited for": fault("long", "backward_long", drop("mbarrier.wait(full.index(stage), ((it + 1)")),
    "keys not waited for": fault("long", "backward_long", drop("mbarrier.wait(kv_full")),
    "stage given back early": fault(
        "long", "backward_long", swap("dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])", _LEFT)
    ),
    "last stage given back early": fault(
        "long, two places", "backward_long", swap("dv, dk = warpgroup_mma_wait(2, deps=[dv_f, dk_f])", _LEFT)
    ),
    "ds not fenced": fault("long", "backward_long", drop_below(_DS, _FENCE)),
    "shares not fenced": fault("long", "backward_long", drop_below("in_order(dq)", _FENCE)),
    "ds overwritten": fault("long", "backward_long", drop("mbarrier.wait(sum_full.index(slot * 2 + 1 - W)")),
    "ds not waited for": fault("long", "backward_long", drop("mbarrier.wait(ds_full.index(slot)")),
    "share overwritten": fault("long", "backward_long", drop("mbarrier.wait(sum_empty.index(slot)")),
    "share used early": fault("long", "backward_long", put("wait(2, deps=[dq_f])", "wait(3, deps=[dq_f])")),
    "keys overwritten": fault("long", "backward_long", drop("mbarrier.wait(sum_full.index((it - 1) % 2")),
    "stores not waited for": fault("long", "backward_long", drop(_OUT)),
    "keys given back on their way out": fault(
        "long", "backward_long", swap(_OUT, "mbarrier.arrive(kv_empty.index(kv)")
    ),
    "keys filled while they are read": fault("long", "backward_long", drop("mbarrier.wait(kv_empty")),
    "job not waited for": fault("long", "backward_long", drop("mbarrier.wait(job_full")),
    "job overwritten": fault("long", "jobs", drop("mbarrier.wait(job_empty")),
    "half a share not waited for": fault(
        "long", "sums", drop("mbarrier.wait(sum_full.index(S * 2 + 1), phase)")
    ),
    "share given back on its way out": fault("long", "sums", swap(_OUT, "mbarrier.arrive(sum_empty.index(S)")),
    "added before its turn": fault("long", "sums", put("while seen < before:", "while False:")),
    "turns skipped": fault("long", "sums", put("raise_flag(flag, before + 1)", "raise_flag(flag, before + 2)")),
    "turn not handed on": fault("long", "sums", drop("raise_flag(flag, before + 1)")),
    "the first adds to nothing": fault("long", "sums", put("if before > 0:", "if before >= 0:")),
    "turn handed on before the addition": fault("long", "sums", put("cp.async.bulk.wait_group 0;", "")),
    "two samples' sums in one place": fault("long", "sums", put("+ 2 * sample", "+ sample")),
    "keys that no query sees are read": fault("long", "backward_long", put("gl.where(q_len > 0, k_x, END)", "k_x")),
    "short: tile not waited for": fault("short", "backward_short", drop("mbarrier.wait(full.index(at)")),
    "short: tile given back early": fault(
        "short", "backward_short", swap("dv, dk = warpgroup_mma_wait(0, deps=[dv_f, dk_f])", "give_back(empty, it")
    ),
    "short: tile filled while it is read": fault("short", "passes", drop("mbarrier.wait(empty.index(at)")),
    "short: keys not waited for": fault("short", "backward_short", drop("mbarrier.wait(k_full")),
    "short: values not waited for": fault("short", "backward_short", drop("mbarrier.wait(v_full")),
    "short: keys filled while they are read": fault("short", "backward_short", drop("mbarrier.wait(k_empty")),
    "short: values filled while they are read": fault("short", "backward_short", drop("mbarrier.wait(v_empty")),
    "short: values given back early": fault("short", "backward_short", put("if i + 1 == n:", "if i + 2 == n:")),
    "short: keys given back early": fault(
        "short", "backward_short", swap("dq = warpgroup_mma_wait(0, deps=[dq_f])", "mbarrier.arrive(k_empty")
    ),
    "short: ds not waited for": fault("short", "backward_short", drop("mbarrier.wait(ds_full.index(it % DS)")),
    "short: ds overwritten": fault(
        "short", "backward_short", drop_below("product of three tiles before has ended", "_wait_ds"),
    ),
    "short: too few places for ds": fault(
        "short", "backward_short", put("constexpr(3)  # buffers", "constexpr(2)  # buffers")
    ),
    "short: ds not fenced": fault("short", "backward_short", drop_below("store(ds16)", _FENCE)),
    "short: stores not waited for": fault("short", "backward_short", drop(_OUT)),
    "short: job not waited for": fault("short", "backward_short", drop("mbarrier.wait(job_full")),
    "short: job overwritten": fault("short", "backward_short", drop("mbarrier.wait(job_empty")),
    "short: job given back early": fault(
        "short", "backward_short", drop("mbarrier.arrive(job_empty"),
        before("mbarrier.wait(v_full.index(W)", "mbarrier.arrive(job_empty.index(t % 2), count=1)"),
    ),
    "short: scores used early": fault("short", "backward_short", put("wait(1, deps=[s_f", "wait(2, deps=[s_f")),
    "short: dq used early": fault(
        "short", "backward_short", put("wait(1, deps=[dq_f", "wait(2, deps=[dq_f")
    ),
    "short: passes forget": fault("short", "backward_short", put("PLACE) > 1:", "PLACE) > 3:")),
    "short: passes walk one way": fault("short", "backward_short", put("step = 64 - 128 * back", "step = 64")),
    "keep: queries not waited for": fault("keep", "backward_keep", drop("mbarrier.wait(full.index(at), ((2 * it) //")),
    "keep: d_out not waited for": fault(
        "keep", "backward_keep", drop("mbarrier.wait(full.index(at), ((2 * it + 1) //")
    ),
    "keep: keys not waited for": fault("keep", "backward_keep", drop("mbarrier.wait(k_full")),
    "keep: values not waited for": fault("keep", "backward_keep", drop("mbarrier.wait(v_full")),
    "keep: keys filled while they are read": fault("keep", "backward_keep", drop("mbarrier.wait(empty, (t & 1)")),
    "keep: dq used early": fault("keep", "backward_keep", put("wait(2, deps=[dq_f", "wait(3, deps=[dq_f")),
    "keep: scores used early": fault(
        "keep", "backward_keep", put("s = warpgroup_mma_wait(1, deps", "s = warpgroup_mma_wait(2, deps")
    ),
    "keep: ds told of too early": fault(
        "keep", "backward_keep", drop("mbarrier.arrive(ds_full.index(it % 2), count=1)"),
        before("dv_f = warpgroup_mma(p, d_out, dv_0", "mbarrier.arrive(ds_full.index(it % 2), count=1)"),
    ),
    "keep: ds not waited for": fault("keep", "backward_keep", drop("mbarrier.wait(ds_full.index(it % 2)")),
    "keep: ds not fenced": fault("keep", "backward_keep", drop_below("store(ds16)", _FENCE)),
    "keep: tile given back early": fault(
        "keep", "backward_keep", drop("give_back(empty, it"), before("if both:", "give_back(empty, it, BUFFERS)")
    ),
    "keep: keys given back early": fault(
        "keep", "backward_keep", swap("dq = warpgroup_mma_wait(0, deps=[dq_f])", "mbarrier.arrive(k_empty")
    ),
    "keep: values given back on their way out": fault(
        "keep", "backward_keep", drop("mbarrier.arrive(v_empty"),
        before("k_end = field", "mbarrier.arrive(v_empty, count=1)"),
    ),
    "keep: stores not waited for": fault("keep", "backward_keep", drop(_OUT)),
    "keep: job overwritten": fault("keep, a tile each", "backward_keep", drop("mbarrier.wait(job_empty")),
    "keep: job not waited for": fault("keep", "backward_keep", drop("mbarrier.wait(job_full")),
    "keep: one block less expected": fault("keep", "backward_keep", put("count * desc.block", "1 * desc.block")),
    "keep: a block of dq left out": fault("keep", "backward_keep", put("range(1, blocks)", "range(2, blocks)")),
    "keep: an idle consumer says nothing": fault(
        "keep", "backward_keep", drop_below("else:", "mbarrier.arrive(ds_full.index(it % 2), count=1)")
    ),
}  # fmt: skip
