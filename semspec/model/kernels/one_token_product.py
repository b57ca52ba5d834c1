"""What the steps of `one_token.py` are made of: programs that wait for each other, weights that are asked for ahead,
the product of one row with a matrix.

One row needs no matrix units, and without them no layout of theirs: weights go as they lie from a pipeline in shared
memory to the registers of a thread, which adds up its own inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from semspec.model.kernels.gemm import activated, rounded

PLAIN, IN_BYTES, IN_WORDS = (tl.constexpr(i) for i in range(3))  # weights; codes one by one, or four to a word
WORD_ASM = tl.constexpr("""
{
.reg .b16 a, b, h0, h1, h2, h3;
.reg .b32 p, q;
mov.b32 {a, b}, $4;
cvt.rn.f16x2.e4m3x2 p, a;
cvt.rn.f16x2.e4m3x2 q, b;
mov.b32 {h0, h1}, p;
mov.b32 {h2, h3}, q;
cvt.f32.f16 $0, h0;
cvt.f32.f16 $1, h1;
cvt.f32.f16 $2, h2;
cvt.f32.f16 $3, h3;
}
""")


@triton.jit
def meet(met, goal, PROGRAMS: tl.constexpr):
    """Wait until all programs are here: what each has written before, all can read after."""
    if PROGRAMS > 1:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred p, q;
            .reg .u32 t, v;
            bar.sync 0;
            mov.u32 t, %tid.x;
            setp.ne.u32 p, t, 0;
            @p bra arrived;
            red.release.gpu.global.add.u32 [$1], 1;
            waiting:
            ld.acquire.gpu.global.u32 v, [$1];
            setp.lt.u32 q, v, $2;
            @q bra waiting;
            arrived:
            bar.sync 0;
            mov.u32 $0, 0;
            }
            """,
            "=r,l,r", [met, goal], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.debug_barrier()


@triton.jit
def part(OUTPUTS: tl.constexpr, PROGRAMS: tl.constexpr):
    """Of so many outputs: this program's first, and the one after its last."""
    EACH: tl.constexpr = (OUTPUTS + PROGRAMS - 1) // PROGRAMS
    first = tl.minimum(tl.program_id(0) * EACH, OUTPUTS)
    return first, tl.minimum(first + EACH, OUTPUTS)


@triton.jit
def ask(weights, OUTPUTS: tl.constexpr, ROW: tl.constexpr, LINES: tl.constexpr, PROGRAMS: tl.constexpr):
    """Have what this program reads first of a matrix, ROW bytes an output, brought into the second-level cache: so many
    lines of 128 bytes, a power of two."""
    if LINES > 0:
        first, last = part(OUTPUTS, PROGRAMS)
        at = tl.minimum(tl.arange(0, LINES) * 128, tl.maximum((last - first) * ROW - 16, 0))
        to = weights + first.to(tl.int64) * ROW + at
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [to], tl.int32, False, 1)


@triton.jit
def address(row, COLUMN: tl.constexpr):
    return tl.multiple_of(tl.load(row + COLUMN), 16)


@triton.jit
def tile(
    weights, i, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, UP: tl.constexpr, KIND: tl.constexpr, half: tl.constexpr,
    PROGRAMS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Tile i of this program's part of a matrix, [TILE, DEPTH], or UP outputs after it. What lies outside is 0, and
    nothing is read for it."""
    PER: tl.constexpr = 4 if KIND == IN_WORDS else 1
    like: tl.constexpr = tl.int32 if KIND == IN_WORDS else tl.uint8 if KIND == IN_BYTES else half
    STEPS: tl.constexpr = (INPUTS + DEPTH - 1) // DEPTH
    first, last = part(OUTPUTS, PROGRAMS)
    n = first + i // STEPS * TILE + tl.arange(0, TILE)
    k = i % STEPS * (DEPTH // PER) + tl.arange(0, DEPTH // PER)
    to = weights.to(tl.pointer_type(like)) + UP * (INPUTS // PER)
    known = (n < last)[:, None] & (k < INPUTS // PER)[None, :]
    at = tl.multiple_of(to + (n * (INPUTS // PER))[:, None] + k[None, :], [1, 16])
    return tl.load(at, mask=known, other=0, eviction_policy="evict_first")


@triton.jit
def inputs(x, norm, i, INPUTS: tl.constexpr, NORMED: tl.constexpr, half: tl.constexpr, DEPTH: tl.constexpr):
    """Those of tile i, and their norm's weights."""
    k = i % ((INPUTS + DEPTH - 1) // DEPTH) * DEPTH + tl.arange(0, DEPTH)
    a = tl.load(x + k, mask=k < INPUTS, other=0.0)
    g = a
    if NORMED:
        g = tl.load(norm.to(tl.pointer_type(half)) + k, mask=k < INPUTS, other=0.0)
    return a, g


@triton.jit
def row_product(
    x, norm, weights, scale, bias, out, eps,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr,
    BIASED: tl.constexpr, SILU: tl.constexpr, KIND: tl.constexpr,
    PROGRAMS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row through a matrix [OUTPUTS, INPUTS], or with a gate [2 OUTPUTS, INPUTS]: this program's outputs.

    NORMED: the row's RMS norm goes through it, whose size is known at the end of the row and multiplies the sums then.
    ADDED: what comes out is added to `out`.
    """
    EACH: tl.constexpr = (OUTPUTS + PROGRAMS - 1) // PROGRAMS
    STEPS: tl.constexpr = (INPUTS + DEPTH - 1) // DEPTH
    ALL: tl.constexpr = (EACH + TILE - 1) // TILE * STEPS
    SUMS: tl.constexpr = DEPTH // (8 if KIND == PLAIN else 16)  # as many inputs lie in one thread
    half: tl.constexpr = x.dtype.element_ty
    a, g = inputs(x, norm, 0, INPUTS, NORMED, half, DEPTH)
    sum = tl.zeros([TILE, SUMS], tl.float32)
    other = tl.zeros([TILE, SUMS], tl.float32)
    squares = tl.zeros([DEPTH], tl.float32)
    for i in tl.range(0, ALL, num_stages=STAGES):  # one loop for all tiles: the next ones are always on their way
        w = tile(weights, i, OUTPUTS, INPUTS, 0, KIND, half, PROGRAMS, TILE, DEPTH)
        v = w
        if GATED:
            v = tile(weights, i, OUTPUTS, INPUTS, OUTPUTS, KIND, half, PROGRAMS, TILE, DEPTH)
        next_a, next_g = inputs(x, norm, i + 1, INPUTS, NORMED, half, DEPTH)  # too few for a pipeline: by hand
        sum, other, squares = _add(
            i, w, v, a, g, sum, other, squares, scale, bias, out, eps,
            INPUTS, OUTPUTS, NORMED, GATED, ADDED, BIASED, SILU, KIND, half, PROGRAMS, TILE, DEPTH, SUMS,
        )  # fmt: skip
        a, g = next_a, next_g


@triton.jit
def _add(
    i, w, v, a, g, sum, other, squares, scale, bias, out, eps,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr,
    BIASED: tl.constexpr, SILU: tl.constexpr, KIND: tl.constexpr, half: tl.constexpr,
    PROGRAMS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Sums with tile i in them. The last tile of a row of tiles ends them: results are stored, and sums are 0 again."""
    STEPS: tl.constexpr = (INPUTS + DEPTH - 1) // DEPTH
    row = a.to(tl.float32)
    if NORMED:
        squares += row * row
        row *= g.to(tl.float32)
    sum += products(w, row, TILE, DEPTH, SUMS, KIND)
    if GATED:
        other += products(v, row, TILE, DEPTH, SUMS, KIND)
    if i % STEPS == STEPS - 1:
        first, last = part(OUTPUTS, PROGRAMS)
        n = first + i // STEPS * TILE + tl.arange(0, TILE)
        exists = n < last
        size = 1.0
        if NORMED:
            size = tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
        made = finished(tl.sum(sum, 1) * size, n, exists, scale, bias, BIASED, KIND, half)
        if GATED:
            up = finished(tl.sum(other, 1) * size, n + OUTPUTS, exists, scale, bias, BIASED, KIND, half)
            made = rounded(activated(rounded(made, out), SILU), out) * rounded(up, out)
        if ADDED:
            made = tl.load(out + n, mask=exists, other=0.0).to(tl.float32) + rounded(made, out)
        tl.store(out + n, made, mask=exists)
        sum = tl.zeros([TILE, SUMS], tl.float32)
        other = tl.zeros([TILE, SUMS], tl.float32)
        squares = tl.zeros([DEPTH], tl.float32)
    return sum, other, squares


@triton.jit
def products(w, row, TILE: tl.constexpr, DEPTH: tl.constexpr, SUMS: tl.constexpr, KIND: tl.constexpr):
    """[TILE, SUMS] what each thread's inputs add up to."""
    if KIND == IN_WORDS:
        c0, c1, c2, c3 = tl.inline_asm_elementwise(
            WORD_ASM, "=r,=r,=r,=r,r", [w], (tl.float32, tl.float32, tl.float32, tl.float32), True, 1
        )
        even, odd = tl.split(tl.reshape(row, [DEPTH // 4, 2, 2]))  # inputs 0, 2 and 1, 3 of each word
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        made = c0 * x0[None, :] + c1 * x1[None, :] + c2 * x2[None, :] + c3 * x3[None, :]
    elif KIND == IN_BYTES:
        made = w.to(tl.float8e4nv, bitcast=True).to(tl.float32) * row[None, :]
    else:
        made = w.to(tl.float32) * row[None, :]
    return tl.sum(tl.reshape(made, [TILE, SUMS, made.shape[1] // SUMS]), 2)


@triton.jit
def finished(sum, n, exists, scale, bias, BIASED: tl.constexpr, KIND: tl.constexpr, half: tl.constexpr):
    if KIND != PLAIN:
        sum *= tl.load(scale.to(tl.pointer_type(tl.float32)) + n, mask=exists, other=0.0)
    if BIASED:
        sum += tl.load(bias.to(tl.pointer_type(half)) + n, mask=exists, other=0.0).to(tl.float32)
    return sum
