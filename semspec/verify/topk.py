"""`topk`: a draft token is accepted if it is among the target's N best and not far below the best. Lossy.

    rank(y_j) <= top   and   p(y_j) >= p(best) - delta
Source: relaxed acceptance in TensorRT-LLM (there inside the thinking phase; its documentation starts at 1 and 0,
others ship 10 and 0.6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.lossy import conclude


@dataclass(frozen=True)
class TopK(Rule):
    name = "topk"
    title = "Top-k acceptance"
    lossless = False

    top: int = field(default=10, metadata={"label": "accept among the target's N likeliest", "main": True, "min": 1})
    delta: float = field(
        default=0.6, metadata={"label": "largest gap to the likeliest one", "main": True, "min": 0, "max": 1}
    )

    def verify(self, drafts: DraftBatch) -> Decisions:
        best = drafts.soft_target_probs.topk(min(self.top, drafts.soft_target_probs.shape[-1]), dim=-1).values[
            drafts.rows[:, :-1]
        ]
        p = drafts.soft_target_prob_of_draft()  # [B, K]
        allowed = (p >= best[..., -1]) & (p >= best[..., 0] - self.delta)
        return conclude(drafts, allowed, evidence=(p, best[..., 0]))

    def reason(self, evidence: Sequence[float]) -> str:
        p, best = evidence
        return f"among the {self.top} best, p {p:.2f} within {self.delta:g} of {best:.2f}"
