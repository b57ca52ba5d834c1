"""Sampling tokens in Triton, as `semspec.sampling` does it in PyTorch: temperature, min-p and the same noise.

There it is some forty operations, each a launch, and a draft model writes a token in the time of a few hundred. Here it
is three: the largest logit of each part of the vocabulary, the winner of each part's exponential race, and the winner
of all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semspec.model.kernels import COUNT, SEED, START, STEP, STREAM
from semspec.model.kernels.early_launch import early, wait_for_previous
from semspec.sampling.noise import MULTIPLIERS, signed

PART = 1024  # tokens of the vocabulary that one program looks at
AT_COUNT, AT_SEED, AT_START = tl.constexpr(COUNT), tl.constexpr(SEED), tl.constexpr(START)
AT_STEP, AT_STREAM = tl.constexpr(STEP), tl.constexpr(STREAM)
GOLDEN, SECOND, THIRD = (tl.constexpr(signed(m)) for m in MULTIPLIERS)


def sample(logits: Tensor, options: Tensor, state: Tensor, kept: Tensor | None) -> Tensor:
    """A token for each row of logits [B, V] -> [B]; any one where a row has NaN in it.

    options [4, B]: temperature, top-k and top-p (which must be off), min-p. state [FIELDS, B] as `advance` keeps it.
    Row state[STEP] of kept [steps, B, V] gets the processed logits, or the raw ones where the temperature is 0.
    """
    rows, size = logits.shape
    assert logits.stride(1) == 1 and options.is_contiguous() and state.is_contiguous()
    parts = triton.cdiv(size, PART)
    peaks, scores = logits.new_empty((2, rows, parts), dtype=torch.float32)
    winners = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.long, device=logits.device)
    numbers = (rows, logits.stride(0), size, parts)
    sizes = {"PART": PART, "PARTS": triton.next_power_of_2(parts), **early(logits.device)}
    _peak[(parts, rows)](logits, peaks, *numbers, **sizes, num_warps=4)
    _race[(parts, rows)](
        logits, options, peaks, scores, winners, state, logits if kept is None else kept, *numbers, **sizes,
        KEEP=kept is not None, num_warps=4,
    )  # fmt: skip
    _winner[(rows,)](scores, winners, tokens, parts, PARTS=sizes["PARTS"], num_warps=4, **early(logits.device))
    return tokens


@triton.jit(do_not_specialize=["rows"])
def _peak(logits, peaks, rows, stride, size, parts, PART: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    i = part * PART + tl.arange(0, PART)
    own = tl.load(logits + row.to(tl.int64) * stride + i, mask=i < size, other=float("-inf")).to(tl.float32)
    tl.store(peaks + row * parts + part, tl.max(own, 0))


@triton.jit(do_not_specialize=["rows"])
def _race(
    logits, wishes, peaks, scores, winners, state, kept, rows, stride, size, parts,
    PART: tl.constexpr, PARTS: tl.constexpr, KEEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The token of one part of the vocabulary with the largest log(weight) - log(noise), the first of equals."""
    wait_for_previous(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    i = part * PART + tl.arange(0, PART)
    p = tl.arange(0, PARTS)
    top = tl.max(tl.load(peaks + row * parts + p, mask=p < parts, other=float("-inf")), 0)
    temperature, min_p = tl.load(wishes + row), tl.load(wishes + 3 * rows + row)
    own = tl.load(logits + row.to(tl.int64) * stride + i, mask=i < size, other=float("-inf")).to(tl.float32)
    greedy = temperature == 0.0
    scaled = (own - top) / tl.where(greedy, 1.0, temperature)  # the largest becomes 0
    below = scaled < tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1e-30)), float("-inf"))
    processed = tl.where(greedy, tl.where(own == top, 0.0, float("-inf")), tl.where(below, float("-inf"), scaled))
    if KEEP:
        place = (tl.load(state + AT_STEP * rows) * rows + row) * size
        tl.store(kept + place + i, tl.where(greedy, own, processed), mask=i < size)
    score = processed - tl.where(greedy, 0.0, tl.log(_exponential(state, row, rows, i)))
    score = tl.where(i < size, score, float("-inf"))
    best = tl.max(score, 0)
    winner = tl.min(tl.where(score == best, i, size), 0)
    tl.store(scores + row * parts + part, best)
    tl.store(winners + row * parts + part, tl.minimum(winner, size - 1))  # NaN must not lead out of bounds


@triton.jit
def _winner(scores, winners, tokens, parts, PARTS: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    row = tl.program_id(0)
    p = tl.arange(0, PARTS)
    score = tl.load(scores + row * parts + p, mask=p < parts, other=float("-inf"))
    part = tl.minimum(tl.min(tl.where(score == tl.max(score, 0), p, PARTS), 0), parts - 1)
    tl.store(tokens + row, tl.load(winners + row * parts + part).to(tl.int64))


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * SECOND
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * THIRD
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def _exponential(state, row, rows, i):
    """semspec.sampling.noise.exponential of a row's seed, the position it writes and its stream, for tokens i."""
    position = tl.load(state + AT_START * rows + row) + tl.load(state + AT_COUNT * rows + row)
    x = _mix(tl.load(state + AT_SEED * rows + row) + GOLDEN)
    x = _mix(x + position * GOLDEN + GOLDEN)
    x = _mix(x + tl.load(state + AT_STREAM * rows + row) * GOLDEN + GOLDEN)
    bits = (_mix(x + (i.to(tl.int64) + 1) * GOLDEN) >> 32) & ((1 << 32) - 1)
    v = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    # -log(1 - v): by its series where 1 - v would lose the digits of v. There is no log1p in the language itself.
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6))))))
    return tl.where(v < 0.0625, series, -tl.log(1 - tl.minimum(v, 0.99999994)))
