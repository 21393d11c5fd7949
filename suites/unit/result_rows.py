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
