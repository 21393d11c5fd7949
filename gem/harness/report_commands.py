"""The command that makes a number again: of the run's own words those that bear on a case, and the case's id."""

import shlex
from collections.abc import Sequence
from typing import Any

# Options of `gem run` that are followed by their value.
VALUED = frozenset(
    {"-k", "--json", "--html", "--lengths", "--column", "--format", "--batch", "--peers", "--impls", "--device"}
    | {"--budget"}
)
# Which cases were chosen, and what became of the results: the copied command chooses one case and only shows it.
DROPPED = frozenset({"-k", "--json", "--html", "-v", "--verbose", "--resume"})


def run_command(request: dict[str, Any]) -> str:
    """What was typed, quoted for a shell; '' where the document does not say."""
    words = _words(request)
    return shlex.join([*_starter(request), *words]) if words else ""


def case_command(request: dict[str, Any], suite: str, case: str) -> str:
    """``gem run suites/throughput/gdpa.toml::name --budget 1``: runs that case alone, as it was run."""
    words = _words(request)
    if words[:1] == ["train"] or suite == "train":
        return shlex.join([*_starter(request), *(words or ["train"])])
    where = f"{suite}::{case}"
    kept = _options(words[1:]) if words[:1] == ["run"] else []
    return shlex.join(["gem", "run", where if not where.startswith("-") else f"./{where}", *kept])


def _starter(request: dict[str, Any]) -> list[str]:
    """What starts the program: torchrun where a training had several ranks."""
    ranks = request.get("ranks")
    if isinstance(ranks, int) and ranks > 1:
        return ["torchrun", "--nproc-per-node", str(ranks), "-m", "gem"]
    return ["gem"]


def _words(request: dict[str, Any]) -> list[str]:
    argv = request.get("argv")
    words = [str(word) for word in argv] if isinstance(argv, list | tuple) else []
    return words[1:] if words[:1] == ["gem"] else words


def _options(words: Sequence[str]) -> list[str]:
    """The options of `words` that are not DROPPED, with their values; suites go."""
    kept: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            break  # suites alone follow
        if not word.startswith("-"):
            continue
        name, joined, _ = word.partition("=")
        short = not word.startswith("--") and len(word) > 2 and word[:2] in VALUED  # -kEXPR
        own = [word]
        if not joined and not short and rest and (name in VALUED or _is_value(name, rest[0])):
            own.append(rest.pop(0))
        if (word[:2] if short else name) not in DROPPED:
            kept += own
    return kept


def _is_value(option: str, word: str) -> bool:
    """Whether `word` after an option that is not known here is its value: no option, and nothing like a suite."""
    suite = word.endswith(".toml") or "::" in word or word.split("/")[0] == "suites"
    return option not in DROPPED and not word.startswith("-") and not suite


class Commands:
    """Numbers the cases of a page: what each is called, and the command that runs it."""

    def __init__(self, requests: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
        self._requests, self._names = requests, names
        self._keys: dict[tuple[str, str], int] = {}

    def of_case(self, run: int, suite: str, case: str, called: str) -> int:
        """The number of a case of run number `run`; a copy calls it `called`."""
        return self._number(self._with_run(run, called), case_command(self._requests[run], suite, case))

    def of_run(self, run: int, called: str) -> int:
        """The number of what a whole run says, as a geometric mean over its cases does."""
        return self._number(self._with_run(run, called), run_command(self._requests[run]))

    @property
    def listed(self) -> list[tuple[str, str]]:
        """(called, command) by number."""
        return list(self._keys)

    def _with_run(self, run: int, called: str) -> str:
        name = self._names[run]
        return f"{name}: {called}" if name else called

    def _number(self, called: str, command: str) -> int:
        return self._keys.setdefault((called, command), len(self._keys))
