"""`cascade-rule`: speculative cascades, which accept the draft's token unless it pays to defer to the target. Lossy.

A deferral rule compares both models' distributions, q the draft's and p the target's, and decides whether to defer:
    chow    max q < 1 - alpha                        the draft is not confident
    diff    max q < max p - alpha                    the target is more confident, by more than alpha
    opt     max q < max p - alpha * TV(p, q)         the same, with a discount where deferring would mostly be rejected
    token   p(y_j) < (1 - alpha) * max p             the target finds this token unlikely
Where it does not defer, the draft token is accepted; where it defers, it is tested as in `sampling`. Larger alphas
defer less. TV is the total variation distance, half the sum of |p - q|: the chance that `sampling` rejects.
diff at alpha -1 always defers and is `sampling`; token at alpha 0 is `exact` when greedy, at alpha 1 `accept-all`.
Source: Narasimhan et al. 2024 (arXiv 2405.19261). Of its token-specific rules this is the multiplicative one; tokens
outside its set are tested against p here, not against the paper's mixture.
May break: chow ignores the target, and a small model can be confident and wrong; diff and opt compare how confident
both are, not of what.
Needs the draft's probabilities. A lookup draft counts as certain, so only `token` makes sense with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from semspec.errors import BadRequest
from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.lossy import conclude
from semspec.verify.sampling import trial


@dataclass(frozen=True)
class SpeculativeCascade(Rule):
    name = "cascade-rule"
    title = "Speculative cascade"
    lossless = False
    needs_draft_logits = True

    defer: str = field(
        default="opt", metadata={"label": "when to defer", "main": True, "choices": ("chow", "diff", "opt", "token")}
    )
    alpha: float = field(
        default=0.2,
        metadata={
            "label": "deferral cost; larger defers less",
            "main": True,
            "min": -1,
            "max": 1,
            "note": "0 or more but with diff",
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha < 0 and self.defer != "diff":
            raise BadRequest(f"cascade-rule's alpha is {self.alpha}; with defer={self.defer} give 0 to 1")

    def verify(self, drafts: DraftBatch) -> Decisions:
        passes, choice = trial(drafts)
        p, q = drafts.soft_target_probs[drafts.rows[:, :-1]], drafts.draft_probs_by_token()  # [B, K, V]
        sure, draft_sure = p.amax(-1), q.amax(-1)  # [B, K]
        of_token = drafts.soft_target_prob_of_draft()
        if self.defer == "chow":
            defers = draft_sure < 1 - self.alpha
        elif self.defer == "diff":
            defers = draft_sure < sure - self.alpha
        elif self.defer == "opt":
            defers = draft_sure < sure - self.alpha * total_variation(p, q)
        else:
            defers = of_token < (1 - self.alpha) * sure
        return conclude(drafts, ~defers, choice, passes, evidence=(draft_sure, sure, of_token))

    def reason(self, evidence: Sequence[float]) -> str:
        draft_sure, sure, of_token = evidence
        if self.defer == "token":
            return f"p {of_token:.2f}, at least {1 - self.alpha:g} of the best's {sure:.2f}"
        return f"the draft is sure to {draft_sure:.2f}, the target to {sure:.2f}"


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """[..., V] -> [...]"""
    return (p - q).abs().sum(-1) / 2
