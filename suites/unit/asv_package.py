"""suites/asv as a package for tests, under a name of its own: asv itself is called asv."""

import importlib
import importlib.util
import sys
from types import ModuleType

import pytest

from gem import paths

NAME = "gem_asv_of_tests"


def load(module: str) -> ModuleType:
    """``suites/asv/<module>.py``; skips where there is no checkout."""
    root = paths.checkout_root()
    if root is None:
        pytest.skip("not run from a checkout")
    if NAME not in sys.modules:
        folder = root / "suites" / "asv"
        spec = importlib.util.spec_from_file_location(
            NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec and spec.loader
        sys.modules[NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[NAME])
    return importlib.import_module(f"{NAME}.{module}")
