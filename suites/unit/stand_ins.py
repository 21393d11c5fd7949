"""Peers that are none, for tests of what the harness makes of bad ones: here and in the workers."""

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from gem.harness import bench, names
from gem.harness.params import SUBJECTS


def make_peers(monkeypatch: pytest.MonkeyPatch, stand_ins: Iterable[str], host: str) -> None:
    """Name them as peers; ``host``, ``module:class`` of a test, is the workers' side, which knows their code."""
    monkeypatch.setattr(bench, "HOST", host)
    for name in stand_ins:
        monkeypatch.setitem(names.PEERS, name, names.Peer("a stand-in", None, tuple(SUBJECTS)))
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
