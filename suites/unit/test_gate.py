"""The gate on documents: each way in which a change can be worse fails it, and nothing else does."""

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gate_documents import SUITE, cases, edited, patch_file, timed, write_rounds
from result_rows import row

from gem.harness.gate import Gate, compare
from gem.harness.gate_pairs import read_pairs
from gem.harness.gate_stats import ALPHA, LOOKS, SHARES, p_worse
from gem.harness.measured_params import BbsParams
from gem.harness.results import Row
from gem.harness.subject_bbs import Bbs

Rows = Callable[[int], list[Row]]


def same(number: int) -> list[Row]:
    return cases(number, side=1)


def judged(folder: Path, base: Rows, new: Rows, rounds: int = 6, **how: Any) -> Gate:
    pairs, _ = read_pairs(*write_rounds(folder, {"base": base, "new": new}, rounds))
    return compare(pairs, **how)


def verdicts(gate: Gate) -> dict[str, str]:
    return {line.case: line.verdict for line in gate.lines}


def test_the_same_code_passes_whatever_the_machine_does(tmp_path: Path) -> None:
    """Rounds differ by 30 % from each other; the sides of a round do not."""
    gate = judged(tmp_path, cases, same)
    assert verdicts(gate) == {"one": "same", "two": "same", "three": "same"}
    assert gate.passed(strict=True)


def test_one_slow_case_is_found_among_three(tmp_path: Path) -> None:
    gate = judged(tmp_path, cases, lambda n: cases(n, {"two": 1.05}, side=1), rounds=12)
    assert verdicts(gate) == {"one": "same", "two": "worse", "three": "same"}
    assert not gate.passed()
    line = next(line for line in gate.lines if line.case == "two")
    assert line.finding is not None
    assert line.finding.change == pytest.approx(0.05, abs=0.01)
    assert line.finding.low < 0.05 < line.finding.high


def test_faster_is_better_and_more_of_a_rate_too(tmp_path: Path) -> None:
    assert verdicts(judged(tmp_path / "a", cases, lambda n: cases(n, {"two": 0.9}, side=1), 12))["two"] == "better"

    def rate(number: int, factor: float) -> list[Row]:
        return [timed("race", 100.0 * factor, seed=number).model_copy(update={"metric": "qps", "better": "higher"})]

    for name, factor, verdict in (("b", 1.1, "better"), ("c", 0.9, "worse"), ("d", 1.0, "same")):
        gate = judged(tmp_path / name, lambda n: rate(n, 1.0), lambda n, f=factor: rate(n, f), 12)
        assert verdicts(gate) == {"race": verdict}


def test_a_threshold_of_its_own(tmp_path: Path) -> None:
    slow: Rows = lambda n: cases(n, {"two": 1.08}, side=1)  # noqa: E731
    gate = judged(tmp_path, cases, slow, 12, thresholds={f"{SUITE}::two": 0.2})
    assert verdicts(gate)["two"] == "same"
    assert verdicts(compare(read_pairs(tmp_path / "base", tmp_path / "new")[0]))["two"] == "worse"


# How the case "two" of the change may be broken -> what its line says.
BROKEN: dict[str, tuple[Callable[[list[Row]], list[Row]], str]] = {
    "missing": (lambda rows: [r for r in rows if r.case != "two"], "missing: the case is not there"),
    "renamed": (lambda rows: edited(rows, "two", case="twoo"), "missing: the case is not there; renamed to 'twoo'"),
    "contestant gone": (lambda rows: edited(rows, "two", impl="triton"), "missing: the case has no such row"),
    "wrong": (
        lambda rows: edited(rows, "two", status="fail", reason="error 3", value=None, samples=[]),
        "failing: fail: error 3",
    ),
    "crash": (lambda rows: edited(rows, "two", status="error", reason="died", value=None), "failing: error: died"),
    "out of memory": (lambda rows: edited(rows, "two", status="oom", value=None), "failing: oom: no reason given"),
    "no value": (lambda rows: edited(rows, "two", value=None), "failing: no value"),
    "no samples": (lambda rows: edited(rows, "two", samples=[]), "failing: no samples"),
    "no time at all": (lambda rows: edited(rows, "two", value=0.0, samples=[0.0]), "failing: a time or rate of 0.0"),
    "skipped": (
        lambda rows: edited(rows, "two", status="skipped", reason="needs cuda", value=None, samples=[]),
        "failing: skipped: needs cuda",
    ),
    "whole case skipped": (
        lambda rows: [
            *(r for r in rows if r.case != "two"),
            row("two", suite=SUITE, impl="", direction="", metric="", value=None, status="skipped", reason="needs x"),
        ],
        "missing: skipped: needs x",
    ),
    "whole case fails": (
        lambda rows: [
            *(r for r in rows if r.case != "two"),
            row("two", suite=SUITE, impl="", direction="", metric="", value=None, status="error", reason="boom"),
        ],
        "missing: error: boom",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
def test_what_was_good_and_is_broken_fails(how: str, tmp_path: Path) -> None:
    change, said = BROKEN[how]
    gate = judged(tmp_path, cases, lambda n: change(same(n)))
    (line,) = [line for line in gate.lines if line.fails]
    assert f"{line.verdict}: {line.reason}" == said
    assert not gate.passed()
    assert gate.compared == 2


def test_one_broken_round_is_enough_and_is_counted(tmp_path: Path) -> None:
    def new(number: int) -> list[Row]:
        broken = {"status": "error", "reason": "died", "value": None, "samples": []}
        return edited(same(number), "two", **broken) if number == 4 else same(number)

    (line,) = [line for line in judged(tmp_path, cases, new).lines if line.fails]
    assert (line.verdict, line.reason) == ("failing", "error: died (in 1 of 6 rounds)")


def test_nan_in_a_document_fails(tmp_path: Path) -> None:
    base, new = write_rounds(tmp_path, {"base": cases, "new": same})

    def spoil(data: dict[str, Any]) -> None:
        data["rows"][1]["value"] = float("nan")

    patch_file(new / "002.json", spoil)
    text = (new / "002.json").read_text()
    assert "NaN" in text
    gate = compare(read_pairs(base, new)[0])
    assert verdicts(gate)["two"] == "failing"


def test_a_failing_check_of_what_is_not_judged_fails_too(tmp_path: Path) -> None:
    """A broken expectation stands in a row of its own, beside a time that is the same."""
    ratio = row("two", suite=SUITE, metric="ratio_to.flex", value=3.0, better="higher")
    fails = ratio.model_copy(update={"status": "fail", "reason": "expected >= 2, is 1", "value": 1.0})
    gate = judged(tmp_path / "a", lambda n: [*cases(n), ratio], lambda n: [*same(n), fails])
    assert [line.reason for line in gate.lines if line.fails] == ["fail: expected >= 2, is 1"]
    # A peer that is gone, or its trouble, is no fault of the change.
    peer = timed("two", impl="flex")
    lost = peer.model_copy(update={"status": "error", "value": None, "samples": []})
    skipped = ratio.model_copy(update={"status": "skipped", "value": None})
    assert judged(tmp_path / "b", lambda n: [*cases(n), peer, ratio], lambda n: [*same(n), lost, skipped]).passed()
    assert judged(tmp_path / "c", lambda n: [*cases(n), peer, ratio], same).passed()


def test_failing_in_both_is_said_and_is_no_regression(tmp_path: Path) -> None:
    broken = {"status": "fail", "reason": "wrong", "value": None, "samples": []}
    gate = judged(tmp_path, lambda n: edited(cases(n), "two", **broken), lambda n: edited(same(n), "two", **broken))
    assert verdicts(gate)["two"] == "failing in both"
    assert gate.passed()
    everything = {"status": "fail", "value": None, "samples": []}
    bad: Rows = lambda n: [one.model_copy(update=everything) for one in cases(n)]  # noqa: E731
    nothing = judged(tmp_path / "all", bad, bad)
    assert not nothing.passed()
    assert "nothing to compare" in str(nothing)


def test_skipped_in_both_is_counted_and_no_line(tmp_path: Path) -> None:
    skip = row("gpu", suite=SUITE, impl="", direction="", metric="", value=None, status="skipped", reason="needs cuda")
    gate = judged(tmp_path, lambda n: [*cases(n), skip], lambda n: [*same(n), skip])
    assert gate.skipped == 1
    assert "gpu" not in verdicts(gate)
    assert gate.passed()


def test_no_overlap_is_no_pass(tmp_path: Path) -> None:
    gate = judged(tmp_path, cases, lambda n: [timed("elsewhere", seed=n)])
    assert not gate.passed()
    assert gate.count("missing") == 3
    assert gate.added == [f"{SUITE}::elsewhere torch forward ms"]
    assert not judged(tmp_path / "empty", lambda n: [], same).passed()


def test_new_rows_are_told_and_mended_ones_too(tmp_path: Path) -> None:
    broken = {"status": "error", "reason": "died", "value": None, "samples": []}
    gate = judged(tmp_path, lambda n: edited(cases(n), "two", **broken), lambda n: [*same(n), timed("four", seed=n)])
    assert gate.passed()
    assert f"{SUITE}::four torch forward ms" in gate.added
    assert f"{SUITE}::two torch forward ms: good, was error: died" in gate.added
    failing_new = [row("five", suite=SUITE, value=None, status="error", reason="died")]
    assert not judged(tmp_path / "b", cases, lambda n: [*same(n), *failing_new]).passed()


def test_a_case_that_the_base_declares_must_be_there(tmp_path: Path) -> None:
    names = [f"{SUITE}::{name}" for name in ("one", "two", "three", "three_d64")]
    gate = judged(tmp_path, cases, same, declared=names)
    assert [(line.case, line.reason) for line in gate.lines if line.fails] == [("three_d64", "the case is not there")]


def test_figures_that_repeat_have_tolerances(tmp_path: Path) -> None:
    def quality(value: float, metric: str = "ne", better: str = "lower") -> Rows:
        return lambda n: [row("quality", suite=SUITE, metric=metric, value=value, better=better)]

    assert verdicts(judged(tmp_path / "a", quality(0.8), quality(0.8005))) == {"quality": "same"}
    assert verdicts(judged(tmp_path / "b", quality(0.8), quality(0.81))) == {"quality": "worse"}
    assert verdicts(judged(tmp_path / "c", quality(0.8), quality(0.79))) == {"quality": "better"}
    auc = quality(0.7, "auc", "higher"), quality(0.69, "auc", "higher")
    assert verdicts(judged(tmp_path / "d", *auc)) == {"quality": "worse"}
    # What a plan costs is the same each time it is counted.
    for name in ("bytes_sent", "memory_tables", "memory_dense", "memory_optimizer", "tables_over_v1", "flops_per_rank"):
        for now, verdict in ((1e6, "same"), (1.005e6, "same"), (1.02e6, "worse"), (0.98e6, "better")):
            found = judged(tmp_path / f"{name} {now}", quality(1e6, name), quality(now, name), rounds=1)
            assert verdicts(found) == {"quality": verdict}
    # From nothing to something there is no share.
    moved = quality(0.0, "bytes_moved"), quality(8.0, "bytes_moved")
    assert verdicts(judged(tmp_path / "e", *moved)) == {"quality": "worse"}


def test_what_is_derived_is_not_judged_twice(tmp_path: Path) -> None:
    def with_flops(rows: list[Row], value: float) -> list[Row]:
        return [*rows, *(row(r.case, suite=SUITE, metric="tflops", value=value, better="higher") for r in rows)]

    gate = judged(tmp_path, lambda n: with_flops(cases(n), 2.0), lambda n: with_flops(same(n), 1.0))
    assert {line.metric for line in gate.lines} == {"ms"}
    assert gate.passed()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"unit": "s"}, "changed its unit: 'ms' in the base, 's' in the change"),
        ({"better": "higher"}, "changed its direction: 'lower' in the base, 'higher' in the change"),
    ],
)
def test_another_unit_or_direction_turns_no_slowdown_into_a_gain(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    def new(number: int) -> list[Row]:
        rows = cases(number, {"two": 2e-3 if "unit" in fields else 2.0}, side=1)
        return edited(rows, "two", **{"unit": "ms", **fields})

    gate = judged(tmp_path, lambda n: edited(cases(n), "two", unit="ms"), new)
    (line,) = [line for line in gate.lines if line.fails]
    assert (line.case, line.verdict, line.reason) == ("two", "failing", said)
    assert not gate.passed()


def test_which_way_is_better_is_no_documents_to_say(tmp_path: Path) -> None:
    """Both sides claim that more milliseconds are better."""
    turned: dict[str, Rows] = {
        "base": lambda n: edited(cases(n), "two", better="higher"),
        "new": lambda n: edited(cases(n, {"two": 2.0}, side=1), "two", better="higher"),
    }
    assert verdicts(judged(tmp_path, turned["base"], turned["new"]))["two"] == "worse"


# ---- suspects and fresh rounds


def test_fresh_rounds_alone_judge_a_suspect(tmp_path: Path) -> None:
    """Six rounds of bad luck make a suspect; sixteen fresh ones clear it, or confirm it."""
    unlucky: Rows = lambda n: cases(n, {"two": 1.06}, side=1)  # noqa: E731
    pairs, _ = read_pairs(*write_rounds(tmp_path / "screen", {"base": cases, "new": unlucky}))
    first = compare(pairs)
    assert first.open_cases() == [f"{SUITE}::two"]
    only: dict[str, Rows] = {"base": lambda n: [r for r in cases(n + 50) if r.case == "two"]}
    for name, factor, verdict in (("clear", 1.0, "same"), ("slow", 1.05, "worse")):
        again = {"new": lambda n, f=factor: [r for r in cases(n + 50, {"two": f}, side=2) if r.case == "two"]}
        fresh, _ = read_pairs(*write_rounds(tmp_path / name, only | again, LOOKS[0]))
        gate = compare(pairs, fresh)
        assert verdicts(gate) == {"one": "same", "two": verdict, "three": "same"}
        assert gate.passed() == (verdict == "same")
        assert gate.open_cases() == []
    few, _ = read_pairs(*write_rounds(tmp_path / "few", only | {"new": only["base"]}, 5))
    assert compare(pairs, few).open_cases() == [f"{SUITE}::two"]


def test_a_suspect_that_breaks_in_its_fresh_rounds_fails(tmp_path: Path) -> None:
    unlucky: Rows = lambda n: cases(n, {"two": 1.06}, side=1)  # noqa: E731
    pairs, _ = read_pairs(*write_rounds(tmp_path / "screen", {"base": cases, "new": unlucky}))
    broken: Rows = lambda n: edited(same(n), "two", status="error", reason="died", value=None)  # noqa: E731
    fresh, _ = read_pairs(*write_rounds(tmp_path / "fresh", {"base": cases, "new": broken}, LOOKS[0]))
    assert verdicts(compare(pairs, fresh))["two"] == "failing"


def test_alternating_turns_are_compared_turn_by_turn(tmp_path: Path) -> None:
    """Half the speed for eight turns of one side and seven of the other: the medians differ, neighbours do not."""

    def turns(factor: float, slow: int) -> Rows:
        samples = [10.0 * factor * (2.0 if turn < slow else 1.0) for turn in range(15)]
        return lambda n: [timed("one", samples=samples, value=sorted(samples)[7])]

    gate = judged(tmp_path, turns(1.0, 8), turns(1.01, 7))
    (line,) = gate.lines
    assert (line.base, line.new) == (20.0, 10.1)
    assert line.finding is not None
    assert line.finding.change == pytest.approx(0.01)
    assert line.verdict == "same"


def test_too_few_fresh_rounds_clear_nothing_that_the_screen_found_worse(tmp_path: Path) -> None:
    """Twice as slow in the screen; then good rounds, but fewer than are looked at."""
    slow: Rows = lambda n: cases(n, {"two": 2.0}, side=1)  # noqa: E731
    pairs, _ = read_pairs(*write_rounds(tmp_path / "screen", {"base": cases, "new": slow}))
    assert verdicts(compare(pairs))["two"] == "worse"
    for rounds, verdict in ((1, "worse"), (LOOKS[0] - 1, "worse"), (LOOKS[0], "same")):
        both: dict[str, Rows] = {"base": lambda n: cases(n + 50), "new": lambda n: cases(n + 50, side=2)}
        fresh, _ = read_pairs(*write_rounds(tmp_path / str(rounds), both, rounds))
        gate = compare(pairs, fresh)
        (line,) = [line for line in gate.lines if line.case == "two"]
        assert line.verdict == verdict
        assert gate.passed() == (verdict == "same")
        assert line.finding is not None
        if verdict == "worse":
            assert f"{rounds} of the {LOOKS[0]} fresh rounds that could clear it" in line.finding.why
            assert gate.open_cases() == [f"{SUITE}::two"]
    # None of the row at all, in rounds of another case.
    other: dict[str, Rows] = {name: lambda n: [timed("one", seed=n)] for name in ("base", "new")}
    fresh, _ = read_pairs(*write_rounds(tmp_path / "other", other, LOOKS[0]))
    assert verdicts(compare(pairs, fresh))["two"] == "worse"


def test_a_reader_s_rate_is_judged(tmp_path: Path) -> None:
    """The subject's own metrics have what the gate judges by: a rate of single measurements."""
    params = BbsParams(measure="merge_rate", median=700.0)
    (rate,) = Bbs().measure(params, "cpu", lambda done, total: None)
    assert len(rate.samples) >= 5
    assert rate.value == statistics.median(rate.samples)

    def read(factor: float) -> Rows:
        told = {"unit": rate.unit, "better": rate.better, "value": factor * rate.value}
        samples = [factor * one for one in rate.samples]
        return lambda n: [row("merge_rate", suite=SUITE, impl="gem", metric=rate.name, samples=samples, **told)]

    assert verdicts(judged(tmp_path / "a", read(1.0), read(1.0))) == {"merge_rate": "same"}
    assert verdicts(judged(tmp_path / "b", read(1.0), read(0.8), 12)) == {"merge_rate": "worse"}


# ---- levels: how many tests share the false alarms that are allowed


def by(changes: dict[str, list[float]]) -> dict[str, Rows]:
    """Both sides of rounds whose changes (logarithms) are exactly these: case -> one a round."""
    base: Rows = lambda n: [timed(name, samples=[10.0] * 3, value=10.0) for name in changes]  # noqa: E731

    def new(number: int) -> list[Row]:
        ms = {name: 10.0 * math.exp(of[number]) for name, of in changes.items()}
        return [timed(name, samples=[one] * 3, value=one) for name, one in ms.items()]

    return {"base": base, "new": new}


def test_the_screens_rows_share_the_level(tmp_path: Path) -> None:
    """Eight rounds of 5 to 6 % are proof (1 in 256) where two rows share 1 %, and are none where three do."""
    slow, quiet = [0.05 + 0.001 * n for n in range(8)], [0.0] * 8
    assert ALPHA / 3 < p_worse(slow) <= ALPHA / 2
    for rows, verdict in ((2, "worse"), (3, "ambiguous")):
        sides = by({"slow": slow} | {f"quiet{n}": quiet for n in range(rows - 1)})
        pairs, _ = read_pairs(*write_rounds(tmp_path / str(rows), sides, 8))
        assert verdicts(compare(pairs))["slow"] == verdict


def test_the_suspects_share_a_looks_level(tmp_path: Path) -> None:
    """What is proof against a single suspect is none against one of three."""
    changes = [0.04 + 0.001 * n for n in range(LOOKS[0])]
    changes[5], changes[7] = -changes[5], -changes[7]
    level = ALPHA * SHARES[0]
    assert level / 3 < p_worse(changes) <= level
    for suspects, verdict in ((1, "worse"), (3, "ambiguous")):
        names = [f"row{n}" for n in range(suspects)]
        screen, _ = read_pairs(*write_rounds(tmp_path / f"{suspects}", by({x: [0.06] * 6 for x in names})))
        fresh, _ = read_pairs(*write_rounds(tmp_path / f"{suspects}f", by(dict.fromkeys(names, changes)), LOOKS[0]))
        gate = compare(screen, fresh)
        assert sum(line.suspect for line in gate.lines) == suspects
        assert verdicts(gate) == dict.fromkeys(names, verdict)


def test_a_suspect_that_is_gone_in_a_fresh_round_fails(tmp_path: Path) -> None:
    unlucky: Rows = lambda n: cases(n, {"two": 1.06}, side=1)  # noqa: E731
    pairs, _ = read_pairs(*write_rounds(tmp_path / "screen", {"base": cases, "new": unlucky}))
    gone: Rows = lambda n: [one for one in same(n) if n != 3 or one.case != "two"]  # noqa: E731
    fresh, _ = read_pairs(*write_rounds(tmp_path / "fresh", {"base": cases, "new": gone}, LOOKS[0]))
    gate = compare(pairs, fresh)
    assert verdicts(gate)["two"] == "missing"
    assert not gate.passed()
