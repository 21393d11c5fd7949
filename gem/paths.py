"""Where the declared suites and the fixtures lie: in the checkout, or bundled in a wheel. Imports no torch."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def checkout_root() -> Path | None:
    """Root of the checkout that this package is run from, or None when it was installed from a wheel.

    ``pyproject.toml`` and ``kernels/`` beside the package tell a checkout from a ``site-packages`` that
    happens to hold a directory named ``suites``.
    """
    root = _PACKAGE.parent
    if (root / "pyproject.toml").is_file() and (root / "kernels").is_dir():
        return root
    return None


def suites_dir() -> Path:
    """Directory of the declared suites (``correctness/``, ``throughput/``, ... of TOML files)."""
    return _data_dir("suites")


def fixtures_dir() -> Path:
    """Directory of the fixtures (``lengths/*.toml`` profiles and the readers' ``samples/``)."""
    return _data_dir("fixtures")


def _data_dir(name: str) -> Path:
    # A wheel carries suites/ and fixtures/ as gem.suites and gem.fixtures (package-dir in pyproject.toml).
    return (checkout_root() or _PACKAGE) / name
