"""asv's pages, made to work without a network: what they load from elsewhere is put beside them.

The packages come from the npm registry, in the versions that asv's page names (0.6.6; of flot there only the sources,
of stupidtable a later one). Without npm, or without its registry, the pages stay as asv makes them.
"""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from gem.errors import RequestError

# An address in asv's page, as a regular expression → npm package and file in it.
NEEDED = {
    r"jquery-3\.3\.1\.min\.js": ("jquery@3.3.1", "dist/jquery.min.js"),
    r"jquery\.flot\.min\.js": ("flot@0.8.3", "jquery.flot.js"),
    r"jquery\.flot\.time\.min\.js": ("flot@0.8.3", "jquery.flot.time.js"),
    r"jquery\.flot\.selection\.min\.js": ("flot@0.8.3", "jquery.flot.selection.js"),
    r"jquery\.flot\.categories\.min\.js": ("flot@0.8.3", "jquery.flot.categories.js"),
    r"jquery\.flot\.orderBars\.js": ("flot-orderbars@1.0.0", "js/jquery.flot.orderBars.js"),
    r"stupidtable\.min\.js": ("stupid-table-plugin@1.1.3", "stupidtable.min.js"),
    r"md5\.min\.js": ("blueimp-md5@2.19.0", "js/md5.min.js"),
    r"bootstrap\.min\.js": ("bootstrap@3.1.1", "dist/js/bootstrap.min.js"),
    r"bootstrap\.min\.css": ("bootstrap@3.1.1", "dist/css/bootstrap.min.css"),
}
FOLDER = "vendor"
_LINK = re.compile(r'<(?:script|link)\b[^>]*?\b(?:src|href)="(?P<url>https://[^"]+)"[^>]*>')
NPM_TIMEOUT_S = 120


def publish(root: Path, results: Path, html: Path) -> None:
    """Write the pages of kept results into `html`: of the benchmarks that have some, others would be empty frames.

    Raises RequestError with asv's last line.
    """
    with tempfile.TemporaryDirectory(prefix="gem-asv-") as place:
        copy = Path(place) / "results"
        shutil.copytree(results, copy)
        index = json.loads((copy / "benchmarks.json").read_text(encoding="utf-8"))
        shown = with_results(results)
        kept = {name: one for name, one in index.items() if name == "version" or (name, one["version"]) in shown}
        (copy / "benchmarks.json").write_text(json.dumps(kept), encoding="utf-8")
        conf = (root / "asv.conf.json").read_text(encoding="utf-8")
        for key, value in {"repo": root, "results_dir": copy, "html_dir": html}.items():
            conf, changed = re.subn(rf'("{key}": *)"[^"]*"', lambda m, v=value: f"{m[1]}{json.dumps(str(v))}", conf)
            assert changed == 1, key
        (Path(place) / "asv.conf.json").write_text(conf, encoding="utf-8")
        command = [sys.executable, "-m", "asv", "publish", "--no-pull"]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    if done.returncode:
        said = ((done.stderr + done.stdout).strip().splitlines() or ["it failed"])[-1]
        raise RequestError(f"asv publish: {said}; accepted: results of commits that this repository has")


def with_results(results: Path) -> set[tuple[str, str]]:
    """(name, version) of each benchmark that some machine has a result of."""
    found: set[tuple[str, str]] = set()
    for path in results.glob("*/*.json"):
        if path.name != "machine.json":
            document = json.loads(path.read_text(encoding="utf-8"))
            at = document["result_columns"].index("version")
            found |= {(name, row[at]) for name, row in document["results"].items() if len(row) > at and row[0]}
    return found


def bring_home(html: Path) -> None:
    """Put beside asv's page what it loads from elsewhere. Raises RequestError where npm cannot bring it."""
    page = html / "index.html"
    text = page.read_text(encoding="utf-8")
    wanted = {found["url"]: _package(found["url"]) for found in _LINK.finditer(text)}
    npm = shutil.which("npm")
    if npm is None:
        raise RequestError("the pages need a network: no npm on PATH; accepted: npm, to put beside them what they load")
    with tempfile.TemporaryDirectory(prefix="gem-asv-npm-") as place:
        packages = sorted({package for package, _ in wanted.values()})
        command = [npm, "pack", "--silent", "--prefer-offline", *packages]
        try:
            done = subprocess.run(
                command, cwd=place, capture_output=True, text=True, check=False, timeout=NPM_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise RequestError(f"npm pack: no answer in {NPM_TIMEOUT_S} s; accepted: a reachable registry") from None
        if done.returncode:
            said = ((done.stderr + done.stdout).strip().splitlines() or ["it failed"])[-1]
            raise RequestError(f"npm pack: {said}; accepted: a reachable registry")
        (html / FOLDER).mkdir(exist_ok=True)
        for url, (package, inside) in wanted.items():
            name, _, version = package.rpartition("@")
            with tarfile.open(Path(place) / f"{name}-{version}.tgz") as tar:
                member = tar.extractfile(f"package/{inside}")
                assert member is not None, f"{package} has no {inside}"
                (html / FOLDER / Path(inside).name).write_bytes(member.read())
            text = _with_home(text, url, f"{FOLDER}/{Path(inside).name}")
    page.write_text(text, encoding="utf-8")


def _package(url: str) -> tuple[str, str]:
    for pattern, found in NEEDED.items():
        if re.search(rf"/{pattern}$", url):
            return found
    raise RequestError(f"asv's page loads {url}, of which no package is known here; accepted: asv 0.6.6's pages")


def _with_home(text: str, url: str, home: str) -> str:
    """The page with one address replaced; its checksum is of the file at the address, minified by another hand."""

    def replaced(found: re.Match[str]) -> str:
        if found["url"] != url:
            return found[0]
        plain = re.sub(r'\s(?:integrity|crossorigin|referrerpolicy)="[^"]*"', "", found[0])
        return plain.replace(url, home)

    return _LINK.sub(replaced, text)
