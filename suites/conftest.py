"""Declared cases under suites/ are pytest items: see gem/harness/pytest_plugin.py."""

import signal

from gem.harness.pytest_plugin import pytest_collect_file, pytest_configure

__all__ = ["pytest_collect_file", "pytest_configure"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what runs behind it (`./ci/test &`): whatever a test starts would be deaf to Ctrl-C too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
