"""`none`: no speculation, the target only, through the same loop, runner and sampling code.

This is the baseline of every speedup, so it is not handicapped: the loop lets the target decode several tokens at once.
If a draft is verified all the same, all of it is rejected and the target's own token follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch


@dataclass(frozen=True)
class NoSpeculation(Rule):
    name = "none"
    title = "Target only"
    lossless = True
    speculates = False

    def verify(self, drafts: DraftBatch) -> Decisions:
        return Decisions(torch.zeros_like(drafts.counts), drafts.target_choice()[:, 0])
