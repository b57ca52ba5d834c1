"""`margin`: a draft token is accepted if it is nearly as likely as the target's best. Lossy.

    p(y_j) >= ratio * p(best)
Source: margin gates as in "Margins, Not Windows" (arXiv 2609.02897), which reject where the best is at least twice as
likely: ratio 0.5. `mars` compares logits instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.lossy import conclude


@dataclass(frozen=True)
class Margin(Rule):
    name = "margin"
    title = "Probability margin"
    lossless = False

    ratio: float = field(
        default=0.5, metadata={"label": "share of the best token's probability", "main": True, "above": 0, "max": 1}
    )

    def verify(self, drafts: DraftBatch) -> Decisions:
        best = drafts.soft_target_probs.amax(-1)[drafts.rows[:, :-1]]  # [B, K]
        p = drafts.soft_target_prob_of_draft()
        return conclude(drafts, p >= self.ratio * best, evidence=(p, best))

    def reason(self, evidence: Sequence[float]) -> str:
        p, best = evidence
        return f"p {p:.2f}, at least {self.ratio:g} of the best's {best:.2f}"
