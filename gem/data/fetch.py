"""Public data sets for the examples, fetched through the package index: `python -m gem.data.fetch ml-100k [DEST]`.

The data is not part of gem (its licence does not allow passing it on), but a Python package that carries it is on the
index. pip brings that one file, which is checked by its hash, unpacked and moved into place.
"""

import argparse
import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from gem.errors import RequestError, exit_code_of


@dataclass(frozen=True)
class DataSet:
    """A file inside a wheel, and where it goes by default."""

    package: str
    version: str
    member: str
    sha256: str
    destination: str


DATA_SETS = {
    # MovieLens 100K of GroupLens: 943 users, 100,000 ratings; histories mean 106, p50 65, p90 245, p99 448, max 737.
    "ml-100k": DataSet(
        package="recbole",
        version="1.2.1",
        member="recbole/dataset_example/ml-100k/ml-100k.inter",
        sha256="4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
        destination="results/data/ml-100k.inter",
    ),
}


def fetch(name: str, destination: str | Path | None = None) -> Path:
    """Path of the data set, downloaded unless it is there already. RequestError if it cannot be had."""
    if name not in DATA_SETS:
        raise RequestError(f"data set {name!r}; accepted: {', '.join(DATA_SETS)}")
    data = DATA_SETS[name]
    target = Path(destination or data.destination)
    if target.is_dir():
        target = target / Path(data.member).name
    if target.exists():
        if target.is_file() and _sha256(target.read_bytes()) == data.sha256:
            return target
        raise RequestError(f"{target}: exists and is not {name}; accepted: a free path, or the file as it was fetched")
    with tempfile.TemporaryDirectory() as scratch:
        return extract(download(data, Path(scratch)), data, target)


def download(data: DataSet, directory: Path) -> Path:
    """The wheel in `directory`, through pip and its configured index."""
    wanted = f"{data.package}=={data.version}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        done = subprocess.run([*pip, "--dest", str(directory), wanted], capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        raise RequestError(f"pip download {wanted}: no answer in 600 s") from None
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip() or done.stdout.strip() or "no wheel").splitlines()[-1]
        raise RequestError(f"pip download {wanted}: {said}")
    return wheels[0]


def extract(wheel: Path, data: DataSet, target: Path) -> Path:
    """Unpack the data set from the wheel to `target`, which appears whole and right or not at all."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(data.member)
    except KeyError:
        raise RequestError(f"{wheel.name}: has no {data.member}; accepted: {data.package} {data.version}") from None
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise RequestError(f"{wheel.name}: broken wheel: {error}") from None
    found = _sha256(content)
    if found != data.sha256:
        raise RequestError(f"{wheel.name}: {data.member} has sha256 {found}; accepted: {data.sha256}")
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        os.replace(part, target)
    except OSError as error:
        with contextlib.suppress(OSError):  # the part may not be there, nor may its directory
            part.unlink()
        raise RequestError(f"{target}: cannot be written: {error.strerror or error}") from None
    return target


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Command line: prints the path of the file; 2 and one line on stderr when the request was wrong."""
    parser = argparse.ArgumentParser(prog="python -m gem.data.fetch", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help=f"one of: {', '.join(DATA_SETS)}")
    parser.add_argument("destination", nargs="?", help="file or directory (default: results/data/)")
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: print(fetch(options.name, options.destination)))


if __name__ == "__main__":
    sys.exit(main())
