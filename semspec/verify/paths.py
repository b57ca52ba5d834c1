"""Rules for chains, over tree drafts: every path is verified as a draft of its own, and the longest accepted one
wins. Among those of the same length the one with most of the target's own choices wins, then the first.

Paths share rows of the target's logits and, token for token, what was drawn for them: what two paths have in common
gets the same decision in both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from semspec.verify.batch import Decisions, DraftBatch


def paths_of(drafts: DraftBatch) -> DraftBatch:
    """The paths of all trees as drafts of their own."""
    trees = drafts.trees
    assert trees is not None
    of, ahead = trees.sequence, (trees.places[:, 1:] - 1).clamp_min(0)
    exists = torch.arange(ahead.shape[1], device=of.device) < trees.counts[:, None]
    return replace(
        drafts,
        ids=torch.where(exists, drafts.ids[of].gather(1, ahead), -1),
        counts=trees.counts,
        first_row=drafts.first_row[of],
        first_draft=drafts.first_draft[of],
        seed=drafts.seed[of],
        position=drafts.position[of],
        round=drafts.round[of],
        state=None if drafts.state is None else drafts.state[of],
        trees=None,
        places=trees.places,
    )


def by_paths(drafts: DraftBatch, verify: Callable[[DraftBatch], Decisions]) -> Decisions:
    trees = drafts.trees
    assert trees is not None
    paths = paths_of(drafts)
    d = verify(paths)
    number = torch.arange(len(d.accepted), device=d.accepted.device)
    own = d.accepted
    if d.relaxed is not None:
        own = own - (d.relaxed & (paths.positions[:-1] < d.accepted[:, None])).sum(-1)
    value = (d.accepted * len(paths.positions) + own) * len(number) + number.flip(0)
    best = torch.zeros_like(drafts.counts).scatter_reduce(0, trees.sequence, value, "amax", include_self=False)
    pick = len(number) - 1 - best % len(number)  # [B]
    accepted = d.accepted[pick]
    return Decisions(
        accepted,
        d.next[pick],
        None if d.relaxed is None else d.relaxed[pick],
        None if d.state is None else d.state[pick],
        None if d.target_tokens is None else d.target_tokens[pick],
        None if d.evidence is None else d.evidence[pick],
        last=trees.places[pick].gather(1, accepted[:, None])[:, 0] - 1,
    )
