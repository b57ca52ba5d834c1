"""`reflective`: the target reads the draft twice, the second time after a prompt, and both logits are mixed. Lossy.

One target pass goes over [draft, prompt, the same draft again]. The second copy gives, for the same tokens, logits of a
target that has seen where the draft leads. With z the first reading's logits and z' the second's,
    fused = (1 - alpha) * z + alpha * z'
and a draft token is accepted if the target chooses it from the fused logits, with the same noise if it samples. With
alpha 0 the rule is `exact`. A rejected token is replaced by the first reading's choice, the target's own (the paper
writes from the fused logits throughout).
Source: Reflective Verification, Wang et al. 2025 (arXiv 2505.18629). Its prompt is not known to us; ours is an option.
May break: text that is in the context is likely to be repeated, so a large alpha makes the target accept anything.
Needs the target's rows and draft ids only, but 2 K + the prompt's length of them in every pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from semspec.verify.base import Rule, RuleResources
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.lossy import conclude

PROMPT = "\n\nLet me read that again and correct what is wrong:\n\n"


@dataclass(frozen=True)
class Reflective(Rule):
    name = "reflective"
    title = "Reflective verification"
    lossless = False

    alpha: float = field(
        default=0.3, metadata={"label": "weight of the second reading", "main": True, "min": 0, "max": 1}
    )
    prompt: str = field(default=PROMPT, metadata={"label": "prompt before it"})
    tokens: tuple[int, ...] = field(default=(), metadata={"option": False})  # the prompt in the target's tokens

    def bind(self, pair: RuleResources) -> Rule:
        return replace(self, tokens=tuple(pair.tokens_of(self.prompt)))

    def layout(self, draft: list[int]) -> list[int]:
        return [*draft, *self.tokens, *draft] if draft else []

    def verify(self, drafts: DraftBatch) -> Decisions:
        fused = self._fused(drafts)
        allowed = drafts.ids == fused.target_choice()[:, :-1]
        return conclude(
            drafts, allowed, evidence=(drafts.soft_target_prob_of_draft(), fused.soft_target_prob_of_draft())
        )

    def _fused(self, drafts: DraftBatch) -> DraftBatch:
        """The same drafts under the fused logits."""
        first, rows = drafts.target_logits.float(), drafts.rows
        # [B, K + 1] the rows of the second copy. An empty draft has none, and nothing to verify.
        second = (rows + drafts.counts[:, None] + len(self.tokens)).clamp_max(len(first) - 1)
        fused = (1 - self.alpha) * first[rows] + self.alpha * first[second]
        # After a shorter draft's end, `rows` repeats its bonus row, so the same values are put there again.
        return replace(drafts, target_logits=first.index_put((rows,), fused))

    def reason(self, evidence: Sequence[float]) -> str:
        p, again = evidence
        return f"p {p:.2f}, read again {again:.2f}"
