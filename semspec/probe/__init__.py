"""Semantic probability, predicted: a small network from a model's hidden states to how likely it says a thing at all.

P_M([s] | c), the probability that model M, after context c, writes a step that means what step s means, is costly to
sample. `collect` samples it, `cluster` and `label` turn samples into shares, `fit` trains a probe on the states that
predicted the steps. At run time only `features` and `head` are needed. Source: arXiv 2602.03708 and its released code.

The names below are imported when first used, since the command line lists this package without needing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semspec.probe.features import Features
    from semspec.probe.head import Probe
    from semspec.probe.identity import fingerprint

_HOME = {"Features": "features", "Probe": "head", "fingerprint": "identity"}

__all__ = ["Features", "Probe", "fingerprint"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"semspec.probe.{_HOME[name]}"), name)
    raise AttributeError(f"module 'semspec.probe' has no attribute {name!r}")
