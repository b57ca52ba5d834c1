"""`specreason`: a reasoning step is accepted if the target, asked to rate it from 0 to 9, rates it well. Lossy.

One target pass goes over the step and a short question after it. The likeliest digit after the question is the score;
the step is accepted from `threshold` on. Needs the target's rows only, but a target that follows instructions.
Source: SpecReason, arXiv 2504.07891. The question is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from semspec.errors import BadRequest
from semspec.verify.base import Rule, RuleResources
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.step_rule import StepRule

QUESTION = "\n\nHow good is the last step of this reasoning, from 0 (useless) to 9 (excellent)? One digit: "


@dataclass(frozen=True)
class SpecReason(StepRule):
    name = "specreason"
    title = "Rated steps"
    several = False

    steps: int = field(default=1, metadata={"main": False})
    threshold: int = field(default=7, metadata={"label": "least mark, 0 to 9", "main": True, "was": "least"})
    question: str = field(default=QUESTION, metadata={"label": "question to the target"})
    tokens: tuple[int, ...] = field(default=(), metadata={"option": False})  # the question in the target's tokens
    digits: tuple[int, ...] = field(default=(), metadata={"option": False})  # the tokens of 0 to 9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.threshold <= 9:
            raise BadRequest(f"specreason's threshold is {self.threshold}; give a score from 0 to 9")

    def bind(self, pair: RuleResources) -> Rule:
        digits = [pair.tokens_of(str(i))[-1:] for i in range(10)]
        if len({digit[0] for digit in digits if digit}) < 10:
            raise BadRequest("specreason needs a tokenizer with a token for every digit; this one has not")
        return replace(self, tokens=tuple(pair.tokens_of(self.question)), digits=tuple(d[0] for d in digits))

    def layout(self, draft: list[int]) -> list[int]:
        return [*draft, *self.tokens] if draft else []

    def verify(self, drafts: DraftBatch) -> Decisions:
        answer = drafts.target_logits[drafts.first_row + drafts.counts + len(self.tokens)]  # [B, V]
        score = answer[:, list(self.digits)].argmax(-1)
        return self.conclude(drafts, score >= self.threshold, (score,))

    def reason(self, evidence: Sequence[float]) -> str:
        return f"the target gives the step {evidence[0]:.0f} of 9"
