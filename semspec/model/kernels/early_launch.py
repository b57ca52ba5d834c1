"""Programmatic dependent launch: a kernel's programs start while the kernel before it is still running.

Between two launches of a graph a GPU idles for a few microseconds, longer than a small model's products take. Started
early, programs can have their weights on the way; then they wait for the results of all kernels before them. That is
safe as long as every kernel that starts early waits (`wait_for_previous`) before it reads or writes anything that
another kernel writes or reads: when its wait is over, the kernel before it has ended, which had waited for the one
before that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from semspec.model.kernels.tiles import card_of

LINE = 128  # bytes that a prefetch brings
AHEAD = 12_000_000  # bytes of weights to have on their way: what memory brings while a norm is computed


def early(device: torch.device) -> dict[str, bool]:
    """Options of a launch, for kernels that call `wait_for_previous`."""
    return {"PDL": True, "launch_pdl": True} if card_of(device).capability >= 90 else {"PDL": False}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait for the kernel before, then let the next one start: never more than one is waiting beside one that works."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def lines_ahead(rows: int, row_bytes: int, splits: int) -> int:
    """Of each row's part, as a power of two, or 0."""
    lines = min(AHEAD // (rows * splits * LINE), row_bytes // (splits * LINE))
    return 1 << (lines.bit_length() - 1) if lines else 0


@triton.jit
def prefetch(row, first, end, AHEAD: tl.constexpr):
    """So many lines of each matrix row into the second-level cache: rows of `end` bytes, from byte `first` on."""
    if AHEAD > 0:
        at = row.to(tl.int64)[:, None] + tl.minimum(first + tl.arange(0, AHEAD) * 128, end - 1)[None, :]
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], tl.int32, False, 1)
