"""What a person sees while a run goes on: a live bar on a terminal, one plain line a case elsewhere. Always on stderr,
so that the table on stdout can be piped."""

import contextlib
import os
import time
from collections import Counter
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from gem.harness.events import Event
from gem.harness.results import Row, Status, own_status

STYLES: dict[Status, str] = {
    "pass": "green",
    "fail": "bold red",
    "error": "bold red",
    "oom": "red",
    "skipped": "yellow",
}


def say(console: Console, text: str | Text) -> None:
    """Print a line; when nobody reads it any more, or the disk behind it is full, that is no reason to end a run."""
    try:
        console.print(text, soft_wrap=True)
    except (OSError, SystemExit):  # rich's answer to a closed pipe is to leave
        silence(console)


def silence(console: Console) -> None:
    """Drop all that is printed there from now on, and what waits in its buffer for the interpreter's end to flush."""
    console.quiet = True
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, console.file.fileno())
        os.close(nothing)


def has_bar(console: Console) -> bool:
    """Whether lines can be drawn over: a terminal that understands more than text (TERM=dumb does not)."""
    return console.is_terminal and not console.is_dumb_terminal


def _start(bar: Progress) -> None:
    """Draw it. Ctrl-C may come before anybody else could bring the cursor back."""
    try:
        bar.start()
    except BaseException:
        bar.stop()
        raise


class LiveProgress:
    """Draws runner events; call it with each. `finished` keeps the rows of the cases that are done.

    `taken`: cases that an earlier session of the run finished.
    """

    def __init__(self, total: int, console: Console, taken: dict[str, list[Row]] | None = None) -> None:
        self.total = total
        self.console = console
        self.finished: dict[str, list[Row]] = dict(taken or {})
        self._counts: Counter[str] = Counter()
        self._started = time.monotonic()
        self._bar: Progress | None = None
        if has_bar(console):
            bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[detail]}", markup=False),
                console=console,
                transient=True,
            )
            self._task = bar.add_task("cases", total=total, completed=len(self.finished), detail="")
            self._bar = bar

    def __enter__(self) -> Self:
        if self._bar:
            _start(self._bar)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, event: Event) -> None:
        """Take one event of the runner."""
        if event.kind == "case_started":
            self._started = time.monotonic()
            self._show(event.case)
        elif event.kind == "step":
            self._show(f"{event.case.rpartition('::')[2]}: {event.detail}")
        elif event.kind == "case_finished":
            self._finish(event)

    def _show(self, detail: str) -> None:
        if self._bar:
            self._bar.update(self._task, detail=detail)

    def _finish(self, event: Event) -> None:
        rows = list(event.rows)
        self.finished[event.case] = rows
        status = own_status(rows)
        self._counts[status] += 1
        if self._bar:
            self._bar.advance(self._task)
            if status in ("pass", "skipped"):
                return
        reason = next((row.reason for row in rows if row.status == status and row.reason), "")
        place = f"[{len(self.finished)}/{self.total}]"
        taken = f" {time.monotonic() - self._started:.1f} s"
        line = Text.assemble(f"{place} {event.case} ", (status, STYLES[status]), taken, f"  {reason}" if reason else "")
        say(self.console, line)


class ReadProgress:
    """Shows how far a large file is read; call it with (bytes done, bytes in all, rows), as gem.data.logs does."""

    EVERY_S = 5.0  # between plain lines: a log file wants signs of life, not a line a block

    def __init__(self, what: str, console: Console) -> None:
        self.what = what
        self.console = console
        self._last = time.monotonic()
        self._bar: Progress | None = None
        if has_bar(console):
            columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), DownloadColumn())
            rows = TextColumn("{task.fields[rows]:,} rows")
            bar = Progress(*columns, TimeRemainingColumn(), rows, console=console, transient=True)
            self._task = bar.add_task(f"reading {what}", total=None, rows=0)
            self._bar = bar

    def __enter__(self) -> Self:
        if self._bar:
            _start(self._bar)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, done: int, total: int, rows: int) -> None:
        """Take a report of the reader."""
        if self._bar:
            self._bar.update(self._task, completed=done, total=total, rows=rows)
        elif time.monotonic() - self._last >= self.EVERY_S:
            self._last = time.monotonic()
            say(self.console, f"reading {self.what}: {done / max(total, 1):.0%}, {rows:,} rows")
