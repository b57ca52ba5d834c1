"""Mixtures of experts in Triton: every expert that is picked is read once, for all the tokens that picked it.

Four launches without the host. `_route` picks each token's experts; `_list` lists the tokens of each expert, picked
experts first; `_gate_up` and `_down` have programs for as many experts as can be picked. Programs of experts that were
not picked end at once, and come last: in between they would occupy processors. Each pick (token, choice) has a row of
its own in the output of `_down`, and the reader of the result adds a token's rows up (`add_norm` does): no atomics,
deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from semspec.model.kernels import quantised_moe, reference
from semspec.model.kernels.gemm import activated, rounded
from semspec.model.kernels.tiles import Card, card_of, fit_shared
from semspec.model.quantised import QuantisedLinear

ROWS = (16, 64)  # tokens of an expert in one tile, at least and at most; where it has more, it is read again


@dataclass(frozen=True, slots=True)
class Cut:
    """How products with weights are tiled among programs."""

    columns: int  # outputs of one program; of gate and up, so many of each
    depth: int  # inputs at a time
    stages: int
    warps: int = 4

    def fit(self, rows: int, wide: int, card: Card, itemsize: int) -> Cut:
        """The same, or smaller, as the card's shared memory wants it; `wide`: weights that are read for each input."""
        stages, depth = fit_shared(self.stages, self.depth, (wide + rows) * itemsize, card.shared)
        return replace(self, depth=depth, stages=stages)

    def launch(self, rows: int) -> dict[str, int]:
        """As a kernel's arguments."""
        sizes = {"BLOCK_M": rows, "BLOCK_N": self.columns, "BLOCK_K": self.depth}
        return sizes | {"num_warps": self.warps, "num_stages": self.stages}


CUTS = (Cut(32, 128, 4), Cut(64, 64, 5))  # of gate and up, and of down; measured, see docs/lab-notes.md


def height(rows: int, itemsize: int) -> int:
    """Of a tile, for a pass over so many tokens. Products of float32 have no matrix units, and a large tile of them
    does not fit into registers."""
    return min(max(triton.next_power_of_2(rows), ROWS[0]), ROWS[1] if itemsize < 4 else ROWS[0])


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
    cuts: tuple[Cut, Cut] = CUTS,
) -> Tensor:
    """x [N, width] through its experts -> [chosen, N, width], float32, to be added up.

    logits [N, experts] are the router's, perhaps in parts [parts, N, experts]; gate_up [experts, 2 ffn, width] and down
    [experts, width, ffn]. The N rows are those of B sequences, of which the first counts [B] are tokens and choose
    experts. `skipping` is (betas [chosen - 1], most, marks [B]): tokens of marked sequences leave out experts, see
    `model.experts.skip`.
    """
    if not all(isinstance(w, Tensor) or quantised_moe.suited(w, x) for w in (gate_up, down)):
        return reference.fused_moe(x, logits, gate_up, down, activation, chosen, renormalise, counts, skipping)
    rows, width = x.shape
    experts, hidden = logits.shape[-1], down.shape[2] if isinstance(down, Tensor) else down.size[1]
    assert x.is_contiguous() and logits.is_contiguous()
    parts = x.new_empty((chosen, rows, width), dtype=torch.float32)
    weights = x.new_empty((rows, chosen), dtype=torch.float32)
    index = x.new_empty((rows, chosen), dtype=torch.int32)
    betas, most, marks = skipping or (weights, 0, counts)
    _route[(rows,)](
        logits, betas, counts, marks, weights, index, parts, rows // counts.shape[0], rows,
        EXPERTS=experts, BLOCK_E=triton.next_power_of_2(experts), CHOSEN=chosen, BLOCK_C=triton.next_power_of_2(chosen),
        MOST=most, RENORMALISE=renormalise, PARTS=logits.shape[0] if logits.dim() == 3 else 1,
        WIDTH=width, BLOCK_W=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    picks = rows * chosen
    lists = x.new_empty((experts, picks), dtype=torch.int32)
    listed = x.new_empty((2, experts), dtype=torch.int32)
    block = min(triton.next_power_of_2(picks), 1024)
    _list[(experts,)](
        index, lists, listed, picks, BLOCK_E=max(triton.next_power_of_2(experts), 32), BLOCK=block,
        num_warps=1 if block <= 256 else 4,
    )  # fmt: skip
    made = x.new_empty((picks, hidden))
    size, card = height(rows, x.element_size()), card_of(x.device)
    if isinstance(gate_up, QuantisedLinear):
        quantised_moe.product(x, gate_up, lists, listed, made, rows, chosen, size, activation=activation)
    else:
        assert gate_up.is_contiguous()
        cut = cuts[0].fit(size, 2 * cuts[0].columns, card, x.element_size())
        _gate_up[(triton.cdiv(hidden, cut.columns), min(experts, picks))](
            x, gate_up, lists, listed, made, picks, experts, WIDTH=width, HIDDEN=hidden, CHOSEN=chosen,
            SILU=activation == "silu", **cut.launch(size),
        )  # fmt: skip
    if isinstance(down, QuantisedLinear):
        quantised_moe.product(made, down, lists, listed, parts, rows, chosen, size, weights)
    else:
        assert down.is_contiguous()
        cut = cuts[1].fit(size, cuts[1].columns, card, x.element_size())
        _down[(triton.cdiv(width, cut.columns), min(experts, picks))](
            made, down, weights, lists, listed, parts, picks, rows, experts, WIDTH=width, HIDDEN=hidden, CHOSEN=chosen,
            **cut.launch(size),
        )  # fmt: skip
    return parts


@triton.jit(do_not_specialize=["queries", "rows"])
def _route(
    logits, betas, counts, marks, weights, index, parts, queries, rows,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, CHOSEN: tl.constexpr, BLOCK_C: tl.constexpr, MOST: tl.constexpr,
    RENORMALISE: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """One token's experts, best first, and their weights. Output rows that no expert will write are cleared."""
    row = tl.program_id(0)
    b = row // queries
    inside = row % queries < tl.load(counts + b)
    e, c = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_C)
    there = e < EXPERTS
    at = logits + row * EXPERTS + e
    score = tl.load(at, mask=there, other=float("-inf")).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        score += tl.load(at + part * rows * EXPERTS, mask=there, other=0.0).to(tl.float32)
    share = tl.exp(score - tl.max(score, 0))
    share = share / tl.sum(share, 0)
    left = tl.where(there, share, -1.0)
    weight = tl.zeros([BLOCK_C], tl.float32)
    expert = tl.zeros([BLOCK_C], tl.int32)
    for i in tl.static_range(CHOSEN):
        best, which = tl.max(left, 0, return_indices=True)
        weight = tl.where(c == i, best, weight)
        expert = tl.where(c == i, which, expert)
        left = tl.where(e == which, -1.0, left)
    whole = tl.sum(weight, 0)
    if RENORMALISE:
        weight = weight / whole
        whole = tl.sum(weight, 0)
    kept = CHOSEN
    if MOST > 0:
        skipped = 0
        for m in tl.static_range(1, MOST + 1):
            small = tl.sum(tl.where(c >= CHOSEN - m, weight, 0.0), 0)
            skipped = tl.where(small / (whole - small) < tl.load(betas + m - 1), m, skipped)
        skipped = tl.where(tl.load(marks + b) != 0, skipped, 0)
        kept = CHOSEN - skipped
        if RENORMALISE:
            weight = tl.where(skipped > 0, weight / tl.sum(tl.where(c < kept, weight, 0.0), 0), weight)
    kept = tl.where(inside, kept, 0)
    expert = tl.minimum(expert, EXPERTS - 1)  # NaN scores must not lead out of bounds
    own = row * CHOSEN + c
    tl.store(weights + own, weight, mask=c < CHOSEN)
    tl.store(index + own, tl.where(c < kept, expert, -1), mask=c < CHOSEN)
    w = tl.arange(0, BLOCK_W)
    for i in range(kept, CHOSEN):
        place = parts + (i * rows + row).to(tl.int64) * WIDTH + w
        tl.store(place, tl.zeros([BLOCK_W], tl.float32), mask=w < WIDTH)


@triton.jit(do_not_specialize=["picks"])
def _list(index, lists, listed, picks, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr):
    """The picks of one expert, in rising order -> a row of lists [experts, picks]. Rows of experts that were picked
    come first; listed [2, experts] has the length of each row, and its expert."""
    own, e = tl.program_id(0), tl.arange(0, BLOCK_E)
    times = tl.zeros([BLOCK_E], tl.int32)  # that each expert was picked
    for at in range(0, picks, BLOCK):
        p = at + tl.arange(0, BLOCK)
        pick = tl.load(index + p, mask=p < picks, other=-1)
        times += tl.histogram(pick, BLOCK_E, mask=pick >= 0)
    some = (times > 0).to(tl.int32)
    before = tl.sum(tl.where(e < own, some, 0), 0)
    mine = tl.sum(tl.where(e == own, times, 0), 0)
    row = tl.where(mine > 0, before, tl.sum(some, 0) + own - before)
    tl.store(listed + row, mine)
    tl.store(listed + tl.num_programs(0) + row, own)
    found = 0
    for at in range(0, tl.where(mine > 0, picks, 0), BLOCK):
        p = at + tl.arange(0, BLOCK)
        here = (tl.load(index + p, mask=p < picks, other=-1) == own).to(tl.int32)
        tl.store(lists + row * picks + found + tl.cumsum(here, 0) - 1, p, mask=here != 0)
        found += tl.sum(here, 0)


@triton.jit(do_not_specialize=["picks", "experts"])
def _gate_up(
    x, weight, lists, listed, out, picks, experts,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, CHOSEN: tl.constexpr, SILU: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Some channels of one expert, for all tokens that picked it: act(gate) * up -> out [picks, HIDDEN]."""
    own = tl.program_id(1)
    count, e = tl.load(listed + own), tl.load(listed + experts + own)
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    exists = n < HIDDEN
    gates = weight + (e.to(tl.int64) * (2 * HIDDEN) + n)[None, :] * WIDTH
    for first in range(0, count, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        pick = tl.load(lists + own * picks + m, mask=m < count, other=0)
        row = x + (pick // CHOSEN)[:, None] * WIDTH
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(0, WIDTH, BLOCK_K):
            at = step + k
            there = at < WIDTH
            known = there[:, None] & exists[None, :]
            a = tl.load(row + at[None, :], mask=(m < count)[:, None] & there[None, :], other=0.0)
            w = tl.load(gates + at[:, None], mask=known, other=0.0, eviction_policy="evict_first")
            gate = tl.dot(a, w, gate, input_precision="ieee")
            w = tl.load(gates + HIDDEN * WIDTH + at[:, None], mask=known, other=0.0, eviction_policy="evict_first")
            up = tl.dot(a, w, up, input_precision="ieee")
        made = rounded(activated(rounded(gate, out), SILU), out) * rounded(up, out)
        target = out + pick.to(tl.int64)[:, None] * HIDDEN + n[None, :]
        tl.store(target, made, mask=(m < count)[:, None] & exists[None, :])


@triton.jit(do_not_specialize=["picks", "rows", "experts"])
def _down(
    made, weight, weights, lists, listed, parts, picks, rows, experts,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, CHOSEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Some outputs of one expert, weighed, for all tokens that picked it -> parts [CHOSEN, rows, WIDTH]."""
    own = tl.program_id(1)
    count, e = tl.load(listed + own), tl.load(listed + experts + own)
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    exists = n < WIDTH
    column = weight + (e.to(tl.int64) * WIDTH + n)[None, :] * HIDDEN
    for first in range(0, count, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        pick = tl.load(lists + own * picks + m, mask=m < count, other=0)
        row = made + pick.to(tl.int64)[:, None] * HIDDEN
        sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(0, HIDDEN, BLOCK_K):
            at = step + k
            there = at < HIDDEN
            a = tl.load(row + at[None, :], mask=(m < count)[:, None] & there[None, :], other=0.0)
            known = there[:, None] & exists[None, :]
            w = tl.load(column + at[:, None], mask=known, other=0.0, eviction_policy="evict_first")
            sum = tl.dot(a, w, sum, input_precision="ieee")
        sum *= tl.load(weights + pick, mask=m < count, other=0.0)[:, None]
        place = (pick % CHOSEN) * rows + pick // CHOSEN
        target = parts + place.to(tl.int64)[:, None] * WIDTH + n[None, :]
        tl.store(target, sum, mask=(m < count)[:, None] & exists[None, :])
