"""Interaction logs: every format gives the same lengths, and a broken file one line with file, line and column."""

import csv
import gzip
import io
import random
import subprocess
import sys
import zipfile
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from gem.data import log_faults, log_text
from gem.data.group_count import GroupCount
from gem.data.logs import FORMATS, read_lengths
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
    assert lengths('u"7 1\nu"7 2\nv 3\n') == [2, 1], "a quote in plain text is a letter"
    assert lengths("007,1\n7,1\n7,2\n", column=1) == [1, 2], "users are tokens, not numbers"
    assert lengths("a,b\n5,3\n6,4\n", column="b", format="lengths") == [3, 4]
    assert lengths("a,b\n5,3\n6,3\n", column="b", format="csv") == [2]
    assert lengths("5\n0\n7\n") == [5, 0, 7]
    assert lengths("7,1\n8,2\n7,3\n", column=2) == [1, 1, 1]


def test_long_values_cross_the_blocks_of_the_reader(tmp_path, monkeypatch):
    monkeypatch.setattr(log_text, "MAX_LINE", 1 << 10)
    users = [f"user-{random.Random(i).randrange(300)}é" for i in range(3000)]
    path = write(tmp_path, "log.csv", "user_id,title\n" + "".join(f'{u},"ü, {i}"\n' for i, u in enumerate(users)))
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


def test_progress_moves_while_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(log_text, "MAX_LINE", 1 << 12)
    path = write(tmp_path, "log.csv", "user_id,item\n" + "12,345\n" * 20_000)
    calls = []
    read_lengths(path, progress=lambda *call: calls.append(call))
    assert len(calls) > 20 and calls[len(calls) // 4][0] < calls[-1][0]


# ---- broken text: FILE:LINE:COLUMN

CSV = "userId,movieId,rating\n1,2,3\n4,5,6\n7,8,9\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("log.csv", CSV[:-5], ":4:1: 1 field; accepted: 3 (userId, movieId, rating)"),  # truncated: "7,8,9" -> "7"
        ("log.csv", CSV.replace("4,5,6", "4,5"), ":3:2: 2 fields; accepted: 3"),
        ("log.csv", CSV.replace("4,5,6", "4,5,6,7"), ":3:4: 4 fields; accepted: 3"),
        ("log.csv", "\n".join(["userId,movieId,rating", "", "1,2,3", "", "4,5"]), ":5:2: 2 fields"),
        ("log.csv", CSV.replace("4,5,6", ",5,6"), ":3:1: userId is empty"),
        ("log.csv", CSV.replace("4,5,6", '4,"5,6'), ":3: quotes do not match"),
        ("log.csv", CSV.replace("userId", "movieId"), ":1:2: header names 'movieId' twice (column 1, 2)"),
        ("log.csv", CSV.replace("userId", "who"), ":1: no user column among who, movieId, rating; accepted: user_id"),
        ("log.csv", "userId,movieId,rating\n", ":1: a header and no rows"),
        ("log.csv", "userId,movieId,rating", ":1: a header and no rows"),
        ("log.csv", "", ": the file is empty"),
        ("log.csv", b"\xef\xbb\xbf", ": the file is empty"),
        ("log.csv", "\n" + CSV, ":1: the first line is empty"),
        ("log.csv", "1,2,3\n4,5,6\n", ":1: no header; accepted: a header with a user column, or column=NUMBER"),
        ("log.csv", CSV.encode().replace(b"4,5", b"4,\xe9"), ":3:2: byte 3 of the line is 0xe9: not UTF-8"),
        ("log.csv", CSV.encode("utf-16"), ":1: byte 1 of the line is 0xff: not UTF-8"),
        ("log.csv", CSV.encode().replace(b"7,8", b"7,\0"), ":4:2: byte 3 of the line is 0x00: binary data"),
        ("log.csv", CSV.encode() + b"1,2,\xc3", ":5:3: byte 5 of the line is 0xc3: not UTF-8"),  # cut inside a letter
        ("log.csv", bytes(range(256)) * 40, ":1: byte 1 of the line is 0x00: binary data"),
        ("log.inter", "user_id:token\titem_id\n1\t2\n", ":1:2: header field 'item_id'; accepted in .inter: name:token"),
        ("log.inter", "1\t2\n", ":1:1: header field '1'"),
        ("log.inter", "u:token\titem_id:token\n1\t2\n", ":1: no user column among u:token, item_id:token"),
        ("log.inter", "user_id:token\titem_id:token\n1\t2\n1 2\n", ":3:1: 1 field; accepted: 2"),
        ("ratings.dat", "1::2::3\n1::2\n", ":2:2: 2 fields; accepted: 3 (user, item, rating)"),
        ("ratings.dat", "1::2::3\n1:2::3:\n", ":2:2: 2 fields"),
        ("ratings.dat", "1::2::3\n1:a:2:b:3\n", ":2:1: 1 field"),
        ("log.txt", "1 2\n3\n", ":2:1: 1 field; accepted: 2 (user, item)"),
        ("log.txt", "1 2\n3  4\n", ":2:3: 3 fields; accepted: 2 (user, item)"),
        ("log.txt", "who what\n3 4\n", ":1: no user column among who, what"),
        ("lengths.csv", "length\n5\nsix\n", ":3:1: length = 'six'; accepted: a length, a whole number 0 or more"),
        ("lengths.csv", "length\n5\n6.5\n", ":3:1: length = '6.5'"),
        ("lengths.csv", "length\n5\n-6\n", ":3:1: length = '-6'"),
        ("lengths.csv", "length\n5\n\n6\n", ":3:1: length = ''"),
        (
            "lengths.csv",
            "length\n5\n99999999999999999999\n",
            ":3:1: length = 99999999999999999999; accepted: a length below",
        ),
        ("lengths.csv", "user_id,length\n1,5\n2,x\n", ":3:2: length = 'x'"),
        ("lengths.txt", "-5\n6\n", ":1:1: length = '-5'"),
        ("lengths.txt", "5\n1O\n", ":2:1: length = '1O'"),
        ("lengths.csv", "length\n", ":1: a header and no rows"),
    ],
)
def test_broken_text(tmp_path, name, content, message):
    assert refusal(write(tmp_path, name, content)).startswith(message)
    if content:  # the same inside gzip
        assert refusal(
            write(tmp_path, name + ".gz", gzip.compress(write(tmp_path, name, content).read_bytes()))
        ).startswith(message)


def test_faults_far_into_a_file_have_their_line(tmp_path):
    lines = ["user_id,item_id", *(f"{i % 977},{i}" for i in range(1_000_000))]
    lines[800_000] = "5"
    assert refusal(write(tmp_path, "log.csv", "\n".join(lines) + "\n")).startswith(":800001:1: 1 field; accepted: 2")
    lines[800_000] = "5,é"
    path = write(tmp_path, "log.csv", "\n".join(lines).encode("latin-1"))
    assert refusal(path).startswith(":800001:2: byte 3 of the line is 0xe9")


def test_a_line_without_end_is_refused_without_reading_it_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(log_text, "MAX_LINE", 1 << 12)
    monkeypatch.setattr(log_faults, "MAX_LINE", 1 << 12)
    assert refusal(write(tmp_path, "a.csv", "user_id,item\n1,2\n" + "x" * 9000)).startswith(
        ":3: the line is longer than"
    )
    assert refusal(write(tmp_path, "b.csv", "x" * 9000)).startswith(":1: the line is longer than")
    monkeypatch.setattr(log_text, "_MAX_SEQUENCE", 1 << 12)
    long = write(tmp_path, "c.txt", "1 2\n" + "3 " * 9000)
    assert refusal(long, format="sequences").startswith(":2: the line is longer than")


@pytest.mark.parametrize("cut", [4, 15, 40, 400, 640])
def test_truncated_gzip(tmp_path, cut):
    whole = (SAMPLES / "recbole.inter.gz").read_bytes()
    assert ": broken gzip after" in refusal(write(tmp_path, "log.inter.gz", whole[:cut]))


def test_damaged_gzip(tmp_path):
    whole = bytearray((SAMPLES / "recbole.inter.gz").read_bytes())
    whole[-6] ^= 0xFF  # the checksum
    assert ": broken gzip after" in refusal(write(tmp_path, "log.inter.gz", bytes(whole)))


# ---- broken parquet, npy, npz


@pytest.mark.parametrize("cut", [4, 100, 2000, -1])
def test_truncated_parquet(tmp_path, cut):
    whole = (SAMPLES / "yambda_flat.parquet").read_bytes()
    assert refusal(write(tmp_path, "log.parquet", whole[:cut])).startswith(": broken parquet: ")


def test_damaged_parquet(tmp_path):
    whole = bytearray((SAMPLES / "yambda_flat.parquet").read_bytes())
    whole[4:400] = bytes(396)
    assert refusal(write(tmp_path, "log.parquet", bytes(whole))).startswith(": broken parquet: ")


@pytest.mark.parametrize("name", ["log.parquet", "log.pq", "log.npy", "log.npz"])
def test_suffix_that_promises_something_else(tmp_path, name):
    assert "file although named so" in refusal(write(tmp_path, name, CSV))


def test_content_goes_before_a_text_suffix(tmp_path):
    path = write(tmp_path, "log.csv", (SAMPLES / "yambda_flat.parquet").read_bytes())
    assert read_lengths(path).lengths.tolist() == LENGTHS


@pytest.mark.parametrize(
    ("table", "request_", "message"),
    [
        ({"uid": [1, None], "item_id": [1, 2]}, {}, ": row 2, column uid: null"),
        (
            {"uid": [1.5, 2.5], "item_id": [1, 2]},
            {},
            ": column 1 (uid) is double; accepted as users: integers or strings",
        ),
        ({"length": [1.5]}, {}, ": column 1 (length) is double; accepted as lengths: integers"),
        ({"length": [4, 5, -1]}, {}, ": row 3, column length: -1; accepted: a length"),
        ({"length": pa.array([2**63], pa.uint64())}, {}, ": row 1, column length: 9223372036854775808"),
        ({"length": pa.array([], pa.int64())}, {}, ": no rows"),
        ({"who": [1], "what": [2]}, {}, ": no user column among who, what"),
        ({"who": [1], "what": [2]}, {"column": "why"}, ": no column 'why'; accepted: who, what, or a number 1 to 2"),
        ({"who": [1], "what": [2]}, {"column": "who"}, ": column 'who' may hold users or lengths"),
        ({"uid": [1], "a": [[1]], "b": [[2]]}, {}, ": which list holds the history? accepted: column= one of a, b"),
        ({"uid": [1], "item_id": [None]}, {"column": "item_id", "format": "lengths"}, ": column 2 (item_id) is null"),
        ({"uid": [1, 2], "item_id": [[3], None]}, {}, ": row 2, column item_id: null"),
        ({"user_id": [1], "item_id": [2]}, {"format": "yambda"}, ": not of format yambda but parquet"),
    ],
)
def test_broken_parquet_content(tmp_path, table, request_, message):
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    assert refusal(tmp_path / "x.parquet", **request_).startswith(message)


def test_fault_in_a_later_batch_of_parquet(tmp_path):
    values = np.ones(1_500_000, dtype=np.int32)
    values[1_400_000] = -7
    pq.write_table(pa.table({"length": values}), tmp_path / "x.parquet")
    assert refusal(tmp_path / "x.parquet").startswith(": row 1400001, column length: -7")


def test_broken_numpy(tmp_path):
    def saved(values, name="x.npy"):
        np.save(tmp_path / name, values)
        return tmp_path / name

    assert refusal(saved(np.array([1.5]))).startswith(": array is float64 of shape (1,); accepted: integers")
    assert refusal(saved(np.ones((2, 2), dtype=int))).startswith(": array is int64 of shape (2, 2)")
    assert refusal(saved(np.array([3, -2]))).startswith(": row 2, array: -2; accepted: a length")
    assert refusal(saved(np.array([], dtype=int))).startswith(": array is empty")
    whole = saved(np.arange(100)).read_bytes()
    for cut in (6, 20, 128, 300):
        assert refusal(write(tmp_path, "cut.npy", whole[:cut])).startswith(": broken npy or npz")
    np.save(tmp_path / "pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert refusal(tmp_path / "pickled.npy").startswith(": broken npy or npz")
    np.savez(tmp_path / "two.npz", a=np.array([1]), b=np.array([2, 3]))
    assert refusal(tmp_path / "two.npz").startswith(": 2 arrays; accepted: column= one of a, b")
    assert read_lengths(tmp_path / "two.npz", column="b").lengths.tolist() == [2, 3]
    assert refusal(write(tmp_path, "cut.npz", (tmp_path / "two.npz").read_bytes()[:200])).startswith(
        ": broken npy or npz"
    )
    with zipfile.ZipFile(tmp_path / "other.npz", "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert refusal(tmp_path / "other.npz").startswith(": ")


# ---- requests that do not fit the file


def test_requests_that_do_not_fit(tmp_path):
    log = write(tmp_path, "log.csv", CSV)
    with pytest.raises(RequestError, match="log format 'cvs'; accepted: inter, movielens,"):
        read_lengths(log, format="cvs")
    assert (
        refusal(log, format="kuairand") == f":1: not of format kuairand but movielens; accepted: {FORMATS['kuairand']}"
    )
    assert refusal(log, format="yambda").startswith(": not parquet; accepted for format yambda")
    assert refusal(log, format="inter").startswith(":1:1: header field 'userId'")
    assert refusal(log, column="nobody").startswith(":1: no column 'nobody'; accepted: userId, movieId, rating")
    assert refusal(log, column="rating").startswith(
        ":1: column 'rating' may hold users or lengths; accepted: format='csv'"
    )
    assert refusal(log, format="lengths").startswith(":1: which column holds the lengths?")
    assert refusal(SAMPLES / "lengths.npy", format="csv").startswith(": a numpy file; accepted for format csv")
    assert refusal(SAMPLES / "lengths.npy", format="yambda").startswith(": not parquet")
    assert refusal(tmp_path).startswith(": a directory; accepted: one file")
    assert refusal(tmp_path / "no.csv").startswith(": No such file or directory")
    assert refusal(write(tmp_path, "one.txt", "7\n8\n"), format="text").startswith(
        ":1:1: one field; accepted: user and item"
    )


def test_every_prefix_of_a_log_is_read_or_refused(tmp_path):
    """Whatever a copy that broke off left over: lengths of whole rows or one clear line, nothing else."""
    for name in ("movielens_quoted.csv", "recbole.inter.gz", "lengths.parquet", "lengths.npz"):
        whole = (SAMPLES / name).read_bytes()
        for cut in range(0, len(whole), 7 if len(whole) < 700 else 37):
            path = write(tmp_path, name, whole[:cut])
            try:
                assert sum(read_lengths(path).lengths) <= 66
            except RequestError as error:
                assert str(error).startswith(str(path)) and "\n" not in str(error)


# ---- memory

_MEASURED = """
import resource, sys
import numpy as np
import gem.data.log_text, gem.data.log_binary
from gem.data.logs import read_lengths
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
log = read_lengths(sys.argv[1])
print(log.rows, len(log.lengths), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_memory_does_not_grow_with_the_rows(tmp_path, kind):
    """3 M rows of 50,000 users, not contiguous: 110 MB of text, of which no more than the blocks and users may stay."""
    rows = 3_000_000
    users = np.random.default_rng(0).integers(0, 50_000, rows) + 10_000_000
    table = pa.table({"user_id": users, "item_id": np.arange(rows) + 10**9, "time_ms": np.arange(rows) + 16 * 10**11})
    path = tmp_path / f"log.{kind}"
    if kind == "csv":
        pyarrow.csv.write_csv(table, path)
    else:
        pq.write_table(table, path, row_group_size=rows)  # one row group, the worst case
    done = subprocess.run([sys.executable, "-c", _MEASURED, str(path)], capture_output=True, text=True, check=True)
    read, found, grown_kib = map(int, done.stdout.split())
    assert (read, found) == (rows, 50_000)
    # A fold holds at most 4 M users of 8 bytes + offsets + counts; whole columns of strings alone would be twice that.
    assert grown_kib < 400 * 1024
