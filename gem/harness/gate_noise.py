"""Noise for the gate's simulation: what rounds of identical code differ by, row by row, in one small file.

    python -m gem.harness.gate_noise results/gate/base results/gate/new ci/measured/cpu/gate-noise.json

The documents are those of `ci/gate HEAD --rounds 40 ...` in a tree without changes: an A/A run.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gem.errors import RequestError, exit_code_of
from gem.harness.gate import TIMED, round_changes
from gem.harness.gate_pairs import read_pairs
from gem.harness.results import write_text

_TOLD = ("time", "git_commit", "device", "gpu", "driver", "cpu", "cores", "threads", "torch", "triton", "platform")
Change = Annotated[float, Field(allow_inf_nan=False)]


class NoiseRow(BaseModel):
    """The changes of one row (logarithms, above 0 worse), one a round."""

    model_config = ConfigDict(extra="forbid")

    row: str
    changes: Annotated[list[Change], Field(min_length=1)]


class Noise(BaseModel):
    """Recorded rounds of identical code: where, and every row's changes; round i is the same round for all rows."""

    model_config = ConfigDict(extra="forbid")

    environment: dict[str, str | float | None]
    busy_cores: list[float]  # of other work, as each round's first run began
    rows: Annotated[list[NoiseRow], Field(min_length=1)]


def record(base: str, new: str) -> Noise:
    """The noise in the documents of an A/A run. Raises RequestError when the sides are not of one clean commit."""
    pairs, _ = read_pairs(base, new)
    first = pairs[0].base.environment
    for pair in pairs:
        for side in (pair.base, pair.new):
            commit, dirty = side.environment.get("git_commit"), side.environment.get("git_dirty")
            if commit != first.get("git_commit") or dirty:
                changed = " with changes" if dirty else ""
                raise RequestError(
                    f"round {pair.name}: of commit {commit}{changed}; accepted: noise of one clean commit on both sides"
                )
    found = {key: changes for key, changes in round_changes(pairs).items() if key[-1] in TIMED}
    rows = [
        NoiseRow(row=" ".join((f"{key[0]}::{key[1]}", *filter(None, key[2:]))), changes=[round(c, 5) for c in changes])
        for key, changes in found.items()
        if len(changes) == len(pairs)  # a row that lacks a round would shift the others'
    ]
    if not rows:
        raise RequestError(f"{base}: no row was timed in all rounds; accepted: documents of ci/gate")
    busy = [float(pair.base.environment.get("busy_cores") or 0.0) for pair in pairs]
    return Noise(environment={name: first.get(name) for name in _TOLD}, busy_cores=busy, rows=rows)


def read_noise(path: str | Path) -> Noise:
    """Read a file that `record` made. Raises RequestError."""
    try:
        return Noise.model_validate_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise RequestError(f"{path}: no noise of gem.harness.gate_noise: {str(error).splitlines()[0]}") from error


def main(words: list[str]) -> None:
    """See the module's text."""
    if len(words) != 3:
        raise RequestError("accepted: python -m gem.harness.gate_noise BASE NEW FILE.json")
    noise = record(*words[:2])
    told = noise.model_dump()
    rows = ",\n  ".join(json.dumps(row) for row in told.pop("rows"))
    head = json.dumps(told, indent=1).removesuffix("\n}")
    write_text(words[2], f'{head},\n "rows": [\n  {rows}\n ]\n}}\n')
    print(f"{len(noise.rows)} rows, {len(noise.busy_cores)} rounds -> {words[2]}")


if __name__ == "__main__":
    sys.exit(exit_code_of(main, sys.argv[1:]))
