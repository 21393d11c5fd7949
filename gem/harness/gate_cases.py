"""Which cases base and change both run, and whose declarations: the change's, where the base's `gem` can read them.

    python -m gem.harness.gate_cases --base DIR --new DIR --out DIR [PATHS] [-k EXPR]

writes OUT/cases (ids to run, one a line) and OUT/declared (ids that the base declares: one that the change no longer
has fails the gate), and prints whose declarations the base is to run: "new", or "own" where it cannot read the
change's. With "own" only the cases that both declare alike are run. What is left out is said on stderr.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gem.errors import RequestError, exit_code_of
from gem.harness.case import AnyCase
from gem.harness.results import write_text
from gem.harness.suites import load_suites

# What a declaration says of a case that changes nothing of what is measured without peers.
_BESIDE = {"suite", "file", "description", "expect", "gate", "peers", "needs", "timeout_s"}


def declared(home: Path, paths: Sequence[str], expr: str | None) -> dict[str, AnyCase]:
    """Id -> case of the checkout `home`, as this `gem` reads its suites; those below `paths` (as in an id) there.

    Raises RequestError for a declaration that this `gem` cannot read.
    """
    found: dict[str, AnyCase] = {}
    for path in paths:
        file, colons, name = path.partition("::")
        place = home / file
        if not place.exists():
            continue
        try:
            cases = load_suites([f"{place}{colons}{name}"], expr)
        except RequestError as error:
            if "no case" in str(error):  # none that matches
                continue
            raise
        for case in cases:
            label = Path(case.file).resolve().relative_to(home.resolve())
            found[f"{label.as_posix()}::{case.name}"] = case
    return found


def measured_alike(one: AnyCase, other: AnyCase) -> bool:
    """Whether both declare the same work."""
    return one.model_dump(exclude=_BESIDE) == other.model_dump(exclude=_BESIDE)


def refusal(base: Path, new: Path, ids: Sequence[str]) -> str:
    """'' when the base's gem can read the change's declarations of `ids`, else its complaint."""
    env = {**os.environ, "PYTHONPATH": str(base)}
    words = [sys.executable, "-P", "-m", "gem", "list", *ids]
    done = subprocess.run(words, cwd=new, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it said nothing"])[-1]


def main(words: list[str]) -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m gem.harness.gate_cases", allow_abbrev=False)
    for name in ("--base", "--new", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("-k", dest="expr")
    parser.add_argument("paths", nargs="*")
    given = parser.parse_args(words)
    base, new, paths = given.base.resolve(), given.new.resolve(), given.paths or ["suites/throughput"]
    changed, before = declared(new, paths, given.expr), declared(base, paths, given.expr)
    if not changed:
        raise RequestError(f"{', '.join(paths)}: no case of {new} is chosen; gem list shows the ids")
    chosen, whose = list(changed), "new"
    complaint = refusal(base, new, chosen)
    if complaint:
        whose = "own"
        chosen = [one for one, case in changed.items() if one in before and measured_alike(case, before[one])]
        left = [one for one in changed if one not in chosen]
        print(f"the base cannot read the change's declarations ({complaint}); it runs its own", file=sys.stderr)
        for one in left:
            why = "declared otherwise" if one in before else "only in the change"
            print(f"not compared: {one}: {why}", file=sys.stderr)
        if not chosen:
            raise RequestError("no case is declared alike in base and change: there is nothing to compare")
    write_text(given.out / "cases", "".join(f"{one}\n" for one in chosen))
    write_text(given.out / "declared", "".join(f"{one}\n" for one in before))
    print(whose)


if __name__ == "__main__":
    sys.exit(exit_code_of(main, sys.argv[1:]))
