"""Mixtures of experts with quantised weights, in Triton: the products of moe.py over codes, as in quantised.py.

Tiles are those of quantised.py: a program has some outputs of one expert, for all the tokens that picked it, and reads
their codes once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semspec.model.kernels.codes import INT4, KINDS
from semspec.model.kernels.gemm import activated, rounded
from semspec.model.kernels.quantised import ANY_ZEROS, NO_ZEROS, add_tile, finished, packed, suits
from semspec.model.kernels.tiles import card_of, fit_shared
from semspec.model.quantised import QuantisedLinear

COLUMNS, DEPTH, STAGES = 32, 128, 4  # outputs of a program, bytes of each at a time, tiles on their way


def suited(experts: QuantisedLinear, x: Tensor) -> bool:
    """Whether there is a kernel for such experts; else they are dequantised."""
    return suits(experts, x) and experts.bias is None and _depth(experts, x, 64, True) is not None


def _depth(experts: QuantisedLinear, x: Tensor, rows: int, gated: bool) -> tuple[int, int] | None:
    """Stages, and bytes of an output in a tile, that fit the card and the groups of scales."""
    group, inputs, halves = experts.block[1], experts.size[1], 2 if experts.kind in ("int4", "fp4") else 1
    depth = experts.run // 2 if halves == 2 else min(DEPTH, max(32, group) if group < inputs else DEPTH)
    each = COLUMNS * (2 if gated else 1) + x.element_size() * halves * rows
    stages, fitting = fit_shared(STAGES, depth, each, card_of(x.device).shared)
    return None if halves == 2 and fitting != depth else (stages, fitting)


def product(
    x: Tensor, experts: QuantisedLinear, lists: Tensor, listed: Tensor, out: Tensor, rows: int, chosen: int, tile: int,
    weights: Tensor | None = None, activation: str | None = None,
) -> None:  # fmt: skip
    """Each pick through its expert. With an activation x [N, in] are tokens and out [picks, outputs] their channels;
    with weights [N, chosen] x are channels of picks and out is [chosen, N, outputs], weighed."""
    gated, (number, picks), inputs = activation is not None, lists.shape, experts.size[1]
    outputs = experts.size[0] // (2 if gated else 1)
    fitting = _depth(experts, x, tile, gated)
    assert fitting is not None and experts.codes.is_contiguous() and x.is_contiguous()
    scales, zeros, gain = experts.scales, experts.zeros, experts.gain
    assert zeros is None or zeros.stride() == scales.stride()
    rows_shared, group = experts.block
    _experts[(triton.cdiv(outputs, COLUMNS), min(number, picks))](
        x, experts.codes.view(torch.uint8), scales, scales if zeros is None else zeros,
        scales if gain is None else gain, scales if weights is None else weights, lists, listed, out, picks, rows,
        number, *scales.stride(), INPUTS=inputs, OUTPUTS=outputs, CHOSEN=chosen, BLOCK_M=tile, BLOCK_N=COLUMNS,
        BLOCK_K=fitting[1], KIND=KINDS[experts.kind], GROUP=group if group < inputs else 0, GROUP_OUT=rows_shared,
        ZEROS=NO_ZEROS if zeros is None else ANY_ZEROS, GAIN=gain is not None, GATED=gated, SILU=activation == "silu",
        ASM=packed(x), STAGES=fitting[0], num_warps=4, num_stages=fitting[0],
    )  # fmt: skip


@triton.jit(do_not_specialize=["picks", "rows", "experts"])
def _experts(
    x, codes, scales, zeros, gain, weights, lists, listed, out, picks, rows, experts,
    scale_expert, scale_row, scale_group,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, CHOSEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, GROUP_OUT: tl.constexpr, ZEROS: tl.constexpr,
    GAIN: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    HALVES: tl.constexpr = 1 if KIND < INT4 else 2
    BYTES: tl.constexpr = INPUTS // HALVES
    ALL: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    own = tl.program_id(1)
    count, e = tl.load(listed + own), tl.load(listed + experts + own).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    up, exists = n + OUTPUTS, n < OUTPUTS
    from_n, from_up = codes + (e * ALL + n) * BYTES, codes + (e * ALL + up) * BYTES
    scales += e * scale_expert
    zeros += e * scale_expert
    gain += e * ALL
    of_n, of_up = n // GROUP_OUT * scale_row, up // GROUP_OUT * scale_row
    for first in range(0, count, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        inside = m < count
        pick = tl.load(lists + own * picks + m, mask=inside, other=0)
        row = x + (pick // CHOSEN if GATED else pick).to(tl.int64)[:, None] * INPUTS
        sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        other = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, BYTES, BLOCK_K, num_stages=STAGES):
            sum, other = add_tile(
                sum, other, row, inside, from_n, from_up, of_n, of_up, scales, zeros, scale_group, start, exists,
                INPUTS, BLOCK_K, KIND, GROUP, ZEROS, GATED, False, ASM,
            )  # fmt: skip
        sum = finished(sum, scales + of_n, gain, x, n, exists, 0, GROUP, GAIN, False)
        place = pick.to(tl.int64)
        if GATED:
            other = finished(other, scales + of_up, gain, x, up, exists, 0, GROUP, GAIN, False)
            sum = rounded(activated(rounded(sum, out), SILU), out) * rounded(other, out)
        else:
            sum *= tl.load(weights + pick, mask=inside, other=0.0)[:, None]
            place = (pick % CHOSEN).to(tl.int64) * rows + pick // CHOSEN
        tl.store(out + place[:, None] * OUTPUTS + n[None, :], sum, mask=inside[:, None] & exists[None, :])
