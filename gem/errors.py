"""Errors that belong to the person who asked, not to the program."""


class RequestError(ValueError):
    """The request was wrong: one line that names what, where and what is accepted.

    The command line prints it as ``gem: error: ...`` and exits 2; library callers catch it as a ``ValueError``.
    """
