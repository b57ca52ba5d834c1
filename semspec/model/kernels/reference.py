"""The kernels in plain PyTorch: the reference of their tests, and their replacement where there is no GPU.

Signatures are those of the kernels. Arithmetic is in the type given, so that float64 inputs make a reference.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from semspec.model.experts import ACTIVATE, route, skip
from semspec.model.kernels import COUNT, LEFT, START, STEP, STOPS, TOKEN, KvScales, RowTiles, SelectedBlocks, TreeMask
from semspec.model.kv_fp8 import FP8, decode, encode
from semspec.model.quantised import QuantisedLinear


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
    chosen: SelectedBlocks | None = None,
    tables: Tensor | None = None,
    scales: KvScales | None = None,
    rows: RowTiles | None = None,
) -> Tensor:
    group, queries = q.shape[2] // keys.shape[1], q.shape[1]
    asked = q.flatten(0, 1)
    answers = torch.zeros_like(asked)
    lineages, depths = (slots, slots) if tree is None else (tree.lineages.flatten(), tree.depths.flatten())
    for b, (slot, start, count) in enumerate(zip(slots.tolist(), starts.tolist(), counts.tolist(), strict=True)):
        if not count:
            continue
        row = b * queries if rows is None else int(rows.offsets[b])
        own_rows = slice(row, row + count)
        end = start + count
        position = torch.arange(end, device=q.device)
        at = _places(keys, tables, slot, position)
        own = [half[at] for half in (keys, values)] if scales is None else _decoded(keys, values, scales, at, q.dtype)
        k, v = (half.transpose(0, 1).repeat_interleave(group, 0) for half in own)  # [heads, end, d]
        place = position[start:, None]
        mask = position <= place  # [count, end]
        if window is not None:
            place = place if tree is None else (tree.bases[b] + depths[own_rows])[:, None]
            mask = mask & (position > place - window)
        if tree is not None:
            base = int(tree.bases[b])
            line = (lineages[own_rows, None] >> torch.arange(end - base, device=q.device)) & 1 != 0
            mask = torch.cat([mask[:, :base], line], 1)
        if chosen is not None:
            lists, listed, span = chosen[:3]
            near = (position >= start // span * span).repeat(keys.shape[1], 1)  # [kv heads, end]
            for h, n in enumerate(listed[b].tolist()):
                near[h] |= torch.isin(position // span, lists[b, h, :n])
            mask = mask & near.repeat_interleave(group, 0)[:, None]  # [heads, count, end]
        scores = torch.einsum("qhd,hnd->hqn", asked[own_rows], k) * scale
        scores = scores.masked_fill(~mask, float("-inf"))
        if chosen is not None and chosen.rest is not None:
            marks, *means = chosen.rest
            full = start // chosen.block
            more_k, more_v = (half[slot, :, :full].repeat_interleave(group, 0) for half in means)  # [heads, full, d]
            more = torch.einsum("qhd,hnd->hqn", asked[own_rows], more_k) * scale + math.log(chosen.block)
            listed_too = (marks[b, :, :full] != 0).repeat_interleave(group, 0)[:, None]
            scores, v = torch.cat([scores, more.masked_fill(listed_too, float("-inf"))], -1), torch.cat([v, more_v], 1)
        weights = scores.softmax(-1)
        answers[own_rows] = torch.einsum("hqn,hnd->qhd", weights, v)
    return answers.view(q.shape)


def add_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float, inner: Tensor | None = None) -> Tensor:
    if added is not None:
        added = added if added.dim() == 2 else added.sum(0).to(x.dtype)
        x.add_(added if inner is None else _norm(added, inner, eps))
    return _norm(x, weight, eps)


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
    queries, kv_heads = qkv.shape[1], keys.shape[1]
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
    if norms is not None:
        q, k = _norm(q, norms[0], eps), _norm(k, norms[1], eps)
    position = starts[:, None] + torch.arange(queries, device=qkv.device)  # [B, Q]
    inside = torch.arange(queries, device=qkv.device) < counts[:, None]
    if cos_sin is not None:
        at = torch.where(inside, position if tree is None else tree.bases[:, None] + tree.depths, 0)
        cos, sin = (table[at][:, :, None].to(qkv.dtype) for table in cos_sin)  # [B, Q, 1, half]
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    for b, slot in enumerate(slots.tolist()):
        rows = inside[b]
        places = _places(keys, tables, slot, position[b, rows])
        for n, (half, new) in enumerate(((keys, k[b, rows]), (values, v[b, rows]))):
            if scales is None:
                half[places] = new.to(half.dtype)
            else:
                codes, scales[n][places] = encode(new)
                half.view(torch.uint8)[places] = codes.view(torch.uint8)
    return q.contiguous()


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
    tables: Tensor | None = None,
    scales: KvScales | None = None,
) -> Tensor:
    q = rope_and_cache(qkv, keys, values, slots, starts, counts, cos_sin, heads, norms, eps, None, tables, scales)
    return attend(q, keys, values, slots, starts, counts, scale, window, tables=tables, scales=scales)


def _places(cache: Tensor, tables: Tensor | None, slot: int, at: Tensor) -> tuple[Tensor, slice, Tensor]:
    """Where positions [n] of a slot lie, as an index: what it picks is [n, kv heads, d]."""
    if tables is None:
        return torch.full_like(at, slot), slice(None), at
    return tables[slot, at // cache.shape[2]].long(), slice(None), at % cache.shape[2]


def _decoded(keys: Tensor, values: Tensor, scales: KvScales, at: Any, dtype: torch.dtype) -> list[Tensor]:
    halves = zip((keys, values), scales, strict=True)
    return [decode(half.view(torch.uint8)[at].view(FP8), scale[at], dtype) for half, scale in halves]


def act_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATE[activation](gate) * up


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, parts: bool = False, activation: str | None = None
) -> Tensor:
    if not parts:
        made = F.linear(x, weight, bias)
        return made if activation is None else act_and_mul(made, activation)
    pieces = zip(x.tensor_split(3, 1), weight.tensor_split(3, 1), strict=True)
    sums = torch.stack([F.linear(a, w) for a, w in pieces])
    if bias is not None:
        sums[0] += bias
    return sums if x.dtype == torch.float64 else sums.float()


def quantised_product(x: Tensor, linear: QuantisedLinear, parts: bool = False, activation: str | None = None) -> Tensor:
    return product(x, linear.dequantised(x.dtype), linear.bias, parts, activation)


def fused_moe(
    x: Tensor,
    logits: Tensor,
    gate_up: Tensor | QuantisedLinear,
    down: Tensor | QuantisedLinear,
    activation: str,
    chosen: int,
    renormalise: bool,
    counts: Tensor,
    skipping: tuple[Tensor, int, Tensor] | None = None,
) -> Tensor:
    queries = len(x) // len(counts)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    weights, index = route(logits.sum(0) if logits.dim() == 3 else logits, chosen, renormalise)
    if skipping is not None:
        betas, most, marks = skipping
        marked = (marks != 0).repeat_interleave(queries)
        weights, index = skip(weights, index, betas, most, marked, renormalise)
    inside = (torch.arange(queries, device=x.device) < counts[:, None]).flatten()
    index = torch.where(inside[:, None], index, -1)
    parts = []
    for choice in range(chosen):  # nothing here must be seen by the host: a graph may hold it
        e = index[:, choice]
        made = act_and_mul(_picked(gate_up, e, x), activation)
        made = _picked(down, e, made).to(weights.dtype) * weights[:, choice, None]
        parts.append(torch.where(e[:, None] >= 0, made, 0))
    return torch.stack(parts)


def _picked(experts: Tensor | QuantisedLinear, index: Tensor, x: Tensor) -> Tensor:
    """Each row through its expert; -1: through any."""
    index = index.clamp(min=0).long()
    own = experts[index] if isinstance(experts, Tensor) else experts.picked(index).dequantised(x.dtype)
    return torch.bmm(own, x[:, :, None])[:, :, 0]


def sparse_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    threshold: float,
    counts: Tensor,
    marks: Tensor,
) -> Tensor:
    queries = len(x) // len(counts)
    active = ACTIVATE[activation](gate)
    inside = torch.arange(queries, device=x.device) < counts[:, None]  # [B, queries]
    large = (active.abs() >= threshold).unflatten(0, (-1, queries)) & inside[..., None]
    needed = large.any(1) | (marks == 0)[:, None]  # [B, channels]
    needed = (needed[:, None] & inside[..., None]).flatten(0, 1)
    made = torch.where(needed, active, 0) * F.linear(x, up, up_bias)
    return F.linear(made, down.t(), down_bias)[None]


def advance(state: Tensor, tokens: Tensor, stops: Tensor, out: Tensor) -> None:
    live = state[COUNT] > 0
    out.index_copy_(0, state[STEP, :1], torch.where(live, tokens, -1)[None])
    state[LEFT] -= live.long()
    goes_on = live & ~stops[state[STOPS], tokens] & (state[LEFT] > 0)
    state[TOKEN] = tokens
    state[START] += state[COUNT]
    state[COUNT] = goes_on.long()
    state[STEP] += 1


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    one, two, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin, rest], dim=-1)
