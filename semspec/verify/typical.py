"""`typical`: a draft token is accepted if it is not surprising, given how undecided the target is. Lossy.

    p(y_j) > min(epsilon, alpha * exp(-H(p)))      H the entropy of the target's distribution, in nats
Source: typical acceptance, Medusa (Cai et al. 2024, arXiv 2401.10774); constants as vLLM shipped them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from semspec.sampling.draw import entropy
from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.lossy import conclude


@dataclass(frozen=True)
class Typical(Rule):
    name = "typical"
    title = "Typical acceptance"
    lossless = False

    epsilon: float = field(
        default=0.09, metadata={"label": "probability that always suffices", "main": True, "above": 0, "max": 1}
    )
    alpha: float = field(
        default=0.3, metadata={"label": "less where the target is undecided", "main": True, "above": 0}
    )

    def verify(self, drafts: DraftBatch) -> Decisions:
        probs = drafts.soft_target_probs
        floor = (self.alpha * torch.exp(-entropy(probs))).clamp_max(self.epsilon)[drafts.rows[:, :-1]]  # [B, K]
        p = drafts.soft_target_prob_of_draft()
        return conclude(drafts, p > floor, evidence=(p, floor))

    def reason(self, evidence: Sequence[float]) -> str:
        p, floor = evidence
        return f"p {p:.3f} > {floor:.3f}"
