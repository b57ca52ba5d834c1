"""Codes of quantised weights as numbers, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

KINDS = {"fp8": 0, "int8": 1, "int4": 2, "fp4": 3}
FP8, INT8, INT4, FP4 = (tl.constexpr(kind) for kind in KINDS.values())

# Four codes at a time: prmt spreads bytes to the halves of two registers, then the bits of a bfloat16 are put together.
# e4m3's exponent is a bfloat16's but for a factor of 2^120.
FP8_ASM = tl.constexpr("""
{
.reg .b32 a, b, s, t, f, c;
mov.b32 f, 0x7b807b80;
mov.b32 c, 0x80008000;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
and.b32 s, a, 0x7f007f00;
and.b32 t, b, 0x7f007f00;
shr.b32 s, s, 4;
shr.b32 t, t, 4;
lop3.b32 a, a, 0x80008000, s, 0xea;
lop3.b32 b, b, 0x80008000, t, 0xea;
fma.rn.bf16x2 $0, a, f, c;
fma.rn.bf16x2 $1, b, f, c;
}
""")
# 128 + the low seven bits, less 128 or, for a negative number, 256: the sign bit is the last of that exponent.
INT8_ASM = tl.constexpr("""
{
.reg .b32 a, b, s, t, f;
mov.b32 f, 0xbf80bf80;
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
lop3.b32 s, a, 0x00800080, 0x43004300, 0xea;
lop3.b32 t, b, 0x00800080, 0x43004300, 0xea;
lop3.b32 a, a, 0x007f007f, 0x43004300, 0xea;
lop3.b32 b, b, 0x007f007f, 0x43004300, 0xea;
fma.rn.bf16x2 $0, s, f, a;
fma.rn.bf16x2 $1, t, f, b;
}
""")
# 128 + the code, less 136; or plus a number for each half, that of a zero: -(128 + zero).
_INT4 = """
{
.reg .b32 a, b, s, t, f, c;
mov.b32 f, 0x3f803f80;
mov.b32 c, 0xc308c308;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shr.b32 s, a, 4;
shr.b32 t, b, 4;
lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
lop3.b32 s, s, 0x000f000f, 0x43004300, 0xea;
lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $0, a, f, %s;
fma.rn.bf16x2 $1, b, f, %s;
fma.rn.bf16x2 $2, s, f, %s;
fma.rn.bf16x2 $3, t, f, %s;
}
"""
INT4_ASM = tl.constexpr(_INT4 % ("c", "c", "c", "c"))
INT4_ZERO_ASM = tl.constexpr(_INT4 % ("$5", "$6", "$7", "$8"))
# e2m1's exponent is a bfloat16's but for a factor of 2^126.
_FP4 = """
shl.b32 s, {0}, {1};
shl.b32 t, {0}, {2};
and.b32 s, s, 0x01c001c0;
lop3.b32 u, t, 0x80008000, s, 0xea;
fma.rn.bf16x2 ${3}, u, f, c;"""
FP4_ASM = tl.constexpr(
    """
{
.reg .b32 a, b, s, t, u, f, c;
mov.b32 f, 0x7e807e80;
mov.b32 c, 0x80008000;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;"""
    + "".join(_FP4.format(*one) for one in (("a", 6, 12, 0), ("b", 6, 12, 1), ("a", 2, 8, 2), ("b", 2, 8, 3)))
    + "\n}\n"
)


@triton.jit
def whole_codes(raw, dtype: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    """Codes of a byte each, as numbers."""
    if ASM and KIND == FP8:
        made = tl.inline_asm_elementwise(FP8_ASM, "=r,=r,r", [raw], tl.bfloat16, True, 4)
    elif ASM:
        made = tl.inline_asm_elementwise(INT8_ASM, "=r,=r,r", [raw], tl.bfloat16, True, 4)
    elif KIND == FP8:
        made = raw.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        made = raw.to(tl.int8, bitcast=True).to(dtype)
    return made


@triton.jit
def half_codes(raw, dtype: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    """Codes of half a byte each, as numbers: the low halves, the high halves."""
    if ASM and KIND == INT4:
        pair = tl.inline_asm_elementwise(INT4_ASM, "=r,=r,=r,=r,r", [raw], (tl.bfloat16, tl.bfloat16), True, 4)
    elif ASM:
        pair = tl.inline_asm_elementwise(FP4_ASM, "=r,=r,=r,=r,r", [raw], (tl.bfloat16, tl.bfloat16), True, 4)
    else:
        pair = _half(raw & 15, dtype, KIND), _half(raw >> 4, dtype, KIND)
    return pair


@triton.jit
def half_codes_less(raw, low, high, dtype: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    """The same less zeros, whole numbers below 128 that are broadcast to the codes."""
    if ASM and KIND == INT4:
        low, high = (-128.0 - low).to(tl.bfloat16), (-128.0 - high).to(tl.bfloat16)
        pair = tl.inline_asm_elementwise(
            INT4_ZERO_ASM, "=r,=r,=r,=r,r,r,r,r,r", [raw, low, high], (tl.bfloat16, tl.bfloat16), True, 4
        )
    else:
        one, two = half_codes(raw, tl.float32, KIND, False)
        MIDDLE: tl.constexpr = 8.0 if KIND == INT4 else 0.0  # is subtracted already
        pair = (one - (low - MIDDLE)).to(dtype), (two - (high - MIDDLE)).to(dtype)
    return pair


@triton.jit
def _half(code, dtype: tl.constexpr, KIND: tl.constexpr):
    if KIND == INT4:
        made = (code.to(tl.int32) - 8).to(dtype)
    else:
        size, power = (code & 1).to(tl.float32), ((code >> 1) & 3).to(tl.float32)
        one = tl.where(power == 0.0, size * 0.5, (1.0 + size * 0.5) * tl.exp2(power - 1.0))
        made = tl.where(code >= 8, -one, one).to(dtype)
    return made


LARGEST = tl.constexpr(448.0)  # code of fp8


@triton.jit
def scale_of(largest):
    """Of fp8 codes, by which the largest number becomes the largest code; see kv_fp8.py."""
    return largest.to(tl.float32) / LARGEST


@triton.jit
def coded(x, scale):
    """Numbers as fp8 codes."""
    return (x.to(tl.float32) / tl.where(scale > 0.0, scale, 1.0)).to(tl.float8e4nv)
