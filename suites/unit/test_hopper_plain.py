"""The ring of the kernel without warp specialisation, followed on the host: what is asked for, where to, and when.

``_load`` runs as plain Python on numbers; descriptors and barriers write down what they are asked.
"""

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels in Gluon are neither there without triton nor interpreted", allow_module_level=True)

from gem.kernels.hopper import gdpa_plain

END, N, D = 2**30, 128, 64
NBYTES = {"q": 3, "k": 5, "v": 5}


class Slots:
    """Buffers or barriers in shared memory, by number."""

    def __init__(self, name: str) -> None:
        self.name = name

    def index(self, at: int) -> tuple[str, int]:
        return self.name, at


def tiles_of(k_len: int) -> int:
    return max(-(-k_len // N), 1)


def follow(records: list[tuple[int, ...]], stages: int) -> tuple[list[Any], int]:
    """What _load asks for at each call: (stage's expected bytes, copies), and calls made after the prologue."""
    asked: list[tuple[list[Any], list[Any]]] = []
    fakes = {
        "gl": SimpleNamespace(thread_barrier=lambda: None, where=lambda c, a, b: a if c else b),
        "END": END,
        "mbarrier": SimpleNamespace(expect=lambda bar, n: asked[-1][0].append((bar, n))),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=lambda desc, at, bar, into: asked[-1][1].append((desc.name, at, bar, into))
        ),
        "key_tiles": lambda k_len, n: tiles_of(k_len),
        "dealt": lambda t, lane, programs, lanes, zigzag: t,
        "record_of": lambda tiles, job, jobs, heads: records[job] if job < len(records) else (-1, *records[0][1:]),
    }
    load = gdpa_plain._load.fn
    descs = [SimpleNamespace(name=x, block_type=SimpleNamespace(nbytes=n)) for x, n in NBYTES.items()]
    ring = (*descs, *(Slots(x) for x in ("q", "k", "v", "q_full", "full")), None, len(records), 1, 1)
    before = {name: load.__globals__[name] for name in fakes}
    load.__globals__.update(fakes)
    try:
        ahead = (0, 0, END, 0, 0, *records[0])
        steps = sum(tiles_of(record[5]) for record in records)
        for it in [*range(stages), *range(steps)]:
            asked.append(([], []))
            ahead = load(ahead, it, ring, 1, N, D, stages)
    finally:
        load.__globals__.update(before)
    return asked, steps


@st.composite
def jobs(draw):
    """Records (sample, row, q_start, q_len, k_start, k_len, head) of one program, in its order."""
    lens = draw(st.lists(st.one_of(st.sampled_from([0, 1, N, N + 1]), st.integers(0, 5 * N)), min_size=1, max_size=8))
    return [(i, 128 * i, 1000 * i, 128 * i + 77, 2000 * i, k_len, i % 3) for i, k_len in enumerate(lens)]


@settings(max_examples=150, deadline=None)
@given(jobs(), st.sampled_from([2, 4]))
def test_each_stage_gets_its_keys_and_the_values_of_the_tile_before(records, stages):
    asked, steps = follow(records, stages)
    expected = []  # of each tile: where its keys lie
    first = {}  # tile that begins a job -> job
    for number, (*_, k_start, k_len, head) in enumerate(records):
        first[len(expected)] = number
        expected += [[END, k_start + k_len, END - k_len + j * N, head * D] for j in range(tiles_of(k_len))]
    assert all(copies == [] for _, copies in asked[steps + 1 :])  # one stage more than tiles: the last values
    for piece, (expects, copies) in enumerate(asked[: steps + 1]):
        stage, slot = piece % stages, first.get(piece, 0) % stages
        by = {name: (at, bar, into) for name, at, bar, into in copies}
        assert len(by) == len(copies) and all(by[x][1:] == (("full", stage), (x, stage)) for x in "kv")
        assert by["k"][0] == expected[piece] if piece < steps else by["k"][0][2] == END
        assert by["v"][0] == expected[piece - 1] if piece else by["v"][0][2] == END
        bytes_of = dict(expects)
        assert bytes_of.pop(("full", stage)) == NBYTES["k"] + NBYTES["v"]
        if piece not in first:
            assert not bytes_of and "q" not in by
            continue
        assert bytes_of == {("q_full", slot): NBYTES["q"]}
        _, row, q_start, q_len, _, k_len, head = records[first[piece]]
        x = END - q_len + row if k_len else END  # without keys queries are not looked at
        assert by["q"] == ([END, q_start + q_len, x, head * D], ("q_full", slot), ("q", slot))


@settings(max_examples=150, deadline=None)
@given(jobs(), st.sampled_from([2, 4]))
def test_queries_stay_until_their_last_scores(records, stages):
    """Piece p is asked for when the consumers are done with tile p - stages: a slot's job before has ended by then."""
    starts = [0]
    for record in records:
        starts.append(starts[-1] + tiles_of(record[5]))
    asked, steps = follow(records, stages)
    loaded = [piece for piece, (_, copies) in enumerate(asked[: steps + 1]) if any(x[0] == "q" for x in copies)]
    assert loaded == starts[:-1]
    for job, piece in enumerate(loaded[stages:], start=stages):
        assert starts[job - stages + 1] - 1 <= piece - stages
