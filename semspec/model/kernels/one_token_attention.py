"""The attention of a single token as steps of `one_token.py`: rotation and cache write, parts of the cache, joining."""

from __future__ import annotations

import triton
import triton.language as tl

from semspec.model.kernels.attention_parts import rotated, weighed


@triton.jit
def attend_parts(
    qkv, keys, values, query_norm, key_norm, parts, sums, table, slot, start, cos, sin, eps, scale,
    page_stride, head_stride, position_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    NORMED: tl.constexpr, PROGRAMS: tl.constexpr, SPLITS: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each unit is a part of the cache of one key head, for all query heads that share it. The one whose part holds the
    new position writes the new key and value."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row, d = tl.arange(0, ROWS), tl.arange(0, D)
    inside = row < GROUP
    end = start + 1
    each = tl.cdiv(tl.cdiv(end, KEYS), SPLITS) * KEYS
    for unit in range(tl.program_id(0), KV_HEADS * SPLITS, PROGRAMS):
        split, kv = unit % SPLITS, unit // SPLITS
        begin = split * each
        stop = tl.minimum(begin + each, end)
        head = kv * GROUP + row
        loaded = inside[:, None] & (d < D)[None, :]
        base = kv * head_stride
        if not PAGE:
            base += slot * page_stride
        if begin < end:
            tile = rotated(
                qkv + head[:, None] * D, d[None, :], loaded, cos, sin, query_norm, eps, start, NORMED, HALF, D
            ).to(qkv.dtype.element_ty)
            if stop == end:
                key = qkv + (HEADS + kv + tl.zeros([1, 1], tl.int32)) * D
                here = base + start.to(tl.int64) * position_stride + tl.zeros([1], tl.int64)
                if PAGE:
                    page = tl.load(table + start // PAGE).to(tl.int64)
                    here += page * page_stride - (start // PAGE * PAGE).to(tl.int64) * position_stride
                known = (d < D)[None, :]
                turned = rotated(key, d[None, :], known, cos, sin, key_norm, eps, start, NORMED, HALF, D)
                value = tl.load(key + KV_HEADS * D + d[None, :], mask=known, other=0.0)
                tl.store(keys + here[:, None] + d[None, :], turned, mask=known)
                tl.store(values + here[:, None] + d[None, :], value, mask=known)
            tl.debug_barrier()  # other threads of this program are about to read it
            best = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            sum = tl.zeros([ROWS, D], tl.float32)
            for at in range(begin, stop, KEYS):
                n = at + tl.arange(0, KEYS)
                there = n < stop
                if PAGE:  # a tile lies in one page
                    page = tl.load(table + at // PAGE).to(tl.int64)
                    where = base + page * page_stride + (n - at // PAGE * PAGE).to(tl.int64) * position_stride
                else:
                    where = base + n.to(tl.int64) * position_stride
                to_k = tl.multiple_of(keys + where[None, :] + d[:, None], [16, 1])
                to_v = tl.multiple_of(values + where[:, None] + d[None, :], [1, 16])
                k = tl.load(to_k, mask=there[None, :], other=0.0)
                v = tl.load(to_v, mask=there[:, None], other=0.0)
                score = tl.dot(tile, k, input_precision="ieee") * scale
                score = tl.where(there[None, :], score, float("-inf"))
                best, total, weight, decay = weighed(score, best, total)
                sum = tl.dot(weight.to(v.dtype), v, sum * decay[:, None], input_precision="ieee")
            to = parts + (head * SPLITS + split)[:, None] * D + d[None, :]
            tl.store(to, sum / total[:, None], mask=loaded)
            tl.store(sums + head * SPLITS + split, best + tl.log2(total), mask=inside)
        else:
            tl.store(sums + head * SPLITS + split, tl.full([ROWS], float("-inf"), tl.float32), mask=inside)


@triton.jit
def join_parts(
    parts, sums, out,
    HEADS: tl.constexpr, D: tl.constexpr, PROGRAMS: tl.constexpr, SPLITS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Weigh the parts of each head by their shares of the softmax; SIZE dimensions of a head at a time."""
    PIECES: tl.constexpr = D // SIZE
    split, d = tl.arange(0, SPLITS), tl.arange(0, SIZE)
    for unit in range(tl.program_id(0), HEADS * PIECES, PROGRAMS):
        head, at = unit // PIECES, unit % PIECES * SIZE + d
        level = tl.load(sums + head * SPLITS + split)
        weight = tl.exp2(level - tl.max(level, 0))
        used = level > float("-inf")
        piece = tl.load(parts + (head * SPLITS + split)[:, None] * D + at[None, :], mask=used[:, None], other=0.0)
        tl.store(out + head * D + at, tl.sum(piece * weight[:, None], 0) / tl.sum(weight, 0))
