"""Which implementation runs a call, and why: ``impl="auto"`` made explainable.

A named implementation runs or raises; nothing is replaced in silence. ``auto`` takes the first of ``PREFERENCE`` that
does not refuse the call; ``gem.explain`` and the ``gem`` logger (level DEBUG) say what was chosen and why not another.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from gem.implementations import TABLE

log = logging.getLogger("gem")

OPS = ("jagged_attention", "gdpa", "block_attention")
IMPLEMENTATIONS = ("reference", "torch", "triton", "gluon")
# Fastest first. The float64 oracle is never chosen by itself.
PREFERENCE = ("gluon", "triton", "torch")


class Call(NamedTuple):
    """What decides the choice: nothing in here reads device memory."""

    op: str
    device: str  # device type: "cpu", "cuda", ...
    dtype: torch.dtype
    heads: int
    head_dim: int
    masked: bool = False  # causal or window
    biased: bool = False
    readable: bool = True  # by a GPU's copy engine: the strides of q, k and v allow it


@dataclass(frozen=True)
class Choice:
    """Outcome of a choice; ``str()`` reads as a short report."""

    op: str
    impl: str
    why: str
    others: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.op}: impl={self.impl!r} ({self.why})"]
        lines += [f"  not {name}: {reason}" for name, reason in self.others.items()]
        return "\n".join(lines)


def refusal(call: Call, impl: str) -> str | None:
    """Why ``impl`` cannot run this call, or None."""
    if impl == "reference":
        return None
    found = TABLE[call.op].get(impl)
    if found is None:
        return f"gem has no {impl} kernel for {call.op}"
    return found.refuses(call)


def _not_by_itself(call: Call, impl: str) -> str | None:
    found = TABLE[call.op].get(impl)
    return None if found is None else found.not_by_itself(call)


def choose(call: Call, impl: str = "auto") -> Choice:
    """The implementation that runs ``call``. ValueError when the named one cannot or is unknown."""
    if impl != "auto":
        if impl not in IMPLEMENTATIONS:
            raise ValueError(f"{call.op}: impl={impl!r}; accepted are 'auto', {', '.join(map(repr, IMPLEMENTATIONS))}")
        reason = refusal(call, impl)
        if reason is not None:
            usable = [name for name in IMPLEMENTATIONS if refusal(call, name) is None]
            raise ValueError(f"{call.op}: impl={impl!r} cannot run it: {reason}; can run it: {', '.join(usable)}")
        return Choice(call.op, impl, "named by the caller")
    others = {"reference": "the float64 oracle runs only when named"}
    for name in PREFERENCE:
        reason = refusal(call, name) or _not_by_itself(call, name)
        if reason is None:
            skipped = [n for n in PREFERENCE if n in others]
            why = "auto: first of " + ", ".join(PREFERENCE) + " that can run it" if skipped else "auto: preferred"
            return Choice(call.op, name, why, others)
        others[name] = reason
    raise ValueError(f"{call.op}: no implementation can run this call: {others}")


def available(op: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[str]:
    """Names of the implementations of ``op`` that run on a device type, the oracle first."""
    if op not in OPS:
        raise ValueError(f"op={op!r}: accepted are {', '.join(OPS)}")
    call = Call(op, device, dtype, heads=4, head_dim=64)
    return [name for name in IMPLEMENTATIONS if refusal(call, name) is None]


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Choice:
    """Say which implementation a call would run on, and why the others would not, without running it.

    ``gem.explain(gem.gdpa, q, k, v, offsets, activation="silu")`` takes the arguments of the op itself and raises what
    the op would raise for them. Print the result, or read ``.impl``, ``.why`` and ``.others``.
    """
    from gem import ops

    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in OPS:
        raise ValueError(f"explain: op={name!r}; accepted are {', '.join(OPS)}")
    choice = getattr(ops, f"_prepare_{name}")(*args, **kwargs)[0]
    return replace(choice, others=dict(choice.others))  # the caller's own: choices are kept
