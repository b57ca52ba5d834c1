"""Speculative decoding with a pluggable verifier: a small model writes ahead, the big one only checks.

The public names are below; each is imported when it is first used, so that `import semspec` and `semspec --help` do
not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semspec import verify as verifiers
    from semspec.errors import BadRequest, BatchFailed, ModelError, SemspecError
    from semspec.loop.stats import Stats
    from semspec.options import Options
    from semspec.pair import Pair
    from semspec.pair.loading import load
    from semspec.pair.result import Result, Stream
    from semspec.pair.session import Session
    from semspec.types import Event, Sampling
    from semspec.verify import Rule, register

__version__ = "0.1.0"

_HOMES = {
    "semspec.errors": ("BadRequest", "BatchFailed", "ModelError", "SemspecError"),
    "semspec.options": ("Options",),
    "semspec.pair.result": ("Result", "Stream"),
    "semspec.pair.loading": ("load",),
    "semspec.pair": ("Pair",),
    "semspec.pair.session": ("Session",),
    "semspec.loop.stats": ("Stats",),
    "semspec.types": ("Event", "Sampling"),
    "semspec.verify": ("Rule", "register"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BadRequest",
    "BatchFailed",
    "Event",
    "ModelError",
    "Options",
    "Pair",
    "Result",
    "Rule",
    "Sampling",
    "SemspecError",
    "Session",
    "Stats",
    "Stream",
    "load",
    "register",
    "verifiers",
]


def __getattr__(name: str) -> Any:
    if name == "verifiers":
        return import_module("semspec.verify")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'semspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
