"""Speculative decoding with a pluggable verifier: a small model writes ahead, the big one only checks."""

from semspec import verify as verifiers
from semspec.errors import BadRequest, ModelError, SemspecError
from semspec.pair import Options, Pair, Result, load
from semspec.stats import Stats
from semspec.types import Event, Sampling
from semspec.verify import Rule, register

__version__ = "0.1.0"

__all__ = [
    "BadRequest",
    "Event",
    "ModelError",
    "Options",
    "Pair",
    "Result",
    "Rule",
    "Sampling",
    "SemspecError",
    "Stats",
    "load",
    "register",
    "verifiers",
]
