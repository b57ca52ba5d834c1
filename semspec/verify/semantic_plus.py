"""`semantic+`: a step stands if a judge, who has seen what the target's pass says about it, is sure enough. Lossy.

    stands if judge(step) >= least
The judge is a probe of the target trained to say whether the step is one the target would write itself, in whatever
words, or one that is right, where a task can tell; best on steps that this rule has met (`semspec probe collect
--traces semantic+`). The draft writes what it finds best, whatever the temperature (unless `sample`: then texts of
different seeds differ more, and more steps fall). Besides states the judge may look at evidence: the target's
probabilities of the step's tokens, of its numbers above all, and their entropies, which the same pass has computed; and
how sure the draft was of its own tokens. One wrong digit, which drowns in a mean of states, is plain there. What is
refused is not lost: the target keeps a step's beginning as far as it would have written the same (`keep`), or as far as
its least likely token if the judge takes what lies before (`part`), and writes the rest, as everything it writes here,
with token-level speculation (`rewrite`, lossless by default). Where the draft is sure of the numbers in a step, it may
write more of them (`steps`).
May break: as often as `least` allows; `semspec probe calibrate` finds it from a bound on the share of bad steps.
Needs the target's rows, and what the judge was fitted with: layers of states, the draft's logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from semspec.errors import BadRequest
from semspec.probe.head import Probe
from semspec.types import Draft, Sampling
from semspec.verify.base import Decisions, DraftBatch, Rule, RuleResources
from semspec.verify.probe_inputs import probe_inputs
from semspec.verify.step_rule import StepRule


@dataclass(frozen=True)
class SemanticPlus(StepRule):
    name = "semantic+"

    lead: int = 0  # its judge needs no step of the target's to start from
    keep: bool = True
    rewrite: str = "exact"
    rewrite_tokens: int = 10
    sample: bool = False  # what stands is the judge's affair, not chance's: a best guess stands more often
    hand_over: bool = False
    part: bool = False  # of a step that falls, keep what lies before its least likely token, if the judge takes that
    threshold: float = field(default=-1.0, metadata={"was": "least"})  # below 0: what the judge was calibrated to
    probes: str = field(default="", metadata={"path": True})  # folder with the judge; "": the one of the pair
    judge_probe: Probe | None = field(default=None, metadata={"option": False})
    numbers: Tensor | None = field(default=None, metadata={"option": False}, compare=False)  # [V] number tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold > 1:
            raise BadRequest(f"semantic+'s threshold is {self.threshold}; give a probability from 0 to 1")

    def bind(self, pair: RuleResources) -> Rule:
        judge = pair.judge_probe(self.probes)
        threshold = self.threshold if self.threshold >= 0 else float(judge.data.get("least", 0.5))
        return replace(self, judge_probe=judge, numbers=pair.numbers(), threshold=threshold)

    @property
    def samples_drafts(self) -> bool:
        """A judge that looks at how sure the draft was is shown drafts like those it has learnt from: drawn, unless it
        was taught by what a rule met whose drafts were not."""
        return self.sample or (self._sees_confidence and self._knows_draws)

    @property
    def keeps_draft_logits(self) -> bool:
        return self.steps > 1 or self._sees_confidence

    @property
    def _sees_confidence(self) -> bool:
        return self.judge_probe is not None and "draft" in self.judge_probe.features.evidence

    @property
    def _knows_draws(self) -> bool:
        return self.judge_probe is None or bool(self.judge_probe.data.get("met", {}).get("drawn", True))

    @property
    def layers(self) -> tuple[int, ...]:
        return self.judge_probe.layers if self.judge_probe else ()

    def confidence(self, draft: Draft, sampling: Sampling) -> float:
        """The probability that the draft gave the numbers of its step; words can be put in many ways, numbers cannot.
        A step without a number is taken as any rule takes it."""
        assert self.numbers is not None
        own = self.draft_logprobs(draft, sampling)
        number = self.numbers.to(own.device)[torch.tensor(draft.tokens, device=own.device)]
        if not number.any():
            return super().confidence(draft, sampling)
        return math.exp(own[number].sum().item())

    def verify(self, drafts: DraftBatch) -> Decisions:
        sure = self._judged(drafts, drafts.counts)
        stands = sure >= self.threshold
        if not self.part or not drafts.ids.shape[1]:
            return self.conclude(drafts, stands, (sure,))
        before = self._least_likely(drafts)
        of_part = self._judged(drafts, before)
        part = torch.where(of_part >= self.threshold, before, 0)
        return self.conclude(drafts, stands, (torch.where(stands, sure, of_part),), part)

    def _judged(self, drafts: DraftBatch, counts: Tensor) -> Tensor:
        """[B] what the judge says of the first so many tokens [B] of each step"""
        assert self.judge_probe is not None, "a rule judges once it is bound to a pair"
        shown = probe_inputs(drafts, self.judge_probe.features.evidence, self.numbers, counts, self.samples_drafts)
        return self.judge_probe(drafts.hidden or {}, drafts.first_row, counts, shown)

    def _least_likely(self, drafts: DraftBatch) -> Tensor:
        """[B] the place in each step of the token that the target finds least likely"""
        logp = drafts.target_logits.float().log_softmax(-1)[drafts.rows[:, :-1], drafts.safe_ids]
        return torch.where(drafts.exists, logp, 1.0).argmin(-1)

    def reason(self, evidence: Sequence[float]) -> str:
        return f"the judge is sure of this step to {evidence[0]:.2f}, at least {self.threshold:.2f}"
