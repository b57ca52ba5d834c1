"""`top-or-ratio`: a draft token is accepted among the target's 2 likeliest, or else with probability p/q. Lossy.

The token-level baseline in SemanticSpec's tables. Drafts of 20 tokens are sampled; q is the draft's probability, p the
target's at temperature 1. A rejected token is replaced by the target's likeliest, not by a draw; after a whole draft
the target draws one. Ours: q has the request's filters applied (the released code's has the temperature alone), and
special tokens are protected.
Source: the baseline in the released code of SemanticSpec, arXiv 2602.03708.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from semspec.sampling.draw import best
from semspec.sampling.noise import ACCEPT
from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.lossy import conclude


@dataclass(frozen=True)
class TopOrRatio(Rule):
    name = "top-or-ratio"
    title = "Top-k or ratio test"
    lossless = False
    needs_draft_logits = True
    draft_tokens = 20

    top: int = field(default=2, metadata={"label": "accept among the target's N likeliest", "main": True, "min": 1})

    def verify(self, drafts: DraftBatch) -> Decisions:
        top = drafts.target_logits.topk(min(self.top, drafts.target_logits.shape[-1]), dim=-1).indices  # [R, top]
        in_top = (top[drafts.rows[:, :-1]] == drafts.ids[..., None]).any(-1)
        p = drafts.target_logits.float().softmax(-1)[drafts.rows[:, :-1], drafts.safe_ids]
        q = drafts.draft_prob_of_draft()
        allowed = in_top | (drafts.uniform(ACCEPT)[:, :-1] * q < p)
        inside = drafts.positions < drafts.counts[:, None]
        choice = torch.where(inside, best(drafts.target_logits)[drafts.rows], drafts.target_choice())
        return conclude(drafts, allowed, choice, evidence=(in_top, p, q))

    def reason(self, evidence: Sequence[float]) -> str:
        in_top, p, q = evidence
        return f"among the target's {self.top} likeliest" if in_top else f"by chance at p / q = {p:.3f} / {q:.3f}"
