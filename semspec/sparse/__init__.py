"""Sparse verification: KV cache blocks, FFN channels and experts skipped by a calibrated plan (arXiv 2512.21911).

docs/sparse.md has the design.
"""

from semspec.sparse.applied import PlanSwitch, apply, dense, plan_of
from semspec.sparse.attention import AttentionPlan
from semspec.sparse.experts import ExpertsPlan
from semspec.sparse.ffn import FfnPlan
from semspec.sparse.plan import SparsePlan

__all__ = ["AttentionPlan", "ExpertsPlan", "FfnPlan", "PlanSwitch", "SparsePlan", "apply", "dense", "plan_of"]
