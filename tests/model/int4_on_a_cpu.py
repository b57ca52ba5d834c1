"""Runs the kernel of int4.py as it is compiled for sm_90, by ptx.py; prints one JSON line of how far off it is.

Run by test_fragments.py in a process of its own, since kernels are either interpreted or compiled.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource

from semspec.model.kernels import reference
from semspec.model.kernels.int4 import Int4Config, launched
from semspec.model.kernels.int4_kernel import int4_product
from semspec.model.kernels.scale_order import put_in_order
from semspec.model.quantised import QuantisedLinear
from tests.model.ptx import launch

NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", int: "i32"}
BF16, F16 = torch.bfloat16, torch.float16


def compiled(arguments: dict[str, Any], constants: dict[str, Any], cut: Int4Config) -> Any:
    names = int4_product.arg_names
    assert set(names) == set(arguments) | set(constants), set(names) ^ (set(arguments) | set(constants))
    types = {n: NAMES[v.dtype if isinstance(v, Tensor) else int] for n, v in arguments.items()}
    aligned = [n for n, v in arguments.items() if isinstance(v, Tensor) or (n != "rows" and v % 16 == 0)]
    source = GluonASTSource(
        int4_product,
        {n: types.get(n, "constexpr") for n in names},
        {(names.index(n),): v for n, v in constants.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": cut.warps} | ({"maxnreg": cut.registers} if cut.registers else {})
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def off(
    rows: int, size: tuple[int, int], group: int, cut: Int4Config, zeros: str = "", gain: bool = False,
    bias: bool = False, activation: str | None = None, dtype: torch.dtype = BF16, scales_in: torch.dtype = BF16,
) -> float:  # fmt: skip
    """Of the size of what float64 gives."""
    torch.manual_seed(rows + sum(size))
    outputs, inputs = size
    groups = (outputs, max(1, inputs // group))
    scales = (torch.rand(groups) + 0.5) / 8 * inputs**-0.5
    chosen = {"": None, "whole": torch.randint(0, 16, groups).float(), "any": (torch.rand(groups) * 15).half()}[zeros]
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    linear = QuantisedLinear("int4", codes, scales.to(scales_in) if zeros == "whole" else scales, (1, group), chosen)
    linear.gain = torch.rand(outputs) + 0.5 if gain else None
    linear.bias = torch.randn(outputs).to(dtype) if bias else None
    exact, x = linear.dequantised(torch.float64), torch.randn(rows, inputs).to(dtype)
    linear.set_fragments()
    if group < inputs:
        put_in_order(linear)
    want = reference.product(x.double(), exact, None if linear.bias is None else linear.bias.double())
    if activation is not None:
        want = reference.act_and_mul(want, activation)
    out = torch.full((cut.splits, *want.shape), float("nan"), dtype=dtype if cut.splits == 1 else torch.float32)
    arguments, constants, grid = launched(x, linear, activation, out.squeeze(0) if cut.splits == 1 else out, cut)
    in_memory = {
        n: v.t() if isinstance(v, Tensor) and v.dim() == 2 and v.stride(0) == 1 else v for n, v in arguments.items()
    }
    in_memory = {n: v.contiguous() if isinstance(v, Tensor) else v for n, v in in_memory.items()} | {"out": out}
    made = compiled(in_memory, constants | {"AHEAD": 1, "PDL": True}, cut)
    launch(made.asm["ptx"], [*in_memory.values(), 0, 0], grid, 32 * cut.warps)
    return float((out.double().sum(0) - want).norm() / want.norm())


def main() -> None:
    print(
        json.dumps(
            {
                "one warp": off(3, (128, 256), 128, Int4Config(1, 1, 1, 1), "whole"),
                "gated": off(9, (128, 256), 128, Int4Config(2, 2, 1, 2), "whole", activation="silu"),
                "small groups": off(9, (128, 256), 32, Int4Config(2, 1, 1, 1), "whole", True, True),
                "any zeros, in uneven parts": off(9, (256, 640), 64, Int4Config(2, 1, 2, 2, 2), "any", bias=True),
                "a middle": off(20, (128, 384), 32, Int4Config(4, 1, 1, 4)),
                "one scale": off(40, (128, 256), 256, Int4Config(4, 1, 1, 1), gain=True),
                "wide groups": off(
                    5, (128, 512), 256, Int4Config(1, 2, 2, 2), "whole", True, True, "gelu_pytorch_tanh"
                ),
                "float16": off(5, (128, 256), 64, Int4Config(1, 2, 2, 1), "whole", dtype=F16, scales_in=F16),
                "idle warps": off(17, (384, 256), 128, Int4Config(2, 2, 4, 1, 1, 168), "whole", bias=True),
                "shared outputs in parts": off(9, (256, 640), 128, Int4Config(2, 2, 2, 2, 2), "whole"),
                "gated, small groups": off(3, (128, 1024), 32, Int4Config(1, 2, 1, 2), "whole", activation="silu"),
                "idle warps, gated": off(5, (384, 256), 128, Int4Config(1, 2, 4, 1), "whole", True, True, "silu"),
            }
        )
    )


if __name__ == "__main__":
    main()
