"""Shared by the gate's tests: rounds of documents with rows as a run writes them, noise and delays put in."""

import copy
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from result_rows import row

from gem.harness.gate_pairs import PAIRED
from gem.harness.results import Document, Row

SUITE = "suites/throughput/jagged_attention.toml"
ENVIRONMENT = {"device": "cpu", "cpu": "AMD EPYC", "torch": "2.13.0+cpu", "threads": 1, "git_commit": "a" * 40}
REQUEST = {"device": "cpu", "peers": [], "impls": None, "lengths": None, "batch": None, "budget_s": 1.0}


def timed(case: str, ms: float = 10.0, impl: str = "torch", noise: float = 0.01, seed: int = 0, **given: Any) -> Row:
    """A `ms` row with 15 samples around `ms`."""
    samples = ms * np.exp(noise * np.random.default_rng(seed).standard_normal(15))
    told = {"value": float(np.median(samples)), "samples": samples.tolist(), **given}
    return row(case, suite=SUITE, impl=impl, metric="ms", **told)


def document(rows: Iterable[Row], commit: str = "a", **request: Any) -> Document:
    """A document of this machine."""
    environment = {**ENVIRONMENT, "git_commit": commit * 40}
    return Document(environment=environment, request={**REQUEST, **request}, rows=list(rows))


def write_rounds(
    folder: Path, sides: dict[str, Callable[[int], list[Row]]], rounds: int = 6, paired: bool = True
) -> tuple[Path, Path]:
    """`rounds` documents of each of both sides, whose rows are `sides[name](round)`."""
    for name, rows in sides.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(rounds):
            told = {PAIRED: f"round {number}"} if paired else {}
            made = document(rows(number), name[0], **told)
            (folder / name / f"{number:03d}.json").write_text(made.model_dump_json())
    base, new = (folder / name for name in sides)
    return base, new


def cases(number: int, slower: dict[str, float] | None = None, noise: float = 0.01, side: int = 0) -> list[Row]:
    """Three cases, one `ms` row each; `slower`: case -> factor. A round's own speed hits both sides."""
    drift = math.exp(0.3 * np.random.default_rng([7, number]).standard_normal())
    factors = slower or {}
    return [
        timed(name, 10.0 * drift * factors.get(name, 1.0), noise=noise, seed=1000 * side + 10 * number + i)
        for i, name in enumerate(("one", "two", "three"))
    ]


def edited(rows: list[Row], of: str, /, **fields: Any) -> list[Row]:
    """The rows, those of the case `of` with other fields."""
    return [one.model_copy(update=fields) if one.case == of else copy.copy(one) for one in rows]


def patch_file(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the JSON of a document in place."""
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
