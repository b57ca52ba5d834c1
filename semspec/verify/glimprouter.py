"""`glimprouter`: the draft writes a reasoning step if it is sure of how the step begins, else the target does. Lossy.

    the step is the draft's if the entropy of the token with which it goes on, over its `top` likeliest, is < threshold
The loop shows the rule this one token before the draft writes on, so a step that goes to the target costs no more.
Where top-k, top-p or min-p would hide unlikely tokens, it first asks for the logits of a greedy token. What the draft
writes is accepted as it is, but for protected tokens. Needs the draft's logits of that token.
Source: GlimpRouter (arXiv 2601.05110) and its released code: 20 tokens, in nats, at temperature 1; its threshold is set
for each model, and 1 is the code's default. Ours: the target reads the draft's steps and adds the first token of the
next, so the draft's token is then the second of a step; and the draft may not end the thinking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from semspec.sampling.draw import entropy
from semspec.types import Draft, Sampling
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.step_rule import FIRST_CHOICE, StepRule


@dataclass(frozen=True)
class GlimpRouter(StepRule):
    name = "glimprouter"
    title = "First-token entropy"
    glimpses = True

    candidates: int = field(default=1, metadata=FIRST_CHOICE)
    lead: int = 0
    hand_over: bool = False
    threshold: float = field(
        default=1.0, metadata={"label": "entropy from which the target writes", "main": True, "min": 0}
    )
    top: int = field(default=20, metadata={"label": "top tokens in the entropy", "min": 2})

    def begins(self, first: Draft, sampling: Sampling) -> bool:
        logits = self.draft_logits(first, sampling)[0]
        probs = logits.topk(min(self.top, len(logits))).values.softmax(-1)
        return entropy(probs).item() < self.threshold

    def verify(self, drafts: DraftBatch) -> Decisions:
        return self.conclude(drafts, torch.ones_like(drafts.counts, dtype=torch.bool))

    def reason(self, evidence: Sequence[float]) -> str:
        return f"the draft was sure of how the step begins, entropy below {self.threshold:g}"
