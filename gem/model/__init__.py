"""The GEM model: sparse tables, a sequence tower of gem's ops, cross-feature learning, DHEN experts, task heads."""

from gem.model.config import PRESETS, ModelConfig
from gem.model.gem_model import GemModel, Losses

__all__ = ["PRESETS", "GemModel", "Losses", "ModelConfig"]
