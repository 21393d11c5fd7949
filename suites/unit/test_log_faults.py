"""Broken logs: each ends in one line with file, line and column; none in lengths of a part, a traceback or a hang."""

import gzip
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem.data import log_faults, log_text
from gem.data.logs import FORMATS, read_lengths
from gem.errors import RequestError
from gem.paths import fixtures_dir

SAMPLES = fixtures_dir() / "samples"
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
        ("log.csv", "userId,movieId,rating\n\n\n", ":1: a header and no rows"),
        ("log.csv", "x7,12\nx8,13\n", ":1: no header"),
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
    lines[800_000] = "5,\0"
    assert refusal(write(tmp_path, "log.csv", "\n".join(lines))).startswith(":800001:2: byte 3 of the line is 0x00")


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
    np.savez(tmp_path / "pickled.npz", np.array([{}], dtype=object), allow_pickle=True)
    assert refusal(tmp_path / "pickled.npz").startswith(": broken npy or npz")
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
    users = SAMPLES / "users.csv"
    assert read_lengths(users, column="length").lengths.tolist() == LENGTHS
    assert read_lengths(users, column="user_id").lengths.tolist() == [1] * 10
    assert ":1: column 'country' may hold users or lengths" in refusal(users, column="country")
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
