"""The gate's documents: found, paired by round, checked that they can be compared at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gem.errors import RequestError
from gem.harness.names import PEERS
from gem.harness.results import Document, Row, read_document

# Where these differ, a difference in time says nothing about the code.
_MACHINE = (
    "device", "gpu", "gpu_count", "capability", "driver", "power_limit_w", "cpu", "cpu_capability", "cores",
    "threads", "torch", "triton", "cuda", "numpy", "python",
)  # fmt: skip
_OPTIONS = ("peers", "impls", "lengths", "batch", "budget_s", "ranks", "data")  # the last two of trainings
_TREES = ("config", "model")  # of trainings: told field by field
# Which commit it is, of sources without their repository; what torch sets itself under torchrun; where a cache lies.
_NOT_A_SETTING = ("GEM_COMMIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHINDUCTOR_CACHE_DIR")
_NOT_SET = type("NotSet", (), {"__repr__": lambda self: "not set"})()
PAIRED = "turns_with"  # see gate_rounds.py
Key = tuple[str, str, str, str, str]  # suite, case, impl, direction, metric


@dataclass(frozen=True)
class Pair:
    """One round: a document of each side. `paired`: their turns alternated, so that sample i lies beside sample i."""

    base: Document
    new: Document
    name: str
    paired: bool


def own_rows(document: Document, where: str | Path = "a document") -> dict[Key, Row]:
    """The rows of the subject's own contestants; those of whole cases (without impl) among them.

    Raises RequestError, naming `where` and the row, where two are of one key: which of them counts, nobody knows.
    """
    found: dict[Key, Row] = {}
    for row in document.rows:
        if row.impl in PEERS:
            continue
        key = (row.suite, row.case, row.impl, row.direction, row.metric)
        if key in found:
            name = " ".join(filter(None, (row.case_id, *key[2:])))
            raise RequestError(f"{where}: more than one row of {name}; accepted: one a case, impl, direction, metric")
        found[key] = row
    return found


def find_documents(given: str | Path) -> list[Path]:
    """The documents that an argument names: a file, a folder's *.json, or several of these with commas between them.

    Raises RequestError for a path that is not there and for a folder without any.
    """
    found: list[Path] = []
    for part in str(given).split(","):
        path = Path(part)
        if path.is_dir():
            files = sorted(path.glob("*.json"))
            if not files:
                raise RequestError(f"{path}: no *.json in it; accepted: documents written by gem run")
            found += files
        elif not path.is_file():
            raise RequestError(f"{path}: no such file or directory; accepted: documents written by gem run")
        else:
            found.append(path)
    return found


def read_pairs(base: str | Path, new: str | Path, allow_different: bool = False) -> tuple[list[Pair], list[str]]:
    """The rounds, in the order of the documents' names, and in what they differ (empty unless `allow_different`).

    Raises RequestError when the sides have different numbers of documents, when one was interrupted or has two
    rows of one thing, or when they come from different machines, software, options or lengths (see `differences`).
    """
    files = find_documents(base), find_documents(new)
    if len(files[0]) != len(files[1]):
        raise RequestError(
            f"{base} has {len(files[0])} documents, {new} has {len(files[1])}; accepted: as many, paired by round"
        )
    pairs = []
    for one, other in zip(*files, strict=True):
        documents = read_document(one), read_document(other)
        for path, document in zip((one, other), documents, strict=True):
            if document.request.get("interrupted"):
                raise RequestError(f"{path}: of a run that was interrupted; accepted: whole runs")
            own_rows(document, path)
        tokens = [document.request.get(PAIRED) for document in documents]
        pairs.append(Pair(*documents, other.stem, tokens[0] is not None and tokens[0] == tokens[1]))
    differing = differences(pairs)
    if differing and not allow_different:
        raise RequestError(f"{base} and {new} cannot be compared: {'; '.join(differing)} (see --allow-different)")
    return pairs, differing


def read_fresh(
    base: str | Path, new: str | Path, screen: Sequence[Pair], allow_different: bool = False
) -> tuple[list[Pair], list[str]]:
    """Fresh rounds of suspects, as `read_pairs`; the differences are those from the rounds of the screen too.

    Raises RequestError as `read_pairs` does, and when they are of other machines, commits, options than the screen.
    """
    pairs, _ = read_pairs(base, new, allow_different)
    differing = differences([*screen, *pairs])
    if differing and not allow_different:
        raise RequestError(
            f"{base} and {new} are no fresh rounds of those documents: {'; '.join(differing)} (see --allow-different)"
        )
    return pairs, differing


def differences(pairs: Sequence[Pair]) -> list[str]:
    """In what any of the documents differs from the first: machine, software, options, the lengths of a fixture; in
    what those of a side are of several commits; and which say nothing of their machine."""
    sides = {"base": [pair.base for pair in pairs], "change": [pair.new for pair in pairs]}
    facts = [_facts(document) for pair in pairs for document in (pair.base, pair.new)]
    found = []
    for name, documents in sides.items():
        dumb = [
            pair.name for pair, one in zip(pairs, documents, strict=True) if not any(map(one.environment.get, _MACHINE))
        ]
        if dumb:
            found.append(
                f"no environment: {len(dumb)} of {len(pairs)} documents of the {name} do not say where they were made"
            )
        commits = list(dict.fromkeys(filter(None, (one.environment.get("git_commit") for one in documents))))
        if len(commits) > 1:
            found.append(f"commit of the {name}: {_short(commits[0])} against {_short(commits[1])}")
    # A fixture that only one side ran on, or what an older document does not say, is no contradiction.
    for name in dict.fromkeys(name for one in facts for name in one):
        found += _differing(name, [one[name] for one in facts if name in one])
    return found


def _differing(name: str, values: Sequence[Any]) -> list[str]:
    """``name: 1 against 2`` where the values differ; of settings and of the parts of a configuration one a field."""
    tree = name == "settings" or name.startswith(tuple(f"request.{one}" for one in _TREES))
    tree = tree and not name.endswith(".cuts")  # of a plan: a table that is not in it is cut in rows
    if tree and all(isinstance(value, dict) for value in values):
        found = []
        for key in dict.fromkeys(key for value in values for key in value):
            if name == "settings":  # whose document tells all that are set
                inner = [value.get(key, _NOT_SET) for value in values]
            else:
                inner = [value[key] for value in values if key in value]
            found += _differing(f"{name}.{key}", inner)
        return found
    other = next((value for value in values if value != values[0]), values[0])
    return [] if other == values[0] else [f"{name}: {_short(values[0])} against {_short(other)}"]


def _facts(document: Document) -> dict[str, Any]:
    env, request = document.environment, document.request
    settings = {name: value for name, value in (env.get("settings") or {}).items() if name not in _NOT_A_SETTING}
    trees = {name: request[name] for name in _TREES if name in request}
    if isinstance(config := trees.get("config"), dict):
        trees["config"] = {"plan": None} | config  # no plan was once told by saying nothing of it
    return {
        **{name: env[name] for name in _MACHINE if name in env},
        **({"settings": settings} if "settings" in env else {}),
        **{f"request.{name}": request[name] for name in _OPTIONS if name in request},
        **{f"request.{name}": tree for name, tree in trees.items()},
        **{f"fixture {name}": stats for name, stats in document.fixtures.items()},
    }


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
