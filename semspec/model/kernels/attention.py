"""Attention of a few new tokens of each sequence over its part of the cache, in Triton.

Scoring a draft or decoding has 1 to 64 queries over a cache of any length: all the time goes into reading keys and
values once. So the cache of one key head is split among many programs (flash-decoding), each program holds the queries
of all heads that share that key head in one tile, and a second launch joins the splits. Lengths are read on the device:
one captured launch serves a cache as it grows. Where only some blocks of the cache are selected (semspec.sparse), the
splits share those, and nothing else is read but, if wanted, the means of the others: each is one more position, with
the logarithm of a block's size added to its score.

A paged cache is a pool of pages, and a table says which hold a sequence. A tile of keys lies in one page, so it costs
one look at the table. Without tables every slot is one page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semspec.model.kernels import LOG2E, KvScales, RowTiles, SelectedBlocks, TreeMask
from semspec.model.kernels.attention_fp8 import halved, weighed_values
from semspec.model.kernels.attention_parts import rotated, weighed
from semspec.model.kernels.attention_splits import join
from semspec.model.kernels.codes import coded, scale_of
from semspec.model.kernels.early_launch import early, wait_for_previous
from semspec.model.kernels.tiles import Tiles, tiles_over


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
    scale: float,
    window: int | None = None,
    tree: TreeMask | None = None,
    tiles: Tiles | None = None,
    chosen: SelectedBlocks | None = None,
    tables: Tensor | None = None,
    scales: KvScales | None = None,
    rows: RowTiles | None = None,
) -> Tensor:
    """[B, Q, heads, d] -> the same.

    q of B sequences, padded to Q; keys and values [pages, kv heads, positions, d] hold the new tokens already. Sequence
    b lies in page slots[b], or in those that row slots[b] of `tables` [slots, W] lists; its first counts[b] queries are
    at starts[b] and after. Later rows are zero. Query i attends to all before it, within `window` tokens including
    itself, or as its `tree` says.

    Where blocks are `chosen`, queries attend to the listed ones of those that are whole before the first new token, to
    everything after the last whole block, and to the others as `SelectedBlocks.rest` says.

    With `scales`, keys and values are in fp8.

    With `rows`, queries are not padded: all lie in one row of B x Q, and what is said of sequences holds for the tiles
    that `rows` tells of. Of a tree, bases belong to tiles, lineages and depths to rows.
    """
    assert q.is_contiguous()
    assert rows is None or chosen is None, "blocks are selected for a sequence, and a tile is a part of one"
    _, queries, heads, _ = q.shape
    batch, queries = len(slots), queries if rows is None else rows.queries
    if tiles is None:
        little = bool(chosen or window)  # is read of a cache, and blocks come in small tiles
        tiles = tiles_over(q, keys, tables, heads, queries, batch, little, scales)
    out = torch.empty_like(q)
    where = (slots, starts, counts)
    _launch(q, keys, values, where, out, scale, window, tree, None, tiles, tables, scales, queries, rows, chosen)
    return out


def rope_cache_attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
    cos_sin: tuple[Tensor, Tensor] | None,
    heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    scale: float,
    window: int | None = None,
    tiles: Tiles | None = None,
    tables: Tensor | None = None,
    scales: KvScales | None = None,
) -> Tensor:
    """`elementwise.rope_and_cache` and `attend` in one launch, for single tokens: qkv [B, 1, heads + 2 kv heads, d].

    Every program rotates the queries it needs; the one whose part of the cache holds the new position stores the new
    key and value.
    """
    batch, queries, _, size = qkv.shape
    assert queries == 1 and qkv.is_contiguous()
    if tiles is None:
        little = scales is None or bool(window)  # single tokens in wider types were not measured over long caches
        tiles = tiles_over(qkv, keys, tables, heads, 1, batch, little, scales)
    out = qkv.new_empty((batch, queries, heads, size))
    rope = (cos_sin, norms, eps)
    _launch(qkv, keys, values, (slots, starts, counts), out, scale, window, None, rope, tiles, tables, scales, queries)
    return out


def _launch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    where: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    scale: float,
    window: int | None,
    tree: TreeMask | None,
    rope: tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None, float] | None,
    tiles: Tiles,
    tables: Tensor | None,
    scales: KvScales | None,
    queries: int,
    rows: RowTiles | None = None,
    chosen: SelectedBlocks | None = None,
) -> None:
    heads, size = out.shape[2:]
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    assert keys.stride() == values.stride() and keys.stride(3) == 1
    key_scales, value_scales = scales or (where[0], where[0])
    if scales is not None:  # they lie as keys and values do
        assert key_scales.stride() == value_scales.stride() == tuple(n // size for n in keys.stride()[:3])
        assert keys.is_contiguous(), "scales of neighbours are neighbours"
    blocks = triton.cdiv(queries * group, tiles.rows)
    parts, sums = out, out  # not used by a single split
    if tiles.splits > 1:
        parts = q.new_empty((*out.shape[:3], tiles.splits, size), dtype=torch.float32)
        sums = q.new_empty((*out.shape[:3], tiles.splits), dtype=torch.float32)
    wide = max(16, triton.next_power_of_2(size))
    cos_sin, norms, eps = rope or (None, None, 0.0)
    cos, sin = cos_sin or (where[0], where[0])
    lists, listed, span, rest = chosen or (where[0], where[0], 0, None)
    assert chosen is None or window is None, "blocks are selected from the whole cache, not from a window"
    marks, mean_keys, mean_values = rest or (where[0], keys, values)
    bases, lineages, depths = tree or (where[0], where[0], where[0])
    if rest is not None:
        assert mean_keys.stride() == mean_values.stride() and mean_keys.stride()[2:] == (size, 1)
        assert marks.shape == lists.shape and marks.is_contiguous()
    _attend[(tiles.splits * blocks, kv_heads, len(where[0]))](
        q, keys, values, key_scales, value_scales, where[0] if tables is None else tables, *where,
        where[0] if rows is None else rows.offsets, bases, lineages, depths, lists, listed,
        out, parts, sums, cos, sin, *(norms or (q, q)), marks, mean_keys, mean_values, eps,
        queries, lists.shape[-1], 0 if tables is None else tables.stride(0),
        keys.stride(0), keys.stride(1), keys.stride(2), mean_keys.stride(0),
        mean_keys.stride(1), scale * LOG2E, window or 0, WINDOWED=window is not None, TREE=tree is not None,
        PACKED=rows is not None, PAGE=0 if tables is None else keys.shape[2], SPAN=span, REST=rest is not None,
        BLOCK_M=tiles.rows, BLOCK_N=tiles.keys, FP8=scales is not None,
        ROPE=rope is not None, NORMED=norms is not None, HALF=0 if cos_sin is None else cos.shape[1],
        GROUP=group, D=size, BLOCK_D=wide, SPLITS=tiles.splits, num_warps=tiles.warps, num_stages=tiles.stages,
        **early(q.device),
    )  # fmt: skip
    if tiles.splits > 1:
        join(parts, sums, out)


@triton.jit(do_not_specialize=["queries", "width", "table_width", "window"])
def _attend(
    q, keys, values, key_scales, value_scales, tables, slots, starts, counts, offsets, bases, lineages, depths,
    lists, listed, out, parts, sums,
    cos, sin, query_norm, key_norm, marks, mean_keys, mean_values, eps,
    queries, width, table_width, page_stride, head_stride, position_stride, mean_slot_stride, mean_head_stride,
    scale, window, WINDOWED: tl.constexpr, TREE: tl.constexpr, PACKED: tl.constexpr, PAGE: tl.constexpr,
    SPAN: tl.constexpr, REST: tl.constexpr, FP8: tl.constexpr, ROPE: tl.constexpr, NORMED: tl.constexpr,
    HALF: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    split, block = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    kv, b = tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    start, count = tl.load(starts + b).to(tl.int32), tl.load(counts + b).to(tl.int32)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)  # a tile's rows: all heads of query 0, all of query 1, ...
    query, head = row // GROUP, kv * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_D)
    inside = query < count
    first_row, room = b * queries, queries  # that this sequence, or tile of a packed pass, has in q and out
    if PACKED:
        first_row = tl.load(offsets + b).to(tl.int32)
        room = tl.load(offsets + b + 1).to(tl.int32) - first_row
    place = (first_row + query) * heads + head
    loaded = inside[:, None] & (d < D)[None, :]
    if ROPE:  # q holds keys and values too, after the queries of each token
        source = q + b * (tl.num_programs(1) * (GROUP + 2)) * D
        tile = rotated(
            source + head[:, None] * D, d[None, :], loaded, cos, sin, query_norm, eps, start, NORMED, HALF, D
        ).to(q.dtype.element_ty)
    else:
        tile = tl.load(q + place[:, None] * D + d[None, :], mask=loaded, other=0.0)

    own = start + query
    root = start
    line = tl.zeros([BLOCK_M], tl.int64)
    if TREE:
        root = tl.load(bases + b).to(tl.int32)
        line = tl.load(lineages + first_row + query, mask=inside, other=0)
        own = root + tl.load(depths + first_row + query, mask=inside, other=0).to(tl.int32)
    first = 0  # what any of these queries attends to: positions from here to the end
    if WINDOWED:
        first = tl.maximum(root - window + 1, 0) // BLOCK_N * BLOCK_N  # tiles begin where those of a page do
    end = start + count
    tail = 0  # the first position after the last whole block
    blocks = 0  # positions in selected blocks
    mine = b * tl.num_programs(1) + kv
    if SPAN:  # positions are counted through the listed blocks and on from there
        tail = start // SPAN * SPAN
        blocks = tl.load(listed + mine).to(tl.int32) * SPAN
        end = blocks + start + count - tail
    each = tl.cdiv(tl.cdiv(end - first, BLOCK_N), SPLITS) * BLOCK_N
    begin = first + split * each
    stop = tl.minimum(begin + each, end)
    stop = tl.where(count > block * BLOCK_M // GROUP, stop, begin)  # a tile without a query reads nothing

    slot = tl.load(slots + b).to(tl.int64)
    table = tables + slot * table_width
    base = kv * head_stride
    if not PAGE:
        base += slot * page_stride
    if ROPE:
        if (begin <= start) & (start < stop):
            key = source + (heads + kv + tl.zeros([1, 1], tl.int32)) * D
            here = base + start.to(tl.int64) * position_stride + tl.zeros([1], tl.int64)
            if PAGE:
                page = tl.load(table + start // PAGE).to(tl.int64)
                here += page * page_stride - (start // PAGE * PAGE).to(tl.int64) * position_stride
            known = (d < D)[None, :]
            turned = rotated(key, d[None, :], known, cos, sin, key_norm, eps, start, NORMED, HALF, D)
            value = tl.load(key + tl.num_programs(1) * D + d[None, :], mask=known, other=0.0)
            if FP8:
                key_scale, value_scale = scale_of(tl.max(tl.abs(turned), 1)), scale_of(tl.max(tl.abs(value), 1))
                tl.store(key_scales + here // D, key_scale)
                tl.store(value_scales + here // D, value_scale)
                tl.store(keys + here[:, None] + d[None, :], coded(turned, key_scale[:, None]), mask=known)
                tl.store(values + here[:, None] + d[None, :], coded(value, value_scale[:, None]), mask=known)
            else:
                tl.store(keys + here[:, None] + d[None, :], turned, mask=known)
                tl.store(values + here[:, None] + d[None, :], value, mask=known)
        tl.debug_barrier()  # other threads of this program are about to read it
    if FP8:
        given, key_unit = tile, scale
        if tile.dtype != tl.float32:
            given, unit = halved(tile)
            key_unit *= unit
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sum = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if PAGE and not SPAN:  # pages are looked up one tile ahead, and nothing waits for them
        next_to = begin if PAGE % BLOCK_N == 0 else begin + tl.arange(0, BLOCK_N)
        ahead = tl.load(table + next_to // PAGE, mask=next_to < stop, other=0)
    for at in range(begin, stop, BLOCK_N):
        n = at + tl.arange(0, BLOCK_N)
        there = n < stop
        lead = at  # the tile's first position, if it has no gaps
        if SPAN and SPAN % BLOCK_N == 0:  # all of a tile lies in one block, or after the blocks
            number = tl.load(lists + mine * width + at // SPAN, mask=at < blocks, other=0).to(tl.int32)
            lead += tl.where(at < blocks, (number - at // SPAN) * SPAN, tail - blocks)
            n = lead + tl.arange(0, BLOCK_N)
        elif SPAN:
            number = tl.load(lists + mine * width + n // SPAN, mask=n < blocks, other=0).to(tl.int32)
            n = tl.where(n < blocks, number * SPAN + n % SPAN, tail + n - blocks)
        where = base + n.to(tl.int64) * position_stride
        if PAGE:
            to = lead if PAGE % BLOCK_N == 0 and SPAN % BLOCK_N == 0 else n  # one page for the tile, or one for each
            if not SPAN:
                page = ahead
                ahead = tl.load(table + (to + BLOCK_N) // PAGE, mask=to + BLOCK_N < stop, other=0)
            elif PAGE % BLOCK_N == 0 and SPAN % BLOCK_N == 0:
                page = tl.load(table + to // PAGE)
            else:
                page = tl.load(table + to // PAGE, mask=there, other=0)
            where += page.to(tl.int64) * page_stride - (to // PAGE * PAGE).to(tl.int64) * position_stride
        if FP8 and PAGE and PAGE % BLOCK_N == 0 and SPAN % BLOCK_N == 0:  # neighbours, and all of them exist
            beside = tl.multiple_of(base // D + page.to(tl.int64) * (page_stride // D) + lead % PAGE, 4)
            where = beside * D + tl.arange(0, BLOCK_N) * D
            key_scale = tl.load(key_scales + beside + tl.arange(0, BLOCK_N))
            value_scale = tl.load(value_scales + beside + tl.arange(0, BLOCK_N))
        elif FP8:
            key_scale = tl.load(key_scales + where // D, mask=there, other=0.0)
            value_scale = tl.load(value_scales + where // D, mask=there, other=0.0)
        k = tl.load(keys + where[None, :] + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0)
        if FP8:
            score = tl.dot(given, k.to(given.dtype), input_precision="ieee") * (key_scale * key_unit)[None, :]
        else:
            score = tl.dot(tile, k, input_precision="ieee") * scale
        masked = True
        if FP8 and not WINDOWED:  # only a few tiles have positions that some query does not see
            masked = (lead + BLOCK_N > root) | (at + BLOCK_N > stop) | (SPAN % BLOCK_N != 0)
        if masked:
            seen = n[None, :] <= own[:, None]
            if WINDOWED:
                seen = seen & (n[None, :] > own[:, None] - window)
            if TREE:
                bit = tl.minimum(tl.maximum(n - root, 0), 63).to(tl.int64)
                seen = tl.where((n < root)[None, :], seen, ((line[:, None] >> bit[None, :]) & 1) != 0)
            score = tl.where(seen & there[None, :], score, float("-inf"))
            if FP8:
                value_scale = tl.where(there, value_scale, 0.0)
        if FP8:
            best, total, weight, decay = weighed_values(score, value_scale, best, total)
        else:
            best, total, weight, decay = weighed(score, best, total)
        v = tl.load(values + where[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
        if FP8:
            v = v.to(given.dtype)
        sum = tl.dot(weight.to(v.dtype), v, sum * decay[:, None], input_precision="ieee")

    used = begin < end
    if REST:  # starting with the last splits, which have fewer positions where the split is uneven
        full = tail // SPAN
        each = tl.cdiv(tl.cdiv(full, BLOCK_N), SPLITS) * BLOCK_N
        begin = (SPLITS - 1 - split) * each
        stop = tl.minimum(begin + each, full)
        stop = tl.where(count > block * BLOCK_M // GROUP, stop, begin)
        used = used | (begin < full)
        base = slot * mean_slot_stride + kv * mean_head_stride
        often = tl.log2(tl.full([1, 1], SPAN, tl.float32))  # a mean stands for so many positions
        for at in range(begin, stop, BLOCK_N):
            n = at + tl.arange(0, BLOCK_N)
            other = tl.load(marks + mine * width + n, mask=n < stop, other=1) == 0
            where = base + n * D
            k = tl.load(mean_keys + where[None, :] + d[:, None], mask=other[None, :] & (d < D)[:, None], other=0.0)
            score = tl.dot(tile, k, input_precision="ieee") * scale + often
            best, total, weight, decay = weighed(tl.where(other[None, :], score, float("-inf")), best, total)
            v = tl.load(mean_values + where[:, None] + d[None, :], mask=other[:, None] & (d < D)[None, :], other=0.0)
            sum = tl.dot(weight.to(v.dtype), v, sum * decay[:, None], input_precision="ieee")

    total = tl.where(inside, total, 0.0)
    whole = tl.where(total > 0.0, total, 1.0)
    answer = tl.where(inside[:, None], sum / whole[:, None], 0.0)
    exists = query < room
    if SPLITS == 1:
        tl.store(out + place[:, None] * D + d[None, :], answer, mask=exists[:, None] & (d < D)[None, :])
    else:
        part = place * SPLITS + split
        here = part[:, None].to(tl.int64) * D + d[None, :]
        tl.store(parts + here, answer, mask=loaded & used)
        tl.store(sums + part, tl.where(total > 0.0, best + tl.log2(whole), float("-inf")), mask=exists)
