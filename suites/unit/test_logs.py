"""Interaction logs: every format gives the same lengths, in bounded memory."""

import csv
import io
import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from gem.data import log_text
from gem.data.group_count import GroupCount
from gem.data.logs import read_lengths
from gem.errors import RequestError
from gem.paths import fixtures_dir

SAMPLES = fixtures_dir() / "samples"
# One made-up log of 66 interactions of 10 users, written in each format.
LENGTHS = [2, 4, 22, 13, 5, 9, 6, 3, 1, 1]


def write(directory, name: str, content: str | bytes):
    path = directory / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal(path, **request) -> str:
    """The message of the RequestError; it is one line that begins with the file."""
    with pytest.raises(RequestError) as caught:
        read_lengths(path, **request)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    return message.removeprefix(str(path))


# ---- formats


@pytest.mark.parametrize(
    ("name", "format", "rows"),
    [
        ("recbole.inter", "inter", 66),
        ("recbole.inter.gz", "inter", 66),
        ("movielens_ratings.csv", "movielens", 66),
        ("movielens_quoted.csv", "movielens", 66),
        ("movielens_ratings.dat", "movielens_dat", 66),
        ("u.data", "text", 66),
        ("kuairand.csv", "kuairand", 66),
        ("user_item.txt", "text", 66),
        ("yambda_flat.parquet", "yambda", 66),
        ("yambda_sequential.parquet", "yambda", 10),
        ("lengths.csv", "lengths", 10),
        ("lengths.txt", "lengths", 10),
        ("users.csv", "lengths", 10),
        ("lengths.parquet", "lengths", 10),
        ("lengths.npy", "lengths", 10),
        ("lengths.npz", "lengths", 10),
    ],
)
def test_sample_of_each_format(name, format, rows):
    found = read_lengths(SAMPLES / name)
    assert found.lengths.tolist() == LENGTHS and found.lengths.dtype == np.int64
    assert (found.format, found.rows) == (format, rows)
    assert name in found.source and format in found.source and "\n" not in found.source
    # What was detected can be asked for.
    assert read_lengths(SAMPLES / name, format=format).lengths.tolist() == LENGTHS


def test_sequences_are_read_when_asked_for(tmp_path):
    assert read_lengths(SAMPLES / "sequences.txt", format="sequences").lengths.tolist() == LENGTHS
    assert ":2:4: 5 fields; accepted: 3" in refusal(SAMPLES / "sequences.txt")
    assert "format='sequences'" in refusal(SAMPLES / "sequences.txt")
    twice = write(tmp_path, "twice.txt", "a 1 2\nb\na 3\n")
    assert read_lengths(twice, format="sequences").lengths.tolist() == [3, 0]
    assert ":2:1: the line is empty" in refusal(write(tmp_path, "gap.txt", "a 1\n\nb 2\n"), format="sequences")


HEADERS = {
    "userId,movieId,rating,timestamp": "movielens",
    '"userId","movieId","rating","timestamp"': "movielens",
    "userID\tmovieID\trating\tdate_day": "movielens",
    "user_id;item_id;rating;time": "csv",
    "item_id,rating,time,customer_id": "csv",
    "user item rating time": "csv",
}


@pytest.mark.parametrize("header", HEADERS)
def test_headers_old_and_new(tmp_path, header):
    separator = next(s for s in "\t,; " if s in header)
    at = next(i for i, name in enumerate(header.lower().split(separator)) if "user" in name or "customer" in name)
    rows = []
    for user in ("x", "y", "x", "z z" if separator != " " else "z", "x"):
        fields = ["1", "2", "3", "4"]
        fields[at] = user
        rows.append(separator.join(fields))
    found = read_lengths(write(tmp_path, "log.csv", "\n".join([header, *rows]) + "\n"))
    assert found.lengths.tolist() == [3, 1, 1] and found.format == HEADERS[header]


def test_what_text_may_look_like(tmp_path):
    def lengths(content, **request):
        return read_lengths(write(tmp_path, "log.csv", content), **request).lengths.tolist()

    assert lengths("user_id,item\r\n7,1\r\n8,2\r\n7,3\r\n") == [2, 1]
    assert lengths("user_id,item\n7,1\n8,2") == [1, 1], "no newline at the end"
    assert lengths("user_id,item\n\n7,1\n\n\n8,2\n\n") == [1, 1], "empty lines are no rows"
    assert lengths(b"\xef\xbb\xbfuser_id,item\n7,1\n") == [1], "byte order mark"
    assert lengths('user_id,title\n7,"a, ""b""\nc"\n7,d\n') == [2], "quoted separator, quote and newline"
    assert lengths("user_id,title\nJosé,é\nJosé,日本\n") == [2]
    assert lengths("7 1\n8 2\n7 3\n") == [2, 1]
    assert lengths("u7\ti1\nu8\ti2\nu7\ti3\n") == [2, 1]
    assert lengths('"7 1\n"7 2\nv" 3\n') == [2, 1], "a quote in plain text is a letter"
    assert lengths("007,1\n7,1\n7,2\n", column=1) == [1, 2], "users are tokens, not numbers"
    assert lengths("a,b\n5,3\n6,4\n", column="b", format="lengths") == [3, 4]
    assert lengths("a,b\n5,3\n6,3\n", column="b", format="csv") == [2]
    assert lengths("user_id,item_id,count\n7,1,5\n7,2,5\n") == [2], "a count beside an item is a feature"
    assert lengths("5\n0\n7\n") == [5, 0, 7]
    assert lengths("7,1\n8,2\n7,3\n", column=2) == [1, 1, 1]


def test_long_values_cross_the_blocks_of_the_reader(tmp_path, monkeypatch):
    monkeypatch.setattr(log_text, "MAX_LINE", 1 << 10)
    users = [f"user-{random.Random(i).randrange(300)}é" for i in range(3000)]
    path = write(tmp_path, "log.csv", "user_id,title\n" + "".join(f'{u},"ü,\n{i}"\n' for i, u in enumerate(users)))
    assert read_lengths(path).lengths.tolist() == list(Counter(users).values())


def test_same_as_a_plain_count_on_random_logs(tmp_path):
    rng = random.Random(0)
    for trial in range(20):
        users = [
            rng.choice(["a", "b,c", 'd"e', "f", "é", "g\nh"]) + str(rng.randrange(4))
            for _ in range(rng.randrange(1, 60))
        ]
        text = io.StringIO()
        writer = csv.writer(text, quoting=rng.choice([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]))
        writer.writerows([["item_id", "user_id"], *([str(i), u] for i, u in enumerate(users))])
        found = read_lengths(write(tmp_path, f"{trial}.csv", text.getvalue()))
        assert found.lengths.tolist() == list(Counter(users).values()) and found.rows == len(users)


def test_counting_in_folds_keeps_the_order_of_first_appearance():
    rng = random.Random(1)
    users = [rng.randrange(500) for _ in range(5000)]
    counter = GroupCount(fold_rows=64)
    for start in range(0, len(users), 37):
        counter.add(pa.array(users[start : start + 37]))
    assert counter.finish().tolist() == list(Counter(users).values())
    words = [rng.choice(["", "x", "é", "10", "9"]) for _ in range(200)]
    for kind in (pa.string(), pa.large_string(), pa.binary()):
        counter = GroupCount(fold_rows=3)
        whole = pa.array(["none", *words]).cast(kind)
        counter.add(whole.slice(1, 90))
        counter.add(whole.slice(91))
        assert counter.finish().tolist() == list(Counter(words).values())
    negative = GroupCount()
    negative.add(pa.array([-1, -9, 7, -1], pa.int8()))
    assert negative.finish().tolist() == [2, 1, 1]
    weighted = GroupCount(fold_rows=1)
    weighted.add(pa.array(["a", "b"]), pa.array([5, 0]))
    weighted.add(pa.array(["b", "a"]), pa.array([2, 1]))
    assert weighted.finish().tolist() == [6, 2]


def test_parquet_of_other_shapes(tmp_path):
    def lengths(table, **request):
        pq.write_table(pa.table(table), tmp_path / "x.parquet")
        return read_lengths(tmp_path / "x.parquet", **request).lengths.tolist()

    words = pa.array(["x", "y", "x"])
    assert lengths({"user_id": words, "item_id": [1, 2, 3]}) == [2, 1]
    assert lengths({"user_id": words.dictionary_encode(), "item_id": [1, 2, 3]}) == [2, 1]
    assert lengths({"user_id": words.cast(pa.string_view()), "item_id": [1, 2, 3]}) == [2, 1]
    assert lengths({"n": [4, 0]}) == [4, 0]
    assert lengths({"a": [4, 0], "b": [5, 6]}, column="b", format="lengths") == [5, 6]
    assert lengths({"a": [4, 4], "b": [5, 6]}, column="a", format="parquet") == [2]
    assert lengths({"history": [[1, 2], [], [3]]}) == [2, 0, 1]
    assert lengths({"uid": words, "history": [[1, 2], [], [3]]}) == [3, 0], "a user in two rows"
    assert lengths({"uid": words, "a": [[1], [], [3]], "b": [[1, 2], [], [3]]}, column="b") == [3, 0]


# ---- drawing a batch, progress


def test_draw_takes_users_by_seed_in_order():
    log = read_lengths(SAMPLES / "recbole.inter")
    assert log.draw() is log and log.draw(10) is log and log.draw(99) is log
    assert log.draw(4).lengths.tolist() == [
        LENGTHS[i] for i in (2, 4, 8, 9)
    ]  # RandomState(0).permutation(10)[:4], sorted
    assert log.draw(4, seed=1).lengths.tolist() != log.draw(4).lengths.tolist()
    assert "4 of 10 users" in log.draw(4).source
    with pytest.raises(RequestError, match=r"batch -1; accepted"):
        log.draw(-1)


def test_stats_are_plain_values():
    stats = read_lengths(SAMPLES / "recbole.inter").stats()
    assert (stats["users"], stats["total"], stats["p50"], stats["max"]) == (10, 66, 4, 22)


@pytest.mark.parametrize("name", ["recbole.inter", "recbole.inter.gz", "yambda_flat.parquet", "lengths.npy"])
def test_progress_ends_at_the_end(name):
    calls = []
    log = read_lengths(SAMPLES / name, progress=lambda *call: calls.append(call))
    size = (SAMPLES / name).stat().st_size
    assert calls[-1] == (size, size, log.rows)
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)


def test_progress_of_sequences_ends_at_the_end():
    calls = []
    read_lengths(SAMPLES / "sequences.txt", format="sequences", progress=lambda *call: calls.append(call))
    size = (SAMPLES / "sequences.txt").stat().st_size
    assert calls == [(size, size, 10)]


def test_progress_moves_while_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(log_text, "MAX_LINE", 1 << 12)
    path = write(tmp_path, "log.csv", "user_id,item\n" + "12,345\n" * 200_000)
    calls = []
    read_lengths(path, progress=lambda *call: calls.append(call))
    # Arrow reads some blocks ahead, here at most a tenth of the file.
    assert len(calls) > 300 and calls[0][0] < calls[-1][0] / 2


# ---- memory

_MEASURED = """
import sys
import gem.data.log_text, gem.data.log_binary
from gem.data.logs import read_lengths

def peak_kib():
    # Not ru_maxrss: a child starts with its parent's, here that of a pytest which holds torch.
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

before = peak_kib()
log = read_lengths(sys.argv[1])
print(log.rows, len(log.lengths), peak_kib() - before)
"""


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_memory_does_not_grow_with_the_rows(tmp_path, kind):
    """3 M rows of 50,000 users, not contiguous, ids of 40 letters: 150 MB, of which only blocks and users may stay."""
    rows = 3_000_000
    users = pa.array(np.random.default_rng(0).integers(0, 50_000, rows)).cast(pa.string())
    table = pa.table(
        {"user_id": pc.call_function("utf8_lpad", [users], pc.PadOptions(40, "0")), "item_id": np.arange(rows) % 977}
    )
    path = tmp_path / f"log.{kind}"
    if kind == "csv":
        pyarrow.csv.write_csv(table, path, pyarrow.csv.WriteOptions(quoting_style="none"))
    else:
        # One row group, the worst case; plainly encoded, as a column of more distinct values would be.
        pq.write_table(table, path, row_group_size=rows, use_dictionary=False, compression="none")
    del table, users
    done = subprocess.run([sys.executable, "-c", _MEASURED, str(path)], capture_output=True, text=True, check=True)
    read, found, grown_kib = map(int, done.stdout.split())
    assert (read, found) == (rows, 50_000)
    # Measured with pyarrow 26: 235 MiB (CSV), 184 (parquet); 296 to 570 if it folds late, pre-fetches or reads whole.
    assert grown_kib < 270 * 1024
