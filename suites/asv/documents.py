"""asv results from results documents: what `gem run` measured at a commit, without measuring it again.

A document is of one commit, the one that its environment names. A row is filed under the benchmark that its case makes
today only if the case was declared then as it is now: the version of a result is the hash of what was declared then.
"""

import io
import json
import math
import subprocess
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from gem.data.lengths import Profile, load_profile
from gem.errors import RequestError
from gem.harness.case import AnyCase, build_cases
from gem.harness.needs import Facts
from gem.harness.results import Document

from . import store
from .cases import KINDS, Found, generate


def revisions(root: Path, path: Path) -> Iterator[Document]:
    """The document in all that it has been in the repository's history, oldest first, then as it lies there now."""
    inside = path.resolve().relative_to(root).as_posix()
    texts: list[str] = []
    for commit in reversed(store.git(root, "log", "--format=%H", "--", inside).split()):
        try:
            texts.append(store.git(root, "show", f"{commit}:{inside}"))
        except RequestError:  # a commit that took it away
            continue
    texts.append(path.read_text(encoding="utf-8"))
    for text in dict.fromkeys(texts):
        if "rows" in json.loads(text):
            yield Document.model_validate_json(text)


def convert(document: Document, root: Path, module: str = "benchmarks") -> tuple[dict[str, Any], dict[str, Any]]:
    """(asv result, asv machine) of one document.

    Raises RequestError for a document of no commit, of a changed checkout, or of which no row is a benchmark's.
    """
    env = document.environment
    if not env.get("git_commit") or env.get("git_dirty"):
        what = "a checkout with changes" if env.get("git_dirty") else "no commit"
        raise RequestError(f"a document of {what} ({env.get('time')}); accepted: of a commit as it was")
    commit, date = store.commit_and_date(root, env["git_commit"])
    started = 1000 * int(datetime.fromisoformat(env["time"]).timestamp())
    facts = Facts(
        device=env["device"], capabilities=(_capability(env),) if env["device"] == "cuda" else (), triton=True
    )
    by_case: dict[str, Found] = {}
    for row in document.rows:
        by_case.setdefault(row.case_id, []).append(row.model_dump())
    results: dict[str, Any] = {}
    with declared_at(root, commit) as (cases, profile):
        measured = [case for case in cases if case.id in by_case]
        for name, made in generate(measured, facts, module=module, profile=profile).items():
            results |= _of_class(f"{module}.{name}", made, by_case[str(made.__doc__)], started)
    if not results:
        raise RequestError(f"a document of {commit[:10]} without a row of a declared benchmark; accepted: from gem run")
    machine = store.machine_facts(store.machine_name(env.get("gpu")), env)
    raw = {"commit_hash": commit, "date": date, "result_columns": store.COLUMNS, "results": results}
    return store.clean_result(raw, machine, store.software(env)), machine


def _capability(env: dict[str, Any]) -> int:
    return int(str(env.get("capability") or "0").replace(".", ""))


def _of_class(name: str, made: type, found: Found, started: int) -> dict[str, Any]:
    """asv's results of a class's benchmarks, made by their own functions from the rows of the case."""
    results = {}
    impls = made.params[0]  # type: ignore[attr-defined]
    for key, benchmark in vars(made).items():
        if key.startswith("track_") and not hasattr(benchmark, "measures_itself"):
            told = [_one(benchmark, made(), found, impl) for impl in impls]
            if any(value is not None and not math.isnan(value) for value, _ in told):
                results[f"{name}.{key}"] = _row(told, impls, made.version, started)  # type: ignore[attr-defined]
    return results


def _one(benchmark: Any, instance: object, found: Found, impl: str) -> tuple[float | None, dict[str, Any] | None]:
    """(value, statistics): nan where there is none to be had, None where it failed, as asv has it."""
    from asv_runner.benchmarks.mark import SkipNotImplemented
    from asv_runner.statistics import compute_stats

    try:
        value = benchmark(instance, found, impl)
    except SkipNotImplemented:
        return math.nan, None
    except RuntimeError:
        return None, None
    return compute_stats(value["samples"], value["number"]) if isinstance(value, dict) else (value, None)


def _row(told: list[tuple[float | None, dict[str, Any] | None]], impls: list[str], version: str, started: int) -> list:
    """A benchmark's row under `store.COLUMNS`."""
    row: list[Any] = [[value for value, _ in told], [[repr(impl) for impl in impls]], version, started, None]
    for column in store.COLUMNS[5:11]:
        key = column.removeprefix("stats_")
        values = [None if stats is None else stats.get(key) for _, stats in told]
        row.append(values if any(value is not None for value in values) else None)
    return row


@contextmanager
def declared_at(root: Path, commit: str) -> Iterator[tuple[list[AnyCase], Any]]:
    """The cases declared at a commit, and its length profiles by name. A suite not understood today is left out."""
    there = [name for name in ("suites", "fixtures") if store.git(root, "ls-tree", "--name-only", commit, name).strip()]
    archive = subprocess.run(
        ["git", "-C", str(root), "archive", commit, *there], capture_output=True, check=True
    ).stdout
    with tempfile.TemporaryDirectory(prefix="gem-asv-") as place:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(place, filter="data")
        lengths = Path(place) / "fixtures" / "lengths"
        known = frozenset(path.stem for path in lengths.glob("*.toml"))

        def profile(name: str) -> Profile:
            return load_profile(lengths / f"{name}.toml")

        cases: list[AnyCase] = []
        for file in (one for kind in KINDS for one in sorted((Path(place) / "suites" / kind).glob("*.toml"))):
            label = file.relative_to(place)
            try:
                document = tomllib.loads(file.read_text(encoding="utf-8"))
                cases += build_cases(document, file=file, label=label, fixtures=known)
            except RequestError:
                continue
        yield cases, profile
