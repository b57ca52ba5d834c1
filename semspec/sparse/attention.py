"""Which blocks of the cache a draft is checked against (arXiv 2512.21911, section 3.1).

The cache of each key head is cut into blocks of B places. With q_0 the first checked token's query, averaged over the
heads that share a key head h, and k[h, b] the mean of the keys in block b of head h,

    first:  s[h, b] = q_0[h] . k[h, b]                                              (the paper's)
    share:  s[h, b] = max over tokens t and heads g of h:  softmax over b of (scale q_t[g] . k[h, b])     (ours)
    reach:  the same with q_t[g] . k[h, b] + 2 sqrt(sum over channels i of q_t[g, i]^2 w[h, b, i])        (ours)

The second asks what share of its attention any query of the draft would give a block if a block were one key. It
compares heads of different temper fairly, and every token of the draft has a say; at the same budget the output of
the pocket target moves a tenth as far (docs/sparse.md). But one key that a query looks for is a B-th of a mean. With w
the variances of a block's keys, the third takes, in place of the mean product, about the largest that a block may hold:
two deviations above the mean, were channels independent. Of all pairs (h, b) the N = floor((L - L0) rho + L0) H / B
with the largest s are kept, where L tokens are in the cache before the pass; for L < L0 everything is. The first blocks
and the latest count as best of all. Behind the last whole block everything is seen, the draft included.

What becomes of a block that is not kept is the plan's `rest`. With v[h, b] the mean of its values, a query q of head h

    nothing:  does not see it, and its softmax is over what is left                 (the paper's)
    mean:     sees B places that all have the key k[h, b] and the value v[h, b]     (ours)

which is one place with the logit scale q . k[h, b] + log B. It is exact where a block's keys and values are alike, and
takes 1 / B of the cache to read. In a model that looks a little at everything, what is left out together weighs much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from semspec.errors import BadRequest
from semspec.model.kernels import REACH, ROOM

SPREADS = ("pairs", "heads")
SCORES = ("first", "share", "reach")
RESTS = ("nothing", "mean")


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    block: int = 16  # B
    dense_below: int = 1024  # L0
    rho: float = 0.1  # of what is beyond L0
    sinks: int = 1  # first blocks that are always kept
    recent: int = 2  # last whole blocks that are always kept
    score: str = "share"  # how blocks are scored, see above
    spread: str = "pairs"  # the best pairs of all heads together, or of each of the "heads" equally many
    anchors: tuple[int, ...] | None = None  # layers that choose; others take the choice of the one before. None: all do
    pays_from: int = 0  # tokens below which choosing took longer than reading everything, where that was measured
    rest: str = "nothing"  # what is seen of blocks that are not kept: nothing, or their mean

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
    def known_by(self) -> int:
        """Vectors as long as a key that are kept of each block: its mean key, perhaps its mean value and variances."""
        return 1 + (self.rest == "mean") + (self.score == "reach")

    def pairs(self, length: int, kv_heads: int) -> int:
        """N, or all pairs where less would not be sparse; a sequence of `length` tokens before the pass."""
        everything = length // self.block * kv_heads
        if length < max(self.dense_below, self.pays_from):
            return everything
        fixed = min(self.sinks + self.recent, length // self.block) * kv_heads
        wanted = int((length - self.dense_below) * self.rho + self.dense_below) * kv_heads // self.block
        return min(max(wanted, fixed), everything)

    def sparse_at(self, length: int, kv_heads: int) -> bool:
        return self.pairs(length, kv_heads) < length // self.block * kv_heads


def choose(scores: Tensor, full: Tensor, pairs: Tensor, plan: AttentionPlan) -> Tensor:
    """Which blocks to keep, [B, kv heads, M], from s of the same shape; of B sequences with full [B] whole blocks, the
    pairs [B] best. Blocks from full on are no blocks yet. No host synchronisation."""
    batch, heads, most = scores.shape
    block = torch.arange(most, device=scores.device)
    there = (block < full[:, None])[:, None]  # [B, 1, M]
    fixed = there & ((block < plan.sinks) | (block >= full[:, None] - plan.recent))[:, None]
    ranked = scores.float().masked_fill(fixed, float("inf")).masked_fill(~there, float("-inf"))
    if plan.spread == "pairs":
        ranked, wanted = ranked.view(batch, 1, heads * most), pairs
    else:
        wanted = pairs // heads
    order = ranked.argsort(dim=-1, descending=True, stable=True)
    best = (torch.arange(ranked.shape[-1], device=scores.device) < wanted[:, None, None]).expand_as(order)
    chosen = torch.zeros_like(ranked, dtype=torch.bool).scatter_(-1, order, best)
    return chosen.view(batch, heads, most) & there


def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """A choice [B, kv heads, M] as lists: blocks [B, kv heads, M] in rising order, and how many of them count."""
    most = chosen.shape[-1]
    place = torch.where(chosen, chosen.cumsum(-1) - 1, most)
    lists = torch.zeros(*chosen.shape[:-1], most + 1, dtype=torch.int32, device=chosen.device)
    numbers = torch.arange(most, device=chosen.device, dtype=torch.int32).expand_as(chosen)
    lists.scatter_(-1, place, numbers)
    return lists[..., :most].contiguous(), chosen.sum(-1, dtype=torch.int32)


def block_scores(
    q: Tensor,
    means: Tensor,
    full: Tensor,
    plan: AttentionPlan,
    scale: float,
    counts: Tensor | None = None,
    variances: Tensor | None = None,
) -> Tensor:
    """s [B, kv heads, M] from queries [B, n, heads, d] and mean keys [B, kv heads, M, d], of which full [B] are made;
    of the queries the first counts [B] are real. A plan that scores by reach needs the keys' variances, too."""
    kv_heads, most = means.shape[1:3]
    grouped = q.unflatten(2, (kv_heads, -1)).to(means.dtype)  # [B, n, kv heads, group, d]
    if plan.score == "first":
        return (means @ grouped[:, 0].mean(2)[..., None])[..., 0]
    rows = grouped.transpose(1, 2).flatten(2, 3)  # [B, kv heads, n x group, d]
    there = torch.arange(most, device=q.device) < full[:, None]
    products = (rows @ means.transpose(-1, -2)).float()
    if plan.score == "reach":
        assert variances is not None
        small = rows / ROOM
        products += REACH * ROOM * (small.square() @ variances.transpose(-1, -2)).float().sqrt()
    products *= scale
    share = products.masked_fill(~there[:, None, None], float("-inf")).softmax(-1)
    if counts is not None:
        real = (torch.arange(q.shape[1], device=q.device) < counts[:, None])[:, :, None]  # [B, n, 1]
        real = real.expand(-1, -1, grouped.shape[3]).flatten(1)
        share = share.masked_fill(~real[:, None, :, None], 0.0)
    return share.amax(2)


class Kept(NamedTuple):
    """Which whole blocks one sequence sees."""

    lists: Tensor  # [kv heads, W], in rising order
    counts: Tensor  # [kv heads]; of each list so many are real
    others: Tensor | None  # [kv heads, M], those that are seen by their means; None: nothing is seen of them


def gathered(tensor: Tensor, lists: Tensor, block: int) -> Tensor:
    """Whole blocks of [kv heads, length, d] by number [kv heads, W] -> [kv heads, W x block, d]"""
    heads, _, size = tensor.shape
    blocks = tensor[:, : tensor.shape[1] // block * block].unflatten(1, (-1, block))
    rows = torch.arange(heads, device=tensor.device)[:, None]
    return blocks[rows, lists].view(heads, -1, size)


def sight(kept: Kept, start: int, count: int, block: int, heads: int, dtype: torch.dtype) -> Tensor:
    """Who sees what of [listed blocks, what is behind the last whole one]: [1, heads, count, W x block + tail]. Lists
    that are shorter than others are filled up with what nobody sees. Where others are seen by their means, these
    are M more places, and it is numbers to add to logits: a mean counts as often as a block has places."""
    kv_heads, width = kept.lists.shape
    device = kept.lists.device

    def spread(seen: Tensor) -> Tensor:
        return seen.repeat_interleave(heads // kv_heads, 0)[:, None].expand(heads, count, -1)

    real = torch.arange(width, device=device) < kept.counts[:, None]
    places = torch.arange(start // block * block, start + count, device=device)
    tail = places <= places[-count:, None]  # [count, tail]
    parts = [spread(real.repeat_interleave(block, 1)), tail.expand(heads, -1, -1)]
    if kept.others is None:
        return torch.cat(parts, dim=-1)[None]
    seen = torch.cat([*parts, spread(kept.others)], dim=-1)
    added = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))
    added[..., -kept.others.shape[1] :] += math.log(block)
    return added[None]
