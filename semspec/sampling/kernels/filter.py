"""`Processed` of draw.py in Triton: temperature, top-k, top-p and min-p without sorting.

What top-k and top-p keep is everything above a threshold and, of tokens that lie on it, the first so many. Here the
threshold is searched for. Floats are compared as whole numbers in the same order, so the search is exact and as long as
a number has bits, whatever the range: each launch cuts the interval that has the threshold into eight, counting how
many tokens, and how much of the mass, lie above each cut. Programs that have no token in the interval have nothing to
do. So a row keeps what sorting would keep, ties included; only where the mass of the better tokens rounds to top-p
itself may one token more or fewer be kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semspec.sampling.draw import SamplingUse

PART = 2048  # tokens of the vocabulary that one program looks at
WARPS = 8
CUTS = 8  # into which a launch divides the interval
# Bits of a float32 that a number of this type never uses, and how many times eight-fold narrowing has to be done.
SHIFTS = {torch.bfloat16: (16, 6), torch.float16: (13, 7), torch.float32: (0, 11)}
NOTHING = tl.constexpr(-(2**40))  # below every number that stands for a float


class Filter:
    """Rows of logits [R, V] as draw.Processed makes them; some of them sample. Where there is NaN in a row, or nothing
    else than -inf, all of it becomes NaN."""

    def __init__(self, logits: Tensor, columns: Tensor, use: SamplingUse) -> None:
        logits = logits if logits.dtype in SHIFTS else logits.float()
        self.source = logits if logits.stride(1) == 1 else logits.contiguous()
        self.columns, self.use = columns, use
        (rows, size), (self.shift, passes) = logits.shape, SHIFTS[logits.dtype]
        self.grid, self.sizes = (triton.cdiv(size, PART), rows), (rows, size, triton.cdiv(size, PART))
        self.rows = (self.source, self.source.stride(0), columns, columns.stride(0), columns.stride(1))
        self.parts = {"PARTS": triton.next_power_of_2(self.grid[0]), "num_warps": WARPS}
        self.kinds = {"FILTERED": use.top_k or use.top_p, "SHIFT": self.shift}
        if rows:
            self._search(passes)

    def _search(self, passes: int) -> None:
        """Launch after launch; what two of them leave for each other lies in two halves, which take turns."""
        rows, _, parts = self.sizes
        new, latest = self.source.new_empty, 0
        peaks, masses = new((2, rows, parts), dtype=torch.float32)
        sizes = ((rows, 3), (rows, 4), (rows, parts, CUTS, 2))
        kinds = (torch.long, torch.float32, torch.float32)
        halves = [[new(size, dtype=kind) for size, kind in zip(sizes, kinds, strict=True)] for _ in range(2)]
        _peak[self.grid](*self.rows, peaks, masses, *self.sizes, PART=PART, **self.parts)
        for by_mass, wanted in ((False, self.use.top_k), (True, self.use.top_p)):
            for i in range(passes if wanted else 0):
                _narrow[self.grid](
                    *self.rows, peaks, masses, *halves[latest], *halves[1 - latest], *self.sizes, **self.parts,
                    PART=PART, BY_MASS=by_mass, BEGINS=i == 0, RANKED=by_mass and self.use.top_k, SHIFT=self.shift,
                    CUTS=CUTS,
                )  # fmt: skip
                latest = 1 - latest
        found = new((rows, 4), dtype=torch.float32)
        edges, earlier = new((rows,), dtype=torch.int32), new((rows, parts), dtype=torch.float32)
        _settle[(rows,)](
            *self.rows[2:], peaks, masses, *halves[latest], found, edges, earlier, *self.sizes, **self.parts,
            FILTERED=self.kinds["FILTERED"], BY_MASS=self.use.top_p, CUTS=CUTS,
        )  # fmt: skip
        self.found = (found, edges, earlier)  # what `kept` wants to know

    def logits(self) -> Tensor:
        return self._made(probs=False)

    def probs(self) -> Tensor:
        # What min-p leaves has not been added up.
        return self.logits().softmax(-1) if self.use.min_p else self._made(probs=True)

    def _made(self, probs: bool) -> Tensor:
        made = torch.empty(self.source.shape, dtype=torch.float32, device=self.source.device)
        if made.numel():
            _apply[self.grid](
                *self.rows, *self.found, made, *self.sizes, PART=PART, num_warps=WARPS, PROBS=probs, **self.kinds
            )
        return made


@triton.jit(do_not_specialize=["rows"])
def _peak(
    logits, stride, columns, by_row, by_column, peaks, masses, rows, size, parts,
    PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The largest logit of each part, +inf if there is NaN in it, and the mass of the part by it."""
    part, row = tl.program_id(0), tl.program_id(1)
    i = part * PART + tl.arange(0, PART)
    own = tl.load(logits + row.to(tl.int64) * stride + i, mask=i < size, other=float("-inf")).to(tl.float32)
    own = tl.where(own == own, own, float("inf"))
    top = tl.max(own, 0)
    weight = tl.where(own > float("-inf"), tl.exp((own - top) / temperature_of(columns + row * by_row)), 0.0)
    tl.store(peaks + row * parts + part, top)
    tl.store(masses + row * parts + part, tl.sum(weight, 0))


@triton.jit
def temperature_of(options):
    own = tl.load(options)
    return tl.where(own == 0.0, 1.0, own)


@triton.jit
def _ordered(x, SHIFT: tl.constexpr):
    """Whole numbers in the order of these float32, without so many low bits, which tell none of them apart."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0 is 0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit(do_not_specialize=["rows"])
def _narrow(
    logits, stride, columns, by_row, by_column, peaks, masses, old_bounds, old_sums, old_above, bounds, sums, above,
    rows, size, parts, PART: tl.constexpr, PARTS: tl.constexpr, BY_MASS: tl.constexpr, BEGINS: tl.constexpr,
    RANKED: tl.constexpr, SHIFT: tl.constexpr, CUTS: tl.constexpr,
):  # fmt: skip
    """One cut of the interval (low, high] of each row. The threshold is the least number above which there is less than
    `goal`: tokens (k), or mass (top-p of that of the k best)."""
    part, row = tl.program_id(0), tl.program_id(1)
    i = part * PART + tl.arange(0, PART)
    p = tl.arange(0, PARTS)
    peak = tl.load(peaks + row * parts + p, mask=p < parts, other=float("-inf"))
    top = tl.max(peak, 0)
    options = columns + row * by_row
    temperature = temperature_of(options)
    if BEGINS:
        high, count, mass = _ordered(top, SHIFT).to(tl.int64), 0.0, 0.0
        lowest = tl.full((), float("-inf"), tl.float32)
        limit, most = high * 0 + NOTHING, 0.0
        low = _ordered(lowest, SHIFT).to(tl.int64)
        if BY_MASS:
            share = tl.load(options + 2 * by_column)
            if RANKED:
                k = tl.load(options + by_column)
                limit, most, total = _ranked(k, old_bounds, old_sums, old_above, row, parts, PARTS, CUTS)
                low = limit - 1
            else:
                there = tl.load(masses + row * parts + p, mask=p < parts, other=0.0)
                total = tl.sum(tl.where(there > 0.0, there * tl.exp((peak - top) / temperature), 0.0), 0)
                # All tokens that lie this far below the largest have together less than the share that may be lost.
                far = top - temperature * (tl.log(size / (1.0 - tl.minimum(share, 0.9999999))) + 0.1)
                low = tl.maximum(low, _ordered(tl.where(share < 1.0, far, lowest), SHIFT).to(tl.int64) - 1)
            goal = tl.where(share < 1.0, share * total, float("inf"))
        else:
            k = tl.load(options + by_column)
            goal = tl.where(k > 0.0, k, float("inf"))
    else:
        low, high, count, mass, _, _, _ = _cut(old_bounds, old_sums, old_above, row, parts, PARTS, CUTS, BY_MASS)
        limit = tl.load(old_bounds + row * 3 + 2)
        goal, most = tl.load(old_sums + row * 4 + 2), tl.load(old_sums + row * 4 + 3)
    if part == 0:
        tl.store(bounds + row * 3, low)
        tl.store(bounds + row * 3 + 1, high)
        tl.store(bounds + row * 3 + 2, limit)
        tl.store(sums + row * 4, count)
        tl.store(sums + row * 4 + 1, mass)
        tl.store(sums + row * 4 + 2, goal)
        tl.store(sums + row * 4 + 3, most)
    own = tl.load(logits + row.to(tl.int64) * stride + i, mask=i < size, other=float("-inf")).to(tl.float32)
    number = _ordered(own, SHIFT)
    inside = (number > low.to(tl.int32)) & (number <= high.to(tl.int32)) & (own > float("-inf"))
    place = above + (row * parts + part) * CUTS * 2
    if tl.max(inside.to(tl.int32), 0) > 0:
        weight = tl.where(inside, tl.exp((own - top) / temperature), 0.0)
        for j in tl.static_range(CUTS):
            over = inside & (number > (low + (high - low) * j // CUTS).to(tl.int32))
            tl.store(place + 2 * j, tl.sum(over.to(tl.float32), 0))
            tl.store(place + 2 * j + 1, tl.sum(tl.where(over, weight, 0.0), 0))
    else:
        j = tl.arange(0, 2 * CUTS)
        tl.store(place + j, tl.zeros((2 * CUTS,), tl.float32))


@triton.jit
def _cut(bounds, sums, above, row, parts, PARTS: tl.constexpr, CUTS: tl.constexpr, BY_MASS: tl.constexpr):
    """The interval after a launch of _narrow; how many tokens, and how much mass, lie above it and within it; and how
    many within it each part has [PARTS]."""
    low, high = tl.load(bounds + row * 3), tl.load(bounds + row * 3 + 1)
    count, mass, goal = tl.load(sums + row * 4), tl.load(sums + row * 4 + 1), tl.load(sums + row * 4 + 2)
    p, j = tl.arange(0, PARTS), tl.arange(0, CUTS)
    at = above + ((row * parts + p) * CUTS * 2)[:, None] + 2 * j[None, :]
    counts = tl.load(at, mask=(p < parts)[:, None], other=0.0)
    masses = tl.load(at + 1, mask=(p < parts)[:, None], other=0.0)
    counted, weighed = tl.sum(counts, 0), tl.sum(masses, 0)  # above each edge, within the interval
    enough = (mass + weighed if BY_MASS else count + counted) < goal
    inner = (high - low) * j // CUTS > 0  # edges of a short interval coincide
    first = tl.min(tl.where(enough & inner, j, CUTS), 0)  # the lowest edge with less than the goal above it
    here, under = j == first, j == first - 1
    inner_count, inner_mass = tl.sum(tl.where(here, counted, 0.0), 0), tl.sum(tl.where(here, weighed, 0.0), 0)
    edge = low + (high - low) * first // CUTS
    bottom = low + (high - low) * (first - 1) // CUTS
    own = tl.sum(tl.where(under[None, :], counts, 0.0), 1) - tl.sum(tl.where(here[None, :], counts, 0.0), 1)
    within = tl.sum(tl.where(under, weighed, 0.0), 0) - inner_mass
    return bottom, edge, count + inner_count, mass + inner_mass, tl.sum(own, 0), within, own


@triton.jit
def _ranked(k, bounds, sums, above, row, parts, PARTS: tl.constexpr, CUTS: tl.constexpr):
    """Of a search for the k best: the threshold, how many tokens on it are among them, and the mass of all k."""
    _, edge, count, mass, ties, within, _ = _cut(bounds, sums, above, row, parts, PARTS, CUTS, False)
    most = tl.minimum(tl.where(k > 0.0, k, float("inf")) - count, ties)
    return edge, most, mass + most * within / tl.maximum(ties, 1.0)


@triton.jit(do_not_specialize=["rows"])
def _settle(
    columns, by_row, by_column, peaks, masses, bounds, sums, above, found, edges, earlier, rows, size, parts,
    PARTS: tl.constexpr, FILTERED: tl.constexpr, BY_MASS: tl.constexpr, CUTS: tl.constexpr,
):  # fmt: skip
    """Of each row: the largest logit (NaN, if the row is no distribution), the first part that has it, the mass of what
    is kept, the threshold, how many tokens on it are kept, and how many of them lie in earlier parts [P]."""
    row = tl.program_id(0)
    p = tl.arange(0, PARTS)
    options = columns + row * by_row
    peak = tl.load(peaks + row * parts + p, mask=p < parts, other=float("-inf"))
    top = tl.max(peak, 0)
    if FILTERED:
        _, edge, count, mass, ties, within, here = _cut(bounds, sums, above, row, parts, PARTS, CUTS, BY_MASS)
        goal, each = tl.load(sums + row * 4 + 2), within / tl.maximum(ties, 1.0)
        if BY_MASS:  # those with less than the goal before them
            most = tl.ceil((goal - mass) / tl.maximum(each, 1e-38))
            limit = tl.load(bounds + row * 3 + 2)
            most = tl.where(edge == limit, tl.minimum(most, tl.load(sums + row * 4 + 3)), most)
        else:
            most = goal - count
        total = mass + tl.minimum(most, ties) * each
        tl.store(edges + row, edge.to(tl.int32))
        tl.store(found + row * 4 + 1, most)
        tl.store(earlier + row * parts + p, tl.cumsum(here, 0) - here, mask=p < parts)
    else:
        there = tl.load(masses + row * parts + p, mask=p < parts, other=0.0)
        total = tl.sum(tl.where(there > 0.0, there * tl.exp((peak - top) / temperature_of(options)), 0.0), 0)
    fine = (top > float("-inf")) & (top < float("inf"))
    tl.store(found + row * 4, tl.where(fine, top, float("nan")))
    tl.store(found + row * 4 + 2, tl.where(tl.load(options) == 0.0, 1.0, total))
    tl.store(found + row * 4 + 3, tl.min(tl.where(peak == top, p, PARTS), 0).to(tl.float32))


@triton.jit
def kept(
    own, i, part, row, columns, by_row, by_column, found, edges, earlier, size, parts,
    FILTERED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The processed logits of one part, from its own: the largest is 0; NaN if the row is no distribution."""
    top, options = tl.load(found + row * 4), columns + row * by_row
    min_p = tl.load(options + 3 * by_column)
    scaled = (own - top) / temperature_of(options)
    keep = scaled >= tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1.2e-38)), float("-inf"))
    if FILTERED:
        most, edge = tl.load(found + row * 4 + 1), tl.load(edges + row)
        number, before = _ordered(own, SHIFT), tl.load(earlier + row * parts + part)
        tied = number == edge
        if before + tl.sum(tied.to(tl.float32), 0) > most:
            tied = tied & (before + tl.cumsum(tied.to(tl.float32), 0) <= most)
        keep = keep & ((number > edge) | tied)
    made = tl.where(keep, scaled, float("-inf"))
    if tl.load(options) == 0.0:  # greedy: the first of the largest
        first = tl.load(found + row * 4 + 3).to(tl.int32)
        best = tl.where(part == first, tl.min(tl.where(own == top, i, size), 0), size)
        made = tl.where(i == best, 0.0, float("-inf"))
    return tl.where(top == top, made, float("nan"))


@triton.jit(do_not_specialize=["rows"])
def _apply(
    logits, stride, columns, by_row, by_column, found, edges, earlier, made, rows, size, parts,
    PART: tl.constexpr, FILTERED: tl.constexpr, SHIFT: tl.constexpr, PROBS: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1)
    i = part * PART + tl.arange(0, PART)
    own = tl.load(logits + row.to(tl.int64) * stride + i, mask=i < size, other=float("-inf")).to(tl.float32)
    processed = kept(
        own, i, part, row, columns, by_row, by_column, found, edges, earlier, size, parts, FILTERED, SHIFT
    )  # fmt: skip
    if PROBS:
        processed = tl.exp(processed) / tl.load(found + row * 4 + 2)
    tl.store(made + row.to(tl.int64) * size + i, processed, mask=i < size)
