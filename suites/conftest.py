"""Declared cases under suites/ are pytest items: see gem/harness/pytest_plugin.py."""

from gem.harness.pytest_plugin import pytest_collect_file, pytest_configure

__all__ = ["pytest_collect_file", "pytest_configure"]
