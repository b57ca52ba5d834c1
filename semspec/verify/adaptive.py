"""`adaptive`: a mismatch stands where both models see the place alike, by a threshold that moves with the run. Lossy.

    JS(p, q) <= scale * (mean JS where tokens agreed + mean JS where they did not) / 2
JS is the Jensen-Shannon distance of the two models' distributions at the draft token: 0 if equal, 1 if disjoint. A
mismatch whose distance is nearer to that of matches is taken for a rewording. Both means are those of the text so far,
older steps counting less by `memory`; they begin at 0 and 2 * start, each worth one token. Only what was judged
counts: the accepted tokens and the first that fell. With scale 0 the rule is `sampling`, and when greedy `exact`.
Source: AdaSD, Lu et al. 2025 (arXiv 2512.11280): acceptance by Jensen-Shannon distance with a threshold that is updated
from accepted and rejected tokens. How it is updated there is not known to us; the midpoint of means is our choice.
May break: two models that err alike agree; then nothing holds the draft back, and the threshold drifts with them.
Needs the draft's probabilities; a looked-up draft has none, so that it is far from the target wherever that is unsure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semspec.errors import BadRequest
from semspec.verify.base import Decisions, DraftBatch, Rule
from semspec.verify.loose import conclude
from semspec.verify.sampling import trial


@dataclass(frozen=True)
class Adaptive(Rule):
    name = "adaptive"
    lossless = False
    needs_draft_logits = True

    start: float = 0.2
    scale: float = 1.0
    memory: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.start <= 1:
            raise BadRequest(f"adaptive's start is {self.start}; give a distance from 0 to 1")
        if self.scale < 0:
            raise BadRequest(f"adaptive's scale is {self.scale}; give 0 (relax nothing) or a positive number")
        if not 0 <= self.memory <= 1:
            raise BadRequest(
                f"adaptive's memory is {self.memory}; give the share that a step leaves of older ones, 0 to 1"
            )

    def verify(self, drafts: DraftBatch) -> Decisions:
        stands, choice = trial(drafts)
        state = (
            self._begin(drafts) if drafts.state is None else drafts.state
        )  # [B, 4] sum, count of agreeing; of others
        threshold = self.scale * (state[:, 0] / state[:, 1] + state[:, 2] / state[:, 3])[:, None] / 2
        distance = js_distance(drafts.beliefs[drafts.rows[:, :-1]], drafts.draft_beliefs_by_token())  # [B, K]
        allowed = (distance <= threshold) & (self.scale > 0)
        decisions = conclude(drafts, allowed, choice, stands, evidence=(distance, threshold.expand_as(distance)))
        decisions.state = self._learn(drafts, state, decisions, stands, distance)
        return decisions

    def _begin(self, drafts: DraftBatch) -> Tensor:
        none = torch.zeros_like(drafts.counts, dtype=torch.float32)
        return torch.stack([none, none + 1, none + 2 * self.start, none + 1], 1)

    def _learn(
        self, drafts: DraftBatch, state: Tensor, decisions: Decisions, stands: Tensor, distance: Tensor
    ) -> Tensor:
        judged = drafts.exists & (drafts.positions[:-1] <= decisions.accepted[:, None])
        columns = []
        for which in (judged & stands, judged & ~stands):
            columns += [(distance * which).sum(-1), which.sum(-1).float()]
        return self._faded(state) + torch.stack(columns, 1)

    def _faded(self, state: Tensor) -> Tensor:
        """Older tokens lose weight, but their means stay even if nothing new comes."""
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
