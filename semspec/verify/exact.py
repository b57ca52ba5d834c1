"""`exact`: a draft token is accepted if it is the token that the target itself generates there.

Greedy: the target's argmax. With temperature: the target draws its own token with noise that depends only on seed and
position, and the draft must have guessed it. Either way the text is, token for token, what the target generates without
a draft and with the same seed. The draft is greedy, so at high temperature it is right with the probability that the
target gives its best guess. With couple=true the draft draws instead, with the target's noise: better for a draft that
knows the target's distribution (the target itself in fewer bits), worse for one that is right only in its best guess.
Source: greedy form, Stern et al. 2018 (arXiv 1811.03115); sampled form, the "sampler match" of mlx-lm and exllamav3.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch, accepted_prefix


@dataclass(frozen=True)
class Exact(Rule):
    name = "exact"
    title = "Exact match"
    lossless = True
    same_text = True

    couple: bool = field(default=False, metadata={"label": "the draft draws with the target's noise"})

    @property
    def couples_draft(self) -> bool:
        return self.couple

    def verify(self, drafts: DraftBatch) -> Decisions:
        choice = drafts.target_choice()  # [B, K + 1]
        accepted = accepted_prefix(drafts.ids == choice[:, :-1], drafts.exists)  # [B]
        return Decisions(accepted, choice.gather(1, accepted[:, None])[:, 0])


EXACT = Exact()
