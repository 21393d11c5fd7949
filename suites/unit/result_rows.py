"""Shared by the tests of the command line and of its tables: result rows of every kind."""

from typing import Any

from gem.harness.results import Row


def row(case: str = "one", **given: Any) -> Row:
    fields = {
        "suite": "s.toml",
        "impl": "torch",
        "direction": "forward",
        "metric": "ms",
        "value": 1.0,
        "status": "pass",
    }
    return Row.model_validate({**fields, "case": case, **given})


ROWS = [
    row(samples=[1.0, 1.1, 0.9, 1.0, 1.2, 1.0, 1.0]),
    row(metric="tflops", value=0.123456),
    row(metric="roofline", value=0.8123),
    row(metric="ratio_to.flex", value=2.5),
    row(metric="max_error", value=2.5e-7),
    row(impl="flex", value=2.5),
    row(impl="flex", direction="backward", value=None, status="oom", reason="out of memory: [malloc] failed"),
    row("two", impl="", direction="", metric="", value=None, status="skipped", reason="needs cuda:sm990: no GPU"),
]


def measured(case: str, impl: str = "gem", **given: Any) -> Row:
    """A row of a measured case: it has no direction."""
    return row(case, impl=impl, direction="", **{"suite": "suites/throughput/e2e.toml", **given})


RACE = [
    measured(
        "tiny", metric="qps", value=1200.0, better="higher", samples=[1190.0, 1200.0, 1210.0] * 3, reason="batch 64"
    ),
    measured("tiny", metric="input_wait", value=0.0125),
    measured("tiny", metric="peak_memory", value=3.0 * 2**30),
    measured("tiny", "flex", metric="qps", value=400.0, better="higher", samples=[400.0, 401.0], reason="batch 16"),
    measured("tiny", metric="ratio_to.flex", value=3.0, better="higher", status="fail", reason="expected >= 4, is 3"),
    measured("gone", metric="", value=None, status="oom", reason="out of memory"),
]
