"""`specreason`: a reasoning step is accepted if the target, asked to rate it from 0 to 9, rates it well. Lossy.

One target pass goes over the step and a short question after it. The likeliest digit after the question is the score;
the step is accepted from `threshold` on. Needs the target's rows only, but a target that follows instructions.
As published, the question is the user's next turn (form="chat"), the score is the token that the target generates, 0 if
it is no digit (score="greedy"), or the mean of the digits among its ten likeliest tokens (score="mean"), the draft
writes the first step, steps have up to 512 tokens, and 7 is enough. paper=true sets what is left at its default so. The
wording of the question is ours; the authors' is in their repository, and `prompt` takes a file with it. Ours as well:
the target's token after an accepted step, and that the draft may not end the thinking.
Source: SpecReason, arXiv 2504.07891, and its released code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from semspec.errors import BadRequest
from semspec.verify.base import Rule, RuleResources
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.step_rule import ONE_STEP, StepRule

QUESTION = "\n\nHow good is the last step of this reasoning, from 0 (useless) to 9 (excellent)? One digit: "
TURN = (
    "Rate the last step of your reasoning so far. Count only whether what it says is true and follows from the steps "
    "before it, not its wording and not whether it helps. Give one digit from 0 (wrong) to 9 (right)."
)
REPLY = "The step deserves: "
FORMS, SCORES = ("inline", "chat"), ("digit", "greedy", "mean")


@dataclass(frozen=True)
class SpecReason(StepRule):
    name = "specreason"
    title = "Step rating"
    published: ClassVar[Mapping[str, Any]] = {
        "form": "chat",
        "score": "greedy",
        "lead": 0,
        "max_step_tokens": 512,
        "hand_over": False,
    }

    steps: int = field(default=1, metadata={"main": False, **ONE_STEP})
    candidates: int = field(default=1, metadata=ONE_STEP)
    threshold: int = field(
        default=7,
        metadata={"label": "lowest rating to accept, 0 to 9", "main": True, "was": "least", "min": 0, "max": 9},
    )
    question: str = field(default=QUESTION, metadata={"label": "question to the target"})
    form: str = field(default="inline", metadata={"label": "where it is asked", "choices": FORMS})
    score: str = field(default="digit", metadata={"label": "how the rating is read", "choices": SCORES})
    paper: bool = field(default=False, metadata={"label": "as published, but for the wording"})
    prompt: str = field(
        default="", metadata={"label": "file with another question", "path": True}
    )  # file with another question
    tokens: tuple[int, ...] = field(default=(), metadata={"option": False})  # the question in the target's tokens
    digits: tuple[int, ...] = field(default=(), metadata={"option": False})  # the tokens of 0 to 9

    def bind(self, pair: RuleResources) -> Rule:
        digits = [pair.tokens_of(str(i))[-1:] for i in range(10)]
        if len({digit[0] for digit in digits if digit}) < 10:
            raise BadRequest(f"{self.name} needs a tokenizer with a token for every digit; this one has not")
        return replace(self, tokens=tuple(self._tokens(pair)), digits=tuple(d[0] for d in digits))

    def _tokens(self, pair: RuleResources) -> list[int]:
        question = self.question if self.form == "inline" or self.question != QUESTION else TURN
        if self.prompt:
            try:
                question = Path(self.prompt).read_text(encoding="utf-8").strip()
            except (OSError, ValueError) as error:
                raise BadRequest(f"{self.name}'s prompt cannot be read: {error}; give a text file") from error
        if self.form == "inline":
            return pair.tokens_of(question)
        return [*pair.next_turn(question), *pair.tokens_of(REPLY)]

    def layout(self, draft: list[int]) -> list[int]:
        return [*draft, *self.tokens] if draft else []

    def verify(self, drafts: DraftBatch) -> Decisions:
        score = self._score(drafts.target_logits[drafts.first_row + drafts.counts + len(self.tokens)])
        return self.conclude(drafts, score >= self.threshold, (score,))

    def _score(self, answer: Tensor) -> Tensor:
        """[B, V] logits after the question -> [B]"""
        own = torch.stack([answer[:, digit] for digit in self.digits], 1)  # [B, 10]; a list would wait for the device
        ratings = torch.arange(10, device=answer.device)
        if self.score == "digit":
            return own.argmax(-1)
        if self.score == "greedy":
            return torch.where(own.amax(-1) >= answer.amax(-1), own.argmax(-1), 0)
        tenth = answer.topk(min(10, answer.shape[-1]), dim=-1).values[:, -1:]
        weights = torch.where(own >= tenth, (own - answer.amax(-1, keepdim=True)).float().exp(), 0.0)
        return (weights * ratings).sum(-1) / weights.sum(-1).clamp_min(1e-30)

    def reason(self, evidence: Sequence[float]) -> str:
        return f"the target gives the step {evidence[0]:.3g} of 9"
