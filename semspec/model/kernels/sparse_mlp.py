"""Feed-forward networks of which only some channels are read, in Triton.

The gates decide which channels matter, so their product is computed in full, before. `_mark` finds the channels that
any token needs, `_list` lists them, and `_up` and `_down` read those rows only: of down a transposed copy, so that a
channel is one row there too. Their number is known on the device alone: there are programs for all channels, and those
after the last listed one end at once. The sum over channels is split among programs, and the reader of the result adds
the parts up (`add_norm` does): no atomics, deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semspec.model.kernels.gemm import activated, rounded
from semspec.model.kernels.moe import Cut, height
from semspec.model.kernels.tiles import card_of

BLOCK = 128  # channels of one program that marks
CUTS = (Cut(64, 64, 6), Cut(64, 128, 4))  # of up, and of down, where depth is in channels; measured


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
    cuts: tuple[Cut, Cut] = CUTS,
) -> Tensor:
    """x [N, width] -> [parts, N, width], float32, to be added up.

    gate [N, channels] is what the gate projection gave; up and down are [channels, width], biases [channels] and
    [width]. The N rows are those of B sequences, of which the first counts [B] are tokens. A channel is left out of a
    sequence if that is marked, in marks [B], and |activation| is below the threshold for all of its tokens.
    """
    (rows, width), channels = x.shape, gate.shape[1]
    assert all(t.is_contiguous() for t in (x, gate, up, down))
    batch = counts.shape[0]
    queries = rows // batch
    active = torch.empty_like(gate)
    blocks = triton.cdiv(channels, BLOCK)
    flags = x.new_empty((channels,), dtype=torch.int32)
    totals = x.new_empty((blocks,), dtype=torch.int32)
    made = torch.empty_like(gate)
    _mark[(blocks,)](
        gate, active, made, flags, totals, counts, marks, batch, queries, threshold, CHANNELS=channels, BLOCK=BLOCK,
        BLOCK_Q=triton.next_power_of_2(queries), SILU=activation == "silu", num_warps=4,
    )  # fmt: skip
    listed = x.new_empty((channels,), dtype=torch.int32)
    number = x.new_empty((1,), dtype=torch.int32)
    _list[(blocks,)](
        flags, totals, listed, number, CHANNELS=channels, BLOCK=BLOCK, BLOCKS=blocks,
        BLOCK_T=triton.next_power_of_2(blocks), num_warps=1,
    )  # fmt: skip
    size, card = height(rows, x.element_size()), card_of(x.device)
    cut = cuts[0].fit(size, cuts[0].columns, card, x.element_size())
    _up[(triton.cdiv(channels, cut.columns),)](
        x, up, up if up_bias is None else up_bias, active, listed, number, made, rows,
        WIDTH=width, CHANNELS=channels, BIASED=up_bias is not None,
        **cut.launch(size),
    )  # fmt: skip
    cut = cuts[1].fit(size, cuts[1].columns, card, x.element_size())
    across = triton.cdiv(width, cut.columns)
    splits = min(max(2 * card.processors // across, 1), 8)  # two programs a processor, and none that waits
    parts = x.new_empty((splits, rows, width), dtype=torch.float32)
    _down[(across, splits)](
        made, down, down if down_bias is None else down_bias, listed, number, parts, rows,
        WIDTH=width, CHANNELS=channels, SPLITS=splits, BIASED=down_bias is not None,
        **cut.launch(size),
    )  # fmt: skip
    return parts


@triton.jit(do_not_specialize=["batch", "queries"])
def _mark(
    gate, active, made, flags, totals, counts, marks, batch, queries, threshold,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_Q: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Of some channels: activations, 0 where a sequence leaves a channel out, and whether any sequence needs it. The
    output of `_up` is cleared, so that `_down` can read past its end."""
    c, q = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_Q)
    exists = c < CHANNELS
    some = tl.zeros([BLOCK], tl.int32)
    for b in range(0, batch):
        count, thin = tl.load(counts + b), tl.load(marks + b)
        at = (b * queries + q)[:, None].to(tl.int64) * CHANNELS + c[None, :]
        known = (q < queries)[:, None] & exists[None, :]
        real = (q < count)[:, None] & exists[None, :]
        value = rounded(activated(tl.load(gate + at, mask=known, other=0.0).to(tl.float32), SILU), gate)
        large = tl.max((real & (tl.abs(value) >= threshold)).to(tl.int32), 0)
        needed = tl.where(thin != 0, large, (exists & (count > 0)).to(tl.int32))
        tl.store(active + at, tl.where(real & (needed[None, :] != 0), value, 0.0), mask=known)
        tl.store(made + at, tl.zeros([BLOCK_Q, BLOCK], tl.float32), mask=known)
        some = tl.maximum(some, needed)
    tl.store(flags + c, some, mask=exists)
    tl.store(totals + tl.program_id(0), tl.sum(some, 0))


@triton.jit
def _list(
    flags, totals, listed, number,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Numbers of the channels that are needed, in rising order, and how many there are."""
    own, t = tl.program_id(0), tl.arange(0, BLOCK_T)
    c = own * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(totals + t, mask=t < BLOCKS, other=0)
    before = tl.sum(tl.where(t < own, total, 0), 0)
    needed = tl.load(flags + c, mask=c < CHANNELS, other=0)
    tl.store(listed + before + tl.cumsum(needed, 0) - 1, c, mask=needed != 0)
    tl.store(number, tl.sum(total, 0), mask=own == 0)


@triton.jit(do_not_specialize=["rows"])
def _up(
    x, weight, bias, active, listed, number, out, rows,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Some of the listed channels: active * up, at their index in the list -> out [rows, CHANNELS]."""
    index, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    count = tl.load(number)
    exists = index < count
    end = tl.where(tl.program_id(0) * BLOCK_N < count, rows, 0)
    channel = tl.load(listed + index, mask=exists, other=0)
    column = weight + channel.to(tl.int64)[None, :] * WIDTH
    for first in range(0, end, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        inside = m < rows
        sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(0, WIDTH, BLOCK_K):
            at = step + k
            there = at < WIDTH
            a = tl.load(x + m[:, None] * WIDTH + at[None, :], mask=inside[:, None] & there[None, :], other=0.0)
            known = there[:, None] & exists[None, :]
            w = tl.load(column + at[:, None], mask=known, other=0.0, eviction_policy="evict_first")
            sum = tl.dot(a, w, sum, input_precision="ieee")
        if BIASED:
            sum += tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)[None, :]
        both = inside[:, None] & exists[None, :]
        row = m.to(tl.int64)[:, None] * CHANNELS
        gate = tl.load(active + row + channel[None, :], mask=both, other=0.0).to(tl.float32)
        tl.store(out + row + index[None, :], gate * rounded(sum, out), mask=both)


@triton.jit(do_not_specialize=["rows"])
def _down(
    made, weight, bias, listed, number, parts, rows,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Some outputs, from a part of the listed channels -> parts [SPLITS, rows, WIDTH]."""
    split = tl.program_id(1)
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    exists = n < WIDTH
    count = tl.load(number)
    each = tl.cdiv(tl.cdiv(count, BLOCK_K), SPLITS) * BLOCK_K
    begin = split * each
    stop = tl.minimum(begin + each, count)
    for first in range(0, rows, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        inside = m < rows
        row = made + m.to(tl.int64)[:, None] * CHANNELS
        sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        channel = tl.load(listed + begin + k, mask=begin + k < stop, other=0)
        for step in range(begin, stop, BLOCK_K):
            at = step + k
            # After the last listed channel there are zeros: a mask that may end anywhere would make narrow loads.
            a = tl.load(row + at[None, :], mask=inside[:, None] & (at < CHANNELS)[None, :], other=0.0)
            known = (at < stop)[:, None] & exists[None, :]
            source = weight + channel.to(tl.int64)[:, None] * WIDTH + n[None, :]
            w = tl.load(source, mask=known, other=0.0, eviction_policy="evict_first")
            sum = tl.dot(a, w, sum, input_precision="ieee")
            channel = tl.load(listed + at + BLOCK_K, mask=at + BLOCK_K < stop, other=0)
        if BIASED:
            sum += tl.load(bias + n, mask=exists & (split == 0), other=0.0).to(tl.float32)[None, :]
        target = parts + (split * rows + m).to(tl.int64)[:, None] * WIDTH + n[None, :]
        tl.store(target, sum, mask=inside[:, None] & exists[None, :])
