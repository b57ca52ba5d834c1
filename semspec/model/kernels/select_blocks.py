"""Selecting blocks of the cache in Triton, as semspec.sparse.attention does it in PyTorch.

Three launches, or two where the score needs no softmax, without the host. `_weigh` computes the denominators of every
query's softmax over the mean keys, in parts; `_score` computes each block's score, as an integer of the same order;
`_select` finds the threshold of the best by bisection, and lists the blocks. Nothing is sorted. Every program of
`_select` searches for itself and then lists one head, since eight searches at once take no longer than one.

Scores are summed in float32 whatever the cache's type: where two differ by rounding only, PyTorch may prefer the other
block. Ties go to the first block, in the first head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semspec.model.kernels import LOG2E, REACH, ROOM

LESS, DEVIATIONS = tl.constexpr(1 / ROOM), tl.constexpr(REACH * ROOM)
SPAN = 128  # blocks that one program scores
HELD = 16384  # scores that a program keeps in registers while it searches; it reads what is more again and again
LISTED = 2048  # blocks listed at a time
INT_MIN, INT_MAX = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
SOME = tl.constexpr(16)  # parts of a softmax that are joined at a time


def choose_blocks(
    q: Tensor,
    means: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
    pairs: Tensor,
    block: int,
    fixed: tuple[int, int],
    scale: float,
    share: bool,
    equal: bool,
    cut: tuple[int, int, int] = (SPAN, HELD, LISTED),
    marks: Tensor | None = None,
    variances: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Lists of blocks [B, kv heads, M], in rising order, and how many of each count, as `attention.attend` wants them.

    q [B, Q, heads, d], slots, starts and counts are as there; means [slots, kv heads, M, d] are mean keys of blocks of
    `block` positions, of which those before starts [B] are made. Of a sequence's (head, block) pairs the pairs [B] best
    are chosen, or of each head `equal`ly many; the first and the latest `fixed` blocks count as best of all. Blocks are
    scored by the largest `share` that a query gives them, or else by the first token's mean query. Where `variances`
    of the keys are given, like means, a query's product with a mean is what it reaches in the block. Where `marks`
    [B, kv heads, M] are given, they become 1 for chosen blocks and 0 for other whole ones.
    """
    assert marks is None or marks.is_contiguous()
    assert variances is None or (share and variances.stride() == means.stride())
    assert q.is_contiguous() and means.stride(3) == 1 and means.stride(2) == means.shape[3]
    batch, queries, heads, size = q.shape
    kv_heads, most = means.shape[1:3]
    group, across = heads // kv_heads, triton.cdiv(most, cut[0])
    # Products of float32 have no matrix units, and a large tile of them does not fit into registers.
    rows = min(max(triton.next_power_of_2(queries * group), 16), 64 if q.element_size() < 4 else 16)
    sums = q.new_empty((batch, kv_heads, across, queries * group), dtype=torch.float32)
    scores = q.new_empty((batch, kv_heads * most), dtype=torch.int32)
    lists = q.new_empty((batch, kv_heads, most), dtype=torch.int32)
    listed = q.new_empty((batch, kv_heads), dtype=torch.int32)
    grid, numbers = (across, kv_heads, batch), (queries, means.stride(0), means.stride(1), scale * LOG2E)
    sizes = {"BLOCK": block, "GROUP": group, "D": size, "BLOCK_D": max(16, triton.next_power_of_2(size))}
    sizes |= {"BLOCK_M": rows, "BLOCK_N": cut[0], "REACHING": variances is not None}
    known = (means, means if variances is None else variances)
    if share:
        _weigh[grid](q, *known, slots, starts, counts, sums, *numbers, **sizes, num_warps=4)
    _score[grid](
        q, *known, slots, starts, counts, sums, scores, most, *numbers, **sizes, SHARE=share,
        SINKS=fixed[0], RECENT=fixed[1], BLOCK_G=triton.next_power_of_2(group), num_warps=4,
    )  # fmt: skip
    held = min(triton.next_power_of_2(most * (1 if equal else kv_heads)), cut[1])
    _select[(kv_heads, batch)](
        scores, starts, pairs, lists, listed, lists if marks is None else marks, most,
        BLOCK=block, EQUAL=equal, MARKING=marks is not None, HELD=held,
        BLOCK_L=min(triton.next_power_of_2(most), cut[2]), num_warps=min(max(held // 1024, 4), 16),
    )  # fmt: skip
    return lists, listed


@triton.jit
def _known(
    means, variances, slots, b, kv, n, full, slot_stride, head_stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, REACHING: tl.constexpr,
):  # fmt: skip
    """Mean keys and, if they are used, variances, each [BLOCK_D, blocks n]"""
    d = tl.arange(0, BLOCK_D)
    at = tl.load(slots + b).to(tl.int64) * slot_stride + kv * head_stride + n[None, :] * D + d[:, None]
    there = (n < full)[None, :] & (d < D)[:, None]
    keys = tl.load(means + at, mask=there, other=0.0)
    wide = keys
    if REACHING:
        wide = tl.load(variances + at, mask=there, other=0.0)
    return keys, wide


@triton.jit
def _products(
    q, keys, wide, b, kv, row, n, full, count, queries, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, REACHING: tl.constexpr,
):  # fmt: skip
    """Of some rows, queries x heads of one key head, with mean keys, or what they reach: [rows, blocks n], for powers
    of 2."""
    d = tl.arange(0, BLOCK_D)
    query, head = row // GROUP, kv * GROUP + row % GROUP
    place = (b * queries + query) * (tl.num_programs(1) * GROUP) + head
    inside = (query < count)[:, None] & (d < D)[None, :]  # after the last token q is undefined
    tile = tl.load(q + place[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0.0)
    product = tl.dot(tile, keys, input_precision="ieee")
    if REACHING:
        small = tile * LESS
        small = (small * small).to(wide.dtype)
        product += DEVIATIONS * tl.sqrt(tl.dot(small, wide, input_precision="ieee"))
    return tl.where((n < full)[None, :], product * scale, float("-inf"))


@triton.jit(do_not_specialize=["queries"])
def _weigh(
    q, means, variances, slots, starts, counts, sums, queries, slot_stride, head_stride, scale,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, REACHING: tl.constexpr,
):  # fmt: skip
    """Some blocks' part in the softmax of every query: logarithms of sums [B, kv heads, parts, queries x GROUP]."""
    part, kv, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    full, count = tl.load(starts + b).to(tl.int32) // BLOCK, tl.load(counts + b).to(tl.int32)
    if part * BLOCK_N < full:
        n = part * BLOCK_N + tl.arange(0, BLOCK_N)
        keys, wide = _known(means, variances, slots, b, kv, n, full, slot_stride, head_stride, D, BLOCK_D, REACHING)
        own = sums + ((b * tl.num_programs(1) + kv) * tl.num_programs(0) + part) * queries * GROUP
        for first in range(0, count * GROUP, BLOCK_M):
            row = first + tl.arange(0, BLOCK_M)
            product = _products(q, keys, wide, b, kv, row, n, full, count, queries, scale, GROUP, D, BLOCK_D, REACHING)
            best = tl.max(product, 1)
            total = tl.sum(tl.exp2(product - best[:, None]), 1)
            tl.store(own + row, best + tl.log2(total), mask=row < count * GROUP)


@triton.jit(do_not_specialize=["most", "queries"])
def _score(
    q, means, variances, slots, starts, counts, sums, scores, most, queries, slot_stride, head_stride, scale,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, REACHING: tl.constexpr, SHARE: tl.constexpr, SINKS: tl.constexpr, RECENT: tl.constexpr,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Some blocks' scores in one head -> scores [B, kv heads x whole blocks]: heads follow each other without a gap."""
    part, kv, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    full, count = tl.load(starts + b).to(tl.int32) // BLOCK, tl.load(counts + b).to(tl.int32)
    if part * BLOCK_N < full:
        n = part * BLOCK_N + tl.arange(0, BLOCK_N)
        keys, wide = _known(means, variances, slots, b, kv, n, full, slot_stride, head_stride, D, BLOCK_D, REACHING)
        if SHARE:
            score = tl.zeros([BLOCK_N], tl.float32)
            parts = tl.cdiv(full, BLOCK_N)
            for first in range(0, count * GROUP, BLOCK_M):
                row = first + tl.arange(0, BLOCK_M)
                inside = row < count * GROUP
                best = tl.full([BLOCK_M], float("-inf"), tl.float32)
                total = tl.zeros([BLOCK_M], tl.float32)
                for at in range(0, parts, SOME):
                    i = at + tl.arange(0, SOME)
                    place = ((b * tl.num_programs(1) + kv) * tl.num_programs(0) + i)[:, None] * queries * GROUP
                    known = (i < parts)[:, None] & inside[None, :]
                    some = tl.load(sums + place + row[None, :], mask=known, other=float("-inf"))
                    better = tl.maximum(best, tl.max(some, 0))
                    level = tl.where(better == float("-inf"), 0.0, better)  # a row that is none
                    total = total * tl.exp2(best - level) + tl.sum(tl.exp2(some - level[None, :]), 0)
                    best = better
                whole = tl.where(inside, best + tl.log2(tl.where(inside, total, 1.0)), 0.0)
                product = _products(
                    q, keys, wide, b, kv, row, n, full, count, queries, scale, GROUP, D, BLOCK_D, REACHING
                )
                given = tl.where(inside[:, None], tl.exp2(product - whole[:, None]), 0.0)
                score = tl.maximum(score, tl.max(given, 0))
        else:
            g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
            place = b.to(tl.int64) * queries * (tl.num_programs(1) * GROUP) + kv * GROUP + g
            inside = (g < GROUP)[:, None] & (d < D)[None, :]
            tile = tl.load(q + place[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
            mean = tl.sum(tile, 0) / GROUP
            score = tl.sum(keys.to(tl.float32) * mean[:, None], 0)
        bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # there is a zero below zero
        number = bits ^ ((bits >> 31) & INT_MAX)  # negative numbers are ordered the other way round
        number = tl.where((n < SINKS) | (n >= full - RECENT), INT_MAX, number)
        tl.store(scores + b.to(tl.int64) * tl.num_programs(1) * most + kv * full + n, number, mask=n < full)


@triton.jit(do_not_specialize=["most"])
def _select(
    scores, starts, pairs, lists, listed, marks, most,
    BLOCK: tl.constexpr, EQUAL: tl.constexpr, MARKING: tl.constexpr, HELD: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """The best of all heads together, or of this head, and of these the blocks of this head."""
    kv, b = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(0)
    full, wanted = tl.load(starts + b).to(tl.int32) // BLOCK, tl.load(pairs + b).to(tl.int32)
    mine = scores + b.to(tl.int64) * heads * most + kv * full
    before = kv * full  # pairs that are asked for together with mine, and come before them
    total = heads * full
    if EQUAL:
        before = 0
        total = full
        wanted = wanted // heads
    first = mine - before
    i = tl.arange(0, HELD)
    held = tl.load(first + i, mask=i < total, other=INT_MIN)
    # The smallest number that at most `wanted` scores exceed.
    low = tl.full([], INT_MIN, tl.int64)
    high = tl.full([], INT_MAX, tl.int64)
    above = tl.zeros([], tl.int32)
    while low < high:
        middle = (low + high) >> 1
        threshold = middle.to(tl.int32)
        found = tl.sum((held > threshold).to(tl.int32), 0)
        for at in range(HELD, total, HELD):
            more = tl.load(first + at + i, mask=at + i < total, other=INT_MIN)
            found += tl.sum((more > threshold).to(tl.int32), 0)
        enough = found <= wanted
        low = tl.where(found == wanted, middle, tl.where(enough, low, middle + 1))
        high = tl.where(enough, middle, high)
        above = tl.where(enough, found, above)
    threshold = high.to(tl.int32)
    ties = wanted - above  # of those that are that number, so many are among the best
    passed = tl.sum(((held == threshold) & (i < before)).to(tl.int32), 0)
    for at in range(HELD, before, HELD):
        more = tl.load(first + at + i, mask=at + i < before, other=INT_MIN)
        passed += tl.sum(((more == threshold) & (at + i < before)).to(tl.int32), 0)
    row = (b * heads + kv).to(tl.int64) * most
    place = lists + row
    taken = tl.zeros([], tl.int32)
    for at in range(0, full, BLOCK_L):
        n = at + tl.arange(0, BLOCK_L)
        number = tl.load(mine + n, mask=n < full, other=INT_MIN)
        tie = ((n < full) & (number == threshold)).to(tl.int32)
        rank = passed + tl.cumsum(tie, 0)
        best = ((n < full) & ((number > threshold) | ((tie != 0) & (rank <= ties)))).to(tl.int32)
        tl.store(place + taken + tl.cumsum(best, 0) - 1, n, mask=best != 0)
        if MARKING:
            tl.store(marks + row + n, best.to(tl.int8), mask=n < full)
        passed += tl.sum(tie, 0)
        taken += tl.sum(best, 0)
    tl.store(listed + b * heads + kv, taken)
