"""`mars`: the target's second choice is accepted if its logit is nearly that of the first. Lossy.

    y_j is the second best, and z(y_j) >= ratio * z(best), both logits before softmax, z(best) > 0
Unlike `margin`, which compares probabilities, the gap that is allowed grows with the logits: at z(best) = 20 and 0.9 it
is 2, and the second choice may be a seventh as likely as the first. So one ratio means other things to other models.
Source: MARS (arXiv 2601.15498) and its released code, whose default is 0.87. The code relaxes only when sampling, and
also where both logits are negative, when the ratio says nothing; here neither. It rejects by speculative sampling;
here, as with `margin`, the target's own draw decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from semspec.sampling.draw import largest
from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.lossy import conclude


@dataclass(frozen=True)
class Mars(Rule):
    name = "mars"
    title = "Logit margin"
    lossless = False

    ratio: float = field(
        default=0.9, metadata={"label": "share of the best token's logit", "main": True, "above": 0, "max": 1}
    )

    def verify(self, drafts: DraftBatch) -> Decisions:
        top = largest(drafts.target_logits.float(), 2)[drafts.rows[:, :-1]]  # [B, K, 2]
        own = drafts.target_logits.float()[drafts.rows[:, :-1], drafts.safe_ids]
        best, second = top.unbind(-1)
        allowed = (own >= second) & (own >= self.ratio * best) & (best > 0)
        return conclude(drafts, allowed, evidence=(own, best))

    def reason(self, evidence: Sequence[float]) -> str:
        own, best = evidence
        return f"second best, logit {own:.2f}, at least {self.ratio:g} of {best:.2f}"
