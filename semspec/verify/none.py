"""`none`: no speculation. The target writes alone, through the same loop, runner and sampling code.

This is the baseline that every speed is measured against, so it is not handicapped: the loop lets the target roll.
Should a pass be judged all the same, nothing of a draft stands and the target's own token follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from semspec.verify.base import Decisions, DraftBatch, Rule


@dataclass(frozen=True)
class NoSpeculation(Rule):
    name = "none"
    lossless = True
    speculates = False

    def verify(self, drafts: DraftBatch) -> Decisions:
        return Decisions(torch.zeros_like(drafts.counts), drafts.target_choice()[:, 0])
