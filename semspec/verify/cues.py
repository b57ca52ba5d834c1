"""Words of one or two tokens, such as "wait" and "hold on", found in drafts: cues by which some step rules decide."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from semspec.verify.base import RuleResources


def cue_tokens(pair: RuleResources, cues: Sequence[str]) -> Tensor:
    """[cues, 2, V] which tokens may be the first and the second word of each cue; any token, if it has one word only"""
    found = []
    for cue in cues:
        first, *second = [pair.tokens_with(word) for word in cue.split()]
        found.append(torch.stack([first, *(second or [torch.ones_like(first)])]))
    return torch.stack(found)


def cue_starts(cues: Tensor, ids: Tensor) -> Tensor:
    """[B, K] whether one of the cues [cues, 2, V] begins at each token; -1: no token"""
    cues = cues.to(ids.device)
    first = cues[:, 0][:, ids.clamp_min(0)] & (ids >= 0)  # [cues, B, K]
    after = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -1)], 1)
    second = cues[:, 1][:, after.clamp_min(0)] & (after >= 0)
    return (first & (second | cues[:, 1].all(-1)[:, None, None])).any(0)
