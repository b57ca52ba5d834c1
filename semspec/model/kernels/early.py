"""Kernels that are on the card before their predecessor has ended (programmatic dependent launch, sm_90 and later).

In a graph, a kernel begins one to two microseconds after the one before it has ended, as long as many of ours take. A
kernel launched early is set up while its predecessor runs. It must then wait before it reads what that one wrote, and
before it writes anything; what nobody writes, such as weights, it may fetch before. Every kernel waits, so whatever has
ended has all its predecessors ended too. Where a kernel was not launched like that, waiting returns at once.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def launched(early: bool) -> dict[str, Any]:
    """Options of a launch."""
    return {"EARLY": early, **({"launch_pdl": True} if early else {})}


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()


@triton.jit
def fetch(addresses, size):
    """Bring so many bytes, a multiple of 16, at each address, a multiple of 16 too, into the L2 cache; waits not."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [addresses.to(tl.int64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
