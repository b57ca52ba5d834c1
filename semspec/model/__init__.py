"""Models: config, weights, KV cache, forward passes, and the runners on top of them."""

from semspec.model.runner import ModelRunner
from semspec.model.source import Source

__all__ = ["ModelRunner", "Source"]
