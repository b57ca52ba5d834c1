"""What `semspec sparse calibrate` aims at: our default, or the paper's rules. Options replace single parts.

The paper (arXiv 2512.21911) has the score of the first token, nothing of unread blocks, the piecewise budget with L0 of
1K, 2K and 4K, thresholds of 0.01, 0.05 and 0.1 for activations, and medians for up to three of eight experts. B, rho,
the number of blocks that are always read and the similarity from which layers share a selection are not known from it:
in both presets they are our choices.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from semspec.errors import BadRequest
from semspec.sparse.attention import AttentionPlan
from semspec.sparse_fit.calibrate import CalibrationConfig

PRESETS: dict[str, dict[str, Any]] = {
    "default": {"score": "reach", "rest": "mean", "block": 16, "dense_below": 1024, "ffn_by": "union", "experts": 0},
    "paper": {
        "score": "first",
        "rest": "nothing",
        "block": 64,
        "dense_below": 4096,
        "ffn_threshold": 0.05,
        "ffn_by": "token",
        "experts": None,
        "quantile": 0.5,
        "refresh": 0,
    },
}


def config(preset: str, **given: Any) -> CalibrationConfig:
    """The preset with what is given (not None) in place of its own; rho of 1 reads all blocks, so attention is off."""
    if preset not in PRESETS:
        raise BadRequest(f"there is no preset {preset!r}; give {' or '.join(PRESETS)}")
    settings = PRESETS[preset] | {name: value for name, value in given.items() if value is not None}
    if given.get("ffn") is not None:  # a share in place of the preset's threshold, if that was not given too
        settings["ffn_threshold"] = given.get("ffn_threshold") or 0.0
    names = {f.name for f in fields(AttentionPlan)}
    attention = AttentionPlan(**{name: value for name, value in settings.items() if name in names})
    others = {name: value for name, value in settings.items() if name not in names}
    return CalibrationConfig(attention if attention.rho < 1 else None, **others)
