"""`block`: block verification, which keeps the target's distribution and accepts at least as much as `sampling`.

Instead of stopping at the first rejected token, the draft is tested as a block and the longest passing prefix accepted.
With p_0 = 1 and p_i = min(1, p_{i-1} * M(x_i) / m(x_i)), M the target's and m the draft's probability, prefix i of a
draft of length K passes its test with probability
    h_i = Z_i / (Z_i + 1 - p_i),   Z_i = sum over x of max(p_i * M(x) - m(x), 0)   for i < K,   h_K = p_K;
the longest passing prefix tau is accepted, and the next token comes from norm(max(p_tau * M - m, 0)), or M if tau = K.
Source: Sun et al. 2025 (arXiv 2403.10444).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semspec.sampling.noise import ACCEPT
from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.sampling import after_rejection


@dataclass(frozen=True)
class Block(Rule):
    name = "block"
    title = "Block verification"
    lossless = True
    needs_draft_logits = True

    def verify(self, drafts: DraftBatch) -> Decisions:
        weight, passing = _tests(drafts)  # [B, K + 1] p_i and h_i
        # Prefix i is tested with the noise of its last token; the empty prefix always passes.
        u = torch.cat([torch.zeros_like(weight[:, :1]), drafts.uniform(ACCEPT)[:, :-1]], 1)
        passes = (u <= passing) & (drafts.positions <= drafts.counts[:, None])
        accepted = torch.where(passes, drafts.positions, 0).amax(-1)
        return Decisions(accepted, after_rejection(drafts, accepted, weight.gather(1, accepted[:, None])[:, 0]))


def _tests(drafts: DraftBatch) -> tuple[Tensor, Tensor]:
    """[B, K + 1] p_i and h_i, position by position, so that no [B, K, V] tensor is made."""
    ratio = drafts.target_prob_of_draft() / drafts.draft_prob_of_draft()  # [B, K]
    weight = torch.ones_like(drafts.counts, dtype=torch.float32)  # [B] p_0
    weights, passing = [], []
    for k in range(ratio.shape[1]):
        at = torch.full_like(drafts.counts, k)
        excess = (weight[:, None] * drafts.target_distribution(at) - drafts.draft_distribution(at)).clamp_min(0).sum(-1)
        inner = excess / (excess + 1 - weight)
        inner = torch.where((excess == 0) & (weight == 1), 1.0, inner)  # 0/0: M equals m
        passing.append(torch.where(drafts.counts == k, weight, inner))
        weights.append(weight)
        weight = (weight * ratio[:, k]).clamp_max(1)
    return torch.stack([*weights, weight], 1), torch.stack([*passing, weight], 1)
