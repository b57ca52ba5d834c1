"""`adaptive`: a mismatch is accepted if both models' distributions are close, by an adaptive threshold. Lossy.

    JS(p, q) <= scale * (mean JS where tokens agreed + mean JS where they did not) / 2
JS is the Jensen-Shannon distance of the two models' distributions at the draft token: 0 if equal, 1 if disjoint. A
mismatch whose distance is closer to that of matches is taken for a rewording. Both means are over the text so far;
each round multiplies the weight of older ones by `memory`. They start at 0 and 2 * start, each with the weight of one
token. Only tested tokens count: the accepted ones and the first rejected one. With scale 0 the rule is `sampling`,
and when greedy `exact`.
Source: AdaSD, Lu et al. 2025 (arXiv 2512.11280): acceptance by Jensen-Shannon distance with a threshold that is updated
from accepted and rejected tokens. We do not know its update; the midpoint of the means is our choice.
May break: two models that make the same mistakes agree, and the threshold drifts with them.
Needs the draft's probabilities. A lookup draft counts as certain, so it is far from the target wherever that is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.lossy import conclude
from semspec.verify.sampling import trial


@dataclass(frozen=True)
class Adaptive(Rule):
    name = "adaptive"
    title = "Adaptive distance threshold"
    lossless = False
    needs_draft_logits = True

    start: float = field(default=0.2, metadata={"label": "threshold at the start", "min": 0, "max": 1})
    scale: float = field(default=1.0, metadata={"label": "factor on the threshold", "main": True, "min": 0})
    memory: float = field(default=0.95, metadata={"label": "weight that older rounds keep", "min": 0, "max": 1})

    def verify(self, drafts: DraftBatch) -> Decisions:
        passes, choice = trial(drafts)
        # [B, 4] sum and count of distances where tokens agreed, then where they did not
        state = self._initial_state(drafts) if drafts.state is None else drafts.state
        threshold = self.scale * (state[:, 0] / state[:, 1] + state[:, 2] / state[:, 3])[:, None] / 2
        distance = js_distance(drafts.soft_target_probs[drafts.rows[:, :-1]], drafts.draft_probs_by_token())  # [B, K]
        allowed = (distance <= threshold) & (self.scale > 0)
        decisions = conclude(drafts, allowed, choice, passes, evidence=(distance, threshold.expand_as(distance)))
        decisions.state = self._update(drafts, state, decisions, passes, distance)
        return decisions

    def _initial_state(self, drafts: DraftBatch) -> Tensor:
        zero = torch.zeros_like(drafts.counts, dtype=torch.float32)
        return torch.stack([zero, zero + 1, zero + 2 * self.start, zero + 1], 1)

    def _update(
        self, drafts: DraftBatch, state: Tensor, decisions: Decisions, passes: Tensor, distance: Tensor
    ) -> Tensor:
        tested = drafts.exists & (drafts.positions[:-1] <= decisions.accepted[:, None])
        columns = []
        for which in (tested & passes, tested & ~passes):
            columns += [(distance * which).sum(-1), which.sum(-1).float()]
        return self._decayed(state) + torch.stack(columns, 1)

    def _decayed(self, state: Tensor) -> Tensor:
        """Older tokens lose weight, but never all of it: a mean without new tokens must stay defined."""
        share = torch.maximum(torch.full_like(state[:, 1::2], self.memory), 1e-3 / state[:, 1::2])
        return state * share.repeat_interleave(2, -1)

    def reason(self, evidence: Sequence[float]) -> str:
        distance, threshold = evidence
        return f"distance {distance:.2f} <= {threshold:.2f}"


def js_distance(p: Tensor, q: Tensor) -> Tensor:
    """[..., V] -> [...] the square root of the Jensen-Shannon divergence in bits, 0 to 1"""
    middle = (p + q) / 2
    both = (torch.special.xlogy(p, p) + torch.special.xlogy(q, q)) / 2 - torch.special.xlogy(middle, middle)
    return (both.sum(-1) / math.log(2)).clamp(0, 1).sqrt()
