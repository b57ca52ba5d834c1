"""Quantised matrices against plain Python, and every way they are cut and joined."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from semspec.errors import ModelError
from semspec.model import quantised
from semspec.model.kernels import reference_kernels
from semspec.model.linear import evenly_spaced
from semspec.model.quantised import FP4, Kind, QuantisedLinear, join, pack_nibbles, quantise, stack

KINDS: list[Kind] = ["fp8", "int8", "int4", "fp4"]


def random(kind: Kind, outputs: int, inputs: int, block: tuple[int, int], seed: int = 0, full: bool = True):
    """Any codes, scales and zeros, and for each weight what it should be."""
    g = torch.Generator().manual_seed(seed)
    sizes = {"fp8": None, "int8": (-128, 128), "int4": (0, 16), "fp4": (0, 16)}[kind]
    if sizes is None:
        plain = (torch.randn(outputs, inputs, generator=g) * 8).to(torch.float8_e4m3fn)
    else:
        plain = torch.randint(*sizes, (outputs, inputs), generator=g)
    blocks = (math.ceil(outputs / block[0]), math.ceil(inputs / block[1]))
    scales = torch.rand(blocks, generator=g).add_(0.5).bfloat16()
    zeros = torch.randint(0, 9, blocks, generator=g).bfloat16() if full else None
    gain = torch.rand(outputs, generator=g) if full else None
    codes = plain if kind == "fp8" else plain.to(torch.int8) if kind == "int8" else pack_nibbles(plain.to(torch.uint8))
    values = plain.float().tolist()
    want = torch.empty(outputs, inputs, dtype=torch.float64)
    for i in range(outputs):
        for j in range(inputs):
            at = i // block[0], j // block[1]
            code = values[i][j]
            if kind == "fp4":
                code = -FP4[int(code) - 8] if code >= 8 else FP4[int(code)]
            zero = float(zeros[at]) if zeros is not None else 8 if kind == "int4" else 0
            want[i, j] = (code - zero) * float(scales[at]) * (float(gain[i]) if gain is not None else 1)
    return QuantisedLinear(kind, codes, scales, block, zeros, gain), want


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [(1, 12), (1, 4), (4, 8)])
@pytest.mark.parametrize("full", [True, False])
def test_weights_are_what_the_formula_says(kind: Kind, block: tuple[int, int], full: bool) -> None:
    linear, want = random(kind, 6, 12, block, full=full)
    assert linear.size == (6, 12)
    assert close(linear.dequantised(), want)
    assert close(linear.sample, evenly_spaced(want))
    x = torch.randn(3, 12)
    assert torch.allclose(linear(x).double(), x.double() @ want.t(), atol=1e-4)


def test_a_sample_of_a_large_matrix_is_of_the_same_places_as_that_of_plain_weights() -> None:
    linear, _ = random("int4", 150, 60, (1, 12))
    assert len(linear.sample) == 4096
    assert torch.equal(linear.sample, evenly_spaced(linear.dequantised()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(8, 4, 4), (6, 3, 3)], ids=["aligned", "blocks cut by a border"])
def test_joined_matrices_are_their_parts_one_after_the_other(kind: Kind, sizes: tuple[int, ...]) -> None:
    made = [random(kind, n, 16, (4, 8), seed=n, full=i != 1 or kind != "fp8") for i, n in enumerate(sizes)]
    parts = [linear for linear, _ in made]
    if kind == "fp8":
        assert join(parts) is None  # one has no zeros: another layout
        made = [random(kind, n, 16, (4, 8), full=False) for n in sizes]
        made[1][0].gain = torch.full((sizes[1],), 3.0)  # no gain is a gain of one
        made[1] = (made[1][0], made[1][1] * 3)
        parts = [linear for linear, _ in made]
    bias = torch.randn(sum(sizes))
    whole = join(parts, bias)
    assert whole is not None and whole.bias is bias
    assert close(whole.dequantised(), torch.cat([want for _, want in made]))


@pytest.mark.parametrize("outputs", [8, 12, 6])
def test_halves_are_gate_and_up(outputs: int) -> None:
    linear, want = random("int8", outputs, 8, (4, 4))
    linear.bias = torch.randn(outputs)
    gate, up = linear.halves
    assert close(torch.cat([gate.dequantised(), up.dequantised()]), want)
    assert gate.bias is not None and torch.equal(gate.bias, linear.bias[: outputs // 2])


@pytest.mark.parametrize("kind", KINDS)
def test_stacked_experts_share_their_memory(kind: Kind) -> None:
    made = [random(kind, 4, 8, (2, 4), seed=e) for e in range(3)]
    whole = stack([linear for linear, _ in made])
    assert close(whole.dequantised(), torch.stack([want for _, want in made]))
    whole.scales[1] = 0
    assert not made[1][0].dequantised().any()
    assert close(made[2][0].dequantised(), made[2][1])


@pytest.mark.parametrize(("kind", "error"), [("fp8", 2**-4), ("int8", 1 / 254), ("int4", 1 / 15)])
def test_quantising_rounds_to_the_nearest_code(kind: Kind, error: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(10, 96) * torch.logspace(-3, 1, 10)[:, None]
    linear = quantise(weight, kind)
    assert linear.block == ((1, 32) if kind == "int4" else (1, 96))
    parts = weight.unflatten(1, (-1, linear.block[1]))
    reach = (parts.amax(-1) - parts.amin(-1)) if kind == "int4" else parts.abs().amax(-1)
    off = (linear.dequantised() - weight).unflatten(1, (-1, linear.block[1])).abs()
    assert bool((off <= error * reach[..., None] * 1.01).all())
    assert torch.equal(linear.sample, evenly_spaced(weight))  # probes of the plain model fit
    assert linear.codes.nbytes * (8 if kind == "int4" else 4) == weight.nbytes


def test_int4_keeps_a_grid_of_sixteen_values() -> None:
    """So weights that were read from a file of four-bit groups stay as they are."""
    grid = torch.randint(0, 16, (8, 64)) * 0.25 - 1.5
    grid[:, ::32], grid[:, 1::32] = -1.5, 2.25
    torch.testing.assert_close(quantise(grid, "int4", group=32).dequantised(), grid, atol=0.01, rtol=0)


def test_a_large_matrix_is_quantised_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(11, 64)
    for kind in ("fp8", "int8", "int4"):
        whole = quantise(weight, kind)  # type: ignore[arg-type]
        monkeypatch.setattr(quantised, "AT_A_TIME", 200)
        assert torch.equal(quantise(weight, kind).dequantised(), whole.dequantised())  # type: ignore[arg-type]
        monkeypatch.undo()


def test_quantising_takes_weights_that_are_all_zero_or_all_of_one_sign() -> None:
    weight = torch.stack([torch.zeros(32), torch.full((32,), 0.7), torch.full((32,), -0.7)])
    for kind in ("fp8", "int8", "int4"):
        assert torch.allclose(quantise(weight, kind).dequantised(), weight, rtol=0.01)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="33 inputs"):
        quantise(torch.ones(2, 33), "int4")


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_kernel_multiplies_like_the_plain_product(kind: Kind) -> None:
    linear, want = random(kind, 8, 16, (2, 8))
    linear.bias = torch.randn(8, dtype=torch.float64)
    x = torch.randn(3, 16, dtype=torch.float64)
    plain = x @ want.t() + linear.bias
    kernels = reference_kernels()
    made = linear.fused(kernels, x, False, None)
    assert made is not None and torch.allclose(made, plain, atol=1e-5)
    parts = linear.fused(kernels, x, True, None)
    assert parts is not None and parts.dim() == 3 and torch.allclose(parts.sum(0), plain, atol=1e-5)
    gate, up = plain.chunk(2, -1)
    active = linear.fused(kernels, x, False, "silu")
    assert active is not None and torch.allclose(active, torch.nn.functional.silu(gate) * up, atol=1e-4)
