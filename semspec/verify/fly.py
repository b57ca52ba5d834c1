"""`fly`: a mismatch is accepted if the target is undecided there and agrees with the draft afterwards. Lossy.

A draft token y_j that is not the target's choice is accepted as a rewording under two conditions. The gate: the target
is undecided there, entropy E_j >= theta. The window: the next W draft tokens exist and are all the target's choices.
    E_j = - sum of p log p over the 3 largest p, in nats         entropy="partial", as in the released code
    E_j = - sum of p log p over the vocabulary / log |V|         entropy="full", as printed in the paper; with large
                                                                 vocabularies theta 0.3 is then almost never reached
Of two mismatches closer than the window the first is rejected, even if the second is accepted. Where fewer than W
tokens follow, nothing is relaxed. How W is read (`reading`):
    paper     W matches follow
    released  the window counts the mismatch itself: W - 1 matches and one more token follow
    vllm      W matches follow, with W at most one less than the configured draft length, so that short drafts have one
When sampling, p is what the target draws from (gate="tempered") or the softmax of its plain logits (gate="raw", as
released); and the target draws twice (draws=2, as released; the paper speaks of one): a draft token that is either draw
counts as a match, and the first draw replaces a rejected token. protect=false: also special tokens may be relaxed, as
in the released code.
Ours, off by default, since the paper leaves them open. carry=n: up to n matches of a window may come after the draft,
and until they have come the next round relaxes nothing. adapt=true: a window of W theta / E_j, rounded up: the more
undecided the target is, the shorter.
Source: Li et al. 2025, arXiv 2511.22972, its released code, and vLLM's pull request 53987 by the same authors.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from semspec.errors import OLD_NAME, BadRequest
from semspec.sampling.noise import SECOND
from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.lossy import conclude, normalised_entropy, partial_entropy


@dataclass(frozen=True)
class Fly(Rule):
    name = "fly"
    title = "Entropy gate and window"
    lossless = False
    draft_tokens = 15  # the paper's: a window has to fit after a mismatch, or nothing is relaxed

    window: int = field(default=6, metadata={"label": "matches that must follow", "main": True, "min": 0})
    theta: float = field(
        default=0.3, metadata={"label": "lowest entropy at which a mismatch may pass", "main": True, "min": 0}
    )
    entropy: str = field(
        default="partial",
        metadata={"label": "entropy of the top tokens, or normalised of all", "choices": ("partial", "full")},
    )
    top: int = field(default=3, metadata={"label": "top tokens in the partial entropy", "min": 1})
    reading: str = field(
        default="paper", metadata={"label": "whose definition of the window", "choices": ("paper", "released", "vllm")}
    )
    gate: str = field(
        default="tempered", metadata={"label": "which probabilities theta sees", "choices": ("tempered", "raw")}
    )
    draws: int = field(default=2, metadata={"label": "draws of the target; either may match", "choices": (1, 2)})
    protect: bool = field(default=True, metadata={"label": "special tokens are never relaxed"})
    carry: int = field(
        default=0, metadata={"label": "matches that may come after the draft", "min": 0, "max": "window"}
    )
    adapt: bool = field(default=False, metadata={"label": "shorter window where the target is undecided"})

    def __post_init__(self) -> None:
        if self.reading == "code":
            text = f"fly's reading=code is now called released; {OLD_NAME}"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            object.__setattr__(self, "reading", "released")
        super().__post_init__()

    def min_draft_tokens(self) -> int:
        return self.window + 1

    def for_draft_length(self, tokens: int) -> Rule:
        if self.reading != "vllm" or not self.window:
            return self
        if tokens < 2:
            raise BadRequest(
                "fly with reading=vllm needs drafts of 2 tokens or more: a window must fit after a mismatch"
            )
        window = min(self.window, tokens - 1)
        return replace(self, window=window, carry=min(self.carry, window))

    def verify(self, drafts: DraftBatch) -> Decisions:
        choice = drafts.target_choice()  # [B, K + 1]
        match = (drafts.ids == choice[:, :-1]) & drafts.exists
        if self.draws == 2 and not drafts.target_sampling.all_greedy:
            match = match | ((drafts.ids == drafts.target_choice(SECOND)[:, :-1]) & drafts.exists)
        entropy = self._entropy(drafts)
        window = self._window(entropy)
        needed = (window - int(self.reading == "released")).clamp_min(0)
        followed, missing = self._followed(drafts, match, window, needed)
        allowed = match | ((entropy >= self.theta) & followed)
        debt = None if drafts.state is None else drafts.state[:, :1]  # matches that the last round still needs
        if debt is not None:
            allowed = allowed & (match | (drafts.positions[:-1] >= debt))
        within = drafts if self.protect else replace(drafts, protected=None)
        decisions = conclude(within, allowed, choice, evidence=(match, entropy, needed))
        if self.carry:
            assert decisions.relaxed is not None
            owed = [torch.where(decisions.relaxed & ~match, missing, 0), torch.zeros_like(drafts.counts)[:, None]]
            owed += [] if debt is None else [debt - decisions.accepted[:, None]]
            # The target's own token, which follows the draft, is one of the matches.
            decisions.state = (torch.cat(owed, 1).amax(1, keepdim=True) - 1).clamp_min(0)
        return decisions

    def reason(self, evidence: Sequence[float]) -> str:
        match, entropy, needed = evidence
        if match:
            return "the target's second draw"
        follow = f"{needed:.0f} matches follow" + (f", up to {self.carry} of them in the next round" * bool(self.carry))
        return f"entropy {entropy:.2f} >= {self.theta:g}, {follow}"

    def _entropy(self, drafts: DraftBatch) -> Tensor:
        """[B, K] how undecided the target is at each draft token"""
        raw = self.gate == "raw"
        probs = drafts.target_logits.float().softmax(-1) if raw else drafts.soft_target_probs  # [R, V]
        entropy = partial_entropy(probs, self.top) if self.entropy == "partial" else normalised_entropy(probs)
        return entropy[drafts.rows[:, :-1]]

    def _window(self, entropy: Tensor) -> Tensor:
        """[B, K] how long the window after each draft token is"""
        whole = torch.full_like(entropy, self.window, dtype=torch.long)
        if not self.adapt:
            return whole
        return torch.minimum(whole, (self.window * self.theta / entropy.clamp_min(1e-6)).ceil().long().clamp_min(1))

    def _followed(self, drafts: DraftBatch, match: Tensor, window: Tensor, needed: Tensor) -> tuple[Tensor, Tensor]:
        """[B, K] whether the matches that are needed follow, and how many of them have to come after the draft"""
        at = drafts.positions[:-1]  # [K]
        # Matches among the tokens j+1 .. j+needed, from running sums: before[i] counts the matches before i.
        before = torch.cat([torch.zeros_like(drafts.counts)[:, None], match.long().cumsum(-1)], 1)  # [B, K + 1]
        end = (at + 1 + needed).clamp_max(match.shape[1])
        following = before.gather(1, end) - before[:, 1:]
        missing = (at + 1 + needed - drafts.counts[:, None]).clamp_min(0)
        fits = at + window < drafts.counts[:, None] + self.carry
        return (following == needed - missing) & fits, missing
