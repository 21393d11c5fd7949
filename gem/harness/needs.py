"""`needs = "cuda:sm90, package:flash_attn_interface"`: what a case or a peer needs of the machine.

Grammar: terms joined by commas, all of which must hold.
``cpu`` the run's device is the CPU · ``cuda`` it is an NVIDIA GPU · ``cuda:smNN`` of compute capability NN or newer ·
``triton`` an importable triton · ``compiler`` a C++ compiler (FlexAttention on the CPU compiles with it) ·
``package:NAME`` an importable Python package.
"""

import importlib.machinery
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from gem.errors import RequestError

GRAMMAR = "cpu, cuda, cuda:smNN, triton, compiler, package:NAME; several joined by commas"
_TERM = re.compile(r"(cpu|cuda|triton|compiler)|cuda:sm(?P<sm>\d{2,3})|package:(?P<package>[A-Za-z_][\w.]*)")


def importable(package: str) -> bool:
    """Whether `package` (dotted or not) could be imported, found out without importing it (or torch on its way)."""
    head, *rest = package.split(".")
    try:
        spec = importlib.util.find_spec(head)
    except (ImportError, ValueError):
        return False
    # find_spec("a.b") would import a; a package's folder on disk answers for the rest.
    for part in rest:
        locations = list(spec.submodule_search_locations or []) if spec else []
        found = importlib.machinery.PathFinder.find_spec(part, locations) if locations else None
        spec = found
    return spec is not None


@dataclass(frozen=True)
class Facts:
    """What this machine offers a run, found without importing torch.

    `device` is the device of the run; `capabilities` the compute capability of each visible GPU as 10·major + minor
    (90 = sm90); `no_cuda` and `no_compiler` say why there is none.
    """

    device: str = "cpu"
    capabilities: tuple[int, ...] = ()
    no_cuda: str = "no NVIDIA GPU here"
    triton: bool = False
    compiler: str | None = None
    no_compiler: str = "no C++ compiler"
    importable: Callable[[str], bool] = field(default=importable, compare=False)


def parse_needs(text: str) -> list[str]:
    """The terms of a `needs` text. Raises RequestError naming the term that is none."""
    terms = [term.strip() for term in text.split(",")]
    for term in terms:
        if not _TERM.fullmatch(term):
            raise RequestError(f"unknown need {term!r}; accepted: {GRAMMAR}")
    return terms


def check_needs(needs: str | None, facts: Facts) -> str | None:
    """None when the machine offers what is needed, else the reason in one line, fit for a skipped row."""
    for term in parse_needs(needs) if needs else []:
        lacking = _lacking(term, facts)
        if lacking:
            return f"needs {term}: {lacking}"
    return None


def _lacking(term: str, facts: Facts) -> str | None:
    if term == "cpu":
        return None if facts.device == "cpu" else f"this run is on {facts.device} (--device cpu)"
    if term == "triton":
        return None if facts.triton else "triton is not installed"
    if term == "compiler":
        return None if facts.compiler else facts.no_compiler
    if term.startswith("package:"):
        package = term.removeprefix("package:")
        return None if facts.importable(package) else f"the Python package {package} is not installed"
    if not facts.capabilities:
        return facts.no_cuda
    if facts.device != "cuda":
        return f"this run is on {facts.device} (--device cuda)"
    if ":sm" in term:
        wanted = int(term.split(":sm")[1])
        # The run uses the first visible GPU, so that one decides.
        if facts.capabilities[0] < wanted:
            return f"the GPU is sm{facts.capabilities[0]}"
    return None
