"""Declared cases as pytest items: ``pytest suites/throughput/gdpa.toml::cross_short_kv``.

suites/conftest.py takes these hooks for the project's suites; one's own: ``pytest -p gem.harness.pytest_plugin DIR``.
A case is one item; what the machine lacks is a skip with its reason; a wrong declaration is a collection error in one
line. All items of a pytest process share one session of the runner, so that its workers start once.
The device is that of ``GEM_DEVICE`` (auto, cpu, cuda); auto when unset. Where there is pytest-benchmark, throughput
cases are benchmarks too: see benchmark_entries.py.
"""

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gem.errors import RequestError
from gem.harness import benchmark_entries, environment
from gem.harness.case import AnyCase, Case
from gem.harness.needs import check_needs
from gem.harness.results import Row, own_status
from gem.harness.suites import is_suite_place, load_suite

_SESSION: pytest.StashKey[tuple[Any, Any]] = pytest.StashKey()


class CaseFailed(Exception):
    """A declared case whose subject failed, errored or ran out of memory; carries its rows."""

    def __init__(self, case: AnyCase, rows: list[Row]) -> None:
        super().__init__(case.id)
        self.case, self.rows = case, rows

    def __str__(self) -> str:
        bad = [row for row in self.rows if row.status not in ("pass", "skipped")]
        lines = [f"{self.case.id}: {len(bad)} of {len(self.rows)} rows are not right"]
        lines += [row_text(row) for row in bad] or ["  no row of the subject: the runner returned nothing"]
        return "\n".join(lines)


def row_text(row: Row) -> str:
    """``  fail  torch forward max_error = 0.31: out: bound 2e-5``."""
    value = "" if row.value is None else f" = {row.value:.6g}{f' {row.unit}' if row.unit else ''}"
    what = " ".join(part for part in (row.impl, row.direction, row.metric) if part)
    return f"  {row.status:7} {what}{value}{f': {row.reason}' if row.reason else ''}"


def pytest_configure(config: pytest.Config) -> None:
    """Join pytest-benchmark, if it takes part."""
    benchmark_entries.register(config)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> "SuiteFile | None":
    """Take the suite files: every TOML file among the project's suites, elsewhere those with a [suite] table."""
    if file_path.suffix != ".toml":
        return None
    if not is_suite_place(file_path):
        try:
            text = file_path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        if not re.search(r"^\s*\[suite\]", text, re.MULTILINE):
            return None
    return SuiteFile.from_parent(parent, path=file_path)


class SuiteFile(pytest.File):
    """One TOML file of declared cases."""

    def collect(self) -> "Iterable[SuiteItem]":
        """The cases as items, or a collection error with the line that gem list would print."""
        try:
            cases = load_suite(self.path)
        except RequestError as error:
            raise self.CollectError(str(error)) from None
        for case in cases:
            yield SuiteItem.from_parent(self, name=case.name, case=case)


class SuiteItem(pytest.Item):
    """One declared case."""

    def __init__(self, *, case: AnyCase, **given: Any) -> None:
        super().__init__(**given)
        self.case = case
        # Beside the node id, -k finds these.
        self.extra_keyword_matches.update((case.kind, case.subject))
        if isinstance(case, Case):
            self.extra_keyword_matches.add(case.fixture)
        if case.kind == "throughput":
            self.fixturenames = ("benchmark",)  # what pytest-benchmark knows benchmarks by, for its --benchmark-only

    def runtest(self) -> None:
        """Run the case in the session's workers."""
        from gem.harness.runner import run_case

        options, session = _session(self.config)
        reason = check_needs(self.case.needs, environment.facts(options.device))
        if reason is not None:
            pytest.skip(reason)
        rows = run_case(self.case, options, session)
        self.add_report_section("call", "rows", "\n".join(row_text(row) for row in rows))
        if self.case.kind == "throughput" and (benchmarks := benchmark_entries.entries(self.config)):
            benchmarks.add(self, rows)
        status = own_status(rows)
        if status == "skipped":
            pytest.skip("; ".join(dict.fromkeys(row.reason for row in rows if row.status == "skipped")))
        if status != "pass":
            raise CaseFailed(self.case, rows)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The failing rows; a traceback only for what is no failing case."""
        if isinstance(excinfo.value, CaseFailed | RequestError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """File, line of the case's name there, and the case's name."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        named = re.compile(rf"^\s*name\s*=\s*[\"']{re.escape(self.case.name)}[\"']")
        return self.path, next((n for n, line in enumerate(lines) if named.match(line)), None), self.case.name


def _session(config: pytest.Config) -> tuple[Any, Any]:
    """The run's options and the runner's session, opened by the first item that runs and closed with pytest."""
    if _SESSION not in config.stash:
        from gem.harness.runner import RunOptions, open_session

        options = RunOptions(device=benchmark_entries.chosen_device())
        if benchmarks := benchmark_entries.entries(config):
            benchmarks.start()
        with contextlib.ExitStack() as opened:
            config.stash[_SESSION] = options, opened.enter_context(open_session(options))
            config.add_cleanup(opened.pop_all().close)
    return config.stash[_SESSION]
