"""One contestant inside its worker: built from the case's declaration, checked, then timed turn by turn.

The parent calls the methods of ``Host`` (see ``runner``). A timed call does real work: before each one an input changes
in place to what no call before had (see ``fresh``), so that a result kept from an earlier call is a wrong one. Some
rows of a random call of each turn, and the whole result of the last one, are held against the oracle. What a contestant
was given must be unchanged when it is done.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from gem.data.lengths import Lengths
from gem.harness import peers
from gem.harness.check import Spot, Verdict, compare, load_answer, masked_d_out, missing_or_recast, same_bits
from gem.harness.fresh import Channels, Heads, digests, watched
from gem.harness.params import SubjectParams
from gem.harness.subjects import Subject, build_inputs
from gem.harness.timing import Timer
from gem.harness.worker import Unsupported

PLAIN = (Tensor, torch.nn.Parameter, NestedTensor)


@dataclass(frozen=True)
class Entry:
    """Who runs, on what: all that a worker needs to build a contestant. ``peer``: a public kernel, else gem's op."""

    name: str
    peer: bool
    subject: str
    params: SubjectParams
    lengths: Lengths
    device: str


class Host:
    """Answers the parent's calls about one contestant. Each method is one message; results are small."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._timer: Timer | None = None
        self._changes: Channels | Heads | None = None  # of what timed calls are given
        self._spot: Spot | None = None
        self._written: list[str] = []  # gradients that a backward was given and wrote to
        self._until_spot = -1  # calls to go until the one of this turn that is looked at
        self._check_s: dict[str, float] = {}
        self._last: Any = None  # result of the last timed call
        self._timed_graph: Tensor | None = None

    def prepare(self) -> None:
        """Draw the inputs and let the contestant bring them into its own form, which is not timed."""
        entry = self._entry
        torch.manual_seed(entry.params.seed)
        # A compiled backward may else write over what its forward saved and then runs only once; timing repeats it.
        functorch_config.donated_buffer = False
        self.inputs = build_inputs(entry.subject, entry.params, entry.lengths, entry.device)
        build = peers.load(entry.name) if entry.peer else Subject
        self.contestant: peers.Contestant = build(self.inputs, entry.name)
        self._seal = digests(watched(self.inputs, self.contestant.leaves))
        self._release()

    def check(self, path: str, direction: str, repeat: bool) -> Verdict:
        """Hold it against the oracle's answer in ``path``; with ``repeat``, also against a second run of itself."""
        self._need(direction)
        answer = load_answer(path, self._entry.device)
        d_out = masked_d_out(self.inputs, answer.samples) if direction == "backward" else None
        start = time.perf_counter()
        first = self._run(direction, d_out)
        self._check_s[direction] = time.perf_counter() - start
        verdict = compare(first, answer, self.inputs)
        verdict.problems += missing_or_recast(first, answer, self.inputs, direction)
        if repeat and self.contestant.repeatable:
            differ = same_bits(first, self._run(direction, d_out))
            verdict.problems += [f"{name}: differs between two runs on the same inputs" for name in differ]
        del first, d_out
        verdict.problems += self._spoilt()
        self._release()
        return verdict

    def _spoilt(self) -> list[str]:
        """What it wrote to although it was given it to read. Then it gets new inputs, for what is checked next."""
        now = digests(watched(self.inputs, self.contestant.leaves))
        written = [name for name, digest in self._seal.items() if now.get(name) != digest] + self._written
        self._written = []
        if not written:
            return []
        self.prepare()
        return [f"writes to its inputs: {', '.join(dict.fromkeys(written))}"]

    def warm_up(self, path: str, direction: str, cap_s: float) -> float:
        """Make it ready to be timed in ``direction``, against the answer in ``path``; returns ms a call, roughly."""
        self._need(direction)
        if self._timer is None:
            self._timer = Timer(self._entry.device)
        self._timer.calls = 1
        self._last = self._timed_graph = None
        self._unchange()  # of a direction that ended in an exception
        if direction == "backward":
            convert = self.contestant.gradient_in
            self._d_out = convert(self.inputs.d_out).clone()
            self._d_out_seal = digests({"d_out": self._d_out})
            self._changes = Heads(self.inputs, self._d_out, convert)
            self._timed_graph = self.contestant.forward()
        else:
            self._changes = Channels(self.contestant.negated)
        self._spot = Spot(load_answer(path, self._entry.device), self.inputs, direction)
        self._release()
        if self._check_s.get(direction, 0.0) > 4 * cap_s:  # seconds a call: the check has warmed it up
            return self._check_s[direction] * 1e3
        return self._timer.warm_up(lambda: self._call(direction), lambda: self._before(direction), cap_s)

    def turn(self, direction: str) -> float:
        """One sample in ms."""
        assert self._timer is not None and self._spot is not None, "warm_up comes first"
        self._until_spot = random.randrange(self._timer.calls) + 1
        ms = self._timer.turn(lambda: self._call(direction), lambda: self._before(direction))
        self._look(direction)  # unless an earlier call was looked at
        self._spot.judge()
        return ms

    def finish(self, path: str, direction: str) -> Verdict:
        """Was the last timed call's result right, and is the next one's, on inputs that have changed in between?"""
        assert self._spot is not None and self._changes is not None, "warm_up comes first"
        answer = load_answer(path, self._entry.device)
        verdict = self._check_timed(answer, direction)
        verdict.problems += self._spot.problems
        if verdict.right:
            self._before(direction)
            self._call(direction)
            verdict = self._check_timed(answer, direction)
        if not verdict.right:
            verdict.problems = [f"timed calls do not compute their result: {'; '.join(verdict.problems)}"]
        self._last = self._timed_graph = self._spot = None
        self._unchange()
        if direction == "backward" and digests({"d_out": self._d_out}) != self._d_out_seal:
            self._written.append("the output's gradient")
        verdict.problems = self._spoilt() + verdict.problems
        self._release()
        return verdict

    def _unchange(self) -> None:
        """Change back what was changed for the timing: then nothing may differ from what it was given at first."""
        if self._changes is not None:
            with torch.no_grad():
                self._changes.restore()
        self._changes = None

    def clock(self) -> dict[str, Any]:
        """What the GPU said of its clock while this contestant was timed; empty on a CPU."""
        if self._timer is None or not self._timer.sm_clocks_mhz:
            return {}
        clocks = sorted(self._timer.sm_clocks_mhz)
        return {"sm_clock_mhz": clocks[len(clocks) // 2], "slowdowns": sorted(self._timer.slowdowns)}

    def _release(self) -> None:
        """Give back device memory that torch keeps for reuse: the others of the case live on the same card."""
        if self._entry.device == "cuda":
            torch.cuda.empty_cache()

    def _need(self, direction: str) -> None:
        if direction == "backward" and self.contestant.no_backward:
            raise Unsupported(self.contestant.no_backward)

    def _run(self, direction: str, d_out: Tensor | None) -> dict[str, Tensor]:
        """Named results in the inputs' rows: {"out"}, or the gradients by leaf."""
        contestant = self.contestant
        if direction == "forward":
            with torch.no_grad():
                return {"out": self._rows("out", contestant.forward())}
        assert d_out is not None
        given = {"the output's gradient": contestant.gradient_in(d_out)}
        before = digests(given)
        grads = self._gradients(contestant.forward(), *given.values(), retain=False)
        self._written += [name for name in given if digests(given) != before]
        return self._name(grads)

    def _gradients(self, out: Tensor, d_out: Tensor, retain: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, list(self.contestant.leaves.values()), d_out, retain_graph=retain)

    def _name(self, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        names = self.contestant.leaves
        return {name: self._rows(name, grad) for name, grad in zip(names, grads, strict=True)}

    def _rows(self, name: str, result: Tensor) -> Tensor:
        if type(result) not in PLAIN:  # one of a class of its own may compute when it is looked at
            raise TypeError(f"{name} is a {type(result).__name__}; accepted: a torch.Tensor")
        return self.contestant.rows(name, result)

    def _before(self, direction: str) -> None:
        assert self._changes is not None
        if self._until_spot == 0:
            self._look(direction)
        self._until_spot -= 1
        self._last = None  # freed here, not inside the timed call
        with torch.no_grad():
            self._changes.step()

    def _look(self, direction: str) -> None:
        """Keep some rows of the last call's result, if this turn has none yet."""
        assert self._spot is not None
        if self._until_spot >= 0 and self._last is not None:
            self._spot.keep(self._timed_rows(direction))
        self._until_spot = -1

    def _call(self, direction: str) -> None:
        if direction == "forward":
            with torch.no_grad():
                self._last = self.contestant.forward()
        else:
            assert self._timed_graph is not None
            self._last = self._gradients(self._timed_graph, self._d_out, retain=True)

    def _check_timed(self, answer: Any, direction: str) -> Verdict:
        if self._last is None:
            return Verdict(problems=["there is no timed result"])
        return compare(dict(self._timed_rows(direction)), answer, self.inputs, timed=True)

    def _timed_rows(self, direction: str) -> Iterator[tuple[str, Tensor]]:
        """The last timed call's results by name, in the inputs' rows, on inputs that were not changed."""
        assert self._changes is not None
        leaves = self.contestant.leaves
        results = {"out": self._last} if direction == "forward" else dict(zip(leaves, self._last, strict=True))
        with torch.no_grad():
            for name, x in results.items():
                yield name, self._changes.undo(name, self._rows(name, x))
