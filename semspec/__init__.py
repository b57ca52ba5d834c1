"""Speculative decoding with a pluggable verifier: a small model writes ahead, the big one only checks.

The public names are below; each is imported when it is first used, so that `import semspec` and `semspec --help` do
not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any
from warnings import warn

if TYPE_CHECKING:
    from semspec import hf
    from semspec import verify as verifiers
    from semspec.draft import register as register_drafter
    from semspec.errors import BadRequest, BatchFailed, ModelError, SemspecError
    from semspec.loop.stats import Stats
    from semspec.options import Options
    from semspec.pair import Pair
    from semspec.pair.loading import load
    from semspec.pair.result import Result, Stream
    from semspec.pair.session import Session
    from semspec.profile import Profile
    from semspec.types import Event, Sampling
    from semspec.verify import Rule
    from semspec.verify import register as register_rule

__version__ = "0.1.0"

_HOMES = {
    "semspec.errors": ("BadRequest", "BatchFailed", "ModelError", "SemspecError"),
    "semspec.options": ("Options",),
    "semspec.pair.result": ("Result", "Stream"),
    "semspec.pair.loading": ("load",),
    "semspec.pair": ("Pair",),
    "semspec.pair.session": ("Session",),
    "semspec.loop.stats": ("Stats",),
    "semspec.profile": ("Profile",),
    "semspec.types": ("Event", "Sampling"),
    "semspec.verify": ("Rule",),
}
_HOME = {name: (module, name) for module, names in _HOMES.items() for name in names} | {
    "register_rule": ("semspec.verify", "register"),
    "register_drafter": ("semspec.draft", "register"),
    "register_task": ("semspec.tasks", "register"),
    "register_clusterer": ("semspec.probe_fit.cluster", "register"),
}
_MODULES = {"verifiers": "semspec.verify", "hf": "semspec.hf"}

__all__ = [
    "BadRequest",
    "BatchFailed",
    "Event",
    "ModelError",
    "Options",
    "Pair",
    "Profile",
    "Result",
    "Rule",
    "Sampling",
    "SemspecError",
    "Session",
    "Stats",
    "Stream",
    "hf",
    "load",
    "register_clusterer",
    "register_drafter",
    "register_rule",
    "register_task",
    "verifiers",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name == "register":
        warn("semspec.register is now register_rule; the old name goes with the next release", DeprecationWarning, 2)
        name = "register_rule"
    if name in _HOME:
        module, attribute = _HOME[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'semspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
