"""`sampling`: speculative sampling with exactly the target's distribution.

Draft token x, drawn from q, is accepted with probability min(1, p(x) / q(x)), p being the target's distribution. The
first rejected token is replaced by a draw from norm(max(p - q, 0)); if none is rejected, the bonus token is drawn from
p. At temperature 0 both distributions are certain and the rule is `exact`.
Siblings in a tree draft are drawn from q without replacement and tested one after the other: each rejected one
leaves norm(max(p - q, 0)) for p, and q without it; an accepted one is followed by its own children.
Source: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318); trees: Jeon et al. 2024 (arXiv
2402.14160).
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
    supports_trees = True

    def verify(self, drafts: DraftBatch) -> Decisions:
        p, q = drafts.target_prob_of_draft(), drafts.draft_prob_of_draft()  # [B, K]
        accepted = accepted_prefix(drafts.uniform(ACCEPT)[:, :-1] * q < p, drafts.exists)  # [B]
        return Decisions(accepted, after_rejection(drafts, accepted, torch.ones_like(accepted, dtype=p.dtype)))

    def verify_tree(self, drafts: DraftBatch) -> Decisions:
        assert drafts.trees is not None
        u, before = drafts.uniform(ACCEPT), drafts.trees.before
        place = accepted = torch.zeros_like(drafts.counts)  # the last accepted token's, 0: none
        p = drafts.target_distribution(place)  # [B, V] what is left of the target's distribution there,
        lost = torch.zeros_like(p, dtype=torch.bool)  # and which of its children are rejected
        for k in range(before.shape[1]):
            tested = (before[:, k] == place) & drafts.exists[:, k]
            token, at = drafts.safe_ids[:, k, None], torch.full_like(place, k)
            q = without(drafts.draft_distribution(at), lost)
            own, drawn = p.gather(1, token)[:, 0], q.gather(1, token)[:, 0]
            passes = tested & (u[:, k] * drawn < own) & (drawn > 0)  # 0: it could not be drawn, with its siblings gone
            rejected = (tested & ~passes)[:, None]
            p = torch.where(rejected, normalised((p - q).clamp_min(0), p), p)
            lost = lost.scatter(1, token, lost.gather(1, token) | rejected)
            place, accepted = torch.where(passes, k + 1, place), accepted + passes.long()
            p = torch.where(passes[:, None], drafts.target_distribution(place), p)
            lost = lost & ~passes[:, None]
        return Decisions(
            accepted, choose(p.log(), drafts.key(RESIDUAL).gather(1, place[:, None])[:, 0]), last=place - 1
        )


def without(q: Tensor, lost: Tensor) -> Tensor:
    """[B, V] what a sibling is drawn from after those that are lost were drawn"""
    return normalised(q.masked_fill(lost, 0.0), torch.zeros_like(q))


def normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """[B, V] weights that sum to 1, or this where there are none"""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)


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
