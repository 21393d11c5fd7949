"""What a contestant is given: never the same twice while it is timed, and what it leaves of it.

A contestant may keep a result and hand it out again. Which key it keeps it under does not matter (the tensor's address
or identity, its version, a digest of its content): each call is given other values in the same memory, none of them
seen before, so that a kept result is a wrong one and a digest never matches. The values change by signs alone, by which
the right result changes in a way that is exact and known: the output's channels with those of v, and the gradients of a
sample's head with the output's gradient there. One pass over one tensor, outside the timed call. Results are plain
tensors: one of a class of its own could compute when it is looked at.

What stays undetected is who sets out to deceive, since a contestant lives in its worker's process: code that knows
these symmetries and signs a kept result anew, or keeps the attention weights, which signs do not change; a thread that
works between the timed calls; code that computes only the samples whose oracle there is time for; code that changes
the clock or the harness. Peers are this project's adapters of public kernels, there to be read. Where batch times heads
are few, gradients repeat after 2 ** (B H) calls.

A contestant may write to its inputs, too: `digests` before and after tell.

Legend: T rows of all samples, B samples, H heads, D head_dim, P patterns of signs.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from gem.harness.subjects import Inputs

PATTERNS = 16  # 2 ** 16 calls before the first content comes again
CHUNK = {"cpu": 1 << 14, "cuda": 1 << 22}  # 64-bit words that a digest reads at a time: 128 KiB stay in a core's cache
MIX = 6364136223846793005  # odd, its bits without a pattern: Knuth's multiplier of a 64-bit generator


def _patterns(size: int) -> np.ndarray:
    """±1 [P, size], independent as bits: no product of some of them is that of others. P <= PATTERNS."""
    count = min(PATTERNS, size)
    signs = np.random.default_rng().choice([-1.0, 1.0], (count, size))
    for number in range(count):  # echelon form
        signs[number, :number], signs[number, number] = 1.0, -1.0
    return signs


class _Signs:
    """Walks through all products of its patterns: one pattern a step, in the order of Gray's code, none twice."""

    def __init__(self, patterns: np.ndarray, like: Tensor) -> None:
        self._patterns = torch.as_tensor(patterns).to(like.device, like.dtype)
        self.total = torch.ones_like(self._patterns[0])  # of all steps so far
        self._steps = 0

    def step(self) -> Tensor:
        """The next pattern, already in ``total``."""
        self._steps += 1
        last_zeros = (self._steps & -self._steps).bit_length() - 1
        pattern = self._patterns[last_zeros % len(self._patterns)]
        self.total = self.total * pattern
        return pattern


class Channels:
    """Changes the channels' signs of v [..., D] in place, whatever its form: those of the output follow."""

    def __init__(self, v: Tensor) -> None:
        self._v = v
        self._signs = _Signs(_patterns(v.shape[-1]), v)

    def step(self) -> None:
        """Before each call."""
        self._v.mul_(self._signs.step())

    def undo(self, name: str, rows: Tensor) -> Tensor:
        """A result's rows [T, H, D], as they would be without the changes."""
        return rows * self._signs.total

    def restore(self) -> None:
        """Undo the changes of v, to the bit."""
        self._v.mul_(self._signs.total)
        self._signs.total = torch.ones_like(self._signs.total)


class Heads:
    """Changes the signs of samples' heads in the output's gradient, in place: those of q, k and v follow.

    ``d_out``: in the contestant's form, that ``convert`` makes of rows [T, H, D]. Gradients of what all samples share
    are sums over changed ones, which nothing can undo: they are left as they are. There must be a pair.
    """

    def __init__(self, inputs: Inputs, d_out: Tensor, convert: Callable[[Tensor], Tensor]) -> None:
        self._inputs, self._d_out, self._convert = inputs, d_out, convert
        lengths, heads = inputs.lengths, inputs.d_out.shape[1]
        filled = np.flatnonzero(lengths.q * lengths.k)  # elsewhere gradients are 0, whatever the sign
        signs = _patterns(len(filled) * heads)
        patterns = np.ones((len(signs), lengths.batch + 1, heads))  # one more: rows behind the last offset
        patterns[:, filled] = signs.reshape(len(signs), -1, heads)
        self._signs = _Signs(patterns, d_out)
        k_rows = inputs.k.shape[0]
        self._sample = {"out": _samples(lengths.q, inputs.d_out.shape[0]), "k": _samples(lengths.k, k_rows)}
        self._sample = {side: sample.to(inputs.device) for side, sample in self._sample.items()}

    def step(self) -> None:
        """Before each call."""
        self._d_out.mul_(self._convert(self._rows(self._signs.step(), "out")))

    def undo(self, name: str, rows: Tensor) -> Tensor:
        """A gradient's rows [T, H, D], as they would be without the changes."""
        if name == "bias" or (name == "q" and self._inputs.shared_queries):
            return rows
        return rows * self._rows(self._signs.total, "k" if name in ("k", "v") else "out")

    def restore(self) -> None:
        """Undo the changes of the output's gradient, to the bit."""
        self._d_out.mul_(self._convert(self._rows(self._signs.total, "out")))
        self._signs.total = torch.ones_like(self._signs.total)

    def _rows(self, signs: Tensor, side: str) -> Tensor:
        """[B + 1, H] -> [T, H, D], expanded, not copied."""
        return signs[self._sample[side]][:, :, None].expand(-1, -1, self._inputs.d_out.shape[2])


def _samples(lengths: np.ndarray, rows: int) -> Tensor:
    """Of each row its sample's number; B behind the last offset. [T]"""
    numbers = np.full(rows, len(lengths), np.int64)
    numbers[: int(lengths.sum())] = np.repeat(np.arange(len(lengths)), lengths)
    return torch.as_tensor(numbers)


# ---- inputs that were written to


def digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """64 bits that tell each tensor's content, made on its device, a part at a time; one object is read once."""
    seen: dict[int, int] = {}
    for x in tensors.values():
        if id(x) not in seen:
            seen[id(x)] = _digest(x.detach())
    return {name: seen[id(x)] for name, x in tensors.items()}


def _digest(x: Tensor) -> int:
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    if not x.numel():
        return 0
    chunk = CHUNK.get(x.device.type, 1 << 20)
    place = torch.arange(chunk, device=x.device) * 2 + 1
    x = x[None] if not x.dim() else x
    for part in x.split(max(1, chunk * 8 // (x[0].numel() * x.element_size()))):
        flat = part.contiguous().view(-1).view(torch.uint8)
        if len(flat) % 8 or flat.storage_offset() % 8:
            flat = torch.cat([flat, flat.new_zeros(-len(flat) % 8)])
        for words in flat.view(torch.int64).split(chunk):
            total.mul_(MIX).add_(_mixed(words, place[: len(words)]).sum())
    return int(total)


def _mixed(words: Tensor, place: Tensor) -> Tensor:
    """Each word, scattered over 64 bits in a way that depends on its place: a one-to-one map of words."""
    # A product with an odd number keeps every change of a word, a sum of products does not: two changes of the highest
    # bit (the sign of a float64) cancel. Shifted down and multiplied again they do not.
    mixed = words * place
    for _ in range(2):
        mixed ^= mixed >> 31
        mixed *= MIX
    return mixed


def watched(inputs: Inputs, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All that a contestant is given, by name: its own form of the inputs first."""
    rope = {f"rope[{i}]": table for i, table in enumerate(inputs.rope or ())}
    offsets = {"q_offsets": inputs.q_offsets, "k_offsets": inputs.k_offsets}
    return {**inputs.leaves, **leaves, "d_out": inputs.d_out, **offsets, **rope}
