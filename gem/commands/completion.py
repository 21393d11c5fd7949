"""What a shell offers for the arguments of `gem`: suites, cases, peers, formats. No torch, and no answer is an error.

An argument completes by its parameter's name, see ``COMPLETERS``; those without an entry (``--json``, a document)
complete as files, which is what shells do where a command offers nothing.
"""

import os
from collections.abc import Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any, TypeVar

from gem.errors import RequestError

Offer = str | tuple[str, str]  # a word, or a word and what it is (zsh and fish show it)
Command = TypeVar("Command", bound=Callable[..., Any])


def completing(command: Command) -> Command:
    """The command, each of its parameters that ``COMPLETERS`` names completed by that."""
    for name, annotation in command.__annotations__.items():
        for info in getattr(annotation, "__metadata__", ()):
            if name in COMPLETERS and hasattr(info, "autocompletion"):
                info.autocompletion = COMPLETERS[name]
    return command


def mend_bash_words(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let bash complete a case right behind the ``::`` of ``FILE::case``.

    bash takes ``a.toml::x`` for three words (COMP_WORDBREAKS has the colon), and where nothing follows the colons it
    calls them the word under the cursor although only what follows will be replaced. Say so: an empty word is next.
    """
    if environment.get("_GEM_COMPLETE") != "complete_bash":
        return
    words, at = environment.get("COMP_WORDS", "").split("\n"), environment.get("COMP_CWORD", "")
    if at.isdigit() and int(at) < len(words) and words[int(at)] == "::":
        environment["COMP_WORDS"] = "\n".join(words[: int(at) + 1])
        environment["COMP_CWORD"] = str(int(at) + 1)


def _paths(ctx: Any, incomplete: str) -> list[Offer]:
    """Suites of the project and of one's own, folders of them, and behind ``::`` the cases of a file."""
    file, colons, name = incomplete.partition("::")
    before = ctx.params.get("paths") or []
    if colons:
        return [(f"{file}::{case}", what) for case, what in _cases([file]) if case.startswith(name)]
    if before[-1:] == ["::"]:  # bash: the colons are a word of their own
        return list(_cases(before[-2:-1]))
    return [*_shipped_suites(), *_local_suites(incomplete)]


def _shipped_suites() -> Iterable[Offer]:
    from gem import paths

    home = paths.suites_dir()
    for folder in sorted(one for one in home.iterdir() if one.is_dir()):
        files = sorted(folder.glob("*.toml"))
        if files:
            yield f"suites/{folder.name}", "all suites of it"
            yield from (f"suites/{folder.name}/{file.name}" for file in files)


def _local_suites(incomplete: str) -> list[Offer]:
    """TOML files, and folders, that begin so; of a lone folder what is in it, so that the shell ends no word there."""
    place = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    start = "" if incomplete.endswith("/") else Path(incomplete).name
    found: list[Offer] = []
    try:
        entries = sorted(place.iterdir())
    except OSError:
        return found
    for one in entries:
        if one.name.startswith(start) and not one.name.startswith("."):
            word = f"{incomplete[: len(incomplete) - len(start)]}{one.name}"
            if one.is_dir():
                found.append(f"{word}/")
            elif one.suffix == ".toml":
                found.append(word)
    if len(found) == 1 and isinstance(found[0], str) and found[0].endswith("/") and found[0] != incomplete:
        found += _local_suites(found[0])
    return found


def _expression(ctx: Any, incomplete: str) -> list[Offer]:
    """Names of cases in the suites named so far, or in all."""
    # Where the option's value is still missing, what stands before it is left over, not yet an argument.
    words = [str(one) for one in (ctx.params.get("paths") or ctx.args)]
    return list(_cases("\n".join(words).replace("\n::\n", "::").split("\n") if words else []))


def _cases(paths: Iterable[str]) -> Iterable[tuple[str, str]]:
    """(name, description) of each case below `paths`, each name once."""
    from gem.harness.suites import load_suites

    seen: set[str] = set()
    try:
        cases = load_suites(list(paths))
    except RequestError:  # a suite with a mistake in it: gem run says which, a Tab does not
        return
    for case in cases:
        if case.name not in seen:
            seen.add(case.name)
            yield case.name, case.description or case.subject


def _listed(words: Iterable[Offer], incomplete: str) -> list[Offer]:
    """``a,b,c``: the words for what stands behind the last comma, those before it left out."""
    before, comma, _ = incomplete.rpartition(",")
    told = before.split(",") if before else []
    offers: list[Offer] = []
    for one in words:
        word, *what = (one,) if isinstance(one, str) else one
        if word not in told:
            offers.append((f"{before}{comma}{word}", *what) if what else f"{before}{comma}{word}")  # type: ignore[arg-type]
    return offers


def _peers(ctx: Any, incomplete: str) -> list[Offer]:
    from gem.harness import names

    offers = _listed([(name, peer.what) for name, peer in names.PEERS.items()], incomplete)
    return offers if "," in incomplete else [*offers, ("none", "no comparison")]


def _impls(ctx: Any, incomplete: str) -> list[Offer]:
    from gem.harness import names

    return _listed(names.IMPLEMENTATIONS, incomplete)


def _device(ctx: Any, incomplete: str) -> list[Offer]:
    return ["auto", "cpu", "cuda"]


def _log_format(ctx: Any, incomplete: str) -> list[Offer]:
    from gem.data.log_layout import FORMATS

    return list(FORMATS.items())


COMPLETERS: dict[str, Callable[[Any, str], list[Offer]]] = {
    "paths": _paths,
    "k": _expression,
    "peers": _peers,
    "impls": _impls,
    "device": _device,
    "log_format": _log_format,
}
