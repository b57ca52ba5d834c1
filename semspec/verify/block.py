"""`block`: block verification. The target's distribution, with at least as many accepted tokens as `sampling`.

Instead of stopping at the first token that falls, the draft is judged as a block and the longest good prefix stands.
With p_0 = 1 and p_i = min(1, p_{i-1} * M(x_i) / m(x_i)), M the target's and m the draft's probability, prefix i of a
draft of length K passes its test with probability
    h_i = Z_i / (Z_i + 1 - p_i),   Z_i = sum over x of max(p_i * M(x) - m(x), 0)   for i < K,   h_K = p_K;
the longest passing prefix tau stands, and the next token comes from norm(max(p_tau * M - m, 0)), or M if tau = K.
Source: Sun et al. 2025 (arXiv 2403.10444).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semspec.noise import ACCEPT
from semspec.verify.base import Decisions, Drafts, Rule
from semspec.verify.rejection import after_rejection


@dataclass(frozen=True)
class Block(Rule):
    name = "block"
    lossless = True
    needs_draft_logits = True

    def judge(self, drafts: Drafts) -> Decisions:
        weight = _prefix_weights(drafts)  # [B, K + 1] p_i
        excess = _excess(drafts, weight[:, :-1])  # [B, K] Z_i for i < K
        inner = excess / (excess + 1 - weight[:, :-1])  # 0/0 only at p_i = 1 with M = m; such a prefix passes
        inner = torch.where(inner.isnan(), 1.0, inner)
        whole = drafts.steps == drafts.counts[:, None]  # [B, K + 1]
        passing = torch.where(whole, weight, torch.cat([inner, torch.zeros_like(weight[:, :1])], 1))
        # Prefix i is tested with the noise of its last token; the empty prefix always stands.
        u = torch.cat([torch.zeros_like(weight[:, :1]), drafts.uniform(ACCEPT)[:, :-1]], 1)
        stands = (u <= passing) & (drafts.steps <= drafts.counts[:, None])
        accepted = torch.where(stands, drafts.steps, 0).amax(-1)
        return Decisions(accepted, after_rejection(drafts, accepted, weight.gather(1, accepted[:, None])[:, 0]))


def _prefix_weights(drafts: Drafts) -> Tensor:
    """[B, K + 1] p_0, p_1, ... p_K"""
    ratio = drafts.target_prob_of_draft() / drafts.draft_prob_of_draft()  # [B, K]
    weights = [torch.ones_like(drafts.counts, dtype=torch.float32)]
    for k in range(ratio.shape[1]):
        weights.append((weights[-1] * ratio[:, k]).clamp_max(1))
    return torch.stack(weights, 1)


def _excess(drafts: Drafts, weight: Tensor) -> Tensor:
    """[B, K] Z_i: how much of the target's mass behind prefix i the draft's distribution does not cover"""
    p = drafts.target_probs[drafts.rows[:, :-1]]  # [B, K, V]
    if drafts.draft_logits is None:
        q = torch.zeros_like(p).scatter_(2, drafts.safe_ids[..., None], 1.0)
    else:
        q = drafts.draft_probs[drafts.draft_rows]
    return (weight[..., None] * p - q).clamp_min(0).sum(-1)
