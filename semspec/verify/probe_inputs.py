"""What a probe of the target is shown of a draft beside states: evidence, from logits that were paid for anyway."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from semspec.probe.evidence import at_one, confidence, evidence
from semspec.verify.base import DraftBatch


def probe_inputs(
    drafts: DraftBatch,
    groups: Collection[str],
    numbers: Tensor | None,
    counts: Tensor | None = None,
    sampled: bool = True,
) -> Tensor | None:
    """[B, E] all the evidence there is, for a probe that wants these groups of it; None: it wants none. With counts
    [B] only the first so many tokens of each step are looked at. `sampled`: the draft drew its tokens as the target
    does; else its logits are as the model gave them.

    How sure the draft was is behind the rest, and only for a probe that asks: its logits are not kept otherwise."""
    if not groups:
        return None
    assert numbers is not None, "a rule judges once it is bound to a pair"
    ids = drafts.safe_ids
    exists = drafts.exists if counts is None else drafts.positions[:-1] < counts[:, None]
    found = evidence(drafts.target_logits, drafts.rows[:, :-1], ids, exists, numbers)
    if "draft" not in groups:
        return found
    assert drafts.draft_logits is not None
    own, sampling = drafts.draft_logits, drafts.target_sampling
    if sampled and not sampling.all_greedy:
        place = torch.arange(len(own), device=own.device)
        whose = torch.searchsorted(drafts.first_draft.contiguous(), place, right=True) - 1  # [D]
        own = at_one(own, sampling.temperature[drafts.first_row[whose]])
    return torch.cat([found, confidence(own, drafts.draft_rows, ids, exists)], -1)
