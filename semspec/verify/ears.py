"""`ears`: speculative sampling that accepts more often where the target is undecided. Lossy.

    accepted if u - tolerance * (1 - max p) < p(y_j) / q(y_j), u uniform
With a tolerance of 0, and when greedy, it is `sampling`. What replaces a rejected token is drawn as there.
Source: EARS (vllm-ascend pull request 7845, issue 5471), tried by its author with 0.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from semspec.sampling.noise import ACCEPT
from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.lossy import conclude
from semspec.verify.sampling import trial


@dataclass(frozen=True)
class Ears(Rule):
    name = "ears"
    title = "Entropy-adaptive sampling"
    lossless = False
    needs_draft_logits = True

    tolerance: float = field(
        default=0.3,
        metadata={"label": "added to the acceptance ratio, times 1 - max p", "main": True, "min": 0, "max": 1},
    )

    def verify(self, drafts: DraftBatch) -> Decisions:
        passes, choice = trial(drafts)
        # A greedy row has all its mass on one token, so nothing is forgiven there.
        undecided = 1 - drafts.target_probs.amax(-1)[drafts.rows[:, :-1]]  # [B, K]
        ratio = drafts.target_prob_of_draft() / drafts.draft_prob_of_draft()
        forgiven = self.tolerance * undecided
        allowed = (drafts.uniform(ACCEPT)[:, :-1] - forgiven < ratio) & (forgiven > 0)
        return conclude(drafts, allowed, choice, passes, evidence=(ratio, forgiven))

    def reason(self, evidence: Sequence[float]) -> str:
        ratio, forgiven = evidence
        return f"ratio {ratio:.2f} + tolerance {forgiven:.2f}"
