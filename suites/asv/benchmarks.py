"""What asv finds here: a benchmark class for each declared case that this machine can run (see cases.py).

``GEM_ASV_FACTS=all``: for those too that the other kind of machine can run, so that the results of both are published.
"""

import os
from dataclasses import replace
from pathlib import Path

from gem import paths
from gem.harness import environment
from gem.harness.suites import load_suites

from .cases import KINDS, check_checkout, generate

check_checkout(Path(__file__).resolve().parents[2])
_here = environment.facts(os.environ.get("GEM_DEVICE", "auto"))
_facts = [_here]
if os.environ.get("GEM_ASV_FACTS") == "all":
    _facts = [replace(_here, device="cpu"), replace(_here, device="cuda", capabilities=(90,), triton=True)]
_places = [place for kind in KINDS if (place := paths.suites_dir() / kind).is_dir()]
globals().update(generate(load_suites(_places), *_facts, module=__name__))
