"""What must hold on a GPU of weights of four bits in the order of fragments.py (`KernelFlags.int4_fragments`)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bench.gpu_checks import Seeded, course, no_rougher
from bench.gpu_checks_kernels import TOLERANCE, check, kernels, near
from bench.gpu_checks_quantised import CHECKS as CHECKS
from bench.gpu_checks_quantised import noise, products, quantised_runner
from semspec.model.kernels import DEFAULT_FLAGS, reference

# outputs and inputs that share a scale (0: all), with zeros, with gains
LAYOUTS = [
    (1, 128, True, False), (1, 128, False, True), (1, 64, True, True), (1, 32, True, False), (1, 64, False, False),
    (1, 0, False, False), (1, 256, True, False),
]  # fmt: skip
SIZES = ((512, 256), (1536, 8960), (2048, 1536), (4352, 5120))
ROWS = (1, 7, 8, 9, 16, 17, 32, 33, 64, 72, 128)


def fragments_check(layout: tuple[int, int, bool, bool], device: torch.device) -> None:
    """Every number of rows with some matrix, and every matrix with some numbers of rows."""
    made = kernels(device)
    if made.prepare is None:
        return
    for i, size in enumerate(SIZES):
        linear = noise("int4", size, layout, device)
        exact = linear.dequantised(torch.float64)
        made.prepare(linear, fragments=True)
        assert linear.fragments, f"{size}, blocks of {layout}"
        near(linear.dequantised(torch.float64), exact, 1e-12, "reordered")
        for rows in ROWS[i % 3 :: 3]:
            for dtype in (torch.bfloat16, torch.float16) if i < 2 else (torch.bfloat16,):
                products(linear, exact, torch.randn(rows, size[1], device=device, dtype=dtype))
        x = torch.randn(9, size[1], device=device)
        assert linear.fused(made, x, False, None) is None, "float32 has no kernel"
        near(linear(x), reference.product(x.double(), exact, linear.bias.double()), 1e-4, "float32")  # type: ignore[union-attr]


for number, layout in enumerate(LAYOUTS):
    CHECKS[f"products with weights in fragments, layout {number}"] = lambda device, one=layout: fragments_check(
        one, device
    )


@check
def products_in_fragments_in_a_graph(device: torch.device) -> None:
    """The same bits as outside, for other rows in the same memory, and from run to run; zeros that are any numbers, and
    matrices that keep the other order."""
    made = kernels(device)
    if made.prepare is None or made.quantised_product is None:
        return
    for outputs in (1000, 1001):  # no whole number of blocks
        odd = noise("int4", (outputs, 512), LAYOUTS[0], device)
        exact = odd.dequantised(torch.float64)
        made.prepare(odd, fragments=True)
        assert not odd.fragments
        x, bias = torch.randn(9, 512, device=device, dtype=torch.bfloat16), odd.bias
        assert bias is not None
        ours = made.quantised_product(x, replace(odd, bias=bias.to(x.dtype)))
        near(ours, reference.product(x.double(), exact, bias.double()), TOLERANCE[x.dtype], f"{outputs} outputs")
    linear = noise("int4", (5120, 5120), LAYOUTS[0], device)
    assert linear.zeros is not None
    linear.zeros, linear.bias = linear.zeros + 0.3, None
    exact = linear.dequantised(torch.float64)
    made.prepare(linear, fragments=True)
    assert linear.fragments and linear.words is None
    for rows in (1, 9, 64):
        x = torch.randn(rows, 5120, device=device, dtype=torch.bfloat16)
        for parts in (False, True):
            made.quantised_product(x, linear, parts)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                ours = made.quantised_product(x, linear, parts)
            for _ in range(3):
                x.copy_(torch.randn_like(x))
                outside = made.quantised_product(x, linear, parts)
                for _ in range(50):
                    graph.replay()
                    assert torch.equal(ours, outside), f"{rows} rows"
            want = reference.product(x.double(), exact, None)
            near(ours.sum(0) if ours.dim() == 3 else ours, want, TOLERANCE[x.dtype], f"{rows} rows in a graph")


class Quiet(Seeded):
    """For wider matrices, whose sums are larger."""

    def read(self, name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        return super().read(name, shape, device, dtype) * (1.0 if "norm" in name else 0.4)


@check
def logits_of_qwen2_in_int4_in_fragments(device: torch.device) -> None:
    """Its matrices whole blocks. In half precision, no farther from float32 on a CPU than operations one by one."""
    sizes = {"hidden_size": 256, "intermediate_size": 384}
    cpu, half = torch.device("cpu"), torch.bfloat16 if device.type == "cuda" else torch.float16
    flags = replace(DEFAULT_FLAGS, int4_fragments=True)
    exact = course(quantised_runner("qwen2", "int4", cpu, torch.float32, True, source=Quiet(), **sizes))
    rough = course(quantised_runner("qwen2", "int4", device, half, True, source=Quiet(), **sizes))
    one = quantised_runner("qwen2", "int4", device, half, False, flags, Quiet(), **sizes)
    matrices = [
        m for layer in one.transformer.layers for m in (layer.qkv, layer.out, layer.ffn.gate_up, layer.ffn.down)
    ]  # type: ignore[union-attr]
    placed = [m.fragments for m in matrices]
    assert all(one == (device.type == "cuda") for one in placed), f"in fragments: {placed}"  # type: ignore[union-attr]
    no_rougher(course(one), rough, exact, "in fragments")
