"""`spec-thinking`: the draft writes on, and the target takes over for a while where a reasoning step has a cue. Lossy.

A step is accepted unless its first `look` tokens have a cue: of doubt (wait, alternatively, hold on, another), of
checking (verify, think again, recap, check) or of being done (yeah, yes, final answer, confident). Then the target
writes `takeover` tokens in its place, and `recheck` more if those speak of checking; after that the draft goes on.
Training-free, and blind to what a step says. Cues and lengths are the published ones. Ours: the target reads every step
and adds a token after it (the released code lets it read when it takes over), a cue must be whole tokens, the draft may
not end the thinking, and no prompt to recapitulate is inserted after many doubts.
Source: Speculative Thinking, arXiv 2504.12329, and its released code; a baseline of SemanticSpec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from semspec.verify.base import Rule, RuleResources
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.cues import cue_starts, cue_tokens
from semspec.verify.step_rule import FIRST_CHOICE, ONE_STEP, StepRule

CHECKING = ("verify", "think again", "recap", "check")
CUES = (*CHECKING, "wait", "alternatively", "hold on", "another", "yeah", "yes", "final answer", "confident")


@dataclass(frozen=True)
class SpecThinking(StepRule):
    name = "spec-thinking"
    title = "Reflection cues"

    steps: int = field(default=1, metadata={"main": False, **ONE_STEP})
    candidates: int = field(default=1, metadata=FIRST_CHOICE)
    lead: int = 0
    hand_over: bool = False
    look: int = field(default=20, metadata={"label": "tokens in which cues count", "main": True, "min": 1})
    takeover: int = field(default=20, metadata={"label": "tokens the target then writes", "main": True, "min": 1})
    recheck: int = field(default=125, metadata={"label": "more of them where it checks", "min": 0})
    cues: Tensor | None = field(default=None, metadata={"option": False}, compare=False)  # [cues, 2, V]

    def bind(self, pair: RuleResources) -> Rule:
        return replace(self, cues=cue_tokens(pair, CUES))

    def verify(self, drafts: DraftBatch) -> Decisions:
        ids = torch.where(drafts.exists, drafts.ids, -1)
        cued = self._cued(ids, len(CUES)) & (drafts.positions[:-1] < self.look)
        return self.conclude(drafts, ~cued.any(-1), (cued.any(-1),))

    def _cued(self, ids: Tensor, of: int) -> Tensor:
        """[B, K] whether one of the first so many cues begins at each token; -1: no token"""
        assert self.cues is not None, "bind the rule to a pair first"
        return cue_starts(self.cues[:of], ids)

    def takeover_tokens(self) -> int:
        return self.takeover

    def prolong(self, tokens: Sequence[int]) -> int:
        return self.recheck if bool(self._cued(torch.tensor([list(tokens)]), len(CHECKING)).any()) else 0

    def reason(self, evidence: Sequence[float]) -> str:
        return "the step begins without a cue of doubt, checking or being done"
