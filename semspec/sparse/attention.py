"""Which KV cache blocks a draft is verified against (arXiv 2512.21911, section 3.1).

The cache of each KV head is cut into blocks of B tokens. With q_0 the first draft token's query, averaged over the
heads that share a KV head h, and k[h, b] the mean of the keys in block b of head h,

    first:  s[h, b] = q_0[h] . k[h, b]                                              (the paper's)
    share:  s[h, b] = max over tokens t and heads g of h:  softmax over b of (scale q_t[g] . k[h, b])     (ours)
    reach:  the same with q_t[g] . k[h, b] + 2 sqrt(sum over channels i of q_t[g, i]^2 w[h, b, i])        (ours)

`share` is the largest share of attention that any query of the draft would give a block if a block were one key. Heads
with different logit scales become comparable, and every draft token counts; at the same budget the output of the pocket
target changes a tenth as much (docs/sparse.md). But a single key that a query looks for is only 1/B of a mean. With w
the variances of a block's keys, `reach` estimates the largest product in the block instead: two standard deviations
above the mean, if channels were independent.

Of all pairs (h, b) the N = floor((L - L0) rho + L0) H / B with the largest s are selected, with L tokens in the cache
before the pass; for L < L0 all are. The first and the latest blocks always rank highest. Everything after the last
whole block is attended to, the draft included.

The plan's `rest` says what stands in for blocks that are not selected. With v[h, b] the mean of its values, a query q
of head h attends to

    nothing:  no part of the block; the softmax is over what is left                (the paper's)
    mean:     B tokens that all have the key k[h, b] and the value v[h, b]          (ours)

which is one token with the logit scale q . k[h, b] + log B. It is exact where a block's keys and values are equal, and
reads 1 / B of the cache. In a model whose attention is spread out, the skipped blocks together weigh much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from semspec.errors import BadRequest
from semspec.model.attention_metadata import own_lines
from semspec.model.kernels import REACH, ROOM

SPREADS = ("pairs", "heads")
SCORES = ("first", "share", "reach")
RESTS = ("nothing", "mean")


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    block: int = 16  # B
    dense_below: int = 1024  # L0
    rho: float = 0.1  # of what is beyond L0
    sinks: int = 1  # first blocks that are always selected
    recent: int = 2  # last whole blocks that are always selected
    score: str = "share"  # how blocks are scored, see above
    spread: str = "pairs"  # the best pairs of all heads together, or of each of the "heads" equally many
    anchors: tuple[int, ...] | None = None  # layers that select; others reuse the last anchor's selection. None: all do
    pays_from: int = 0  # context length from which it was measured to be faster than dense attention
    rest: str = "nothing"  # what stands in for blocks that are not selected: nothing, or their mean

    def __post_init__(self) -> None:
        if self.block < 1 or min(self.dense_below, self.sinks, self.recent, self.pays_from) < 0:
            raise BadRequest(
                f"a block of {self.block}, dense below {self.dense_below}, {self.sinks} first and {self.recent} recent "
                "blocks: give a block of 1 or more, and no negative numbers"
            )
        if not 0.0 <= self.rho <= 1.0:
            raise BadRequest(f"rho is {self.rho}; give the share of the cache to read beyond dense_below, 0 to 1")
        if self.spread not in SPREADS:
            raise BadRequest(f"spread is {self.spread!r}; give {' or '.join(SPREADS)}")
        if self.score not in SCORES:
            raise BadRequest(f"score is {self.score!r}; give {' or '.join(SCORES)}")
        if self.rest not in RESTS:
            raise BadRequest(f"rest is {self.rest!r}; give {' or '.join(RESTS)}")
        if self.anchors is not None and (not self.anchors or list(self.anchors) != sorted(set(self.anchors))):
            raise BadRequest(f"anchors are {self.anchors}; give layers in rising order, at least one")

    @property
    def vectors_per_block(self) -> int:
        """Vectors stored for each block: its mean key, and where needed its mean value and variances."""
        return 1 + (self.rest == "mean") + (self.score == "reach")

    def pairs(self, length: int, kv_heads: int) -> int:
        """N (head, block) pairs of a sequence of `length` tokens before the pass; all of them below L0."""
        total = length // self.block * kv_heads
        if length < max(self.dense_below, self.pays_from):
            return total
        fixed = min(self.sinks + self.recent, length // self.block) * kv_heads
        budget = int((length - self.dense_below) * self.rho + self.dense_below) * kv_heads // self.block
        return min(max(budget, fixed), total)

    def sparse_at(self, length: int, kv_heads: int) -> bool:
        return self.pairs(length, kv_heads) < length // self.block * kv_heads


def select_blocks(scores: Tensor, full: Tensor, pairs: Tensor, plan: AttentionPlan) -> Tensor:
    """Selected blocks [B, kv heads, M], from s of the same shape: of B sequences with full [B] whole blocks, the
    pairs [B] best. Blocks from `full` on do not exist yet. No host synchronisation."""
    batch, heads, blocks = scores.shape
    block = torch.arange(blocks, device=scores.device)
    exists = (block < full[:, None])[:, None]  # [B, 1, M]
    fixed = exists & ((block < plan.sinks) | (block >= full[:, None] - plan.recent))[:, None]
    ranked = scores.float().masked_fill(fixed, float("inf")).masked_fill(~exists, float("-inf"))
    if plan.spread == "pairs":
        ranked, budget = ranked.view(batch, 1, heads * blocks), pairs
    else:
        budget = pairs // heads
    order = ranked.argsort(dim=-1, descending=True, stable=True)
    best = (torch.arange(ranked.shape[-1], device=scores.device) < budget[:, None, None]).expand_as(order)
    selected = torch.zeros_like(ranked, dtype=torch.bool).scatter_(-1, order, best)
    return selected.view(batch, heads, blocks) & exists


def block_lists(selected: Tensor) -> tuple[Tensor, Tensor]:
    """A selection [B, kv heads, M] as lists: block numbers [B, kv heads, M] in rising order, and how many are valid."""
    blocks = selected.shape[-1]
    index = torch.where(selected, selected.cumsum(-1) - 1, blocks)
    lists = torch.zeros(*selected.shape[:-1], blocks + 1, dtype=torch.int32, device=selected.device)
    numbers = torch.arange(blocks, device=selected.device, dtype=torch.int32).expand_as(selected)
    lists.scatter_(-1, index, numbers)
    return lists[..., :blocks].contiguous(), selected.sum(-1, dtype=torch.int32)


def block_scores(
    q: Tensor,
    means: Tensor,
    full: Tensor,
    plan: AttentionPlan,
    scale: float,
    counts: Tensor | None = None,
    variances: Tensor | None = None,
) -> Tensor:
    """s [B, kv heads, M] from queries [B, n, heads, d], of which the first counts [B] are valid, and mean keys
    [B, kv heads, M, d], of which the first full [B] are. A plan that scores by reach needs the keys' variances, too."""
    kv_heads, blocks = means.shape[1:3]
    grouped = q.unflatten(2, (kv_heads, -1)).to(means.dtype)  # [B, n, kv heads, group, d]
    if plan.score == "first":
        return (means @ grouped[:, 0].mean(2)[..., None])[..., 0]
    rows = grouped.transpose(1, 2).flatten(2, 3)  # [B, kv heads, n x group, d]
    exists = torch.arange(blocks, device=q.device) < full[:, None]
    products = (rows @ means.transpose(-1, -2)).float()
    if plan.score == "reach":
        assert variances is not None
        small = rows / ROOM
        products += REACH * ROOM * (small.square() @ variances.transpose(-1, -2)).float().sqrt()
    products *= scale
    share = products.masked_fill(~exists[:, None, None], float("-inf")).softmax(-1)
    if counts is not None:
        valid = (torch.arange(q.shape[1], device=q.device) < counts[:, None])[:, :, None]  # [B, n, 1]
        valid = valid.expand(-1, -1, grouped.shape[3]).flatten(1)
        share = share.masked_fill(~valid[:, None, :, None], 0.0)
    return share.amax(2)


class SequenceBlocks(NamedTuple):
    """The whole blocks that one sequence attends to."""

    lists: Tensor  # [kv heads, W], in rising order
    counts: Tensor  # [kv heads]; valid entries of each list
    averaged: Tensor | None  # [kv heads, M], those represented by their means; None: the others are skipped


def gather_blocks(tensor: Tensor, lists: Tensor, block: int) -> Tensor:
    """Whole blocks of [kv heads, length, d] by number [kv heads, W] -> [kv heads, W x block, d]"""
    heads, _, size = tensor.shape
    blocks = tensor[:, : tensor.shape[1] // block * block].unflatten(1, (-1, block))
    rows = torch.arange(heads, device=tensor.device)[:, None]
    return blocks[rows, lists].view(heads, -1, size)


def attention_mask(
    blocks: SequenceBlocks, start: int, count: int, block: int, heads: int, dtype: torch.dtype,
    parents: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """Over [listed blocks, tokens after the last whole one]: [1, heads, count, W x block + tail], false for the padding
    of short lists. With means there are M more columns, and the mask is added to logits instead: log B for a mean."""
    kv_heads, width = blocks.lists.shape
    device = blocks.lists.device

    def expand(visible: Tensor) -> Tensor:
        return visible.repeat_interleave(heads // kv_heads, 0)[:, None].expand(heads, count, -1)

    valid = torch.arange(width, device=device) < blocks.counts[:, None]
    positions = torch.arange(start // block * block, start + count, device=device)
    tail = positions <= positions[-count:, None]  # [count, tail]
    if parents:
        tail[-len(parents) :, -len(parents) :] = own_lines(parents, device)
    parts = [expand(valid.repeat_interleave(block, 1)), tail.expand(heads, -1, -1)]
    if blocks.averaged is None:
        return torch.cat(parts, dim=-1)[None]
    visible = torch.cat([*parts, expand(blocks.averaged)], dim=-1)
    bias = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float("-inf"))
    bias[..., -blocks.averaged.shape[1] :] += math.log(block)
    return bias[None]
