"""Find suite files, read them, choose cases: what stands behind the PATHS and -k of every command. No torch."""

import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gem import paths as places
from gem.errors import RequestError
from gem.harness import names
from gem.harness.case import AnyCase, build_cases
from gem.harness.select import compile_expression


def load_suites(paths: Sequence[str | Path], expr: str | None = None) -> list[AnyCase]:
    """The declared cases below `paths`, in the order of files and declarations, kept by the -k expression `expr`.

    A path is a suite file, a directory of them, or one case's id (``suites/throughput/gdpa.toml::name``). No paths mean
    all suites of the checkout, or those bundled with the package. A relative path that is not here is looked up there.
    Raises RequestError on the first wrong declaration, on a path without suites, and when no case is chosen.
    """
    matches = compile_expression(expr) if expr is not None else None
    fixtures = fixture_names()
    cases: dict[str, AnyCase] = {}
    loaded: dict[Path, list[AnyCase]] = {}
    for given in paths or [places.suites_dir()]:
        text, _, name = str(given).partition("::")
        for file in _suite_files(Path(text)):
            key = file.resolve()
            if key not in loaded:
                loaded[key] = load_suite(file, fixtures)
            chosen = [case for case in loaded[key] if not name or case.name == name]
            if not chosen:
                known = [case.name for case in loaded[key]]
                near = names.nearest(name, known)
                raise RequestError(f"{text}: no case {name!r}; accepted: {names.accepted_list(known)}{near}")
            cases.update((case.id, case) for case in chosen)
    if matches is None:
        return list(cases.values())
    kept = [case for case in cases.values() if matches(case.id)]
    if not kept:
        raise RequestError(
            f"no case selected: none of {len(cases)} case ids matches -k {expr!r}; gem list shows the ids"
        )
    return kept


def fixture_names() -> frozenset[str]:
    """The names of the shipped length profiles."""
    from gem.data.lengths import list_profiles  # numpy: not for `gem --help`

    return frozenset(list_profiles())


def load_suite(file: Path, fixtures: Iterable[str] | None = None) -> list[AnyCase]:
    """The cases of one suite file. Raises RequestError naming file, case, field, value and what is accepted."""
    known = fixture_names() if fixtures is None else frozenset(fixtures)
    return build_cases(_read(file), file=file, label=suite_label(file), fixtures=known)


def suite_label(file: Path) -> Path:
    """The suite's name in ids and results: ``suites/…`` for the project's own, whoever runs them from wherever.

    Others are relative to the working directory when below it. Results of two machines are compared by these labels,
    so a checkout's path must not be part of them.
    """
    whole, home = file.resolve(), places.suites_dir().resolve()
    if whole.is_relative_to(home):
        return Path("suites") / whole.relative_to(home)
    return whole.relative_to(Path.cwd()) if whole.is_relative_to(Path.cwd()) else file


def is_suite_place(file: Path) -> bool:
    """Whether a file lies where the project keeps its suites: there each TOML is one, a misspelt [suite] an error."""
    whole, home = file.resolve(), places.suites_dir().resolve()
    return whole.is_relative_to(home) and whole.relative_to(home).parts[0] not in ("unit", "asv")


def _suite_files(path: Path) -> list[Path]:
    found = path
    if not path.exists() and not path.is_absolute():
        home = places.suites_dir()
        inside = path.relative_to("suites") if path.parts[:1] == ("suites",) else path
        found = next((one for one in (home / inside, home / f"{inside}.toml") if one.exists()), path)
    if found.is_dir():
        files = sorted(file for file in found.rglob("*.toml") if _is_shown(file, found))
        if not files:
            raise RequestError(f"{path}: a directory without suites; accepted: *.toml files with a [suite] table in it")
        return files
    if not found.exists():
        raise RequestError(
            f"{path}: no such file or directory; accepted: a suite file (.toml), a directory of them, or FILE::case"
        )
    return [found]


def _is_shown(file: Path, below: Path) -> bool:
    hidden = any(part.startswith((".", "__")) for part in file.relative_to(below).parts)
    home = places.suites_dir().resolve()
    return not hidden and (is_suite_place(file) or not file.resolve().is_relative_to(home))


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_bytes().decode("utf-8")
        return tomllib.loads(text)
    except RecursionError:
        raise RequestError(f"{file}: tables nested too deeply; accepted: TOML text") from None
    except OSError as error:
        raise RequestError(
            f"{file}: cannot be read: {error.strerror or error}; accepted: a suite file (.toml)"
        ) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise RequestError(f"{file}:{line}: not UTF-8; accepted: TOML text in UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        where = re.search(r" \(at line (\d+), column (\d+)\)", message)
        if where:
            raise RequestError(f"{file}:{where[1]}:{where[2]}: bad TOML: {message[: where.start()]}") from error
        end = text.rstrip().count("\n") + 1
        raise RequestError(f"{file}:{end}: bad TOML: {message}") from error
