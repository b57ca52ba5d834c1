"""Triton's products with quantised weights against float64, over random layouts; without a GPU in its interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

from bench.gpu_checks_quantised import LAYOUTS, noise, products  # noqa: E402
from semspec.model.kernels import quantised, tiles  # noqa: E402
from semspec.model.kernels.dequantise import dequantise  # noqa: E402
from semspec.model.quantised import Kind, QuantisedLinear, quantise  # noqa: E402
from tests.interpreter import allow_new_numpy  # noqa: E402

allow_new_numpy()

few = settings(max_examples=14, phases=[Phase.generate])  # interpreted kernels are slow, and shrinking runs hundreds
H200 = tiles.Card(132, 227 * 1024, 90)


@few
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_products_equal_float64(monkeypatch_module: pytest.MonkeyPatch, data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    kind = data.draw(st.sampled_from(sorted(LAYOUTS)))
    layout = data.draw(st.sampled_from(LAYOUTS[kind]))
    inputs = data.draw(st.sampled_from([128, 256, 384, 160] if layout[1] in (0, 16, 32) else [128, 256, 640]))
    linear = noise(kind, (2 * data.draw(st.integers(8, 70)), inputs), layout, DEVICE)
    exact = linear.dequantised(torch.float64)
    quantised.prepare(linear)
    assert torch.equal(linear.dequantised(torch.float64), exact)
    torch.testing.assert_close(dequantise(linear, torch.float32).double(), exact, rtol=1e-6, atol=1e-9)
    rows = data.draw(st.sampled_from([1, 9, 17, 40, 72]))
    products(linear, exact, torch.randn(rows, inputs, device=DEVICE))


@pytest.fixture(scope="module")
def monkeypatch_module() -> pytest.MonkeyPatch:
    """On a CPU, the checks of a GPU take the Triton kernels too, interpreted."""
    import bench.gpu_checks_quantised as checks
    from semspec.model.kernels import triton_kernels

    patch = pytest.MonkeyPatch()
    patch.setattr(checks, "kernels", lambda device: triton_kernels())
    yield patch
    patch.undo()


@pytest.mark.parametrize(("kind", "layout"), [(kind, layout) for kind in sorted(LAYOUTS) for layout in LAYOUTS[kind]])
def test_every_layout(monkeypatch_module: pytest.MonkeyPatch, kind: Kind, layout: tuple[int, int, bool, bool]) -> None:
    linear = noise(kind, (32, 256), layout, DEVICE)
    exact = linear.dequantised(torch.float64)
    quantised.prepare(linear)
    products(linear, exact, torch.randn(3, 256, device=DEVICE))


@pytest.mark.parametrize("group", [32, 128])
def test_zeros_that_are_no_whole_numbers(monkeypatch_module: pytest.MonkeyPatch, group: int) -> None:
    linear = noise("int4", (48, 256), (1, group, True, False), DEVICE)
    assert linear.zeros is not None
    linear.zeros += 0.25
    exact = linear.dequantised(torch.float64)
    quantised.prepare(linear)
    assert linear.words is None
    torch.testing.assert_close(dequantise(linear, torch.float32).double(), exact, rtol=1e-6, atol=1e-9)
    products(linear, exact, torch.randn(9, 256, device=DEVICE))


def test_a_scale_and_a_zero_share_a_word() -> None:
    for group, dtype in ((128, torch.bfloat16), (32, torch.float16)):
        linear = noise("int4", (48, 256), (1, group, True, False), DEVICE)
        assert linear.zeros is not None and linear.scales.dtype == dtype
        before = linear.zeros.clone(), linear.scales.clone()
        quantised.prepare(linear)
        assert linear.words is not None and linear.words.shape == (256 // group, 48)
        assert torch.equal(linear.zeros.float(), before[0]) and torch.equal(linear.scales, before[1])
        assert linear.zeros.untyped_storage().data_ptr() == linear.scales.untyped_storage().data_ptr()


@pytest.mark.parametrize("fault", ["codes", "scales", "zeros"])
def test_a_planted_fault_is_found(monkeypatch_module: pytest.MonkeyPatch, fault: str) -> None:
    linear = noise("int4", (64, 256), (1, 128, True, False), DEVICE)
    exact = linear.dequantised(torch.float64)
    quantised.prepare(linear)
    tensor = getattr(linear, fault)
    tensor[3] = tensor[4] if fault != "zeros" else tensor[3] + 1
    with pytest.raises(AssertionError, match="is off by"):
        products(linear, exact, torch.randn(9, 256, device=DEVICE))


def test_what_no_kernel_suits_is_refused_by_it() -> None:
    odd = quantise(torch.randn(32, 36), "int4")  # groups of four
    quantised.prepare(odd)
    assert quantised.quantised_product(torch.randn(2, 36), odd) is None
    thirds = QuantisedLinear("int8", torch.ones(4, 9, dtype=torch.int8), torch.ones(4, 3), (1, 3))
    assert quantised.quantised_product(torch.randn(2, 9), thirds) is None
    assert odd.fused(_kernels(), torch.randn(200, 36), False, None) is None


def _kernels() -> object:
    from semspec.model.kernels import triton_kernels

    return triton_kernels()


@pytest.mark.parametrize("rows", [1, 9, 17, 64, 65, 128])
@pytest.mark.parametrize(
    ("size", "split", "gated"),
    [
        ((7168, 5120), False, False),
        ((5120, 27648), True, False),
        ((55296, 5120), False, True),
        ((576, 64), True, False),
    ],
)
def test_tiles_fit_the_card(rows: int, size: tuple[int, int], split: bool, gated: bool) -> None:
    for halves, depth in ((1, 256), (1, 128), (2, 128), (2, 16)):
        cut = quantised.QuantisedConfig.of((size[0], size[1] // halves), rows, H200, split, gated, depth, halves)
        width = cut.columns * (2 if gated else 1) + 2 * halves * cut.rows
        assert cut.stages * cut.depth * width <= H200.shared
        assert cut.rows >= rows and (cut.splits == 1 or split) and cut.depth >= 16
        assert halves == 1 or cut.depth == depth, "a byte's halves belong to inputs that are one depth apart"
