"""The second launch of attention: it joins what programs found in their parts of the cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from semspec.model.kernels.early_launch import early, wait_for_previous


def join(parts: Tensor, sums: Tensor, out: Tensor) -> None:
    """parts [..., splits, d] and sums [..., splits] of every query and head -> out [..., d]"""
    splits, size = parts.shape[-2:]
    _join[(sums.numel() // splits,)](
        parts, sums, out, D=size, BLOCK_D=triton.next_power_of_2(size), SPLITS=splits, num_warps=4, **early(out.device)
    )


@triton.jit
def _join(parts, sums, out, D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr):
    """Weigh the splits of one query and head by their shares of the softmax. Added up in one order, whichever ended
    first: the same inputs give the same bits."""
    wait_for_previous(PDL)
    row = tl.program_id(0)
    split, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    level = tl.load(sums + row * SPLITS + split)
    used = level > float("-inf")
    best = tl.max(level, 0)
    weight = tl.where(used, tl.exp2(level - tl.where(best > float("-inf"), best, 0.0)), 0.0)
    total = tl.sum(weight, 0)
    at = parts + (row * SPLITS + split).to(tl.int64)[:, None] * D + d[None, :]
    part = tl.load(at, mask=(d < D)[None, :], other=0.0)  # unused ones too: to skip them takes a load
    answer = tl.sum(tl.where(used[:, None], part, 0.0) * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * D + d, answer, mask=d < D)
