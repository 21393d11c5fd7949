"""``python suites/asv COMMAND``: see tool.py. The package goes by another name, since asv's own is asv."""

import importlib
import importlib.util
import sys
from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(
        "gem_asv", here / "__init__.py", submodule_search_locations=[str(here)]
    )
    assert spec and spec.loader
    sys.modules["gem_asv"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["gem_asv"])
    sys.exit(importlib.import_module("gem_asv.tool").main(sys.argv[1:]))
