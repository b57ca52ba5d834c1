"""The inputs of a target probe besides hidden states: evidence, from logits that are computed anyway."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from semspec.probe.evidence import at_one, confidence, evidence
from semspec.verify.batch import DraftBatch


def probe_inputs(
    drafts: DraftBatch,
    groups: Collection[str],
    numbers: Tensor | None,
    counts: Tensor | None = None,
    sampled: bool = True,
) -> Tensor | None:
    """[B, E] the evidence for a probe that uses these groups of it; None: it uses none. With counts [B] only the
    first so many tokens of each step count. `sampled`: the draft's logits have the request's temperature applied.

    The draft's confidence comes last, and only for a probe that uses it: the draft's logits are not kept otherwise."""
    if not groups:
        return None
    assert numbers is not None, "bind the rule to a pair first"
    ids = drafts.safe_ids
    exists = drafts.exists if counts is None else drafts.positions[:-1] < counts[:, None]
    found = evidence(drafts.target_logits, drafts.rows[:, :-1], ids, exists, numbers)
    if "draft" not in groups:
        return found
    return torch.cat([found, draft_confidence(drafts, counts, sampled)], -1)


def draft_confidence(drafts: DraftBatch, counts: Tensor | None = None, sampled: bool = True) -> Tensor:
    """[B, len(CONFIDENCE)] how sure the draft was of its steps, or of their first counts [B] tokens"""
    assert drafts.draft_logits is not None
    own, sampling = drafts.draft_logits, drafts.target_sampling
    if sampled and not sampling.all_greedy:
        row = torch.arange(len(own), device=own.device)
        draft = torch.searchsorted(drafts.first_draft.contiguous(), row, right=True) - 1  # [D] which draft a row is of
        own = at_one(own, sampling.temperature[drafts.first_row[draft]])
    own_ids, rows, own_exists = drafts.own(counts)
    return confidence(own, rows, own_ids, own_exists)
