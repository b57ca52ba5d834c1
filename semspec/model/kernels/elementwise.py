"""The operations between matrix products, each in one launch: norms, RoPE with the cache write, activation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semspec.model.kernels import COUNT, LEFT, START, STEP, STOPS, TOKEN, KvScales, TreeMask
from semspec.model.kernels.codes import coded, scale_of
from semspec.model.kernels.early_launch import early, wait_for_previous
from semspec.model.kernels.gemm import activated, rounded

AT_TOKEN, AT_START, AT_COUNT = tl.constexpr(TOKEN), tl.constexpr(START), tl.constexpr(COUNT)
AT_LEFT, AT_STOPS, AT_STEP = tl.constexpr(LEFT), tl.constexpr(STOPS), tl.constexpr(STEP)


def add_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float, inner: Tensor | None = None) -> Tensor:
    """x += added, in place; returns the RMS norm of x, times weight. [N, width]

    With `inner`, what is added is normed with that weight first. It may come in parts to add up, [parts, N, width].
    """
    size = x.shape[-1]
    normed = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _add_norm[(x.shape[0],)](
        x, x if added is None else added, weight, weight if inner is None else inner, normed, eps,
        x.shape[0] * size, SIZE=size, BLOCK=block, INNER=inner is not None,
        PARTS=0 if added is None else added.shape[0] if added.dim() == 3 else 1,
        num_warps=min(max(block // 512, 1), 16), **early(x.device),
    )  # fmt: skip
    return normed


def rope_and_cache(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
    cos_sin: tuple[Tensor, Tensor] | None,
    heads: int,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    tree: TreeMask | None = None,
    tables: Tensor | None = None,
    scales: KvScales | None = None,
) -> Tensor:
    """Returns rotated queries [B, Q, heads, d]; rotated keys, and values, are written to the cache.

    qkv [B, Q, heads + 2 kv heads, d] are projections; keys, values, slots, starts, counts, tables and scales are as in
    `attend`; cos_sin are [capacity, half of the rotated dimensions], float32; with norms, the heads of queries and keys
    are normed before they are rotated. Where sequences end with trees, tokens are rotated to their depths.
    """
    batch, queries, all_heads, size = qkv.shape
    kv_heads = keys.shape[1]
    out = qkv.new_empty((batch, queries, heads, size))
    cos, sin = (starts, starts) if cos_sin is None else cos_sin
    query_norm, key_norm = (starts, starts) if norms is None else norms
    half = 0 if cos_sin is None else cos.shape[1]
    rest = size - 2 * half
    bases, depths = (starts, starts) if tree is None else (tree.bases, tree.depths)
    _rope_and_cache[(batch * queries, all_heads)](
        qkv, out, keys, values, *(scales or (slots, slots)), slots if tables is None else tables,
        slots, starts, counts, bases, depths, cos, sin, query_norm, key_norm, eps,
        queries, 0 if tables is None else tables.stride(0),
        keys.stride(0), keys.stride(1), keys.stride(2), PAGE=0 if tables is None else keys.shape[2],
        HEADS=heads, KV_HEADS=kv_heads, D=size, HALF=half, REST=rest,
        BLOCK_HALF=triton.next_power_of_2(max(half, 1)), BLOCK_REST=triton.next_power_of_2(max(rest, 1)),
        NORMED=norms is not None, TREE=tree is not None, FP8=scales is not None, num_warps=1, **early(qkv.device),
    )  # fmt: skip
    return out


def act_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """[N, 2 ffn] -> [N, ffn]: the activation of the first half, times the second."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, size))
    block = 1024
    _act_and_mul[(rows, triton.cdiv(size, block))](
        gate_up, out, size, BLOCK=block, SILU=activation == "silu", num_warps=4, **early(out.device)
    )
    return out


def advance(state: Tensor, tokens: Tensor, stops: Tensor, out: Tensor) -> None:
    """Record the sampled token of every sequence that is decoding, and its next position, or that it has ended.

    state [FIELDS, B], tokens [B], stops [sets, V] bool, out [steps, B]: row state[STEP] gets the tokens, -1 where a
    sequence had ended before. A sequence ends with a token of its set state[STOPS], or when nothing is LEFT to write.
    """
    batch = tokens.shape[0]
    _advance[(1,)](
        state, tokens, stops, out, batch, stops.stride(0), BLOCK=triton.next_power_of_2(batch), num_warps=1,
        **early(state.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["batch"])
def _advance(state, tokens, stops, out, batch, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    b = tl.arange(0, BLOCK)
    inside = b < batch
    token = tl.load(tokens + b, mask=inside, other=0)
    count = tl.load(state + AT_COUNT * batch + b, mask=inside, other=0)
    start = tl.load(state + AT_START * batch + b, mask=inside, other=0)
    left = tl.load(state + AT_LEFT * batch + b, mask=inside, other=0)
    step = tl.load(state + AT_STEP * batch + b, mask=inside, other=0)
    stop_set = tl.load(state + AT_STOPS * batch + b, mask=inside, other=0)
    stopped = tl.load(stops + stop_set * stride + token, mask=inside, other=0)
    live = count > 0
    left = left - live.to(tl.int64)
    goes_on = live & (stopped == 0) & (left > 0)
    tl.store(out + step * batch + b, tl.where(live, token, -1), mask=inside)
    tl.store(state + AT_TOKEN * batch + b, token, mask=inside)
    tl.store(state + AT_START * batch + b, start + count, mask=inside)
    tl.store(state + AT_COUNT * batch + b, goes_on.to(tl.int64), mask=inside)
    tl.store(state + AT_LEFT * batch + b, left, mask=inside)
    tl.store(state + AT_STEP * batch + b, step + 1, mask=inside)


@triton.jit
def _add_norm(
    x, added, weight, inner, normed, eps, part,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + i
    # The weights are loaded first: the compiler moves no load across a reduction, and they take longest to arrive.
    scale = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    if INNER:
        inner_scale = tl.load(inner + i, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    value = tl.load(x + at, mask=inside, other=0.0)
    if PARTS > 0:
        wide = tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        for i_part in tl.static_range(1, PARTS):
            wide += tl.load(added + i_part * part + at, mask=inside, other=0.0).to(tl.float32)
        more = wide.to(value.dtype)
        if INNER:
            wide = more.to(tl.float32)
            wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
            more = (wide * inner_scale).to(more.dtype)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)  # rounded as the residual stream is stored
        tl.store(x + at, value, mask=inside)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    tl.store(normed + at, wide * scale, mask=inside)


@triton.jit(do_not_specialize=["queries", "table_width"])
def _rope_and_cache(
    qkv, out, keys, values, key_scales, value_scales, tables, slots, starts, counts, bases, depths,
    cos, sin, query_norm, key_norm, eps,
    queries, table_width, page_stride, head_stride, position_stride, PAGE: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, NORMED: tl.constexpr, TREE: tl.constexpr,
    FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one token, as two halves that are rotated as pairs, and a rest that is not."""
    wait_for_previous(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    b, query = row // queries, row % queries
    inside = query < tl.load(counts + b)
    position = tl.load(starts + b) + query
    i, j = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_REST)
    rotated, passed = (i < HALF) & inside, (j < REST) & inside
    source = qkv + (row.to(tl.int64) * (HEADS + 2 * KV_HEADS) + head) * D
    one = tl.load(source + i, mask=rotated, other=0.0).to(tl.float32)
    two = tl.load(source + HALF + i, mask=rotated, other=0.0).to(tl.float32)
    rest = tl.load(source + 2 * HALF + j, mask=passed, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORMED:
            size = tl.rsqrt((tl.sum(one * one, 0) + tl.sum(two * two, 0) + tl.sum(rest * rest, 0)) / D + eps)
            norm = query_norm if head < HEADS else key_norm
            one = one * size * tl.load(norm + i, mask=rotated, other=0.0).to(tl.float32)
            two = two * size * tl.load(norm + HALF + i, mask=rotated, other=0.0).to(tl.float32)
            rest = rest * size * tl.load(norm + 2 * HALF + j, mask=passed, other=0.0).to(tl.float32)
        if HALF > 0:
            turn = position
            if TREE:
                turn = tl.load(bases + b) + tl.load(depths + row)
            c = tl.load(cos + turn * HALF + i, mask=rotated, other=0.0)
            s = tl.load(sin + turn * HALF + i, mask=rotated, other=0.0)
            before = one
            one = one * c - two * s
            two = two * c + before * s
    if head < HEADS:
        _store(out + (row.to(tl.int64) * HEADS + head) * D, one, two, rest, i, j, rotated, passed, HALF)
    else:
        kv = (head - HEADS) % KV_HEADS
        cache = keys if head < HEADS + KV_HEADS else values
        page = tl.load(slots + b).to(tl.int64)
        if PAGE:
            page = tl.load(tables + page * table_width + position // PAGE, mask=inside, other=0).to(tl.int64)
            position = position % PAGE
        at = page * page_stride + kv * head_stride + position * position_stride
        if FP8:
            largest = tl.maximum(tl.max(tl.abs(one), 0), tl.max(tl.abs(two), 0))
            scale = scale_of(tl.maximum(largest, tl.max(tl.abs(rest), 0)))
            scales = key_scales if head < HEADS + KV_HEADS else value_scales
            tl.store(scales + at // D, scale, mask=inside)
            codes = (coded(one, scale), coded(two, scale), coded(rest, scale))
            _store(cache + at, codes[0], codes[1], codes[2], i, j, rotated, passed, HALF)
        else:
            _store(cache + at, one, two, rest, i, j, rotated, passed, HALF)


@triton.jit
def _store(target, one, two, rest, i, j, rotated, passed, HALF: tl.constexpr):
    tl.store(target + i, one, mask=rotated)
    tl.store(target + HALF + i, two, mask=rotated)
    tl.store(target + 2 * HALF + j, rest, mask=passed)


@triton.jit
def _act_and_mul(gate_up, out, size, BLOCK: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    gate = tl.load(gate_up + row * 2 * size + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + i, rounded(activated(gate, SILU), out) * up, mask=inside)
