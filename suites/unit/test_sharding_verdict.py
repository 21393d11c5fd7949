"""Who is at fault, judged from what ranks say; and batches of as many lanes as a run began with, on any ranks."""

import re
import socket
import sys
import threading
from datetime import timedelta
from fractions import Fraction
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from gem.cli import main
from gem.data.reader_lanes import Lanes, cut, shares
from gem.data.readers import Reader, ReaderStrategy
from gem.data.samples import merge
from gem.data.synthetic import Synthetic, SyntheticConfig
from gem.errors import RequestError
from gem.sharding.verdict import (
    Beat,
    Ended,
    Limits,
    Verdict,
    code_of,
    is_consequence,
    named,
    place_of,
    raised_at,
    silent,
    stuck,
    text_of,
)  # fmt: skip
from gem.sharding.watch import Watch
from gem.train.config import parse_config
from gem.train.world import join


def beats(*given: dict) -> dict[int, Beat]:
    return {rank: Beat(who=f"process {rank} of h", **one) for rank, one in enumerate(given)}


# -- who is at fault ---------------------------------------------------------------------------------------------------


def test_who_says_nothing_for_too_long_is_named_with_its_last_place():
    found = beats({"place": "step 3"}, {"place": "step 2"}, {"left": True}, {"place": "step 2"})
    quiet = {0: 0.0, 1: 7.0, 2: 99.0, 3: 9.0}
    text = silent(found, quiet, 5.0)
    assert text is not None and text.startswith("ranks 1, 3: no sign of life for 7 s")
    assert text.endswith("last in step 2, process 1 of h")
    assert silent(found, quiet, 10.0) is None  # who has left may be silent


def test_who_is_least_far_and_does_not_wait_holds_up_the_others():
    reading = {"moved": 10, "still": 8.0, "place": "step 6, reading its batch", "line": "gem/train/loop.py:1 in f"}
    waiting = {"moved": 11, "still": 7.5, "place": "step 6", "line": "gem/train/world.py:2 in sum", "waits": True}
    text = stuck(beats(waiting, reading, waiting), 8.0)
    assert text == (
        "rank 1: no progress for 8 s in step 6, reading its batch at gem/train/loop.py:1 in f, process 1 of h; the "
        "others wait in step 6 at gem/train/world.py:2 in sum"
    )
    same = reading | {"moved": 11}  # as far as the others: only its line tells
    assert (stuck(beats(waiting, same, waiting), 8.0) or "").startswith("rank 1: ")
    everyone = stuck(beats(waiting, waiting, waiting), 7.0)
    assert everyone is not None and everyone.startswith("ranks 0, 1, 2: ") and "others" not in everyone
    assert stuck(beats(waiting, reading), 8.5) is None
    assert stuck(beats(waiting, reading | {"patient": True}), 8.0) is None
    assert stuck(beats(waiting, reading | {"left": True}), 8.0) is None  # and rank 0 not long enough
    # A rank that has just gone on is not at fault, however long the others have waited for it.
    assert stuck(beats(waiting | {"still": 8.0}, reading | {"still": 0.1}), 8.0) is None


@given(
    st.lists(st.builds(Beat, moved=st.integers(0, 3), still=st.floats(0, 20), waits=st.booleans()), min_size=1),
    st.floats(1, 20),
)
def test_a_fault_is_found_only_of_who_stands_still_and_of_nobody_behind_whom_another_is(given, longest):
    text = stuck(dict(enumerate(given)), longest)
    if max(beat.still for beat in given) < longest:
        assert text is None
    if text is not None:
        first = given[int(text.split(":")[0].split()[1].rstrip(","))]
        assert first.moved == min(beat.moved for beat in given)


def test_limits_follow_from_one_number():
    assert Limits.of(600.0) == Limits(still=600.0, silent=60.0, gone=5.0, beat=1.0)
    short = Limits.of(5.0)
    assert short.still == short.silent == 5.0 and short.beat < short.gone < short.silent
    for wrong in (4.0, 1e18, float("inf"), float("nan")):  # which no clock of torch's can wait for
        with pytest.raises(RequestError, match="timeout_s = "):
            parse_config({"data": {"kind": "synthetic"}, "timeout_s": wrong}, "test")


def test_words_come_through_the_store_as_they_went():
    beat, verdict = Beat(3, 4, "step 1", 0.5, "x", True, False, True, "p"), Verdict(2, 'a "b"', 3)
    assert Beat.load(beat.dump().encode()) == beat and Verdict.load(verdict.dump()) == verdict
    assert named([2]) == "rank 2" and named(range(6)) == "ranks 0, 1, 2, 3 and 2 more"


def test_what_another_ranks_end_does_to_this_one_is_no_cause():
    gloo = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4"
    assert is_consequence(RuntimeError(gloo)) and is_consequence(torch.distributed.DistNetworkError("recv"))
    for cause in (RuntimeError("shape mismatch"), RequestError(gloo), OSError("gloo"), KeyboardInterrupt()):
        assert not is_consequence(cause)
    codes = [code_of(one) for one in (RequestError(""), KeyboardInterrupt(), ValueError())]
    assert codes == [2, 130, 3]


def test_an_error_is_one_line_with_its_place_in_gem():
    try:
        shares(0, 1, 0)
    except ZeroDivisionError as error:
        assert raised_at(error.__traceback__).startswith("gem/data/reader_lanes.py:")
        text = text_of(error, "step 2")
    assert text.startswith("in step 2: ZeroDivisionError: Fraction(0, 0) (gem/data/reader_lanes.py:")
    assert text_of(RequestError("a: b;\naccepted: c"), "step 2") == "a: b; accepted: c"
    line, waits = place_of(sys._getframe())
    assert line == "" and not waits  # no line of gem's


# -- lanes -------------------------------------------------------------------------------------------------------------

SOURCE = Synthetic(SyntheticConfig(samples=192, chunk=24))


@given(st.integers(1, 12), st.integers(1, 12))
def test_ranks_share_lanes_out_evenly_and_whole(lanes, ranks):
    taken = dict.fromkeys(range(lanes), Fraction(0))
    for rank in range(ranks):
        mine = shares(lanes, rank, ranks)
        assert sum(high - low for _, low, high in mine) == Fraction(lanes, ranks)
        for lane, low, high in mine:
            assert taken[lane] == low < high  # where the rank before it stopped
            taken[lane] = high
    assert set(taken.values()) == {1}


def reader(lanes: int, strategy: ReaderStrategy = "samples", rank: int = 0) -> Reader:
    return Reader(SOURCE, batch=8, base=4, pool=4, epochs=None, seed=3, rank=rank, ranks=lanes, strategy=strategy)


def steps(lanes: int, ranks: int, count: int, start: int = 0, **given) -> list[list[list[int]]]:
    """Keys of each rank's batch, by step."""
    streams = []
    for rank in range(ranks):
        own = Lanes(reader(lanes, **given), rank, ranks)
        own.load_state_dict(Lanes(reader(lanes, **given), 0, 1).state_dict() | {"delivered": start})
        streams.append([batch.keys.tolist() for batch in islice(own, count)])
    return [list(one) for one in zip(*streams, strict=True)]


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3, 5, 8]), st.sampled_from(["samples", "budget", "bbs"]))
def test_a_step_has_the_same_samples_on_any_number_of_ranks(lanes, ranks, strategy):
    """Over the end of an epoch, and from the middle of one."""
    count = 192 // (8 * lanes) + 2
    began = steps(lanes, lanes, count, strategy=strategy)
    other = steps(lanes, ranks, count, strategy=strategy)
    for one, another in zip(began, other, strict=True):
        assert sorted(chain(*one)) == sorted(chain(*another))
        assert len(another) == ranks
    assert steps(lanes, ranks, 2, start=3, strategy=strategy) == other[3:5]


def test_as_many_ranks_as_lanes_read_as_they_always_did():
    one = [batch.keys.tolist() for batch in islice(iter(reader(2, rank=1)), 20)]
    assert [batch[1] for batch in steps(2, 2, 20)] == one


def test_workers_change_no_batch():
    alone, dealt = Lanes(reader(3), 0, 2), Lanes(reader(3), 0, 2, workers=2)
    for a, b in islice(zip(alone, dealt, strict=True), 5):
        assert torch.equal(a.keys, b.keys) and len(a) == 12  # a lane and a half
    assert alone.delivered == dealt.delivered == 5


def test_shares_of_a_batch_leave_nothing_out_and_may_be_empty():
    batch = next(iter(reader(1)))
    parts = [cut(batch.take(0, 2), *one[1:]) for rank in range(4) for one in shares(1, rank, 4)]
    assert [len(part) for part in parts] == [0, 1, 0, 1]
    assert torch.equal(merge(parts).keys, batch.keys[:2])


def test_a_place_is_any_ranks_and_no_other_readers():
    place = Lanes(reader(4), 3, 4).state_dict()
    assert "rank" not in place["reader"] and place["reader"]["ranks"] == 4
    Lanes(reader(4), 0, 1).load_state_dict(place)
    old = place | {"reader": place["reader"] | {"rank": 3}}  # as it was stored before
    Lanes(reader(4), 0, 2).load_state_dict(old)
    with pytest.raises(RequestError, match="reader state: ranks 4; accepted: 2"):
        Lanes(reader(2), 0, 2).load_state_dict(place)
    with pytest.raises(RequestError, match="reader state: not one"):
        Lanes(reader(2), 0, 2).load_state_dict({})
    with pytest.raises(RequestError, match="rank 2 of 2; accepted"):
        Lanes(reader(2), 2, 2)


# -- who starts the ranks ----------------------------------------------------------------------------------------------

TWO = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{free}"}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two in the environment; accepted: a whole number, 1 or more"),
        ({"RANK": "2"}, "RANK=2 with WORLD_SIZE=2 in the environment; accepted: 0 to 1"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1 in the environment"),
        ({"MASTER_ADDR": None}, "the ranks' store, MASTER_ADDR not set, MASTER_PORT"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT abc: "),
        ({"MASTER_PORT": "{taken}"}, "EADDRINUSE"),
        ({"RANK": "1"}, "in which rank 0 is started too"),  # nobody serves it
    ],
    ids=str,
)
def test_an_environment_that_leads_to_no_ranks_is_one_line(changes, what, monkeypatch, capsys):
    with socket.socket() as taken, socket.socket() as free:
        for one in (taken, free):
            one.bind(("127.0.0.1", 0))
        taken.listen()
        ports = {"taken": taken.getsockname()[1], "free": free.getsockname()[1]}
        free.close()
        for name, value in (TWO | changes).items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value.format(**ports))
        with pytest.raises(RequestError, match=re.escape(what)) as caught, join("cpu", timeout_s=1.0):
            pass
        assert "\n" not in str(caught.value) and "; accepted: " in str(caught.value)
    if "WORLD_SIZE" in changes:  # which the command asks for before anything else
        with pytest.raises(SystemExit) as ended:
            main(["train", "none.toml"])
        assert ended.value.code == 2 and capsys.readouterr().err.strip() == f"gem: error: {caught.value}"


def test_who_hangs_once_rank_0_is_done_is_still_judged(monkeypatch):
    """Both ranks in this process; what would end it is noted instead."""
    ended: list[tuple[int, Verdict]] = []

    def quit_of(watch: Watch, verdict: Verdict) -> None:
        ended.append((watch.rank, verdict))
        watch._stop.set()

    monkeypatch.setattr(Watch, "_quit", quit_of)
    monkeypatch.setattr(Watch, "_tell", lambda watch, verdict, error=None: watch.store.set("told", "1"))
    store = HashStore()
    first, hung = Watch(store, 0, 2, 1.0), Watch(store, 1, 2, 1.0)
    other = threading.Thread(target=hung.begin)
    other.start()
    first.begin()
    other.join()
    hung.at("what it never leaves")
    first.leave()
    hung._stop_threads()
    assert dict(ended).keys() == {0, 1} and {verdict.code for _, verdict in ended} == {3}
    assert ended[0][1].text.startswith("rank 1: no progress for 1 s in what it never leaves")


def test_a_ranks_patient_work_is_told_as_such():
    watch = Watch(HashStore(), 0, 1, 5.0)
    with watch.patient("reading all data"):
        beat = watch._beat()
        assert beat.patient and beat.place == "reading all data"
    assert not watch._beat().patient


def test_torchs_own_timeout_comes_behind_the_watch(monkeypatch):
    given: dict[str, Any] = {}

    def group(backend: str, **more: Any) -> None:
        given.update(more)
        raise LookupError("no further")

    class Quiet(Watch):
        def begin(self) -> None:
            pass

        def end(self, error: BaseException) -> Verdict:
            return Verdict(0, str(error), 3)

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("gem.sharding.watch.connect", lambda timeout_s: (None, Quiet(HashStore(), 0, 2, timeout_s)))
    monkeypatch.setattr("torch.distributed.init_process_group", group)
    with pytest.raises(Ended, match="no further"), join("cpu", timeout_s=7.0):
        pass
    assert given["timeout"] == timedelta(seconds=67)
