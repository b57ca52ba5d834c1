"""`threshold`: a draft token is accepted if the target gives it enough probability. Lossy.

    p(y_j) >= single,   or   u <= p(y_j) / acc   with u uniform
Source: SGLang's speculative_accept_threshold_single and _acc, which start at 1 and 1, where nothing is relaxed. There
p accumulates over a tree's siblings; here each token has its own. u is the target's own
draw and, if that is another token, a second number, so that together they accept y_j with probability p / acc, and a
rejected token is replaced by what the target drew: p without y_j. When greedy, only `single` counts, and p is the
target's probability at temperature 1 (SGLang's greedy path has no thresholds at all).
May break: a low `single` accepts any token that is possible, however confident the target is of another.
Needs the target's rows and draft ids only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from semspec.sampling.noise import ACCEPT
from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.lossy import conclude


@dataclass(frozen=True)
class Threshold(Rule):
    name = "threshold"
    title = "Probability threshold"
    lossless = False

    single: float = field(
        default=0.3, metadata={"label": "probability that suffices", "main": True, "above": 0, "max": 1}
    )
    acc: float = field(default=1.0, metadata={"label": "accept with probability p / acc as well", "above": 0, "max": 1})

    def verify(self, drafts: DraftBatch) -> Decisions:
        p, soft = drafts.target_prob_of_draft(), drafts.soft_target_prob_of_draft()  # [B, K]
        # Given that the target drew another token, the chance that brings that of y_j from p up to p / acc.
        chance = ((p / self.acc).clamp_max(1.0) - p) / (1.0 - p).clamp_min(torch.finfo(p.dtype).tiny)
        by_chance = drafts.uniform(ACCEPT)[:, :-1] < chance
        return conclude(drafts, (soft >= self.single) | by_chance, evidence=(soft,))

    def reason(self, evidence: Sequence[float]) -> str:
        p = evidence[0]
        return f"p {p:.2f} >= {self.single:g}" if p >= self.single else f"by chance at p / acc = {p:.2f} / {self.acc:g}"
