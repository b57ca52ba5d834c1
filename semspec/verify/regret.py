"""`regret`: mismatches are accepted while what they cost the target stays within a budget for the whole answer. Lossy.

The regret of draft token y_i, i = 0 .. K-1, is how far it lies below the target's best, in logits:
    r_i = max z_i - z_i(y_i)
A mismatch is accepted if all three hold:
    r_0 + ... + r_i, with all that was accepted in earlier rounds, is at most `budget`
    r_i <= slope * (K - i)          the more of the draft hangs on it, the more it may cost
    it is one of the first `mismatches` of this draft
With a budget of 0 the rule is `exact`. What an answer has spent is the rule's state: it comes back with the next draft,
and the rule itself keeps nothing. When sampling, logits have the request's temperature.
Source: ASD (arXiv 2608.03447), and its authors' proposals to transformers (issue 48636) and LightLLM (pull request
1555). It is published for greedy decoding, with a budget of 2.06 for one pair; `slope` and `mismatches` are our choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.lossy import conclude


@dataclass(frozen=True)
class Regret(Rule):
    name = "regret"
    title = "Regret budget"
    lossless = False

    budget: float = field(default=2.0, metadata={"label": "regret that an answer may have", "main": True, "min": 0})
    slope: float = field(default=0.5, metadata={"label": "most per token that follows", "main": True, "min": 0})
    mismatches: int = field(default=2, metadata={"label": "most mismatches per draft", "min": 0})

    def verify(self, drafts: DraftBatch) -> Decisions:
        choice = drafts.target_choice()  # [B, K + 1]
        mismatch = (drafts.ids != choice[:, :-1]) & drafts.exists
        best = drafts.soft_target_probs.amax(-1)[drafts.rows[:, :-1]]
        regret = torch.where(mismatch, best.log() - drafts.soft_target_prob_of_draft().log(), 0.0)  # [B, K]
        unspent = torch.zeros_like(drafts.counts, dtype=torch.float32)[:, None]
        spent = unspent if drafts.state is None else drafts.state  # [B, 1]
        # Nothing after a rejected token is accepted, so a running sum may count rejected ones, too.
        total = spent + regret.cumsum(-1)
        left = drafts.counts[:, None] - drafts.positions[:-1]  # K - i
        allowed = (total <= self.budget) & (regret <= self.slope * left) & (mismatch.cumsum(-1) <= self.mismatches)
        decisions = conclude(drafts, allowed & (self.budget > 0), choice, evidence=(regret, total))
        assert decisions.relaxed is not None
        decisions.state = spent + torch.where(decisions.relaxed, regret, 0.0).sum(-1, keepdim=True)
        return decisions

    def reason(self, evidence: Sequence[float]) -> str:
        regret, total = evidence
        return f"regret {regret:.2f}; {total:.2f} of {self.budget:g} spent"
