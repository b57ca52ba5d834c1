"""`confspec`: the draft model rates its own reasoning step; only where it is not sure, the target does. Lossy.

Both models are asked the question of `specreason` after the step. With s the draft's probability of a rating from
`threshold` on, among the ten digits:
    s >= sure             accepted
    s <= 1 - sure         rejected
    between               accepted if the target's own rating is at least `threshold`
Needs two models with the same tokenizer that follow instructions.
Source: ConfSpec (arXiv 2602.18447), from its abstract: the cascade is its, the question and 0.9 are ours. It has the
models say whether the step is equivalent to the target's own, which is not written here. The target reads every step,
as with all step rules here, with the question after it; so what the draft's rating saves is not passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from semspec.errors import BadRequest
from semspec.verify.base import Rule, RuleResources
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.specreason import SpecReason


@dataclass(frozen=True)
class ConfSpec(SpecReason):
    name = "confspec"
    title = "Draft self-rating"
    asks_draft = True

    sure: float = field(
        default=0.9,
        metadata={
            "label": "draft's certainty that settles it",
            "main": True,
            "above": 0.5,
            "max": 1,
        },
    )

    def bind(self, pair: RuleResources) -> Rule:
        if pair.draft_numbers() is not None:
            raise BadRequest(
                "confspec asks both models the same question in the same tokens, and these have different tokenizers; "
                "choose specreason, which asks the target only"
            )
        return super().bind(pair)

    def rate_by_draft(self, answer: Tensor) -> float:
        return answer[list(self.digits)].float().softmax(-1)[self.threshold :].sum().item()

    def verify(self, drafts: DraftBatch) -> Decisions:
        assert drafts.self_ratings is not None, "the loop asks the draft first"
        score = self._score(drafts.target_logits[drafts.first_row + drafts.counts + len(self.tokens)])
        by_draft = drafts.self_ratings
        unsure = (by_draft < self.sure) & (by_draft > 1 - self.sure)
        passes = torch.where(unsure, score >= self.threshold, by_draft >= self.sure)
        return self.conclude(drafts, passes, (by_draft, score.float(), unsure.float()))

    def reason(self, evidence: Sequence[float]) -> str:
        by_draft, score, unsure = evidence
        if unsure:
            return f"the draft is sure to {by_draft:.2f} only, and {super().reason((score,))}"
        return f"the draft is sure to {by_draft:.2f} that the step is good"
