"""The harness's own measurements as pytest-benchmark's: ``pytest suites/throughput --benchmark-json FILE``.

Nothing is timed twice: each contestant and direction of a throughput case becomes one entry, whose data are the samples
that the runner took (in seconds), so that pytest-benchmark's table, files and comparisons work on them. `extra_info`
holds the other figures (TFLOP/s, ratios, roofline, status) and where they were taken.

pytest-benchmark 5.3 passes what it has not measured: under xdist, with a benchmark that is gone, with none at all, with
none that the earlier run knows. Who asks for a file or a comparison gets an error instead.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gem.harness import environment
from gem.harness.results import SEVERITY, Row, own_status

NAME = "gem-benchmark-entries"
# Of the environment in each entry; all of it stands once in the file, under "gem".
TOLD = (
    "device", "gpu", "driver", "capability", "torch", "triton", "cuda", "cpu", "cores", "threads", "settings",
    "git_commit", "git_dirty", "time",
)  # fmt: skip
# Of the machine, for pytest-benchmark's warning that two runs were not on the same: what does not move with load.
MACHINE = ("device", "gpu", "gpu_count", "driver", "torch", "triton", "cuda", "threads")
SHOWN = 10  # absent benchmarks named in the summary


@dataclass
class _Entry:
    """What pytest-benchmark's Metadata reads of its fixture."""

    name: str
    fullname: str
    group: str
    param: str
    params: dict[str, str]
    extra_info: dict[str, Any]
    cprofile_stats: None = None
    has_error: bool = False


@dataclass
class BenchmarkEntries:
    """A plugin of a pytest run that has pytest-benchmark."""

    config: pytest.Config
    environment: dict[str, Any] = field(default_factory=dict)
    unmeasured: dict[str, str] = field(default_factory=dict)  # full name → status and reason
    deselected: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Before the first case: where the run takes place."""
        self.environment = environment.capture(chosen_device())
        if self.environment["device"] == "cpu":
            self.environment["busy_cores"] = environment.busy_cores()

    def add(self, item: pytest.Item, rows: list[Row]) -> None:
        """The entries of one case, unless benchmarks are disabled."""
        if self._session.disabled:
            return
        from pytest_benchmark.stats import Metadata

        for (impl, direction), own in _by_contestant(rows).items():
            param = "-".join(filter(None, (impl, direction)))
            fullname = f"{item.nodeid}[{param}]"
            timed = next((row for row in own if row.metric in _UNITS and row.samples and row.status != "error"), None)
            if timed is None:
                worst = max(own, key=lambda row: SEVERITY.index(row.status))
                self.unmeasured[fullname] = f"{worst.status}: {worst.reason}" if worst.reason else worst.status
                continue
            extra = _figures(own) | {"case_status": own_status(rows), "data": _UNITS[timed.metric][0]}
            extra["environment"] = {key: self.environment.get(key) for key in TOLD}
            group = " ".join(filter(None, (item.nodeid, direction)))
            params = {"impl": impl, "direction": direction}
            entry = _Entry(f"{item.name}[{param}]", fullname, group, param, params, extra)
            found = Metadata(entry, iterations=1, options={"timer": "gem.harness.timing"})
            for seconds in _UNITS[timed.metric][1](timed.samples):
                found.update(seconds)
            self._session.benchmarks.append(found)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        """What -k and -m left out is not absent."""
        self.deselected.update(item.nodeid for item in items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        """pytest-benchmark knows of no GPU."""
        if not self.environment:  # to compare with is loaded before anything runs
            self.environment = environment.capture(chosen_device())
        machine_info["gem"] = {key: self.environment.get(key) for key in MACHINE}

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        """The whole environment, and who has no samples."""
        output_json["gem"] = {"environment": self.environment, "not_measured": self.unmeasured}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A run that was asked for figures and has none, or lacks some to compare, is no success."""
        if self._session.disabled or self.config.option.collectonly:
            return
        measured = {found.fullname for found in self._session.benchmarks if found}
        asked = _asked_for(self.config)
        if hollow := bool(asked) and not measured:
            self.problems.append(f"{asked}: nothing was measured")
        gone = [
            f"{fullname} is in {Path(path).name} and was not measured now"
            + (f": {self.unmeasured[fullname]}" if fullname in self.unmeasured else "")
            for path, known in (self._session.compared_mapping or {}).items()
            for fullname in known
            if fullname not in measured and self._expected(fullname)
        ]
        self.problems += gone[:SHOWN]
        if len(gone) > SHOWN:
            self.problems.append(f"{len(gone) - SHOWN} more that were not measured now")
        strange = [
            f"--benchmark-compare: nothing was compared: none of the {len(measured)} benchmarks measured now is among "
            f"the {len(known)} of {Path(path).name}"
            for path, known in (self._session.compared_mapping or {}).items()
            if measured and not measured & known.keys()
        ]
        self.problems += strange
        fatal = hollow or ((gone or strange) and self._session.compare_fail)
        if fatal and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The problems, before pytest-benchmark's own words, which may end in an exception."""
        fatal = bool(self._session.compare_fail) or not self._session.benchmarks
        for problem in self.problems:
            terminalreporter.write_line(f"{'ERROR' if fatal else 'WARNING'}: {problem}", red=fatal, yellow=not fatal)

    # -- what was asked for --------------------------------------------------------------------------------------------

    @property
    def _session(self) -> Any:
        """pytest-benchmark's."""
        return self.config._benchmarksession  # type: ignore[attr-defined]

    def _expected(self, fullname: str) -> bool:
        """Whether a benchmark of an earlier run is among what this run was asked to run."""
        node = fullname.rpartition("[")[0] if fullname.endswith("]") else fullname
        if {node, fullname} & self.deselected:
            return False
        file, _, name = node.partition("::")
        path = self.config.rootpath / file
        for given in self.config.args:
            place, _, wanted = given.partition("::")
            at = (self.config.invocation_params.dir / place).resolve()
            if path == at and (not wanted or name == wanted or name.startswith(f"{wanted}::")):
                return True
            if at in path.parents and not wanted:
                return True
        return False


# A sample's meaning, and samples as seconds.
_UNITS: dict[str, tuple[str, Any]] = {
    "ms": ("seconds a call", lambda samples: [ms / 1e3 for ms in samples]),
    "qps": ("seconds a sample trained", lambda samples: [1 / rate for rate in samples]),
}


def _by_contestant(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.impl:
            found.setdefault((row.impl, row.direction), []).append(row)
    return found


def _figures(rows: list[Row]) -> dict[str, Any]:
    """Values by metric, their units and remarks, and the worst status of those that were measured."""
    measured = [row.status for row in rows if row.status != "skipped"]
    return {
        **{row.metric: row.value for row in rows if row.metric},
        "status": max(measured, key=SEVERITY.index) if measured else "skipped",
        "units": {row.metric: row.unit for row in rows if row.unit},
        "notes": {row.metric: row.reason for row in rows if row.reason},
    }


# ---- the run's options


def register(config: pytest.Config) -> None:
    """Take part in a run that has pytest-benchmark. Raises UsageError for one that would measure nothing in silence."""
    if not hasattr(config.option, "benchmark_json") or config.pluginmanager.has_plugin(NAME):
        return
    asked = _asked_for(config)
    for why in _disabled(config) if asked else ():
        raise pytest.UsageError(f"{asked}: {why}, so nothing would be measured")
    if config.getoption("benchmark_compare_fail") and not config.getoption("benchmark_compare"):
        raise pytest.UsageError("--benchmark-compare-fail needs --benchmark-compare, the run to compare with")
    config.pluginmanager.register(BenchmarkEntries(config), NAME)


def entries(config: pytest.Config) -> BenchmarkEntries | None:
    """The run's plugin, where there is pytest-benchmark."""
    return config.pluginmanager.get_plugin(NAME)


def chosen_device() -> str:
    """That of ``GEM_DEVICE`` (auto, cpu, cuda), as cpu or cuda; RequestError for one that there is not."""
    return environment.facts(os.environ.get("GEM_DEVICE", "auto")).device


def _asked_for(config: pytest.Config) -> str:
    """The first option that asks for figures, or ''."""
    options = ("json", "save", "autosave", "compare", "compare-fail")
    return next((f"--benchmark-{one}" for one in options if config.getoption(f"benchmark_{one.replace('-', '_')}")), "")


def _disabled(config: pytest.Config) -> Iterator[str]:
    """Why pytest-benchmark measures nothing in this run."""
    if config.getoption("dist", "no") != "no" or os.environ.get("PYTEST_XDIST_WORKER"):
        yield "pytest-benchmark disables itself under xdist (without -n it measures)"
    if config.getoption("benchmark_disable") and not config.getoption("benchmark_enable"):
        yield "--benchmark-disable is given"
    if config.getoption("benchmark_skip") and not config.getoption("benchmark_only"):
        yield "--benchmark-skip is given"
