"""What a run tells while it goes on: the runner emits events, the command line draws them, tests count them."""

from dataclasses import dataclass, field
from typing import Literal

from gem.harness.results import Row

EventKind = Literal["run_started", "case_started", "step", "case_finished", "run_finished"]


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    run_started: `total` cases are ahead. case_started: the case `case` (an id) is number `index` (from 0).
    step: inside that case, `detail` says what is being done ("sdpa_padded: check backward", "timing 12/40").
    case_finished: its `rows` are final. run_finished: all are.
    """

    kind: EventKind
    case: str = ""
    index: int = 0
    total: int = 0
    detail: str = ""
    rows: tuple[Row, ...] = field(default=())
