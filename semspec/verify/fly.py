"""`fly`: a mismatch is accepted if the target is undecided there and agrees with the draft afterwards. Lossy.

A draft token y_j that is not the target's choice is accepted as a rewording under two conditions. The gate: the target
is undecided there, entropy E_j >= theta. The window: the next W draft tokens exist and are all the target's choices.
    E_j = - sum of p log p over the 3 largest p, in nats         entropy="partial", as in the released code
    E_j = - sum of p log p over the vocabulary / log |V|         entropy="full", as printed in the paper; with large
                                                                 vocabularies theta 0.3 is then almost never reached
Of two mismatches closer than the window the first is rejected, even if the second is accepted. The code's window of 6
counts the mismatch itself (reading="code": 5 following matches); the paper's does not. With a draft too short for the
window, the window is one less than the draft. When sampling, the target draws twice, and a draft token that is either
draw counts as a match; the first draw replaces a rejected token.
Source: Li et al. 2025, arXiv 2511.22972, and its released code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semspec.errors import BadRequest
from semspec.sampling.noise import SECOND
from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.loose import conclude, normalised_entropy, partial_entropy


@dataclass(frozen=True)
class Fly(Rule):
    name = "fly"
    lossless = False
    draft_tokens = 15  # the paper's: a window has to fit after a mismatch, or nothing is relaxed

    window: int = 6
    theta: float = 0.3
    entropy: str = "partial"
    top: int = 3
    reading: str = "paper"

    def __post_init__(self) -> None:
        if self.window < 0:
            raise BadRequest(f"fly's window is {self.window}; give 0 (no window) or a number of following matches")
        if self.theta < 0:
            raise BadRequest(f"fly's theta is {self.theta}; give 0 (no gate) or a positive entropy")
        if self.entropy not in ("partial", "full"):
            raise BadRequest(f"fly's entropy is {self.entropy!r}; give partial (the code's) or full (the paper's)")
        if self.reading not in ("paper", "code"):
            raise BadRequest(f"fly's reading is {self.reading!r}; give paper (window after it) or code (includes it)")
        if self.top < 1:
            raise BadRequest(f"fly's top is {self.top}; give the number of tokens whose entropy counts, 1 or more")

    def min_draft_tokens(self) -> int:
        return self.window + 1

    def verify(self, drafts: DraftBatch) -> Decisions:
        choice = drafts.target_choice()  # [B, K + 1]
        match = (drafts.ids == choice[:, :-1]) & drafts.exists
        if not drafts.target_sampling.all_greedy:
            match = match | ((drafts.ids == drafts.target_choice(SECOND)[:, :-1]) & drafts.exists)
        entropy, needed = self._entropy(drafts), self._needed(drafts)
        allowed = match | ((entropy >= self.theta) & self._followed(drafts, match, needed))
        return conclude(drafts, allowed, choice, evidence=(match, entropy, needed.expand_as(match)))

    def reason(self, evidence: Sequence[float]) -> str:
        match, entropy, needed = evidence
        if match:
            return "the target's second draw"
        return f"entropy {entropy:.2f} >= {self.theta:g}, {needed:.0f} matches follow"

    def _entropy(self, drafts: DraftBatch) -> Tensor:
        """[B, K] how undecided the target is at each draft token"""
        probs = drafts.beliefs  # [R, V]
        entropy = partial_entropy(probs, self.top) if self.entropy == "partial" else normalised_entropy(probs)
        return entropy[drafts.rows[:, :-1]]

    def _window(self, drafts: DraftBatch) -> Tensor:
        """[B, 1] how far the window reaches"""
        return torch.minimum(torch.full_like(drafts.counts, self.window), (drafts.counts - 1).clamp_min(0))[:, None]

    def _needed(self, drafts: DraftBatch) -> Tensor:
        """[B, 1] how many matches must follow"""
        return (self._window(drafts) - int(self.reading == "code")).clamp_min(0)

    def _followed(self, drafts: DraftBatch, match: Tensor, needed: Tensor) -> Tensor:
        """[B, K] whether a whole window of matches follows within the draft"""
        at = drafts.positions[:-1]  # [K]
        # Matches among the tokens j+1 .. j+needed, from running sums: before[i] counts the matches before i.
        before = torch.cat([torch.zeros_like(drafts.counts)[:, None], match.long().cumsum(-1)], 1)  # [B, K + 1]
        end = (at + 1 + needed).clamp_max(match.shape[1])
        following = before.gather(1, end) - before[:, 1:]
        return (following == needed) & (at + self._window(drafts) < drafts.counts[:, None])
