"""`likely-step`: a reasoning step is accepted if the target finds its tokens likely enough. Lossy.

    accepted if the mean log-probability of the step's tokens >= threshold
With of="lowest" the least likely token decides, with of="numbers" the least likely one that has a digit in it: words
have paraphrases, numbers have not. Training-free, at temperature 1 whatever the request's is.
May break: as often as steps that read well are wrong. Needs the target's rows only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from semspec.probe.evidence import NAMES, evidence
from semspec.verify.base import Rule, RuleResources
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.step_rule import StepRule

COLUMNS = {"mean": "mean", "lowest": "lowest", "numbers": "lowest_number"}


@dataclass(frozen=True)
class LikelyStep(StepRule):
    name = "likely-step"
    title = "Step likelihood"

    lead: int = 0
    keep: bool = True
    hand_over: bool = False
    sample: bool = False
    threshold: float = field(
        default=-0.5, metadata={"label": "lowest log-probability to accept", "main": True, "max": 0}
    )
    of: str = field(default="mean", metadata={"label": "of which tokens", "choices": tuple(COLUMNS), "main": True})
    numbers: Tensor | None = field(default=None, metadata={"option": False}, compare=False)  # [V] number tokens

    def bind(self, pair: RuleResources) -> Rule:
        return replace(self, numbers=pair.numbers())

    def verify(self, drafts: DraftBatch) -> Decisions:
        assert self.numbers is not None, "bind the rule to a pair first"
        seen = evidence(drafts.target_logits, drafts.rows[:, :-1], drafts.safe_ids, drafts.exists, self.numbers)
        found = seen[:, NAMES.index(COLUMNS[self.of])]
        return self.conclude(drafts, found >= self.threshold, (found,))

    def reason(self, evidence: Sequence[float]) -> str:
        return f"{self.of} log-probability {evidence[0]:.2f} is at least {self.threshold:g}"
