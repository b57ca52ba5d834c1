"""Controls, not methods: baselines for step rules. Lossy.

`random-step` accepts steps at a given rate, whatever is in them: a step rule that is no better at the same rate has
learnt nothing. `accept-all-steps` and `accept-no-step` are the extremes: the draft's steps (except protected tokens and
the end of thinking), and the target's text with all drafts wasted. `oracle` accepts exactly the steps that the task's
referee calls valid: the upper bound of every step rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from semspec.sampling.noise import ACCEPT
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.step_rule import ONE_STEP, StepRule


@dataclass(frozen=True)
class RandomStep(StepRule):
    """A reasoning step is accepted at random."""

    name = "random-step"
    title = "Random steps"
    control = True

    rate: float = field(default=0.7, metadata={"label": "share of steps accepted", "main": True, "min": 0, "max": 1})

    def verify(self, drafts: DraftBatch) -> Decisions:
        u = drafts.uniform(ACCEPT)[:, 0]
        return self.conclude(drafts, u < self.rate, (u,))

    def reason(self, evidence: Sequence[float]) -> str:
        return f"random number {evidence[0]:.2f} < {self.rate:g}"


@dataclass(frozen=True)
class AcceptAllSteps(StepRule):
    """Every reasoning step of the draft is accepted."""

    name = "accept-all-steps"
    title = "Accept all steps"
    control = True

    def verify(self, drafts: DraftBatch) -> Decisions:
        return self.conclude(drafts, torch.ones_like(drafts.counts, dtype=torch.bool))

    def reason(self, evidence: Sequence[float]) -> str:
        return "every draft step is accepted"


@dataclass(frozen=True)
class AcceptNoStep(StepRule):
    """No reasoning step is accepted: the target's text, with all drafts wasted."""

    name = "accept-no-step"
    title = "Accept no step"
    control = True

    def verify(self, drafts: DraftBatch) -> Decisions:
        return self.conclude(drafts, torch.zeros_like(drafts.counts, dtype=torch.bool))


@dataclass(frozen=True)
class Oracle(StepRule):
    """A reasoning step is accepted if the task's referee calls it valid."""

    name = "oracle"
    title = "Referee"
    control = True
    refereed = True

    candidates: int = field(default=1, metadata=ONE_STEP)

    def verify(self, drafts: DraftBatch) -> Decisions:
        assert drafts.valid is not None, "the loop asks the referee first"
        return self.conclude(drafts, drafts.valid)

    def reason(self, evidence: Sequence[float]) -> str:
        return "the referee calls the step valid"
