"""The kernel of int4.py, in Gluon, where we say which register of which thread holds what.

Weights are the left factor of `mma.m16n8k16`: what a thread loads, 16 bytes at a time, are its own fragments (the order
is in semspec/model/fragments.py), so codes meet no other thread on their way to the matrix units. A thread's inputs of
x are 8 neighbours of a row, one load of 16 bytes each too, for which the first-level cache serves: all warps of a
multiprocessor read the same rows. Nothing in the loop waits for another warp.

A code becomes 128 + code, which is exact, with one operation for two weights and at most one shift. Of the sum of a
group, (128 + zero) times the sum of its inputs is taken off; a fragment of ones gives that sum where it is needed. So
zeros may be any numbers, and a group costs two operations for each number of its sum.

All tensors are flat: 8 numbers of each thread, so many as two fragments of sums have (t, h, j): rows 2t + h of four
neighbours, columns j of two.
"""

# ruff: noqa: RUF005, SIM108 - the compiler knows no unpacking, and decides conditions only in statements

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from semspec.model.kernels.gemm import activated, rounded
from semspec.model.kernels.int4_asm import floats, product_asm, total_asm

NO_ZEROS, WORDS, ANY_ZEROS = (gl.constexpr(i) for i in range(3))  # as in quantised.py
UNIT = gl.constexpr(128)  # inputs at a time; in a pair of fragments (32 outputs) 2 KB


@gluon.jit
def products(codes, x, sums, TILES: gl.constexpr, HALF: gl.constexpr, FIRST: gl.constexpr, KIND: gl.constexpr):
    ASM: gl.constexpr = product_asm(TILES, HALF, FIRST, KIND)
    if FIRST:
        given = (codes,) + x
    else:
        given = (codes,) + x + sums
    return gl.inline_asm_elementwise(ASM[0], ASM[1], given, floats(TILES), True, 8)


@gluon.jit
def totals(x, sums, TILES: gl.constexpr, FIRST: gl.constexpr, KIND: gl.constexpr):
    ASM: gl.constexpr = total_asm(TILES, FIRST, KIND)
    if FIRST:
        given = x
    else:
        given = x + sums
    return gl.inline_asm_elementwise(ASM[0], ASM[1], given, floats(TILES), True, 8)


@gluon.jit
def both(value, SIZE: gl.constexpr, L: gl.constexpr):
    """What each of a thread's four outputs has, for its two columns: no instruction."""
    return gl.convert_layout(gl.join(value, value).reshape([SIZE]), L, assert_trivial=True)


@gluon.jit
def moved(unit, step, INWARD: gl.constexpr, STEPS: gl.constexpr, UNITS: gl.constexpr, EVEN: gl.constexpr):
    """How many units a step's is from a warp's first; after the last step, and after the last unit, that one."""
    if EVEN:
        far = gl.minimum(step, STEPS - 1) * INWARD
    else:
        far = gl.minimum(unit + step * INWARD, UNITS - 1) - unit
    return far


@gluon.jit
def group_at(
    unit, step, part, INWARD: gl.constexpr, STEPS: gl.constexpr, UNITS: gl.constexpr, EVEN: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """The group of one part of a step's unit."""
    own = unit + moved(unit, step, INWARD, STEPS, UNITS, EVEN)
    if GROUP == 0:
        own = own * 0
    elif GROUP >= UNIT:
        own = own // (GROUP // UNIT)
    else:
        own = own * (UNIT // GROUP) + part
    return own


@gluon.jit
def load_codes(codes, own):
    """They are read once, and must leave the first-level cache to x."""
    return gl.load(codes + own, eviction_policy="evict_first")


@gluon.jit
def stay():
    """Loads from before stay before: the assembler would save registers by asking for codes just before it needs
    them."""
    gl.inline_asm_elementwise("bar.warp.sync -1; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def load_scales(scales, zeros, at, own, ZEROS: gl.constexpr):
    """What is loaded of scales, and of zeros."""
    if ZEROS == WORDS:
        loaded = (gl.load(zeros + at + own),)
    elif ZEROS == ANY_ZEROS:
        loaded = (gl.load(scales + at + own), gl.load(zeros + at + own))
    else:
        loaded = (gl.load(scales + at + own),)
    return loaded


@gluon.jit
def scale_and_zero(loaded, ZEROS: gl.constexpr, HALF_SCALE: gl.constexpr, BEYOND: gl.constexpr):
    """A scale, and what to add to codes in its place for each input."""
    word = loaded[0]
    if ZEROS == WORDS:
        low = -BEYOND - (word << 16).to(gl.float32, bitcast=True)
        if HALF_SCALE:
            scale = (word >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        else:
            scale = (word & -65536).to(gl.float32, bitcast=True)
    else:
        scale = word.to(gl.float32)
        if ZEROS == ANY_ZEROS:
            low = -BEYOND - loaded[1].to(gl.float32)
        else:
            low = gl.full_like(scale, -BEYOND - 8.0)
    return scale, low


@gluon.jit
def fetch(
    codes, between, unit, end, PAIRS: gl.constexpr, INWARD: gl.constexpr, AHEAD: gl.constexpr, LANES: gl.constexpr
):  # fmt: skip
    """A warp's next codes into the second-level cache: AHEAD times two units of 16 lines each."""
    lane = gl.arange(0, unit.shape[0], layout=LANES) % 32
    for n in gl.static_range(AHEAD):
        later = gl.minimum(unit + (2 * n + 1 + lane // 16) * INWARD, end - 1)
        for p in gl.static_range(PAIRS):
            line = codes + (p * between + later * 512 + lane % 16 * 32)
            gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [line], gl.int32, False, 1)


@gluon.jit
def finished(
    sum, first, apart, limit, split, gain, bias, INWARD: gl.constexpr, GAIN: gl.constexpr, BIASED: gl.constexpr
):  # fmt: skip
    """The sum of all warps that share outputs, with gain and bias. `first` is the program's first output of this pair
    of fragments, `apart` how far it is to the next warp's."""
    SIZE: gl.constexpr = sum.shape[0] // INWARD
    if INWARD > 1:
        APART: gl.constexpr = gl.BlockedLayout([INWARD, 8 // INWARD], [1, 32], [1, gl.num_warps()], [1, 0])
        sum = gl.sum(gl.convert_layout(sum.reshape([INWARD, SIZE]), APART), 0)
    i = gl.arange(0, SIZE, layout=sum.type.layout)
    n = first + i // 256 * apart + i // 32 % 8 * 4 + i % 8 // 2
    if GAIN:
        sum *= gl.load(gain + n, mask=n < limit, other=0.0)
    if BIASED:
        sum += gl.load(bias + n, mask=(n < limit) & (split == 0), other=0.0).to(gl.float32)
    return sum


@gluon.jit
def put(sum, first, apart, row, out, rows, outputs, out_stride, split):
    i = gl.arange(0, sum.shape[0], layout=sum.type.layout)
    n = first + i // 256 * apart + i // 32 % 8 * 4 + i % 8 // 2
    m = row + i // 8 % 4 * 2 + i % 2
    target = out + (split * rows + m).to(gl.int64) * out_stride + n
    gl.store(target, sum.to(out.dtype.element_ty), mask=(m < rows) & (n < outputs))


@gluon.jit(do_not_specialize=["rows"])
def int4_product(
    x, codes, scales, zeros, gain, bias, out, rows, outputs, out_stride, scale_group,
    INPUTS: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr, GAIN: gl.constexpr, BIASED: gl.constexpr,
    GATED: gl.constexpr, SILU: gl.constexpr, SPLITS: gl.constexpr, ACROSS: gl.constexpr, INWARD: gl.constexpr,
    PAIRS: gl.constexpr, TILES: gl.constexpr, AHEAD: gl.constexpr, ORDERED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """ACROSS warps have outputs of their own, PAIRS times 32 each (with a gate: 32 gates and their ups); INWARD warps
    share outputs and take turns with the inputs. TILES times 8 rows of x. GROUP 0: all inputs share a scale."""
    WARPS: gl.constexpr = ACROSS * INWARD
    L: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    FOUR: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    UNITS: gl.constexpr = INPUTS // UNIT
    EACH: gl.constexpr = (UNITS + SPLITS - 1) // SPLITS  # units of a split
    STEPS: gl.constexpr = (EACH + INWARD - 1) // INWARD
    EVEN: gl.constexpr = EACH * SPLITS == UNITS and STEPS * INWARD == EACH
    GROUPS: gl.constexpr = UNIT // GROUP if GROUP > 0 and GROUP < UNIT else 1  # of a unit
    PER: gl.constexpr = GROUP // 32 if GROUP > 0 and GROUP < UNIT else 4  # steps of 32 inputs
    KIND: gl.constexpr = "bf16" if x.dtype.element_ty == gl.bfloat16 else "f16"
    BEYOND: gl.constexpr = 128.0 if x.dtype.element_ty == gl.bfloat16 else 1024.0  # what the bits above a code are
    HALF_SCALE: gl.constexpr = scales.dtype.element_ty == gl.float16
    BLOCK: gl.constexpr = 4 * INPUTS  # words of 32 outputs
    split, row = gl.program_id(1), gl.program_id(2) * (8 * TILES)
    end = gl.minimum((split + 1) * EACH, UNITS)
    i, of_four = gl.arange(0, WARPS * 256, layout=L), gl.arange(0, WARPS * 128, layout=FOUR)
    own: gl.constexpr = 1 if GATED else PAIRS
    between = outputs // 32 if GATED else 1  # blocks from one of a warp's to the next
    last = outputs // 32 - own  # a program's last warps may have nothing to do
    block = gl.minimum((gl.program_id(0) * ACROSS + i // 256 % ACROSS) * own, last)
    block_of_four = gl.minimum((gl.program_id(0) * ACROSS + of_four // 128 % ACROSS) * own, last)
    unit = split * EACH + i // (256 * ACROSS)
    of_unit = split * EACH + of_four // (128 * ACROSS)
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    lane = gl.arange(0, WARPS * 32, layout=LANES)
    block_of_lane = gl.minimum((gl.program_id(0) * ACROSS + lane // 32 % ACROSS) * own, last)
    unit_of_lane = split * EACH + lane // (32 * ACROSS)
    from_codes = block * BLOCK + unit * 512 + i // 4 % 2 * 128 + i // 8 % 32 * 4 + i % 4
    from_scales = block_of_four * 32 + of_four // 16 % 8 * 4 + of_four % 4
    held, scaled = (), ()
    at = moved(unit, 0, INWARD, STEPS, UNITS, EVEN) * 512
    for p in gl.static_range(PAIRS):
        for h in gl.static_range(2):
            held = held + (load_codes(codes + at, from_codes + (p * between * BLOCK + h * 256)),)
    for g in gl.static_range(GROUPS):
        at = group_at(of_unit, 0, g, INWARD, STEPS, UNITS, EVEN, GROUP) * scale_group
        for p in gl.static_range(PAIRS):
            scaled = scaled + (load_scales(scales, zeros, at, from_scales + p * between * 32, ZEROS),)
    if AHEAD > 0:
        fetch(codes + block_of_lane * BLOCK, between * BLOCK, unit_of_lane, end, PAIRS, INWARD, AHEAD, LANES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    sums, from_x = (), ()
    for n in gl.static_range(TILES):  # rows beyond the last: any
        from_x = from_x + (gl.minimum(row + n * 8 + i // 32 % 8, rows - 1) * INPUTS + unit * UNIT + i % 32,)
    for _ in gl.static_range(PAIRS * TILES):
        sums = sums + (gl.full([WARPS * 256], 0.0, gl.float32, L),)
    for step in range(STEPS):
        here, then = moved(unit, step, INWARD, STEPS, UNITS, EVEN), moved(unit, step + 1, INWARD, STEPS, UNITS, EVEN)
        made, total = (), ()
        for j in gl.static_range(4):
            some = ()
            for n in gl.static_range(TILES):
                some = some + (gl.load(x + (here * UNIT + j * 32) + from_x[n]),)
            before, made = made, ()
            for p in gl.static_range(PAIRS):
                made = made + products(
                    held[2 * p + j // 2], some, before[p * TILES : p * TILES + TILES], TILES, j % 2, j % PER == 0, KIND
                )
            total = totals(some, total, TILES, j % PER == 0, KIND)
            if j % 2 == 1:  # these codes have been used: the next ones come in their place
                for p in gl.static_range(PAIRS):
                    next = load_codes(codes + then * 512, from_codes + (p * between * BLOCK + j // 2 * 256))
                    held = held[: 2 * p + j // 2] + (next,) + held[2 * p + j // 2 + 1 :]
                if ORDERED:
                    stay()
            if (j + 1) % PER == 0:
                at = group_at(of_unit, step + 1, j // PER, INWARD, STEPS, UNITS, EVEN, GROUP) * scale_group
                before, sums = sums, ()
                for p in gl.static_range(PAIRS):
                    scale, low = scale_and_zero(scaled[j // PER * PAIRS + p], ZEROS, HALF_SCALE, BEYOND)
                    if not EVEN:
                        scale = gl.where(of_unit + step * INWARD < end, scale, 0.0)
                    scale, low = both(scale, WARPS * 256, L), both(low, WARPS * 256, L)
                    for n in gl.static_range(TILES):
                        less = gl.fma(low, total[n], made[p * TILES + n])
                        sums = sums + (gl.fma(scale, less, before[p * TILES + n]),)
                    next = load_scales(scales, zeros, at, from_scales + p * between * 32, ZEROS)
                    scaled = scaled[: j // PER * PAIRS + p] + (next,) + scaled[j // PER * PAIRS + p + 1 :]
    first = gl.program_id(0) * (ACROSS * 32 * own)
    for n in gl.static_range(TILES):
        if GATED:
            gate = finished(sums[n], first, 32, outputs, split, gain, bias, INWARD, GAIN, BIASED)
            up = finished(sums[TILES + n], outputs + first, 32, 2 * outputs, split, gain, bias, INWARD, GAIN, BIASED)
            gate = rounded(activated(rounded(gate, out), SILU), out) * rounded(up, out)
            put(gate, first, 32, row + n * 8, out, rows, outputs, out_stride, split)
        else:
            for p in gl.static_range(PAIRS):
                sum = finished(
                    sums[p * TILES + n], first + p * 32, PAIRS * 32, outputs, split, gain, bias, INWARD, GAIN, BIASED
                )
                put(sum, first + p * 32, PAIRS * 32, row + n * 8, out, rows, outputs, out_stride, split)
