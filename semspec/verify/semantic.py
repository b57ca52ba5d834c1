"""`semantic`: a reasoning step is accepted if the target would write one of the same meaning. Lossy.

With p and q the probabilities that the target and the draft write a step of this meaning here, as their probes estimate
them from the hidden states that predicted the step's tokens:
    accepted if u < min(1, p / q), u uniform          tau=0, the ratio test of the paper, lifted to steps
    accepted if p >= tau * q                          tau>0, deterministic; ours
A step whose every token is among the target's `top` likeliest is accepted without the probes (the released code's fast
path; 0: off). A ratio below `floor` is always rejected (0: off; older releases had 0.5). Ours: q counts as `min_prob`
or more, because labels are shares of 20 samples; a blank line ends a step however it is spelled; special tokens are
protected; the target ends when it likes. paper=true has none of these four, as released: what is left at its default
among min_prob, delimiters, protect and end_tokens becomes 0, released, false and 2,000. The probes are then to be
fitted as in the paper, too (`semspec probe fit --paper`), or imported (`semspec probe import`).
May break: a probe sees an average of states, in which one wrong digit is lost. The target's probe may be fitted with
evidence from the logits as well (`semspec probe fit --target-evidence`), which the paper does not do.
Needs both models' hidden states and both probes: `semspec probe fit`.
Source: SemanticSpec, arXiv 2602.03708, and its released code. (It writes p for the draft's, q for the target's.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from semspec.probe.probe import Probe
from semspec.sampling.noise import ACCEPT
from semspec.types import Draft, Sampling
from semspec.verify.base import Rule, RuleResources
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.probe_inputs import probe_inputs
from semspec.verify.step_rule import StepRule


@dataclass(frozen=True)
class Semantic(StepRule):
    name = "semantic"
    title = "Semantic equivalence"
    published: ClassVar[Mapping[str, Any]] = {
        "min_prob": 0.0,
        "delimiters": "released",
        "protect": False,
        "end_tokens": 2000,
    }

    tau: float = field(
        default=0.0, metadata={"label": "accept if p >= tau q; 0: with probability p/q", "main": True, "min": 0}
    )
    top: int = field(default=2, metadata={"label": "accept if all tokens are in the target's top N", "min": 0})
    floor: float = field(default=0.0, metadata={"label": "reject below this ratio", "min": 0})
    min_prob: float = field(
        default=0.02, metadata={"label": "the draft's probability counts as this or more", "min": 0}
    )
    paper: bool = field(default=False, metadata={"label": "as released, see the documentation"})
    # Folder with the probes of both models; "": the pair's own. Clients of a server may not name one.
    probes: str = field(default="", metadata={"label": "folder of probes; empty: the pair's own", "path": True})
    target_probe: Probe | None = field(default=None, metadata={"option": False})
    draft_probe: Probe | None = field(default=None, metadata={"option": False})
    numbers: Tensor | None = field(default=None, metadata={"option": False}, compare=False)  # [V] number tokens

    def bind(self, pair: RuleResources) -> Rule:
        target, draft = pair.probes(self.probes)
        numbers = pair.numbers() if target.features.evidence else None
        return replace(self, target_probe=target, draft_probe=draft, numbers=numbers)

    @property
    def keeps_draft_logits(self) -> bool:
        return self.target_probe is not None and "draft" in self.target_probe.features.evidence

    @property
    def layers(self) -> tuple[int, ...]:
        return self.target_probe.layers if self.target_probe else ()

    @property
    def draft_layers(self) -> tuple[int, ...]:
        return self.draft_probe.layers if self.draft_probe else ()

    def confidence(self, draft: Draft, sampling: Sampling) -> float:
        """The probability, by its own probe, that the draft writes a step of this meaning."""
        assert self.draft_probe is not None
        device = next(iter(draft.hidden.values())).device
        first, count = torch.tensor([[0], [len(draft.own_tokens)]], device=device)
        return float(self.draft_probe(draft.hidden, first, count))

    def verify(self, drafts: DraftBatch) -> Decisions:
        assert self.target_probe and self.draft_probe, "bind the rule to a pair first"
        assert drafts.draft_hidden is not None
        inputs = probe_inputs(drafts, self.target_probe.features.evidence, self.numbers, sampled=self.samples_drafts)
        p = self.target_probe(drafts.hidden or {}, drafts.first_row, drafts.counts, inputs)
        q = self.draft_probe(drafts.draft_hidden, drafts.first_draft, drafts.own_counts())
        q = q.to(p.device).clamp_min(self.min_prob)
        # Products, not quotients: the same test, and nothing to divide by. A ratio over nothing is none, as released.
        passes = (p >= self.tau * q if self.tau else drafts.uniform(ACCEPT)[:, 0] * q < p) & (q > 0)
        in_top = self._in_top(drafts)
        return self.conclude(drafts, in_top | (passes & (p >= self.floor * q)), (p, q, in_top))

    def _in_top(self, drafts: DraftBatch) -> Tensor:
        """[B] whether every token of the step is among the target's `top` likeliest"""
        if not self.top:
            return drafts.counts < 0
        top = drafts.target_logits.topk(min(self.top, drafts.target_logits.shape[-1]), dim=-1).indices  # [R, top]
        inside = (top[drafts.rows[:, :-1]] == drafts.ids[..., None]).any(-1)
        return (inside | ~drafts.exists).all(-1)

    def reason(self, evidence: Sequence[float]) -> str:
        p, q, in_top = evidence
        if in_top:
            return f"every token of the step is among the target's {self.top} likeliest"
        return f"probability of this meaning: target {p:.2f}, draft {q:.2f}"
