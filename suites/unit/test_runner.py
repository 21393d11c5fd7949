"""The runner: whatever a contestant does is a row, what is wrong gets no ratio, and a wrong request is one line.

Kinds: one out-of-memory shape ended a sweep or counted as a success; a numerically broken baseline kept its ratio;
failing cases were dropped; timed calls that were no-ops; a crash took every later case with it; a hung peer.
"""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stand_ins import make_peers

from gem.data.lengths import load_profile
from gem.data.logs import LogLengths
from gem.errors import RequestError
from gem.harness import peers as public_kernels
from gem.harness import runner, session
from gem.harness.case import Case
from gem.harness.contestant import Host
from gem.harness.params import SUBJECTS
from gem.harness.peer_padded import SdpaPadded
from gem.harness.results import Interrupted
from gem.harness.runner import RunOptions, open_session, run, run_case

SMALL: dict[str, Any] = {"heads": 2, "head_dim": 16}


def make_case(
    name="case",
    subject="jagged_attention",
    kind: Any = "correctness",
    fixture="empty_middle",
    params=None,
    peers=None,
    expect=None,
    **given,
):
    case = Case(
        suite=Path("suites/test.toml"), file=Path("suites/test.toml"), kind=kind, subject=subject, name=name,
        fixture=fixture, params=SUBJECTS[subject](**(SMALL | (params or {}))),
        **given,
    )  # fmt: skip
    # Past the validation: the stand-ins below are no declared peers.
    return case.model_copy(update={"peers": peers or [], "expect": expect or {}})


# ---- stand-ins for public kernels, each with one fault


class Wrong(SdpaPadded):
    """A hundredth off."""

    def forward(self):
        return super().forward() * 1.01


class WrongGradient(SdpaPadded):
    """Right forward; the gradient of q is too large."""

    def rows(self, name, tensor):
        return super().rows(name, tensor) * (1.01 if name == "q" else 1.0)


class NotANumber(SdpaPadded):
    """One value, in the longest sample."""

    def forward(self):
        out = super().forward()
        out[int(self.segments.q.argmax()), 0, 0, 0] = float("nan")
        return out


class Segfault(SdpaPadded):
    """An illegal access in its kernel."""

    def forward(self):
        import ctypes

        return ctypes.string_at(0)


class OutOfMemory(SdpaPadded):
    """While it builds its batch."""

    def __init__(self, inputs, name):
        torch.empty(1 << 50)


class Hang(SdpaPadded):
    """Waits for ever."""

    def forward(self):
        time.sleep(300)


class Leaves(SdpaPadded):
    """Ends the process as if all were well."""

    def forward(self):
        os._exit(0)


class Cached(SdpaPadded):
    """Computes once and then returns what it has: infinitely fast."""

    kept = None

    def forward(self):
        if torch.is_grad_enabled():
            return super().forward()
        if self.kept is None:
            self.kept = super().forward()
        return self.kept


class Unrepeatable(SdpaPadded):
    """Promises the same bits and gives others, all of them good."""

    repeatable = True
    calls = 0

    def forward(self):
        self.calls += 1
        return super().forward() * (1 + 2e-7 * self.calls)


class DiesWhileTimed(SdpaPadded):
    """Killed for memory after some calls."""

    calls = 0

    def forward(self):
        self.calls += 1
        if self.calls == 12:
            os.kill(os.getpid(), 9)
        return super().forward()


FAULTS = {c.__name__.lower(): c for c in SdpaPadded.__subclasses__() if c.__module__ == __name__}


class FaultyHost(Host):
    """The worker's side, which knows the stand-ins."""

    def __init__(self, entry):
        public_kernels.REGISTRY.update({name: f"test_runner:{cls.__name__}" for name, cls in FAULTS.items()})
        super().__init__(entry)


@pytest.fixture
def faulty(monkeypatch):
    """Makes the stand-ins peers, here and in the workers."""
    make_peers(monkeypatch, FAULTS, "test_runner:FaultyHost")


def run_one(case, step=lambda detail: None):
    options = RunOptions(device="cpu", budget_s=0.05)
    with open_session(options) as opened:
        return run_case(case, options, opened, step)


def pick(rows, impl, direction="forward", metric=None):
    return [r for r in rows if (r.impl, r.direction) == (impl, direction) and metric in (None, r.metric)]


def test_every_fault_is_a_row_and_only_the_right_ones_are_compared(faulty):
    everyone = ["sdpa_padded", *(name for name in FAULTS if name != "unrepeatable"), "torch_varlen"]
    case = make_case(kind="throughput", directions=["forward"], peers=everyone, timeout_s=4.0)
    rows = run_one(case)
    ms = {name: pick(rows, name, metric="ms")[0] for name in ["torch", *everyone]}
    expected = {
        "torch": ("pass", ""),
        "sdpa_padded": ("pass", ""),
        "wronggradient": ("pass", ""),  # its forward is right
        "wrong": ("fail", "out: error"),
        "notanumber": ("fail", "values are not finite"),
        "segfault": ("error", "killed by SIGSEGV"),
        "outofmemory": ("oom", "out of memory"),
        "hang": ("error", "hung: no answer within 4 s"),
        "leaves": ("error", "ended by itself with exit code 0"),
        "cached": ("fail", "timed calls do not compute their result"),
        "dieswhiletimed": ("oom", "killed by SIGKILL"),
        "torch_varlen": ("skipped", "needs cuda"),
    }
    assert set(expected) == set(ms)
    for name, (status, text) in expected.items():
        assert ms[name].status == status and text in ms[name].reason, ms[name]
        assert (ms[name].value is not None) == (status == "pass") == bool(ms[name].samples), name
        ratio = None if name == "torch" else pick(rows, "torch", metric=f"ratio_to.{name}")[0]
        if ratio is not None and status == "pass":
            assert (
                ratio.value == pytest.approx((ms[name].value or 0) / (ms["torch"].value or 1))
                and ratio.status == "pass"
            )
        elif ratio is not None:
            assert ratio.value is None and ratio.status == "skipped" and f"no ratio: {name} {status}" in ratio.reason
    assert pick(rows, "wrong", metric="max_error")[0].status == "fail"
    assert {"tflops", "gbps", "roofline", "max_error"} <= {r.metric for r in pick(rows, "torch")}
    assert not any(r.metric in ("tflops", "roofline") for r in pick(rows, "wrong"))


def test_a_wrong_gradient_fails_backward_alone(faulty):
    rows = run_one(make_case(peers=["wronggradient"]))
    assert [r.status for r in pick(rows, "wronggradient", "forward")] == ["pass"]
    (backward,) = pick(rows, "wronggradient", "backward")
    assert backward.status == "fail" and "dq: error" in backward.reason and "above" in backward.reason
    assert all(r.status == "pass" for r in rows if r.impl == "torch")


def test_promised_repeatability_is_checked(faulty):
    (row,) = run_one(make_case(directions=["forward"], peers=["unrepeatable"], impls=[]))
    assert row.status == "fail" and row.reason == "out: differs between two runs on the same inputs"


def test_correctness_rows_are_right_and_cheap():
    """Overhead: the whole way of a tiny case, two workers included, well below the second that it may cost."""
    options = RunOptions(device="cpu")
    with open_session(options) as opened:
        run_case(make_case(), options, opened)  # the server imports torch
        took = []
        for seed in range(3):
            start = time.perf_counter()
            rows = run_case(make_case(params={"seed": seed}), options, opened)
            took.append(time.perf_counter() - start)
            assert [(r.impl, r.direction, r.metric, r.status) for r in rows] == [
                ("torch", "forward", "max_error", "pass"),
                ("torch", "backward", "max_error", "pass"),
            ]
            assert all(r.value is not None and 0 <= r.value < 1e-4 and "allowed" in r.reason for r in rows)
        assert min(took) < 1.0  # a tenth of it where nobody else works


def test_a_broken_oracle_passes_nothing(monkeypatch):
    monkeypatch.setattr(session, "ORACLE", "builtins:dict")
    rows = run_one(make_case())
    assert {r.status for r in rows} == {"error"} and len(rows) == 2
    assert all(r.reason.startswith("the oracle: ") for r in rows)


def test_what_the_machine_lacks_is_skipped_with_the_reason():
    (row,) = run_one(make_case(needs="cuda:sm90"))
    assert (row.impl, row.status) == ("", "skipped") and row.reason.startswith("needs cuda:sm90: ")
    rows = run_one(make_case(impls=["gluon"]))
    assert {(r.impl, r.status) for r in rows} == {("gluon", "skipped")} and all(r.reason for r in rows)


def test_peers_do_not_run_for_an_implementation_that_cannot():
    steps = []
    rows = run_one(make_case(kind="throughput", impls=["gluon"], peers=["sdpa_padded"]), steps.append)
    assert {(r.impl, r.status) for r in rows} == {("gluon", "skipped"), ("sdpa_padded", "skipped")}
    assert all("nothing to compare with" in r.reason for r in rows if r.impl == "sdpa_padded") and steps == []


# ---- requests


def test_wrong_requests_are_one_line_before_anything_runs():
    events = []

    def refused(cases, text, **options):
        with pytest.raises(RequestError) as caught:
            run(cases, options=RunOptions(device="cpu", **options), on_event=events.append)
        assert text in str(caught.value) and "\n" not in str(caught.value)

    refused([], "no case selected")
    refused([make_case()], "unknown peer 'sdpa_paded'; accepted: sdpa_padded", peers=["sdpa_paded"])
    block = make_case(subject="block_attention", fixture="more_q_than_k")
    refused([make_case("first"), block], "accepted for block_attention: a fixture of pattern self")
    assert events == []


def log(values, name="log"):
    array = np.array(values, dtype=np.int64)
    return LogLengths(name, array, "lengths", len(array), f"{name}: {len(array)} users")


def test_lengths_of_a_log_replace_the_history_of_every_case():
    cases = [
        make_case("a", fixture="one_long", params={"seed": 1}),
        make_case("b", fixture="pma_empty_histories"),
        make_case(
            "c", fixture="single_token", params={"seed": 1}
        ),  # another profile of pattern self: now the same as a
        # Expected of the fixture, and not kept there either.
        make_case("d", fixture="single_token", params={"seed": 2}, expect={"forward.max_error": "< 0"}),
    ]
    mine = log([3, 9, 1, 7, 30])
    document = run(cases, options=RunOptions(device="cpu", lengths=mine, batch=4), on_event=lambda event: None)
    by_case = {name: [r for r in document.rows if r.case == name] for name in "abcd"}
    assert all(r.status == "pass" for name in "abd" for r in by_case[name])
    (same,) = by_case["c"]
    assert same.status == "skipped" and "the same as suites/test.toml::a" in same.reason
    sides = {name: stats["k"] for name, stats in document.fixtures.items()}
    assert set(sides) == {"one_long+log", "pma_empty_histories+log", "single_token+log"}
    chosen = mine.draw(4).lengths
    assert all(side["total"] == chosen.sum() for side in sides.values())
    assert document.request["lengths"]["users"] == 5 and document.request["batch"] == 4
    # Without --batch: as many users as the profile has samples.
    with open_session(RunOptions(device="cpu", lengths=log(range(100)))) as opened:
        assert opened.lengths(cases[0]).batch == load_profile("one_long").size


def test_peers_asked_for_replace_those_declared():
    case = make_case(kind="throughput", peers=["flex"], subject="gdpa", expect={"forward.ratio_to.padded": ">= 0.1"})
    chosen = runner._with_peers(case, ["sdpa_padded", "padded"])
    assert chosen.peers == ["sdpa_padded", "padded"] and chosen.expect
    without = runner._with_peers(case, ["sdpa_padded"])
    assert without.peers == ["sdpa_padded"] and without.expect == {}  # nothing to judge it by
    plain = make_case(kind="throughput", peers=["flex"])
    assert runner._with_peers(plain, ["sdpa_padded", "padded"]).peers == ["sdpa_padded"]  # padded computes gdpa alone
    assert runner._with_peers(make_case(peers=["nested"]), ["sdpa_padded"]).peers == ["nested"]  # a correctness case


def test_events_tell_the_whole_run():
    events = []
    cases = [make_case("one"), make_case("two", needs="cuda")]
    document = run(cases, options=RunOptions(device="cpu"), on_event=events.append)
    kinds = [e.kind for e in events if e.kind != "step"]
    assert kinds == ["run_started", *["case_started", "case_finished"] * 2, "run_finished"]
    finished = [e for e in events if e.kind == "case_finished"]
    assert [e.index for e in finished] == [0, 1] and all(e.total == 2 for e in events)
    assert [r for e in finished for r in e.rows] == document.rows
    assert any("check backward" in e.detail for e in events if e.kind == "step")
    assert document.environment["torch"] == torch.__version__


def test_interrupt_leaves_no_worker_and_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pids = []

    def step(detail):
        if detail.startswith("timing"):
            pids.extend(w.pid for w in list(runner_workers()))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_one(make_case(kind="throughput", peers=["sdpa_padded"]), step)
    assert len(pids) >= 3  # torch, sdpa_padded, the oracle
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert list(tmp_path.iterdir()) == []


def test_what_was_finished_before_ctrl_c_comes_with_its_ceilings_and_fixtures(monkeypatch):
    first, second = make_case(kind="throughput"), make_case(name="second", kind="throughput")

    def stop(event):
        if event.kind == "case_started" and event.case == second.id:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as stopped:
        run([first, second], options=RunOptions(device="cpu", budget_s=0.05), on_event=stop)
    document = stopped.value.document
    assert {row.case for row in document.rows} == {first.name}
    assert document.fixtures and document.ceilings


def runner_workers():
    from gem.harness.worker import _LIVE

    return _LIVE


def test_ceilings_that_a_contestant_beats_are_measured_again_and_the_larger_kept(monkeypatch):
    """As if other work had held the machine while they were measured first."""
    asked = []

    class Helper:
        def call(self, method, device, dtype, with_copy, timeout_s):
            asked.append(with_copy)
            slow = {"tflops": 1e-9, "gbps": 1e9}
            return slow if len(asked) == 1 else {"tflops": 1e6, "gbps": 1e6}

    monkeypatch.setattr(runner.Session, "helper", with_ceilings(Helper()))
    with open_session(RunOptions(device="cpu", budget_s=0.05)) as opened:
        rows = run_case(make_case(kind="throughput", peers=[], directions=["forward"]), opened.options, opened)
        assert opened.ceilings == {"tflops": {"float32": 1e6}, "gbps": 1e9}
    assert asked == [True, True]
    (share,) = [r.value for r in rows if r.metric == "roofline"]
    assert share is not None and 0 < share < 1


def with_ceilings(ceilings):
    """Session.helper with a stand-in for the ceilings' worker alone."""
    real = runner.Session.helper
    return lambda self, name, target: ceilings if name == "ceilings" else real(self, name, target)


def test_without_ceilings_the_roofline_says_why(monkeypatch):
    monkeypatch.setattr(
        runner.Session, "measured", lambda self, dtype: self.helper("c", "builtins:dict").call("x", timeout_s=9)
    )
    rows = run_one(make_case(kind="throughput", directions=["forward"]))
    (roofline,) = pick(rows, "torch", metric="roofline")
    assert (roofline.status, roofline.value) == ("skipped", None) and "no ceilings: AttributeError" in roofline.reason
    assert pick(rows, "torch", metric="ms")[0].status == "pass"
