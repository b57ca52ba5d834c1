"""Sampling tokens in Triton, as `semspec.sampling` does it in PyTorch: temperature, min-p and the same noise.

There it is some forty launches, and a draft model's token takes a few hundred. Here it is three: the largest logit of
each part of the vocabulary, each part's sum of weights, and one program for each row that finds the part in which the
noise falls and the token in it. Sums are in another order than in PyTorch, so a sample on the border between two tokens
may be the other one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semspec.model.kernels import COUNT, SEED, START, STEP, STREAM
from semspec.sampling.noise import BITS, MULTIPLIERS, signed

PART = 1024  # tokens of the vocabulary that one program looks at
AT_COUNT, AT_SEED, AT_START = tl.constexpr(COUNT), tl.constexpr(SEED), tl.constexpr(START)
AT_STEP, AT_STREAM = tl.constexpr(STEP), tl.constexpr(STREAM)
GOLDEN, SECOND, THIRD = (tl.constexpr(signed(m)) for m in MULTIPLIERS)
SHIFT, SPAN = tl.constexpr(64 - BITS), tl.constexpr(1 << BITS)


def sample(logits: Tensor, options: Tensor, state: Tensor, kept: Tensor | None) -> Tensor:
    """A token for each row of logits [B, V] -> [B].

    options [4, B]: temperature, top-k and top-p (which must be off), min-p. state [FIELDS, B] as `advance` keeps it.
    Row state[STEP] of kept [steps, B, V] gets the processed logits, or the raw ones where the temperature is 0.
    """
    rows, size = logits.shape
    assert logits.stride(1) == 1 and options.is_contiguous() and state.is_contiguous()
    parts = triton.cdiv(size, PART)
    peaks, sums = logits.new_empty((2, rows, parts), dtype=torch.float32)
    tokens = torch.empty(rows, dtype=torch.long, device=logits.device)
    numbers = (rows, logits.stride(0), size, parts)
    sizes = {"PART": PART, "PARTS": triton.next_power_of_2(parts)}
    _peak[(parts, rows)](logits, peaks, *numbers, **sizes, num_warps=4)
    _weigh[(parts, rows)](
        logits, options, peaks, sums, state, logits if kept is None else kept, *numbers, **sizes,
        KEEP=kept is not None, num_warps=4,
    )  # fmt: skip
    _pick[(rows,)](logits, options, peaks, sums, state, tokens, *numbers, **sizes, num_warps=4)
    return tokens


@triton.jit(do_not_specialize=["rows"])
def _peak(logits, peaks, rows, stride, size, parts, PART: tl.constexpr, PARTS: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1)
    i = part * PART + tl.arange(0, PART)
    own = tl.load(logits + row.to(tl.int64) * stride + i, mask=i < size, other=float("-inf")).to(tl.float32)
    tl.store(peaks + row * parts + part, tl.max(own, 0))


@triton.jit
def _processed(
    logits, options, peaks, row, i, rows, stride, size, parts, PARTS: tl.constexpr
):  # fmt: skip
    """Logits of tokens i as they are, and with temperature and min-p applied. The largest becomes 0."""
    p = tl.arange(0, PARTS)
    top = tl.max(tl.load(peaks + row * parts + p, mask=p < parts, other=float("-inf")), 0)
    temperature, min_p = tl.load(options + row), tl.load(options + 3 * rows + row)
    own = tl.load(logits + row.to(tl.int64) * stride + i, mask=i < size, other=float("-inf")).to(tl.float32)
    greedy = temperature == 0.0
    scaled = (own - top) / tl.where(greedy, 1.0, temperature)
    below = scaled < tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1e-30)), float("-inf"))
    best = tl.where(own == top, 0.0, float("-inf"))
    return own, tl.where(greedy, best, tl.where(below, float("-inf"), scaled))


@triton.jit(do_not_specialize=["rows"])
def _weigh(
    logits, options, peaks, sums, state, kept, rows, stride, size, parts,
    PART: tl.constexpr, PARTS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1)
    i = part * PART + tl.arange(0, PART)
    own, processed = _processed(logits, options, peaks, row, i, rows, stride, size, parts, PARTS)
    tl.store(sums + row * parts + part, tl.sum(tl.exp(processed), 0))
    if KEEP:
        place = (tl.load(state + AT_STEP * rows) * rows + row) * size
        known = tl.where(tl.load(options + row) == 0.0, own, processed)
        tl.store(kept + place + i, known, mask=i < size)


@triton.jit(do_not_specialize=["rows"])
def _pick(
    logits, options, peaks, sums, state, tokens, rows, stride, size, parts, PART: tl.constexpr, PARTS: tl.constexpr
):
    """The first token at which the sum of weights exceeds what the noise aims at. Where rounding leaves none, the last
    that has weight; a part or a token without weight is never it."""
    row = tl.program_id(0)
    p = tl.arange(0, PARTS)
    weights = tl.load(sums + row * parts + p, mask=p < parts, other=0.0)
    reached = tl.cumsum(weights, 0)
    # A greedy row aims at nothing: the first of its best.
    aim = tl.where(tl.load(options + row) == 0.0, 0.0, _noise(state, row, rows) * tl.max(reached, 0))
    there = (reached > aim) & (weights > 0.0)
    part = tl.min(tl.where(there, p, PARTS), 0)
    part = tl.where(part == PARTS, tl.max(tl.where(weights > 0.0, p, 0), 0), part)
    before = tl.sum(tl.where(p == part, reached - weights, 0.0), 0)

    i = part * PART + tl.arange(0, PART)
    _, processed = _processed(logits, options, peaks, row, i, rows, stride, size, parts, PARTS)
    weight = tl.exp(processed)
    found = (before + tl.cumsum(weight, 0) > aim) & (weight > 0.0)
    token = tl.min(tl.where(found, i, size), 0)
    tl.store(tokens + row, tl.where(token == size, tl.max(tl.where(weight > 0.0, i, 0), 0), token).to(tl.int64))


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * SECOND
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * THIRD
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def _noise(state, row, rows):
    """semspec.sampling.noise.uniform of a row's seed, the position it writes, and its stream."""
    position = tl.load(state + AT_START * rows + row) + tl.load(state + AT_COUNT * rows + row)
    x = _mix(tl.load(state + AT_SEED * rows + row) + GOLDEN)
    x = _mix(x + position * GOLDEN + GOLDEN)
    x = _mix(x + tl.load(state + AT_STREAM * rows + row) * GOLDEN + GOLDEN)
    return (((x >> SHIFT) & (SPAN - 1)).to(tl.float32) + 0.5) / SPAN
