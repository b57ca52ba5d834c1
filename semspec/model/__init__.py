"""How a checkpoint becomes fast: config, weights, cache, transformer, and the Runner on top of them."""

from semspec.model.runner import ModelRunner
from semspec.model.source import Source

__all__ = ["ModelRunner", "Source"]
