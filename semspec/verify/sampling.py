"""`sampling`: speculative sampling with exactly the target's distribution.

Draft token x, drawn from q, is accepted with probability min(1, p(x) / q(x)), p being the target's distribution. The
first rejected token is replaced by a draw from norm(max(p - q, 0)); if none is rejected, the bonus token is drawn from
p. At temperature 0 both distributions are certain and the rule is `exact`.
Source: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semspec.sampling.draw import choose
from semspec.sampling.noise import ACCEPT, RESIDUAL
from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch, accepted_prefix


@dataclass(frozen=True)
class SpeculativeSampling(Rule):
    name = "sampling"
    title = "Speculative sampling"
    lossless = True
    needs_draft_logits = True

    def verify(self, drafts: DraftBatch) -> Decisions:
        p, q = drafts.target_prob_of_draft(), drafts.draft_prob_of_draft()  # [B, K]
        accepted = accepted_prefix(drafts.uniform(ACCEPT)[:, :-1] * q < p, drafts.exists)  # [B]
        return Decisions(accepted, after_rejection(drafts, accepted, torch.ones_like(accepted, dtype=p.dtype)))


def trial(drafts: DraftBatch) -> tuple[Tensor, Tensor]:
    """What speculative sampling would do at each draft token if all before it were accepted, for rules that relax it.

    [B, K] whether it accepts the token, [B, K + 1] what it draws after a rejection there, or after the whole draft.
    """
    if drafts.target_sampling.all_greedy:
        choice = drafts.target_choice()
        return drafts.ids == choice[:, :-1], choice
    p, q = drafts.target_prob_of_draft(), drafts.draft_prob_of_draft()
    ones = torch.ones_like(drafts.counts, dtype=p.dtype)
    accepted = [torch.full_like(drafts.counts, k).minimum(drafts.counts) for k in range(p.shape[1] + 1)]
    drawn = [after_rejection(drafts, count, ones) for count in accepted]
    return drafts.uniform(ACCEPT)[:, :-1] * q < p, torch.stack(drawn, 1)


def after_rejection(drafts: DraftBatch, accepted: Tensor, scale: Tensor) -> Tensor:
    """[B] draw from norm(max(scale * p - q, 0)) after the accepted tokens; after the whole draft, from p itself."""
    p, q = drafts.target_distribution(accepted), drafts.draft_distribution(accepted)  # [B, V]
    whole = accepted >= drafts.counts
    residual = (torch.where(whole, 1.0, scale)[:, None] * p - q).clamp_min(0)
    # p and q that agree to the last bit leave nothing; then p is the residual's limit.
    weights = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
    return choose(weights.log(), drafts.key(RESIDUAL).gather(1, accepted[:, None])[:, 0])
