"""`Processed` of draw.py in Triton: temperature, top-k, top-p and min-p without sorting.

What top-k and top-p keep is everything above a threshold and, of tokens that lie on it, the first so many. Here the
threshold is searched for. Floats are compared as whole numbers in the same order, so the search is exact and as long as
a number has bits, whatever the range: each pass cuts the interval that has the threshold into sixteen, counting how
many tokens, and how much of the mass, lie above each cut, part by part (`_narrow`); then one program for each row adds
parts up and picks the piece (`_pick`). Parts that have no token in the interval have nothing to do, and once the
interval is one number, none has. So a row keeps what sorting would keep, ties included; only where the mass of the
better tokens rounds to top-p itself may one token more or fewer be kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semspec.sampling.draw import SamplingUse

PART = 2048  # tokens of the vocabulary that one program looks at
WARPS = 8
CUTS = 16  # into which a pass divides the interval
# Bits of a float32 that a number of this type never uses, and how many passes all others take.
SHIFTS = {torch.bfloat16: (16, 4), torch.float16: (13, 5), torch.float32: (0, 8)}
COUNT, MASS, GOAL, MOST, TIES, EACH, TOP, TOTAL, FIRST, FIELDS = (tl.constexpr(i) for i in range(10))  # of a row
LOW, HIGH, LIMIT, DONE, NUMBERS = (tl.constexpr(i) for i in range(5))
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
        self.parts = {"PARTS": triton.next_power_of_2(self.grid[0]), "num_warps": 4}
        self.kinds = {"FILTERED": use.top_k or use.top_p, "SHIFT": self.shift}
        if rows:
            self._search(passes)

    def _search(self, passes: int) -> None:
        rows, _, parts = self.sizes
        new = self.source.new_empty
        peaks, masses = new((2, rows, parts), dtype=torch.float32)
        found, numbers = new((rows, FIELDS.value), dtype=torch.float32), new((rows, NUMBERS.value), dtype=torch.long)
        above, earlier = new((rows, parts, 2, CUTS), dtype=torch.float32), new((rows, parts), dtype=torch.float32)
        state, use = (found, numbers), self.use
        kinds = {"SHIFT": self.shift, "CUTS": CUTS}
        _peak[self.grid](*self.rows, peaks, masses, *self.sizes, PART=PART, num_warps=WARPS)
        _begin[(rows,)](
            *self.rows[2:], peaks, masses, *state, *self.sizes, **self.parts, SHIFT=self.shift, BY_MASS=not use.top_k
        )
        for by_mass, wanted in ((False, use.top_k), (True, use.top_p)):
            for left in range(passes if wanted else 0, 0, -1):
                _narrow[self.grid](*self.rows, *state, above, *self.sizes, PART=PART, num_warps=WARPS, **kinds)
                _pick[(rows,)](
                    *self.rows[2:], *state, above, earlier, *self.sizes, **self.parts, **kinds, BY_MASS=by_mass,
                    LAST=left == 1, THEN_MASS=use.top_p,
                )  # fmt: skip
        self.found = (found, numbers, earlier)  # what `kept` wants to know

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


def softmax(logits: Tensor) -> Tensor:
    """[R, V] -> [R, V] float32. Torch has one program for a row, which for few long rows leaves a GPU idle."""
    columns = torch.zeros((1, 4), device=logits.device)
    columns[:, ::2] = 1.0  # temperature and top-p
    return Filter(logits, columns.expand(len(logits), 4), SamplingUse(all_greedy=False)).probs()


@triton.jit(do_not_specialize=["rows"])
def _peak(logits, stride, columns, by_row, by_column, peaks, masses, rows, size, parts, PART: tl.constexpr):
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
def _begin(
    columns, by_row, by_column, peaks, masses, found, numbers, rows, size, parts,
    PARTS: tl.constexpr, SHIFT: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """Of each row the largest logit (NaN, if the row is no distribution), the first part that has it, its mass, and the
    interval (low, high] in which the threshold is: the least number above which there is less than the goal, of tokens
    or, BY_MASS, of mass."""
    row, p = tl.program_id(0), tl.arange(0, PARTS)
    options, own = columns + row * by_row, found + row * FIELDS
    peak = tl.load(peaks + row * parts + p, mask=p < parts, other=float("-inf"))
    there = tl.load(masses + row * parts + p, mask=p < parts, other=0.0)
    top, temperature = tl.max(peak, 0), temperature_of(options)
    total = tl.sum(tl.where(there > 0.0, there * tl.exp((peak - top) / temperature), 0.0), 0)
    lowest = tl.full((), float("-inf"), tl.float32)
    low = _ordered(lowest, SHIFT).to(tl.int64)
    k, share = tl.load(options + by_column), tl.load(options + 2 * by_column)
    if BY_MASS:
        # All tokens that lie this far below the largest have together less than the share that may be lost.
        far = top - temperature * (tl.log(size / (1.0 - tl.minimum(share, 0.9999999))) + 0.1)
        low = tl.maximum(low, _ordered(tl.where(share < 1.0, far, lowest), SHIFT).to(tl.int64) - 1)
        goal = tl.where(share < 1.0, share * total, float("inf"))
    else:
        goal = tl.where(k > 0.0, k, float("inf"))
    _store_search(own, numbers + row * NUMBERS, low, _ordered(top, SHIFT).to(tl.int64), NOTHING, 0.0, goal)
    fine = (top > float("-inf")) & (top < float("inf"))
    tl.store(own + TOP, tl.where(fine, top, float("nan")))
    tl.store(own + TOTAL, tl.where(tl.load(options) == 0.0, 1.0, total))  # a greedy row's one token has all of it
    tl.store(own + FIRST, tl.min(tl.where(peak == top, p, PARTS), 0).to(tl.float32))


@triton.jit
def _store_search(own, numbers, low, high, limit, most, goal):
    """A search that begins: nothing lies above its interval. Of what lies at `limit` only `most` tokens count."""
    tl.store(own + COUNT, 0.0)
    tl.store(own + MASS, 0.0)
    tl.store(own + GOAL, goal)
    tl.store(own + MOST, most)
    tl.store(numbers + LOW, low)
    tl.store(numbers + HIGH, high)
    tl.store(numbers + LIMIT, limit)
    tl.store(numbers + DONE, 0)


@triton.jit(do_not_specialize=["rows"])
def _narrow(
    logits, stride, columns, by_row, by_column, found, numbers, above, rows, size, parts,
    PART: tl.constexpr, SHIFT: tl.constexpr, CUTS: tl.constexpr,
):  # fmt: skip
    """How many tokens of a part, and how much mass, lie in the interval and above each of CUTS edges."""
    part, row = tl.program_id(0), tl.program_id(1)
    if tl.load(numbers + row * NUMBERS + DONE) == 0:
        low, high = tl.load(numbers + row * NUMBERS + LOW), tl.load(numbers + row * NUMBERS + HIGH)
        i = part * PART + tl.arange(0, PART)
        own = tl.load(logits + row.to(tl.int64) * stride + i, mask=i < size, other=float("-inf")).to(tl.float32)
        number = _ordered(own, SHIFT)
        inside = (number > low.to(tl.int32)) & (number <= high.to(tl.int32)) & (own > float("-inf"))
        place = above + (row * parts + part) * CUTS * 2
        if tl.max(inside.to(tl.int32), 0) > 0:
            top = tl.load(found + row * FIELDS + TOP)
            weight = tl.where(inside, tl.exp((own - top) / temperature_of(columns + row * by_row)), 0.0)
            for j in tl.static_range(CUTS):
                over = inside & (number > (low + (high - low) * j // CUTS).to(tl.int32))
                tl.store(place + j, tl.sum(over.to(tl.float32), 0))
                tl.store(place + CUTS + j, tl.sum(tl.where(over, weight, 0.0), 0))
        else:
            tl.store(place + tl.arange(0, 2 * CUTS), tl.zeros((2 * CUTS,), tl.float32))


@triton.jit(do_not_specialize=["rows"])
def _pick(
    columns, by_row, by_column, found, numbers, above, earlier, rows, size, parts, PARTS: tl.constexpr,
    SHIFT: tl.constexpr, CUTS: tl.constexpr, BY_MASS: tl.constexpr, LAST: tl.constexpr, THEN_MASS: tl.constexpr,
):  # fmt: skip
    """The piece of the interval that has the threshold. Once it is one number: how many tokens lie on it, also in the
    parts before each [P], and the mass of each. After the last pass: how many of them are kept, and the mass of all
    that is kept; or, after the k best, where the search by mass begins."""
    row, p, j = tl.program_id(0), tl.arange(0, PARTS), tl.arange(0, CUTS)
    own, bounds, options = found + row * FIELDS, numbers + row * NUMBERS, columns + row * by_row
    low, high, limit = tl.load(bounds + LOW), tl.load(bounds + HIGH), tl.load(bounds + LIMIT)
    count, mass, goal, most = tl.load(own + COUNT), tl.load(own + MASS), tl.load(own + GOAL), tl.load(own + MOST)
    ties, each = tl.load(own + TIES), tl.load(own + EACH)
    if tl.load(bounds + DONE) == 0:
        at = above + ((row * parts + p) * CUTS * 2)[:, None] + j[None, :]
        counts = tl.load(at, mask=(p < parts)[:, None], other=0.0)
        masses = tl.load(at + CUTS, mask=(p < parts)[:, None], other=0.0)
        counted, weighed = tl.sum(counts, 0), tl.sum(masses, 0)  # above each edge, within the interval
        enough = (mass + weighed if BY_MASS else count + counted) < goal
        inner = (high - low) * j // CUTS > 0  # edges of a short interval coincide
        first = tl.min(tl.where(enough & inner, j, CUTS), 0)  # the lowest edge with less than the goal above it
        here, under = j == first, j == first - 1
        tied = tl.sum(tl.where(under[None, :], counts, 0.0) - tl.where(here[None, :], counts, 0.0), 1)  # [PARTS]
        within = tl.sum(tl.where(under, weighed, 0.0) - tl.where(here, weighed, 0.0), 0)
        ties = tl.sum(tied, 0)
        each = within / tl.maximum(ties, 1.0)
        count += tl.sum(tl.where(here, counted, 0.0), 0)
        mass += tl.sum(tl.where(here, weighed, 0.0), 0)
        wide = high - low
        high = low + wide * first // CUTS
        low = low + wide * (first - 1) // CUTS
        tl.store(earlier + row * parts + p, tl.cumsum(tied, 0) - tied, mask=p < parts)
        tl.store(bounds + LOW, low)
        tl.store(own + COUNT, count)
        tl.store(own + MASS, mass)
        tl.store(own + TIES, ties)
        tl.store(own + EACH, each)
        tl.store(bounds + HIGH, high)
        tl.store(bounds + DONE, (high - low <= 1).to(tl.int64))
    if LAST:
        if BY_MASS:  # those with less than the goal before them
            left = tl.ceil((goal - mass) / tl.maximum(each, 1e-38))
            left = tl.where(high == limit, tl.minimum(left, most), left)
        else:
            left = goal - count
        total = mass + tl.minimum(left, ties) * each
        if THEN_MASS and not BY_MASS:
            share = tl.load(options + 2 * by_column)
            top = _ordered(tl.load(own + TOP), SHIFT).to(tl.int64)
            goal = tl.where(share < 1.0, share * total, float("inf"))
            _store_search(own, bounds, high - 1, top, high, tl.minimum(left, ties), goal)
        else:
            tl.store(own + MOST, left)
            tl.store(own + TOTAL, tl.where(tl.load(options) == 0.0, 1.0, total))


@triton.jit
def kept(
    own, i, part, row, columns, by_row, by_column, found, numbers, earlier, size, parts,
    FILTERED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The processed logits of one part, from its own: the largest is 0; NaN if the row is no distribution."""
    top, options = tl.load(found + row * FIELDS + TOP), columns + row * by_row
    min_p = tl.load(options + 3 * by_column)
    scaled = (own - top) / temperature_of(options)
    keep = scaled >= tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1.2e-38)), float("-inf"))
    if FILTERED:
        most, edge = tl.load(found + row * FIELDS + MOST), tl.load(numbers + row * NUMBERS + HIGH).to(tl.int32)
        number, before = _ordered(own, SHIFT), tl.load(earlier + row * parts + part)
        tied = number == edge
        if before + tl.sum(tied.to(tl.float32), 0) > most:
            tied = tied & (before + tl.cumsum(tied.to(tl.float32), 0) <= most)
        keep = keep & ((number > edge) | tied)
    made = tl.where(keep, scaled, float("-inf"))
    if tl.load(options) == 0.0:  # greedy: the first of the largest
        first = tl.load(found + row * FIELDS + FIRST).to(tl.int32)
        best = tl.where(part == first, tl.min(tl.where(own == top, i, size), 0), size)
        made = tl.where(i == best, 0.0, float("-inf"))
    return tl.where(top == top, made, float("nan"))


@triton.jit(do_not_specialize=["rows"])
def _apply(
    logits, stride, columns, by_row, by_column, found, numbers, earlier, made, rows, size, parts,
    PART: tl.constexpr, FILTERED: tl.constexpr, SHIFT: tl.constexpr, PROBS: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1)
    i = part * PART + tl.arange(0, PART)
    own = tl.load(logits + row.to(tl.int64) * stride + i, mask=i < size, other=float("-inf")).to(tl.float32)
    processed = kept(
        own, i, part, row, columns, by_row, by_column, found, numbers, earlier, size, parts, FILTERED, SHIFT
    )  # fmt: skip
    if PROBS:
        processed = tl.exp(processed) / tl.load(found + row * FIELDS + TOTAL)
    tl.store(made + row.to(tl.int64) * size + i, processed, mask=i < size)
