"""What asv finds here: a benchmark class for each declared throughput case that this machine can run (see cases.py)."""

from pathlib import Path

from gem import paths
from gem.harness import environment
from gem.harness.suites import load_suites

from .cases import check_checkout, generate

check_checkout(Path(__file__).resolve().parents[2])
globals().update(generate(load_suites([paths.suites_dir() / "throughput"]), environment.facts(), __name__))
