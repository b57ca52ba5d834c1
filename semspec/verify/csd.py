"""`csd`: a mismatch that keeps coming back in this answer is accepted if the target finds it possible. Lossy.

A memory counts pairs (draft token, the target's choice) where the two differed. A mismatch is accepted if its pair has
been met `count` times in earlier rounds, and if
    p(y_j) >= ratio * p(the target's choice)
Words for the same thing come in pairs that repeat; mistakes seldom do. Counts go into 1,024 buckets, so that rarely two
pairs share one; they are the rule's state, which comes back with the next draft of the same answer.
Source: CSD (arXiv 2604.13634), with its ratio of 0.01, as others summarise it; we have not read its whole text. There
the memory is filled from 2,000 to 8,000 samples first and shared by all answers; here it begins empty with every
answer, so that no answer depends on another's, and a count of 2 is our choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.lossy import conclude

BUCKETS = 1024
SPREAD = (2_654_435_761, 2_246_822_519)  # large odd numbers, so that near ids do not share a bucket


@dataclass(frozen=True)
class CorrectionMemory(Rule):
    name = "csd"
    title = "Correction memory"
    lossless = False

    count: int = field(default=2, metadata={"label": "times the pair was met", "main": True, "min": 0})
    ratio: float = field(
        default=0.01, metadata={"label": "share of the choice's probability", "main": True, "above": 0, "max": 1}
    )

    def verify(self, drafts: DraftBatch) -> Decisions:
        choice = drafts.target_choice()  # [B, K + 1]
        mismatch = (drafts.ids != choice[:, :-1]) & drafts.exists
        bucket = ((drafts.safe_ids * SPREAD[0] + choice[:, :-1] * SPREAD[1]) >> 16) % BUCKETS  # [B, K]
        memory = self._empty(drafts) if drafts.state is None else drafts.state  # [B, BUCKETS]
        met = memory.gather(1, bucket)
        p = drafts.soft_target_prob_of_draft()
        other = drafts.soft_target_probs[drafts.rows[:, :-1], choice[:, :-1]]
        decisions = conclude(drafts, (met >= self.count) & (p >= self.ratio * other), choice, evidence=(met, p, other))
        tested = mismatch & (drafts.positions[:-1] <= decisions.accepted[:, None])
        decisions.state = memory.scatter_add(1, bucket, tested.long())
        return decisions

    def _empty(self, drafts: DraftBatch) -> Tensor:
        return torch.zeros([len(drafts.counts), BUCKETS], dtype=torch.long, device=drafts.ids.device)

    def reason(self, evidence: Sequence[float]) -> str:
        met, p, other = evidence
        return f"met {met:.0f} times, p {p:.3f} at least {self.ratio:g} of {other:.3f}"
