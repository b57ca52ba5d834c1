"""`ensemble`: the draft is verified against a mixture of both models instead of the target. Lossy.

    v = weight * p + (1 - weight) * q
When sampling, draft token x, drawn from q, is accepted with probability v(x) / q(x) = 1 - weight + weight * p(x) /
q(x). The residual of v over q is that of p over q, so a rejected token is replaced as in `sampling`. When greedy, x is
accepted if it is the best token of v. With weight 1 the rule is `sampling`, and when greedy `exact`.
Source: transformers' assistant_ensemble_weight. There a greedy mismatch is replaced by the best token of v; here by
the target's own, so that the mixture can accept draft tokens but never adds a third token.
May break: where the draft is confident and wrong, 1 - weight of its mistakes pass, whatever the target predicts.
Needs the draft's probabilities. A lookup draft counts as certain, so the target's doubts have little weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from semspec.sampling.noise import ACCEPT
from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.lossy import conclude
from semspec.verify.sampling import trial


@dataclass(frozen=True)
class Ensemble(Rule):
    name = "ensemble"
    title = "Mixture of both models"
    lossless = False
    needs_draft_logits = True

    weight: float = field(default=0.7, metadata={"label": "the target's weight", "main": True, "above": 0, "max": 1})

    def verify(self, drafts: DraftBatch) -> Decisions:
        passes, choice = trial(drafts)
        own, others = drafts.soft_target_probs[drafts.rows[:, :-1]], drafts.draft_probs_by_token()  # [B, K, V]
        mixed = self.weight * own + (1 - self.weight) * others
        allowed = drafts.ids == mixed.argmax(-1)
        if not drafts.target_sampling.all_greedy:
            p, q = drafts.target_prob_of_draft(), drafts.draft_prob_of_draft()
            passed = drafts.uniform(ACCEPT)[:, :-1] * q < self.weight * p + (1 - self.weight) * q
            allowed = torch.where(drafts.greedy[:, None], allowed, passed)
        at = drafts.safe_ids[..., None]
        return conclude(
            drafts, allowed, choice, passes, evidence=(own.gather(-1, at)[..., 0], others.gather(-1, at)[..., 0])
        )

    def reason(self, evidence: Sequence[float]) -> str:
        p, q = evidence
        return f"p {p:.2f} and the draft's {q:.2f} make {self.weight * p + (1 - self.weight) * q:.2f}"
