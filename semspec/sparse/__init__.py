"""Sparse verification: KV cache blocks, FFN channels and experts skipped by a calibrated plan (arXiv 2512.21911).

docs/sparse.md has the design. The names below are imported when first used, so that `semspec --help` does not wait for
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semspec.sparse.applied import apply, plan_of
    from semspec.sparse.attention import AttentionPlan
    from semspec.sparse.experts import ExpertsPlan
    from semspec.sparse.ffn import FfnPlan
    from semspec.sparse.plan import SparsePlan

_HOME = {
    "AttentionPlan": "attention",
    "ExpertsPlan": "experts",
    "FfnPlan": "ffn",
    "SparsePlan": "plan",
    "apply": "applied",
    "plan_of": "applied",
}

__all__ = ["AttentionPlan", "ExpertsPlan", "FfnPlan", "SparsePlan", "apply", "plan_of"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"semspec.sparse.{_HOME[name]}"), name)
    raise AttributeError(f"module 'semspec.sparse' has no attribute {name!r}")
