"""How a checkpoint becomes fast: config, weights, cache, transformer, and the Runner on top of them."""

from semspec.model.runner import ModelRunner

__all__ = ["ModelRunner"]
