"""Errors that belong to the person who asked, not to the program."""

import sys
from collections.abc import Callable


class RequestError(ValueError):
    """The request was wrong: one line that names what, where and what is accepted.

    The command line prints it as ``gem: error: ...`` and exits 2; library callers catch it as a ``ValueError``.
    """


def exit_code_of(main: Callable[..., object], *words: object) -> int:
    """Run ``main(*words)`` as a program, ``python -m``: 0, or 2 and one line on stderr for a wrong request."""
    try:
        main(*words)
    except RequestError as error:
        print(f"gem: error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"gem: error: {error.filename}: {error.strerror}", file=sys.stderr)
    else:
        return 0
    return 2
