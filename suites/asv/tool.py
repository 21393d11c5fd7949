"""What ci/asv asks of Python: the machine's name, asv's configuration, and results as the repository keeps them."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gem.errors import RequestError

from . import documents, publish, store

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0, 1 with one line on stderr, or 2 where results are kept of which some failed."""
    parser = argparse.ArgumentParser(prog="suites/asv", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "ci" / "measured" / "asv", help="folder of kept results")
    parser.add_argument("--machine", help="its stable name; derived from the GPU's, or cpu")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("name", help="print the machine's name")
    one = commands.add_parser(
        "prepare", help="asv's configuration and what it knows of the machine, in a scratch folder"
    )
    one.add_argument("scratch", type=Path)
    one.add_argument("repository", type=Path)
    one.add_argument("benchmarks", type=Path)
    one = commands.add_parser("keep", help="the results that asv left in a scratch folder")
    one.add_argument("scratch", type=Path)
    one.add_argument("--commit", help="whose they are, where asv could not know")
    one = commands.add_parser("failed", help="note that a commit could not be measured")
    one.add_argument("commit")
    one.add_argument("reason")
    one = commands.add_parser("index", help="asv's list of benchmarks, from a scratch folder")
    one.add_argument("scratch", type=Path)
    one = commands.add_parser("adopt", help="results that ci/asv --out left on another machine")
    one.add_argument("folder", type=Path)
    one = commands.add_parser("documents", help="results from documents of gem run, in all their revisions")
    one.add_argument("files", type=Path, nargs="+")
    one = commands.add_parser("publish", help="pages of the kept results, that need no network")
    one.add_argument("--html", type=Path, default=ROOT / "results" / "asv" / "html", help="folder of the pages")
    given = parser.parse_args(arguments)
    try:
        return _COMMANDS[given.command](given)
    except (RequestError, ValueError, OSError) as error:
        print(f"asv: {error}", file=sys.stderr)
        return 1


def _name(given: argparse.Namespace) -> str:
    return store.checked_name(given.machine or store.machine_name(store.here()["gpu"]))


def print_name(given: argparse.Namespace) -> int:
    """The name alone on a line."""
    print(_name(given))
    return 0


def prepare(given: argparse.Namespace) -> int:
    """asv looks for its configuration where it is told, and for machines in the home directory."""
    name = _name(given)
    conf = {
        "version": 1, "project": "gem", "project_url": "", "repo": str(given.repository), "branches": ["HEAD"],
        "dvcs": "git", "environment_type": "existing", "benchmark_dir": str(given.benchmarks),
        "env_dir": str(given.scratch / "env"), "results_dir": str(given.scratch / "results"),
        "html_dir": str(given.scratch / "html"),
        # Its server would fork from a process that has imported the benchmarks: of the commit before.
        "launch_method": "spawn",
    }  # fmt: skip
    machine = store.machine_facts(name, store.here())
    home = given.scratch / "home"
    home.mkdir(parents=True, exist_ok=True)
    machines = {name: {key: value for key, value in machine.items() if key != "version"}, "version": 1}
    (home / ".asv-machine.json").write_text(json.dumps(machines), encoding="utf-8")
    (given.scratch / "asv.conf.json").write_text(json.dumps(conf), encoding="utf-8")
    return 0


def keep(given: argparse.Namespace) -> int:
    """Each result file of the scratch folder; a file is removed once it is kept."""
    env, name = store.here(), _name(given)
    machine, told, failed = store.machine_facts(name, env), store.software(env), 0
    files = [path for path in sorted((given.scratch / "results" / name).glob("*.json")) if path.name != "machine.json"]
    for path in files:
        document = json.loads(path.read_text(encoding="utf-8"))
        if given.commit:
            document["commit_hash"] = given.commit
        kept = store.clean_result(document, machine, told)
        where = store.keep(kept, machine, given.out)
        failed += store.failures(kept)
        print(f"{where}: {len(kept['results'])} benchmarks, {store.failures(kept)} failed")
        path.unlink()
    if not files:
        raise RequestError(f"{given.scratch}: asv left no results; accepted: those of a run")
    return 2 if failed else 0


def failed(given: argparse.Namespace) -> int:
    """A line in not-measured.txt."""
    store.note_failure(given.out, _name(given), given.commit, given.reason)
    return 0


def index(given: argparse.Namespace) -> int:
    """Without it asv publishes nothing: results of benchmarks that it does not list are left out."""
    document = json.loads((given.scratch / "results" / "benchmarks.json").read_text(encoding="utf-8"))
    store.refuse_places(document)
    store.write_json(given.out / "benchmarks.json", document)
    return 0


def adopt(given: argparse.Namespace) -> int:
    """A machine without the repository knows neither a commit's whole hash nor its date: here they are known."""
    found = [path for path in sorted(given.folder.glob("*/*.json")) if path.name != "machine.json"]
    for path in found:
        document = json.loads(path.read_text(encoding="utf-8"))
        machine = json.loads((path.parent / "machine.json").read_text(encoding="utf-8"))
        document["commit_hash"], document["date"] = store.commit_and_date(ROOT, document["commit_hash"])
        told = {key: document["params"][key] for key in store.SOFTWARE if key in document["params"]}
        print(store.keep(store.clean_result(document, machine, told), machine, given.out))
    if not found:
        raise RequestError(f"{given.folder}: no results; accepted: a folder that ci/asv --out wrote")
    return 0


def from_documents(given: argparse.Namespace) -> int:
    """A document that cannot become results is said and passed over; none at all is an error."""
    kept = 0
    for file in given.files:
        for document in documents.revisions(ROOT, file):
            try:
                result, machine = documents.convert(document, ROOT)
            except RequestError as error:
                print(f"{file}: left out: {error}", file=sys.stderr)
                continue
            print(f"{store.keep(result, machine, given.out)}: {len(result['results'])} benchmarks")
            kept += 1
    if not kept:
        raise RequestError("none of the documents became results; accepted: documents of gem run at a commit")
    return 0


def publish_pages(given: argparse.Namespace) -> int:
    """asv's pages; where what they load cannot be put beside them, that is said."""
    html = given.html.resolve()
    html.parent.mkdir(parents=True, exist_ok=True)
    publish.publish(ROOT, given.out.resolve(), html)
    print(f"{html / 'index.html'}: to be served, as by {Path(sys.executable).name} -m http.server -d {html}")
    publish.bring_home(html)
    return 0


_COMMANDS = {
    "name": print_name, "prepare": prepare, "keep": keep, "failed": failed, "index": index, "adopt": adopt,
    "documents": from_documents, "publish": publish_pages,
}  # fmt: skip
