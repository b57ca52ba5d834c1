"""How the splits of an attention become one: by a launch of its own, or by whichever split ends last.

Each split leaves its answer and the size of its part of the softmax in memory: parts [B, heads, Q, splits, d] and sums
[B, heads, Q, splits]. Neither way adds them up in the order in which they end, so the same inputs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semspec.model.kernels.tiles import Tiles

ROWS = tl.constexpr(8)  # joined at a time; every tile has a multiple of this
COUNTERS = 4096  # tiles of one launch; with more than one split there are no more than a card has processors


class Tickets:
    """Counters by which a split knows that it is the last of its tile, on each device.

    They are zero between launches: the last split puts its counter back, so graphs can be replayed for ever. Launches
    that share tickets must not run at the same time; those of one model never do.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows  # of a tile, up to which splits are joined by the last
        self._on: dict[torch.device, Tensor] = {}

    def take(self, tiles: Tiles, count: int, device: torch.device) -> Tensor | None:
        """Counters for so many tiles, or None where the joining is a launch of its own, or there is nothing to join."""
        if tiles.splits == 1 or tiles.rows > self.rows:
            return None
        assert count <= COUNTERS
        if device not in self._on:
            self._on[device] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        return self._on[device]


@triton.jit
def join_if_last(
    ticket, used, parts, sums, out, b, kv, block, queries, heads, count,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A split has stored its parts of a block of rows. If all others have too, it joins them, some rows at a time.

    Splits from `used` on have seen nothing and stored nothing. Rows behind the last query get zeros.
    """
    tl.debug_barrier()  # what any thread of this program has stored comes before the ticket is taken
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
        SOME: tl.constexpr = min(SPLITS, min(2048 // BLOCK_D, 16))  # splits asked for before the first is needed
        d = tl.arange(0, BLOCK_D)
        for at in range(0, tl.minimum(queries * GROUP - block * BLOCK_M, BLOCK_M), ROWS):
            row = block * BLOCK_M + at + tl.arange(0, ROWS)
            query, head = row // GROUP, kv * GROUP + row % GROUP
            part = ((b * heads + head) * queries + query) * SPLITS
            inside, known = query < count, (d < D)[None, :]
            best = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            sum = tl.zeros([ROWS, BLOCK_D], tl.float32)
            for first in range(0, used, SOME):
                levels, answers = (), ()
                for i in tl.static_range(SOME):
                    there = inside & (first + i < used)
                    where = parts + (part + first + i).to(tl.int64)[:, None] * D + d[None, :]
                    answers += (tl.load(where, mask=there[:, None] & known, other=0.0),)  # type: ignore[assignment]
                    levels += (tl.load(sums + part + first + i, mask=there, other=float("-inf")),)  # type: ignore[assignment]
                better = best
                for i in tl.static_range(SOME):
                    better = tl.maximum(better, levels[i])
                base = tl.where(better == float("-inf"), 0.0, better)
                decay = tl.exp2(best - base)
                total, sum, best = total * decay, sum * decay[:, None], better
                for i in tl.static_range(SOME):
                    weight = tl.exp2(levels[i] - base)
                    total += weight
                    sum += answers[i] * weight[:, None]
            answer = sum / tl.where(total > 0.0, total, 1.0)[:, None]
            place = ((b * queries + query) * heads + head)[:, None] * D + d[None, :]
            tl.store(out + place, answer, mask=(query < queries)[:, None] & known)
        tl.store(ticket, 0)


def join(parts: Tensor, sums: Tensor, out: Tensor) -> None:
    """All splits of all rows, when every split has been stored."""
    batch, queries, heads, size = out.shape
    _join[(queries, heads, batch)](
        parts, sums, out, queries, heads,
        D=size, BLOCK_D=triton.next_power_of_2(size), SPLITS=parts.shape[3], num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["queries"])
def _join(parts, sums, out, queries, heads, D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr):
    """Weigh the splits of one query and head by their shares of the softmax."""
    query, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = (b * heads + head) * queries + query
    split, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    level = tl.load(sums + row * SPLITS + split)
    used = level > float("-inf")
    best = tl.max(level, 0)
    weight = tl.where(used, tl.exp2(level - tl.where(best > float("-inf"), best, 0.0)), 0.0)
    total = tl.sum(weight, 0)
    at = parts + (row * SPLITS + split).to(tl.int64)[:, None] * D + d[None, :]
    part = tl.load(at, mask=(d < D)[None, :], other=0.0)  # also what nobody has stored: knowing better takes a load
    answer = tl.sum(tl.where(used[:, None], part, 0.0) * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + ((b * queries + query) * heads + head) * D + d, answer, mask=d < D)
