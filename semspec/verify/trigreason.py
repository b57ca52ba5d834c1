"""`trigreason`: the draft's reasoning steps are accepted unless one of three triggers calls the target. Lossy.

    the beginning       the target writes the first `lead` steps, in which the plan is made
    overconfidence      the geometric mean of the draft's probabilities of the step's tokens is `overconfident` or more
    going in circles    `circles` steps in a row have a cue of hesitation
Needs the draft's logits, and nothing of the target's. Unlike most rules it distrusts a draft that is too sure; a draft
trained on one kind of text is sure of nearly all of it, and is then rejected nearly always.
Source: TrigReason (arXiv 2604.14847), from its abstract and descriptions: the triggers are its, the measures, cues and
numbers ours. The target reads every step, as with all step rules here; there only when called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from semspec.verify.base import Rule, RuleResources
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.cues import cue_starts, cue_tokens
from semspec.verify.probe_inputs import draft_confidence
from semspec.verify.step_rule import FIRST_CHOICE, ONE_STEP, StepRule

CUES = ("wait", "hmm", "alternatively", "hold on", "actually", "mistake")


@dataclass(frozen=True)
class TrigReason(StepRule):
    name = "trigreason"
    title = "Takeover triggers"

    steps: int = field(default=1, metadata={"main": False, **ONE_STEP})
    candidates: int = field(default=1, metadata=FIRST_CHOICE)
    lead: int = field(default=1, metadata={"main": True})
    hand_over: bool = False
    overconfident: float = field(
        default=0.99, metadata={"label": "mean probability that is too sure", "main": True, "above": 0}
    )
    circles: int = field(default=3, metadata={"label": "hesitant steps in a row", "main": True, "min": 1})
    cues: Tensor | None = field(default=None, metadata={"option": False}, compare=False)  # [cues, 2, V]

    def bind(self, pair: RuleResources) -> Rule:
        return replace(self, cues=cue_tokens(pair, CUES))

    @property
    def keeps_draft_logits(self) -> bool:
        return True

    def verify(self, drafts: DraftBatch) -> Decisions:
        assert self.cues is not None, "bind the rule to a pair first"
        sure = draft_confidence(drafts, sampled=self.samples_drafts)[:, 1].exp()  # [B]
        hesitates = cue_starts(self.cues, torch.where(drafts.exists, drafts.ids, -1)).any(-1)
        before = torch.zeros_like(drafts.counts) if drafts.state is None else drafts.state[:, 0]
        row = torch.where(hesitates, before + 1, 0)  # hesitant steps in a row
        circles = row >= self.circles
        decisions = self.conclude(drafts, (sure < self.overconfident) & ~circles, (sure, row))
        decisions.state = torch.where(circles, 0, row)[:, None]
        return decisions

    def reason(self, evidence: Sequence[float]) -> str:
        sure, row = evidence
        hesitant = f", {row:.0f} hesitant steps in a row" if row else ""
        return f"no trigger: the draft is sure to {sure:.2f}{hesitant}"
