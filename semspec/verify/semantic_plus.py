"""`semantic+`: a reasoning step is accepted if a judge probe gives it a high enough probability. Lossy.

    accepted if judge(step) >= threshold
The judge probe reads the target. It is trained to predict whether the target would write a step of this meaning, or,
where a task can tell, whether the step is right; best on steps collected with this rule (`semspec probe collect
--traces semantic+`). The draft is greedy whatever the temperature (unless `sample`: then texts of different seeds
differ more, and more steps are rejected). Besides hidden states it may use evidence from the same pass: the
target's probabilities of the step's tokens and above all of its numbers, their entropies, and the draft's confidence in
its own tokens. One wrong digit is lost in a mean of states, but not there. A rejected step's beginning is accepted as
far as the target would have written the same (`keep`), or up to its least likely token if the probe accepts that
prefix (`part`). The target writes the rest, as everything it writes here, with token-level speculation (`rewrite`,
lossless by default). Where the draft is confident of the numbers in a step, it may draft further steps (`steps`).
May break: as often as `threshold` allows; `semspec probe calibrate` finds it from a bound on the share of bad steps.
Needs the target's rows, and what the judge probe was fitted with: layers of states, the draft's logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from semspec.probe.probe import Probe
from semspec.types import Draft, Sampling
from semspec.verify.base import Rule, RuleResources
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.probe_inputs import probe_inputs
from semspec.verify.step_rule import StepRule


@dataclass(frozen=True)
class SemanticPlus(StepRule):
    name = "semantic+"
    title = "Judge probe"

    lead: int = 0  # the judge probe works from the first step on
    keep: bool = True
    rewrite: str = "exact"
    rewrite_tokens: int = 10
    sample: bool = False  # greedy drafts are accepted more often
    hand_over: bool = False
    # Of a rejected step, accept what is before its least likely token if the judge probe does.
    part: bool = field(default=False, metadata={"label": "accept a rejected step's prefix if probe agrees"})
    threshold: float = field(  # below 0: the one the judge probe was calibrated to
        default=-1.0,
        metadata={"label": "lowest judge-probe probability", "main": True, "unset": "calibrated", "was": "least"}
        | {"max": 1},
    )
    probes: str = field(
        default="", metadata={"label": "folder of probes; empty: the pair's own", "path": True}
    )  # folder with the judge probe; "": the pair's own
    judge_probe: Probe | None = field(default=None, metadata={"option": False})
    numbers: Tensor | None = field(default=None, metadata={"option": False}, compare=False)  # [V] number tokens
    draft_numbers: Tensor | None = field(default=None, metadata={"option": False}, compare=False)  # of the draft model

    def bind(self, pair: RuleResources) -> Rule:
        judge = pair.judge_probe(self.probes)
        threshold = self.threshold if self.threshold >= 0 else float(judge.data.get("threshold", 0.5))
        numbers, draft_numbers = pair.numbers(), pair.draft_numbers()
        return replace(self, judge_probe=judge, numbers=numbers, draft_numbers=draft_numbers, threshold=threshold)

    @property
    def samples_drafts(self) -> bool:
        """A judge probe that uses the draft's confidence gets drafts like those it was trained on: sampled, unless they
        were collected with a rule whose drafts were greedy."""
        return self.sample or (self._uses_confidence and self._trained_on_samples)

    @property
    def keeps_draft_logits(self) -> bool:
        return self.steps > 1 or self._uses_confidence

    @property
    def _uses_confidence(self) -> bool:
        return self.judge_probe is not None and "draft" in self.judge_probe.features.evidence

    @property
    def _trained_on_samples(self) -> bool:
        return self.judge_probe is None or bool(
            self.judge_probe.data.get("collected_by", {}).get("samples_drafts", True)
        )

    @property
    def layers(self) -> tuple[int, ...]:
        return self.judge_probe.layers if self.judge_probe else ()

    def confidence(self, draft: Draft, sampling: Sampling) -> float:
        """The draft's probability of the numbers in its step: words have paraphrases, numbers do not. Without numbers,
        that of any step rule."""
        assert self.numbers is not None
        own = self.draft_logprobs(draft, sampling)
        numbers = self.numbers if self.draft_numbers is None else self.draft_numbers
        number = numbers.to(own.device)[torch.tensor(draft.own_tokens, device=own.device)]
        if not number.any():
            return super().confidence(draft, sampling)
        return math.exp(own[number].sum().item())

    def verify(self, drafts: DraftBatch) -> Decisions:
        score = self._judge(drafts, drafts.counts)
        passes = score >= self.threshold
        if not self.part or not drafts.ids.shape[1]:
            return self.conclude(drafts, passes, (score,))
        before = self._least_likely(drafts)
        part_score = self._judge(drafts, before)
        part = torch.where(part_score >= self.threshold, before, 0)
        return self.conclude(drafts, passes, (torch.where(passes, score, part_score),), part)

    def _judge(self, drafts: DraftBatch, counts: Tensor) -> Tensor:
        """[B] the judge probe's probability for the first counts [B] tokens of each step"""
        assert self.judge_probe is not None, "bind the rule to a pair first"
        inputs = probe_inputs(drafts, self.judge_probe.features.evidence, self.numbers, counts, self.samples_drafts)
        return self.judge_probe(drafts.hidden or {}, drafts.first_row, counts, inputs)

    def _least_likely(self, drafts: DraftBatch) -> Tensor:
        """[B] the position in each step of the token that is least likely to the target"""
        logp = drafts.target_logits.float().log_softmax(-1)[drafts.rows[:, :-1], drafts.safe_ids]
        return torch.where(drafts.exists, logp, 1.0).argmin(-1)

    def reason(self, evidence: Sequence[float]) -> str:
        return f"judge probe {evidence[0]:.2f} >= {self.threshold:.2f}"
