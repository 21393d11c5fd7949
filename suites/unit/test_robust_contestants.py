"""Contestants that cheat without knowing it: they keep results, or write to what they were given to read.

Kinds: timed calls that were no-ops; a result kept under its inputs' address, identity or content; a kernel that scales
its queries in place and so spoils every later call.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stand_ins import make_peers

from gem.data.lengths import load_profile
from gem.harness import peers as public_kernels
from gem.harness.case import Case
from gem.harness.check import Oracle
from gem.harness.contestant import Entry, Host
from gem.harness.fresh import Channels, Heads, digests
from gem.harness.params import SUBJECTS
from gem.harness.peer_padded import SdpaPadded
from gem.harness.peers import PackedRows
from gem.harness.runner import RunOptions, open_session, run_case
from gem.harness.subjects import Subject, build_inputs, run_reference

PARAMS = SUBJECTS["jagged_attention"](heads=2, head_dim=16)
COMPUTING_S = 0.02  # what a result costs one that keeps results by their content


class Keeps(SdpaPadded):
    """Computes a result once for each key that it knows."""

    timed = 0

    def __init__(self, inputs, name):
        super().__init__(inputs, name)
        self.kept: dict[Any, torch.Tensor] = {}

    def key(self):
        raise NotImplementedError

    def compute(self):
        return super().forward()

    def forward(self):
        if torch.is_grad_enabled():
            return self.compute()
        key = self.key()
        if key not in self.kept:
            self.kept[key] = self.compute()
        return self.kept[key]


class KeepsByAddress(Keeps):
    def key(self):
        return tuple(x.data_ptr() for x in self.leaves.values())


class KeepsByIdentity(Keeps):
    def key(self):
        return tuple(map(id, self.leaves.values()))


class KeepsBySize(Keeps):
    """A digest that does not see what changes."""

    def key(self):
        return float(self.leaves["v"].abs().double().sum())


class KeepsByContent(Keeps):
    """The best that one can do: never a wrong result. Never a hit either."""

    def key(self):
        return hash(b"".join(x.detach().numpy().tobytes() for x in self.leaves.values()))

    def compute(self):
        time.sleep(COMPUTING_S)
        return super().compute()


class KeepsMostly(Keeps):
    """Computes every fourth call in earnest, whichever is looked at."""

    def key(self):
        self.timed += 1
        return max(0, self.timed - 6) // 4


class WithGradient(torch.autograd.Function):
    """The identity; its backward is given to another."""

    @staticmethod
    def forward(ctx, x, backward):
        ctx.by = backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        return ctx.by(grads[0]), None


class KeepsGradients(SdpaPadded):
    """By the content of the output's gradient, but for its signs; after the two calls of a check."""

    kept = None
    calls = 0

    def forward(self):
        return WithGradient.apply(super().forward(), self.given)

    def given(self, grad):
        self.calls += 1
        if self.kept is None or self.calls < 4:
            self.kept = grad.clone()
        return self.kept


class Later(torch.Tensor):
    """Not there yet; whoever looks at it has it computed."""


class ComputesLater(SdpaPadded):
    """Hands over a promise."""

    def forward(self):
        out = super().forward()
        return out if torch.is_grad_enabled() else out.as_subclass(Later)


class WritesQueries(SdpaPadded):
    """Leaves the queries scaled. The first result is right."""

    def forward(self):
        out = super().forward()
        self.leaves["q"].data.mul_(1.25)
        return out


class WritesLater(SdpaPadded):
    """Uses the keys as its workspace once it has found its pace; what it returns stays right."""

    calls = 0

    def forward(self):
        self.calls += 1
        out = super().forward()
        if self.calls == 8:
            self.leaves["k"].data[0, 0, 0, 0] += 1e-3
        return out


class WritesGradient(SdpaPadded):
    """Takes the output's gradient for its own."""

    def forward(self):
        return WithGradient.apply(super().forward(), self.given)

    def given(self, grad):
        mine = grad.clone()
        grad.data.mul_(0.5)
        return mine


CHEATS = {
    c.__name__.lower(): c
    for c in (
        KeepsByAddress, KeepsByIdentity, KeepsBySize, KeepsByContent, KeepsMostly, KeepsGradients, WritesQueries,
        WritesLater, WritesGradient, ComputesLater,
    )
}  # fmt: skip


class CheatsHost(Host):
    """The worker's side, which knows the stand-ins."""

    def __init__(self, entry):
        found = {name: f"test_robust_contestants:{cls.__name__}" for name, cls in CHEATS.items()}
        public_kernels.REGISTRY.update(found)
        super().__init__(entry)


@pytest.fixture
def rows(monkeypatch):
    """Runs a case with these peers; rows by contestant, direction and metric."""
    make_peers(monkeypatch, CHEATS, "test_robust_contestants:CheatsHost")

    def run(peers, directions, kind: Any = "throughput", budget_s=0.1):
        file = Path("suites/test.toml")
        case = Case(
            suite=file, file=file, kind=kind, subject="jagged_attention", name="case", fixture="empty_middle",
            params=PARAMS, directions=directions, timeout_s=20.0,
        ).model_copy(update={"peers": peers})  # fmt: skip
        options = RunOptions(device="cpu", budget_s=budget_s)
        with open_session(options) as session:
            return {(r.impl, r.direction, r.metric): r for r in run_case(case, options, session)}

    return run


def test_a_result_that_is_kept_is_found_whatever_its_key(rows):
    stale = ["keepsbyaddress", "keepsbyidentity", "keepsbysize", "keepsmostly"]
    found = rows([*stale, "keepsbycontent", "sdpa_padded"], ["forward"], budget_s=0.2)
    for name in stale:
        ms = found[name, "forward", "ms"]
        assert ms.status == "fail" and "timed calls do not compute their result" in ms.reason, ms
        assert found["torch", "forward", f"ratio_to.{name}"].status == "skipped"
    honest = found["keepsbycontent", "forward", "ms"]
    assert honest.status == "pass" and len(honest.samples) >= 3
    assert min(honest.samples) >= 1e3 * COMPUTING_S  # it never met a content again
    assert found["sdpa_padded", "forward", "ms"].status == "pass"


def test_gradients_that_are_kept_are_found(rows):
    found = rows(["keepsgradients", "sdpa_padded"], ["forward", "backward"])
    assert found["keepsgradients", "forward", "ms"].status == "pass"
    ms = found["keepsgradients", "backward", "ms"]
    assert ms.status == "fail" and "timed calls do not compute their result" in ms.reason, ms
    assert {found[name, "backward", "ms"].status for name in ("torch", "sdpa_padded")} == {"pass"}


def test_a_peer_that_writes_to_its_inputs_is_named_and_spoils_nobody_else(rows):
    peers = ["writesqueries", "writeslater", "writesgradient", "sdpa_padded"]
    found = rows(peers, ["forward", "backward"])

    def told(name, direction):
        return found[name, direction, "ms"].status, found[name, direction, "ms"].reason

    assert told("writesqueries", "forward") == ("fail", "writes to its inputs: q")
    status, reason = told("writeslater", "forward")
    assert status == "fail" and reason.startswith("writes to its inputs: k"), reason
    assert told("writesgradient", "forward")[0] == "pass"
    status, reason = told("writesgradient", "backward")
    assert status == "fail" and reason.startswith("writes to its inputs: the output's gradient"), reason
    for name in ("torch", "sdpa_padded"):
        assert {told(name, direction)[0] for direction in ("forward", "backward")} == {"pass"}
        assert found[name, "forward", "max_error"].status == "pass"


def test_a_check_alone_finds_it_too(rows):
    found = rows(["writesqueries"], ["forward"], kind="correctness")
    row = found["writesqueries", "forward", "max_error"]
    assert row.status == "fail" and row.reason == "writes to its inputs: q"


def test_a_result_is_a_plain_tensor(rows):
    found = rows(["computeslater"], ["forward"])
    row = found["computeslater", "forward", "ms"]
    assert row.status == "error" and "out is a Later; accepted: a torch.Tensor" in row.reason


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("stale", [False, True])
def test_a_call_of_every_turn_is_looked_at(direction, stale, tmp_path, monkeypatch):
    """One turn of kept results among others that are right, as the last ones are."""
    entry = Entry("sdpa_padded", True, "jagged_attention", PARAMS, load_profile("empty_middle").draw(), "cpu")
    host, path = Host(entry), str(tmp_path / "same.pt")
    Oracle().make("jagged_attention", PARAMS, entry.lengths, "cpu", ["forward", "backward"], {"same": path})
    host.prepare()
    assert host.check(path, direction, False).right
    host.warm_up(path, direction, 0.01)
    assert host._timer is not None
    host._timer.calls = 3
    real, kept = host._call, []

    def call(direction):
        real(direction)
        if kept:
            host._last = kept[0]

    monkeypatch.setattr(host, "_call", call)
    for _ in range(2):
        host.turn(direction)
    kept += [host._last] if stale else []
    host.turn(direction)
    kept.clear()
    host.turn(direction)
    verdict = host.finish(path, direction)
    assert verdict.right is not stale
    if stale:
        assert verdict.reason().startswith("timed calls do not compute their result: ") and "turn 3" in verdict.reason()


# ---- the changes of what is given


def inputs_of(fixture="more_q_than_k", dtype: Any = "float64"):
    made = SUBJECTS["jagged_attention"](heads=2, head_dim=16, dtype=dtype)
    return build_inputs("jagged_attention", made, load_profile(fixture).draw(), "cpu")


def contestants(inputs):
    return [Subject(inputs, "reference"), SdpaPadded(inputs, "sdpa_padded"), PackedRows(inputs, "torch_varlen")]


@pytest.mark.parametrize("fixture", ["more_q_than_k", "empty_middle", "pma_empty_histories"])
def test_changed_values_give_the_output_that_undoes_to_the_same_bits(fixture):
    inputs = inputs_of(fixture)
    subject = Subject(inputs, "reference")
    with torch.no_grad():
        plain, v = subject.forward(), inputs.v.clone()
        changes = Channels(subject.negated)
        for _ in range(5):
            changes.step()
        assert not torch.equal(inputs.v, v)
        changed = subject.forward()
        assert not torch.equal(changed, plain)
        assert torch.equal(changes.undo("out", changed), plain)
        changes.restore()
    assert torch.equal(inputs.v, v)


@pytest.mark.parametrize("fixture", ["more_q_than_k", "empty_middle", "pma_empty_histories"])
def test_changed_gradients_undo_to_the_same_bits(fixture):
    inputs = inputs_of(fixture)
    out = run_reference(inputs, "same")
    leaves = [inputs.q, inputs.k, inputs.v]
    given = inputs.d_out.clone()
    plain = torch.autograd.grad(out, leaves, given, retain_graph=True)
    changes = Heads(inputs, given, lambda rows: rows)
    for _ in range(5):
        changes.step()
    assert not torch.equal(given, inputs.d_out)
    changed = torch.autograd.grad(out, leaves, given)
    for name, x, wanted in zip("qkv", changed, plain, strict=True):
        assert torch.equal(changes.undo(name, x), wanted), name
    assert any(not torch.equal(x, wanted) for x, wanted in zip(changed, plain, strict=True))
    changes.restore()
    assert torch.equal(given, inputs.d_out)


def test_the_changes_reach_every_form_that_contestants_give_their_tensors():
    """What a contestant's own form becomes, read back as rows, is what the rows themselves become."""
    inputs = inputs_of("more_q_than_k", "float32")
    rows = inputs.lengths.tokens_q
    for contestant in contestants(inputs):
        d_out = contestant.gradient_in(inputs.d_out).clone()
        changes = Heads(inputs, d_out, contestant.gradient_in)
        for _ in range(3):
            changes.step()
        read = contestant.rows("out", d_out)[:rows]
        assert torch.equal(changes.undo("out", torch.cat([read, inputs.d_out[rows:]]))[:rows], inputs.d_out[:rows])
        assert not torch.equal(read, inputs.d_out[:rows])


def test_no_content_comes_again():
    v = torch.ones(3, 16)
    changes = Channels(v)
    seen = set()
    for _ in range(3000):
        changes.step()
        seen.add(v[0].numpy().tobytes())
    assert len(seen) == 3000
    inputs = inputs_of("more_q_than_k", "float32")
    d_out = torch.ones_like(inputs.d_out)
    heads, seen = Heads(inputs, d_out, lambda rows: rows), {d_out.numpy().tobytes()}
    distinct = 2 ** (2 * inputs.lengths.batch)
    assert distinct == 256
    for _ in range(distinct - 1):
        heads.step()
        seen.add(d_out.numpy().tobytes())
    assert len(seen) == distinct  # all that there are


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("shape", [(5,), (7, 3), (300, 2, 16), (40000, 4)])
def test_digests_see_every_change(dtype, shape):
    x = torch.as_tensor(np.random.default_rng(0).integers(1, 90, shape)).to(dtype)
    before = digests({"x": x})["x"]
    assert digests({"x": x.clone()})["x"] == before

    def changed(change):
        other = x.clone()
        change(other)
        return digests({"x": other})["x"]

    found = {
        changed(lambda t: t.neg_()),
        changed(lambda t: t[0].neg_()),
        changed(lambda t: t.view(-1)[-1:].add_(1)),
        changed(lambda t: t.copy_(t.flip(0))),
        changed(lambda t: t.view(-1)[:2].neg_()),
        changed(lambda t: t.zero_()),
    }
    assert before not in found and len(found) == 6
    assert digests({"x": x.new_zeros(0, 3)}) == {"x": 0}


def test_digests_read_views_as_they_are_seen():
    wide = torch.randn(6, 2, 3)
    view = wide[:, 0]
    before = digests({"v": view})
    wide[:, 1] = 7.0
    assert digests({"v": view}) == before
    assert digests({"v": view.contiguous()}) == before
    wide[5, 0, 2] = 7.0
    assert digests({"v": view}) != before
