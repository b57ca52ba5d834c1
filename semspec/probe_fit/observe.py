"""What a model computes of steps: pooled states, and evidence from its logits; for many steps in one call.

It has the form of a rule, because the Executor batches rules over sequences. Its answer is no decision but the numbers
of each step, which stay on the device until all have been gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semspec.probe.evidence import CONFIDENCE as SURE
from semspec.probe.evidence import NAMES, at_one, confidence, evidence
from semspec.probe.features import pool
from semspec.probe_fit.data import CONFIDENCE, EVIDENCE
from semspec.sampling.draw import process
from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch

MEAN = NAMES.index("mean")


@dataclass(frozen=True, eq=False)
class Observe(Rule):
    """One model's view of steps, each with as many rows as it has tokens: those that predicted them."""

    name = "observe"
    lossless = True
    captured = False  # it looks at rows by their order

    model: str
    states: tuple[int, ...]  # whose hidden states to pool
    numbers: Tensor  # [V] tokens with a digit in them
    poolings: tuple[str, ...] = ("mean", "last")

    def verify(self, drafts: DraftBatch) -> Decisions:
        hidden, ids, exists = drafts.hidden or {}, drafts.safe_ids, drafts.exists
        at = drafts.rows[:, :-1].clamp_max(len(drafts.target_logits) - 1)  # after a step's end, some row that exists
        parts = [pool(hidden[i], drafts.first_row, drafts.counts, how) for i in self.states for how in self.poolings]
        parts.append(evidence(drafts.target_logits, at, ids, exists, self.numbers))
        if self.model == "draft":
            parts.append(confidence(drawn_from(drafts), at, ids, exists))
        nothing = torch.zeros_like(drafts.counts)
        return Decisions(nothing, nothing, state=torch.cat(parts, -1))

    def named(self, numbers: Tensor) -> dict[str, Tensor]:
        """The columns of all steps' numbers [N, x], under the names that a collection has for them."""
        logits = {EVIDENCE: len(NAMES)} | ({CONFIDENCE: len(SURE)} if self.model == "draft" else {})
        pooled = [f"{i}.{how}" for i in self.states for how in self.poolings]
        width = (numbers.shape[1] - sum(logits.values())) // max(1, len(pooled))
        sizes = dict.fromkeys(pooled, width) | logits
        columns = numbers.split(list(sizes.values()), -1)
        return {f"{self.model}.{name}": column for name, column in zip(sizes, columns, strict=True)}


def drawn_from(drafts: DraftBatch) -> Tensor:
    """[R, V] what a draft draws from, as it is known at run time: filters applied, temperature undone.

    A token that is not the draft's own counts as let through, since of those that it writes all are."""
    logits, sampling = drafts.target_logits, drafts.target_sampling
    if sampling.all_greedy:
        return logits
    row = torch.arange(len(logits), device=logits.device)
    step = torch.searchsorted(drafts.first_row.contiguous(), row, right=True) - 1
    ids = drafts.safe_ids[step, row - drafts.first_row[step]][:, None]  # [R, 1]
    known = at_one(process(logits, sampling), sampling.temperature)
    own = logits.float() - logits.float().amax(-1, keepdim=True)
    return known.scatter(-1, ids, own.gather(-1, ids))
