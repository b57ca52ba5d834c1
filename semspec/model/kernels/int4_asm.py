"""What int4_kernel.py says in PTX: products of fragments, whose codes become numbers on the way."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def product_asm(tiles: int, half: int, first: bool, kind: str) -> tuple[str, str]:
    """Instructions, and which registers they take: the product of 32 outputs and 32 inputs (one half of the codes
    given) with `tiles` times 8 rows of x, added to sums, or the first of sums."""
    made, words = 8 * tiles, 8 * tiles + 8
    magic = "0x43004300" if kind == "bf16" else "0x64006400"
    lines = ["{", ".reg .b32 a<4>, s;", ".reg .f32 z;", "mov.f32 z, 0f00000000;"]
    for t in range(2):
        for step in range(2):
            word = f"${made + 4 * t + 2 * half + step}"
            for i in range(4):
                if i:
                    lines.append(f"shr.b32 s, {word}, {4 * i};")
                lines.append(f"lop3.b32 a{i}, {'s' if i else word}, 0x000f000f, {magic}, 0xea;")
            for n in range(tiles):
                target = ", ".join(f"${8 * n + 4 * t + i}" for i in range(4))
                before = ", ".join(f"${words + 4 * tiles + 8 * n + 4 * t + i}" for i in range(4))
                start = target if step else "z, z, z, z" if first else before
                x = f"${words + 4 * n + 2 * step}, ${words + 4 * n + 2 * step + 1}"
                lines.append(
                    f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{target}}}, "
                    f"{{a0, a1, a2, a3}}, {{{x}}}, {{{start}}};"
                )
    taken = ["=&f"] * made + ["r"] * (8 + 4 * tiles) + ["f"] * (0 if first else made)
    return "\n".join([*lines, "}"]), ",".join(taken)


@gluon.constexpr_function
def total_asm(tiles: int, first: bool, kind: str) -> tuple[str, str]:
    """The same with ones in place of 16 outputs: each column's sum, where its products are in both fragments."""
    made, one = 8 * tiles, "0x3f803f80" if kind == "bf16" else "0x3c003c00"
    lines = ["{", ".reg .b32 a;", ".reg .f32 z;", "mov.f32 z, 0f00000000;", f"mov.b32 a, {one};"]
    for n in range(tiles):
        target = ", ".join(f"${8 * n + i}" for i in range(4))
        before = ", ".join(f"${made + 4 * tiles + 8 * n + i}" for i in range(4))
        for step in range(2):
            x = f"${made + 4 * n + 2 * step}, ${made + 4 * n + 2 * step + 1}"
            start = target if step else "z, z, z, z" if first else before
            lines.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{target}}}, {{a, a, a, a}}, "
                f"{{{x}}}, {{{start}}};"
            )
        lines += [f"mov.f32 ${8 * n + 4 + i}, ${8 * n + i};" for i in range(4)]
    return "\n".join([*lines, "}"]), ",".join(["=&f"] * made + ["r"] * (4 * tiles) + ["f"] * (0 if first else made))


@gluon.constexpr_function
def floats(number: int) -> tuple[gl.dtype, ...]:
    return (gl.float32,) * number
