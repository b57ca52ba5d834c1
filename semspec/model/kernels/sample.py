"""Sampling the tokens of a roll in Triton: `semspec.sampling.kernels` over the state that graphs keep.

As single operations it is some forty, each a launch, and a draft model writes a token in the time of a few hundred.
Here it is three, and some more for top-k and top-p: the largest logit of each part of the vocabulary, the thresholds,
the winner of each part's exponential race, and the winner of all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semspec.model.kernels import COUNT, SEED, START, STEP, STREAM
from semspec.sampling.draw import SamplingUse
from semspec.sampling.kernels.filter import Filter, kept
from semspec.sampling.kernels.race import key_of, race, winner

AT_COUNT, AT_SEED, AT_START = tl.constexpr(COUNT), tl.constexpr(SEED), tl.constexpr(START)
AT_STEP, AT_STREAM = tl.constexpr(STEP), tl.constexpr(STREAM)


def sample(logits: Tensor, columns: Tensor, use: SamplingUse, state: Tensor, history: Tensor | None) -> Tensor:
    """A token for each row of logits [B, V] -> [B]; any one where a row has NaN in it.

    columns [B, 4] and what they use as in `SamplingRows`. state [FIELDS, B] as `advance` keeps it.
    Row state[STEP] of history [steps, B, V] gets the processed logits, or the raw ones where the temperature is 0.
    """
    assert state.is_contiguous()
    found = Filter(logits, columns, use)
    scores = torch.empty((found.grid[1], found.grid[0]), dtype=torch.float32, device=logits.device)
    winners = torch.empty(scores.shape, dtype=torch.int32, device=logits.device)
    _race[found.grid](
        *found.arguments, state, logits if history is None else history, scores, winners, **found.flags,
        KEEP=history is not None,
    )  # fmt: skip
    return winner(scores, winners, least=0)


@triton.jit(do_not_specialize=["rows"])
def _race(
    logits, stride, columns, by_row, by_column, peaks, bounds, sums, above, rows, size, parts, state, history, scores,
    winners, PART: tl.constexpr, PARTS: tl.constexpr, FILTERED: tl.constexpr, BY_MASS: tl.constexpr,
    SHIFT: tl.constexpr, CUTS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1)
    i = part * PART + tl.arange(0, PART)
    own = tl.load(logits + row.to(tl.int64) * stride + i, mask=i < size, other=float("-inf")).to(tl.float32)
    processed = kept(
        logits, stride, columns, by_row, by_column, peaks, bounds, sums, above, rows, size, parts, part, row, i, own,
        PARTS, FILTERED, BY_MASS, SHIFT, CUTS,
    )  # fmt: skip
    if KEEP:
        place = (tl.load(state + AT_STEP * rows) * rows + row) * size
        tl.store(history + place + i, tl.where(tl.load(columns + row * by_row) == 0.0, own, processed), mask=i < size)
    position = tl.load(state + AT_START * rows + row) + tl.load(state + AT_COUNT * rows + row)
    key = key_of(tl.load(state + AT_SEED * rows + row), position, tl.load(state + AT_STREAM * rows + row))
    best, won = race(processed, key, i, size)  # of a greedy row only one token is left, which wins whatever its noise
    tl.store(scores + row * parts + part, best)
    tl.store(winners + row * parts + part, won)
