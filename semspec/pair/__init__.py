"""A target and its draft model, ready to answer: loading them, preparing requests, results, conversations."""

from semspec.pair.pair import Pair

__all__ = ["Pair"]
