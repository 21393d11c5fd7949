"""How a job's end is said: one line on stderr, and a file that torchrun's agent shows in its own summary."""

import json
import os
import sys
import time
from contextlib import suppress

from gem.sharding.verdict import EXIT_INTERRUPTED, Verdict

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torchrun: what a rank leaves there stands in the agent's summary


def line_of(text: str, code: int) -> str:
    """What is printed."""
    return f"gem: interrupted: {text}" if code == EXIT_INTERRUPTED else f"gem: error: {text}"


def say(text: str, code: int, before: str = "") -> None:
    """Print the line, behind ``before``, in one write: other ranks write to the same place."""
    with suppress(Exception):
        sys.stderr.flush()
    # A terminal may show a live line, and have its cursor hidden.
    clean = "\r\x1b[2K\x1b[?25h" if os.isatty(2) else ""
    data = f"{clean}{before}{line_of(text, code)}\n".encode(errors="replace")
    with suppress(OSError):  # nobody reads it any more
        while data:
            data = data[os.write(2, data) :]


def leave_word(verdict: Verdict, told: bool) -> None:
    """For torchrun's summary, whose root cause is the earliest word: that of the rank that has told why."""
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    text = line_of(verdict.text, verdict.code) if told else f"ended with the others, as rank {verdict.rank} told"
    when = str(int(time.time()) + (not told))
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": when}}
    with suppress(OSError):
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)
        os.replace(f"{path}.part", path)
