"""Who is at fault when a job of many ranks stands still: judged from what each rank says of itself, nothing else.

No process, no store and no clock is in here: gem.sharding.watch has those.
"""

import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType

import gem
from gem.errors import RequestError

EXIT_REQUEST, EXIT_FAULT, EXIT_INTERRUPTED, EXIT_TERMINATED = 2, 3, 130, 143
_HERE = Path(gem.__file__).parent
_MOST_NAMED = 4  # ranks


@dataclass(frozen=True)
class Limits:
    """Seconds. ``of`` derives all from the one that a person sets."""

    still: float  # a rank that lives and does not move on is at fault
    silent: float  # a rank that says nothing is at fault
    gone: float  # the same, once another rank has lost its connection or was told to end: then something has happened
    beat: float  # between two words of a rank

    @staticmethod
    def of(timeout_s: float) -> "Limits":
        """Silence is told after a minute at most, a process that has died after seconds."""
        silent, beat = min(60.0, timeout_s), min(1.0, timeout_s / 20)
        return Limits(timeout_s, silent, min(max(5 * beat, 3.0), silent), beat)


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself."""

    number: int = 0  # of this one
    moved: int = 0  # how often it has moved on
    place: str = "its start"  # in the run's words
    still: float = 0.0  # seconds since it has moved on
    line: str = ""  # of gem's code where it is
    waits: bool = False  # that line waits for other ranks
    patient: bool = False  # what it does may take as long as it likes
    left: bool = False  # it is done, and says no more
    who: str = ""  # host and process

    def dump(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: bytes | str) -> "Beat":
        """What ``dump`` gave."""
        return Beat(**json.loads(text))


@dataclass(frozen=True)
class Verdict:
    """Why the job ends, said once and known to every rank. ``code``: what all of them exit with."""

    rank: int  # who tells it
    text: str
    code: int

    def dump(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: bytes | str) -> "Verdict":
        """What ``dump`` gave."""
        return Verdict(**json.loads(text))


class Ended(RuntimeError):
    """The job has ended on every rank, and it was said why. ``__cause__``: what this rank raised, if it did."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.text)
        self.code = verdict.code


def named(ranks: Sequence[int]) -> str:
    """ "rank 2", "ranks 1, 3"."""
    shown = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"


def silent(beats: Mapping[int, Beat], quiet: Mapping[int, float], longest: float) -> str | None:
    """Of ranks that have said nothing for ``longest`` seconds; ``quiet``: for how long each has."""
    found = sorted(r for r, beat in beats.items() if not beat.left and quiet[r] >= longest)
    if not found:
        return None
    first = beats[found[0]]
    return (
        f"{named(found)}: no sign of life for {min(quiet[r] for r in found):.0f} s (killed, out of memory, stopped or "
        f"cut off); last in {first.place}, {first.who}"
    )


def stuck(beats: Mapping[int, Beat], longest: float) -> str | None:
    """Of ranks that live and do not move on for ``longest`` seconds, while the others wait for them.

    Who waits has come at least as far as whom it waits for: so those who are least far, and of them those who do not
    wait. On a GPU a line does not tell, since work is only queued there; how far a rank is does.
    """
    there = {r: beat for r, beat in beats.items() if not beat.left}
    if not there or max(beat.still for beat in there.values()) < longest:
        return None
    least = min(beat.moved for beat in there.values())
    behind = [r for r in sorted(there) if there[r].moved == least]
    found = [r for r in behind if not there[r].waits] or behind
    if any(there[r].patient for r in found) or max(there[r].still for r in found) < longest / 2:
        return None
    first = there[found[0]]
    others = next((beat for r, beat in sorted(there.items()) if r not in found), None)
    rest = f"; the others wait in {others.place}{_at(others.line)}" if others is not None else ""
    return f"{named(found)}: no progress for {first.still:.0f} s in {first.place}{_at(first.line)}, {first.who}{rest}"


def _at(line: str) -> str:
    return f" at {line}" if line else ""


# -- lines of code -----------------------------------------------------------------------------------------------------


def place_of(frame: FrameType | None) -> tuple[str, bool]:
    """("gem/train/loop.py:12 in step", whether it waits there for other ranks) of a thread's innermost frame."""
    waits = frame is not None and "/torch/distributed/" in frame.f_code.co_filename
    while frame is not None and not (line := _line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)):
        frame = frame.f_back
    return (line, waits) if frame is not None else ("", waits)


def _line(file: str, number: int | None, name: str) -> str:
    path = Path(file)
    return f"gem/{path.relative_to(_HERE).as_posix()}:{number} in {name}" if path.is_relative_to(_HERE) else ""


def raised_at(trace: TracebackType | None) -> str:
    """gem's innermost line of a traceback, else the innermost of all."""
    frames = traceback.extract_tb(trace)
    for one in reversed(frames):
        if line := _line(one.filename, one.lineno, one.name):
            return line
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


# -- errors ------------------------------------------------------------------------------------------------------------

# How torch says that others are gone. Its own classes are not raised by all of it: gloo's errors are RuntimeErrors.
_CLASSES = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_WORDS = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "Timed out waiting", "Broken pipe")


def is_consequence(error: BaseException) -> bool:
    """Whether it looks like what another rank's end does to this one."""
    if not isinstance(error, RuntimeError):
        return False
    return type(error).__name__ in _CLASSES or any(word in str(error) for word in _WORDS)


def text_of(error: BaseException, place: str) -> str:
    """One line of what was raised, without the rank."""
    words = " ".join(str(error).split())
    if isinstance(error, RequestError):
        return words
    line = raised_at(error.__traceback__)
    return f"in {place}: {type(error).__name__}: {words}" + (f" ({line})" if line else "")


def code_of(error: BaseException) -> int:
    """What a job ends with that ends by it."""
    if isinstance(error, RequestError):
        return EXIT_REQUEST
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_FAULT
