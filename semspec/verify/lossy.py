"""What lossy rules share: a draft token may be accepted although the target chose another.

A rule only says which draft tokens it allows. `conclude` also accepts the target's own choice everywhere, and never
relaxes a protected token (special, control, end of thinking), whether the draft proposed it or the target chose it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from semspec.sampling.draw import entropy, largest
from semspec.verify.batch import Decisions, DraftBatch, accepted_prefix


def conclude(
    drafts: DraftBatch,
    allowed: Tensor,
    choice: Tensor | None = None,
    agrees: Tensor | None = None,
    evidence: tuple[Tensor, ...] = (),
) -> Decisions:
    """Decisions of a rule that allows these draft tokens [B, K] besides the target's own choice [B, K + 1].

    `agrees` [B, K] is by default where the target chose the draft's token. A rule that compares distributions passes
    what speculative sampling accepts, and as `choice` what it draws after a rejection.
    """
    choice = drafts.target_choice() if choice is None else choice
    agrees = drafts.ids == choice[:, :-1] if agrees is None else agrees
    accepted = accepted_prefix(agrees | (allowed & relaxable(drafts, choice)), drafts.exists)
    inside = drafts.positions[:-1] < accepted[:, None]
    return Decisions(
        accepted,
        choice.gather(1, accepted[:, None])[:, 0],
        relaxed=inside & ~agrees,
        target_tokens=choice[:, :-1],
        evidence=torch.stack([e.float() for e in evidence], -1) if evidence else None,
    )


def relaxable(drafts: DraftBatch, choice: Tensor) -> Tensor:
    """[B, K] where neither the draft's token nor the target's is protected, and the draft's is possible at all"""
    possible = drafts.exists & (drafts.soft_target_prob_of_draft() > 0)
    if drafts.protected is None:
        return possible
    return possible & ~drafts.protected[drafts.safe_ids] & ~drafts.protected[choice[:, :-1]]


def partial_entropy(probs: Tensor, top: int) -> Tensor:
    """[R, V] -> [R] the part of the entropy, in nats, that the `top` likeliest tokens carry"""
    return entropy(largest(probs, top))


def normalised_entropy(probs: Tensor) -> Tensor:
    """[R, V] -> [R] entropy as a share of its largest possible value"""
    return entropy(probs) / torch.log(torch.tensor(float(probs.shape[-1])))
