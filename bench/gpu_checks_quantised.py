"""What must hold on a GPU of quantised weights."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from bench.gpu_checks import Seeded, course, no_rougher
from bench.gpu_checks_grouped import CHECKS
from bench.gpu_checks_kernels import TOLERANCE, check, kernels, near
from semspec.model import ModelRunner
from semspec.model.config import Shape
from semspec.model.graph_runner import GraphRunner
from semspec.model.graphs import GraphCache, NoGraphs
from semspec.model.kernels import DEFAULT_FLAGS, KernelFlags, reference
from semspec.model.quantised import Kind, QuantisedLinear, quantise, stack
from semspec.model.transformer import Transformer
from tests.checkpoints import FAMILIES

__all__ = ["CHECKS"]

# outputs and inputs that share a scale (0: all), with zeros, with gains
LAYOUTS: dict[Kind, list[tuple[int, int, bool, bool]]] = {
    "fp8": [(1, 0, False, False), (128, 128, False, False), (1, 32, False, True)],
    "int8": [(1, 0, False, True), (1, 128, False, False), (1, 0, True, False), (1, 64, True, False)],
    "int4": [(1, 128, True, False), (1, 128, False, True), (1, 32, True, False), (1, 64, False, False)],
    "fp4": [(1, 16, False, True), (1, 32, False, False)],
}


def noise(
    kind: Kind, size: tuple[int, int], layout: tuple[int, int, bool, bool], device: torch.device
) -> QuantisedLinear:
    (outputs, inputs), (rows, columns, zeros, gains) = size, layout
    columns = columns or inputs
    halves = 2 if kind in ("int4", "fp4") else 1
    codes = torch.randint(0, 256, (outputs, inputs // halves), device=device, dtype=torch.uint8)
    if kind == "fp8":
        codes = torch.where(codes & 0x7F == 0x7F, codes ^ 1, codes).view(torch.float8_e4m3fn)  # no NaN
    elif kind == "int8":
        codes = codes.view(torch.int8)
    largest = {"fp8": 448, "int8": 127, "int4": 8, "fp4": 6}[kind]
    groups = (-(-outputs // rows), -(-inputs // columns))
    scales = (torch.rand(groups, device=device) + 0.5) / largest * inputs**-0.5
    return QuantisedLinear(
        kind,
        codes,
        scales if not zeros or columns == inputs else scales.bfloat16() if columns == 128 else scales.half(),
        (rows, columns),
        torch.randint(0, 16, groups, device=device).float() if zeros else None,
        torch.rand(outputs, device=device) + 0.5 if gains else None,
        torch.randn(outputs, device=device),
    )


def products_check(kind: Kind, layout: tuple[int, int, bool, bool], device: torch.device) -> None:
    made, sizes = kernels(device), ((512, 256), (1536, 8960), (2048, 1536), (4352, 5120))
    types = (torch.bfloat16, torch.float32, torch.float16) if device.type == "cuda" else (torch.float32,)
    for i, size in enumerate(sizes if device.type == "cuda" else sizes[:1]):
        linear = noise(kind, size, layout, device)
        exact = linear.dequantised(torch.float64)
        assert made.prepare is None or made.prepare(linear) is None
        near(linear.dequantised(torch.float64), exact, 1e-12, f"{kind}, reordered")
        for dtype in types:
            every = (1, 9, 17, 33, 72, 128)[i % 2 :: 2]
            for rows in every if dtype is types[0] else every[i // 2 :: 2]:  # to compile them is what takes time
                products(linear, exact, torch.randn(rows, size[1], device=device, dtype=dtype))


for kind, layouts in LAYOUTS.items():
    for number, layout in enumerate(layouts):
        CHECKS[f"products with weights in {kind}, layout {number}"] = lambda device, one=kind, other=layout: (
            products_check(one, other, device)
        )


def products(linear: QuantisedLinear, exact: Tensor, x: Tensor) -> None:
    what = f"{linear.kind}, {linear.size}, blocks of {linear.block}, {len(x)} rows of {x.dtype}"
    # Weights that are rounded to the type of activations before they are summed are off by as much as that type is.
    most = TOLERANCE[x.dtype] * (2 if linear.block[1] < 64 else 1)
    own = replace(linear, bias=None if linear.bias is None else linear.bias.to(x.dtype))
    assert own.bias is not None
    want = reference.product(x.double(), exact, own.bias.double())
    near(own(x), want, 3 * most, f"{what}, as floats")
    if linear.kind in ("int4", "fp4") and x.dtype == torch.float32 and len(x) > 64:
        assert kernels(x.device).quantised_product(x, own) is None  # type: ignore[misc]
        return
    for parts in (False, True):
        ours = kernels(x.device).quantised_product(x, own, parts)  # type: ignore[misc]
        assert ours is not None, what
        near(ours.sum(0) if ours.dim() == 3 else ours, want, most, what)
    ours = kernels(x.device).quantised_product(x, own, False, "silu")  # type: ignore[misc]
    assert ours is not None
    near(ours, reference.act_and_mul(want, "silu"), 3 * most, f"{what}, with its activation")


def stacked(
    kind: Kind, number: int, size: tuple[int, int], layout: tuple[int, int, bool, bool], device: torch.device
) -> QuantisedLinear:
    """Experts in the order that kernels want."""
    own = [replace(noise(kind, size, layout, device), bias=None) for _ in range(number)]
    prepare = kernels(device).prepare
    for expert in own if prepare is not None else []:
        prepare(expert, expert=True)  # type: ignore[misc]
    return stack(own)


@check
def quantised_experts_of_a_pass(device: torch.device) -> None:
    """Up to more tokens than a tile has; what nobody picked is not a number."""
    large = device.type == "cuda"
    number, chosen, width, hidden = (32, 4, 2048, 768) if large else (6, 2, 256, 256)
    dtype = torch.bfloat16 if large else torch.float32
    for kind, layout in [*((kind, layouts[0]) for kind, layouts in LAYOUTS.items()), ("fp8", LAYOUTS["fp8"][1])]:
        gate_up = stacked(kind, number, (2 * hidden, width), layout, device)
        down = stacked(kind, number, (width, hidden), layout, device)
        exact = [experts.dequantised(torch.float64) for experts in (gate_up, down)]
        gate_up.scales[-1] = float("nan")
        for rows in (9, 100):
            x = torch.randn(rows, width, device=device, dtype=dtype)
            logits = torch.randn(rows, number, device=device)
            logits[:, 0], logits[:, -1] = 9.0, -99.0
            rest = ("silu", chosen, True, torch.tensor([rows], device=device))
            want = reference.fused_moe(x.double(), logits.double(), *exact, *rest)
            ours = kernels(device).fused_moe(x, logits, gate_up, down, *rest)
            near(ours, want, 3 * TOLERANCE[dtype], f"{kind}, blocks of {layout[:2]}, {rows} rows of {dtype}")


def quantised_runner(
    family: str, kind: Kind, device: torch.device, dtype: torch.dtype, plain: bool, flags: KernelFlags = DEFAULT_FLAGS,
    source: Seeded | None = None, **sizes: int,
) -> ModelRunner:  # fmt: skip
    """Quantised on a CPU, so that the same codes are everywhere. `sizes` are those that differ from the family's."""
    source, config = source or Seeded(), copy.deepcopy(FAMILIES[family][1])
    config.update(sizes)
    transformer = Transformer(Shape.of(config), source, torch.device("cpu"), torch.float32)
    placed = Transformer(Shape.of(config), source, device, dtype)

    def moved(linear: object) -> QuantisedLinear:
        one = quantise(linear.weight, kind, linear.bias)  # type: ignore[attr-defined]
        rest = {n: None if (t := getattr(one, n)) is None else t.to(device) for n in ("scales", "zeros", "original")}
        bias = None if one.bias is None else one.bias.to(device, dtype)
        return replace(one, codes=one.codes.to(device), bias=bias, **rest)

    for layer, source in zip(placed.layers, transformer.layers, strict=True):
        layer.qkv, layer.out = moved(source.qkv), moved(source.out)
        layer.ffn.gate_up, layer.ffn.down = moved(source.ffn.gate_up), moved(source.ffn.down)  # type: ignore[union-attr]
    placed.head = moved(transformer.head)
    made = ModelRunner(placed, 3, 512, graphs=False)  # weights have one order, which the flags choose
    launcher = NoGraphs() if device.type == "cpu" else GraphCache(device)
    graphs = None if plain else GraphRunner(placed, made.cache, kernels(device), launcher, flags)
    made.use(graphs)
    return made


def quantised_check(family: str, kind: Kind, device: torch.device) -> None:
    exact = course(quantised_runner(family, kind, torch.device("cpu"), torch.float32, True))
    for ours, theirs in zip(course(quantised_runner(family, kind, device, torch.float32, False)), exact, strict=True):
        near(ours, theirs, 1e-3, f"{kind}, float32")
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    mine, rough = (course(quantised_runner(family, kind, device, half, plain)) for plain in (False, True))
    no_rougher(mine, rough, exact, f"{kind}, {half}")


for family in ("qwen2", "qwen3", "gemma3"):
    for kind in ("fp8", "int8", "int4"):
        CHECKS[f"logits of {family} in {kind}"] = lambda device, one=family, other=kind: quantised_check(
            one, other, device
        )
