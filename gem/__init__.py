"""gem: the attention ops of GEM-style ads recommendation models, and the harness that proves them.

The public names load on first use, so that ``import gem`` (and ``gem list``) costs no torch import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gem.bias import PositionBias, TimeBias
    from gem.dispatch import explain
    from gem.ops import block_attention, gdpa, jagged_attention

__all__ = [
    "PositionBias",
    "TimeBias",
    "__version__",
    "block_attention",
    "explain",
    "gdpa",
    "jagged_attention",
]

_HOME = {
    "PositionBias": "gem.bias",
    "TimeBias": "gem.bias",
    "block_attention": "gem.ops",
    "explain": "gem.dispatch",
    "gdpa": "gem.ops",
    "jagged_attention": "gem.ops",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use (PEP 562)."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'gem' has no attribute {name!r}; it has: {', '.join(__all__)}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
