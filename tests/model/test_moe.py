"""Kernels that read some experts or some channels, against their references and against the networks themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

from semspec.model.experts import Experts, FeedForward, skip
from semspec.model.kernels import moe, quantised, quantised_moe, reference, sparse_mlp
from semspec.model.kernels.tiles import Card
from semspec.model.linear import DenseLinear
from semspec.model.quantised import Kind, QuantisedLinear, quantise, stack
from tests.interpreter import allow_new_numpy

allow_new_numpy()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
few = settings(max_examples=10, phases=[Phase.generate], deadline=None)
TYPES = {torch.float32: 1e-5, torch.float16: 3e-3}


@pytest.fixture(autouse=True, scope="module")
def memory_that_was_not_written() -> Iterator[None]:
    """Is no number, or a very large one: whoever reads it is found out."""
    if DEVICE.type == "cpu":
        torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


SMALL = (moe.Cut(16, 16, 2), moe.Cut(16, 32, 2))


def noise(generator: torch.Generator, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=generator).to(DEVICE, dtype)


def near(ours: Tensor, exact: Tensor, most: float) -> None:
    assert not ours.isnan().any()
    assert (ours.double() - exact).norm() <= most * exact.norm().clamp_min(1e-6)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """How many tokens of each sequence are real, which sequences are marked, and rows of each."""
    queries = draw(st.integers(1, 7))
    counts = draw(st.lists(st.integers(0, queries), min_size=1, max_size=3))
    return counts, draw(st.lists(st.integers(0, 1), min_size=len(counts), max_size=len(counts))), queries


@given(
    batches(), st.sampled_from(sorted(TYPES, key=str)), st.sampled_from([(4, 1), (6, 2), (9, 5)]),
    st.sampled_from([(48, 24), (16, 33)]), st.booleans(), st.booleans(), st.sampled_from([None, 0.3, 9.0]),
    st.sampled_from([0, 2]), st.integers(0, 99),
)  # fmt: skip
@few
def test_experts(batch, dtype, mixture, sizes, renormalise, silu, beta, parts, seed) -> None:  # type: ignore[no-untyped-def]
    (counts, marks, queries), (number, chosen), (width, hidden) = batch, mixture, sizes
    generator, rows = torch.Generator().manual_seed(seed), len(counts) * queries
    x, logits = noise(generator, rows, width, dtype=dtype), noise(generator, *([parts] if parts else []), rows, number)
    gate_up = noise(generator, number, 2 * hidden, width, dtype=dtype) * 0.3
    down = noise(generator, number, width, hidden, dtype=dtype) * 0.3
    whole, marked = (torch.tensor(numbers, device=DEVICE) for numbers in (counts, marks))
    skipping = None
    if beta is not None and chosen > 1:
        skipping = (torch.full((chosen - 1,), beta, device=DEVICE), chosen - 1, marked)
    rest = ("silu" if silu else "gelu_pytorch_tanh", chosen, renormalise, whole)
    ours = moe.fused_moe(x, logits, gate_up, down, *rest, skipping, cuts=SMALL)
    if skipping is not None:
        skipping = (skipping[0].double(), *skipping[1:])
    exact = reference.fused_moe(x.double(), logits.double(), gate_up.double(), down.double(), *rest, skipping)
    assert ours.shape == exact.shape and ours.dtype == torch.float32
    near(ours, exact, 2 * TYPES[dtype])
    again = moe.fused_moe(
        x, logits, gate_up, down, *rest, skipping and (skipping[0].float(), *skipping[1:]), cuts=SMALL
    )
    assert torch.equal(ours, again), "the same bits every time"


def test_experts_that_somebody_picked_come_first() -> None:
    """Of a pass's picks, -1 being none: how long each row is, whose it is, and what is in it."""
    picks = [5, 0, -1, 5, 2, 0, 5, -1, -1, 2]
    index = torch.tensor(picks, dtype=torch.int32, device=DEVICE)
    lists = torch.full((7, len(picks)), -7, dtype=torch.int32, device=DEVICE)
    listed = torch.full((2, 7), -7, dtype=torch.int32, device=DEVICE)
    moe._list[(7,)](index, lists, listed, len(picks), BLOCK_E=32, BLOCK=4)
    assert listed.tolist() == [[2, 2, 3, 0, 0, 0, 0], [0, 2, 5, 1, 3, 4, 6]]
    assert [lists[row, :n].tolist() for row, n in enumerate([2, 2, 3])] == [[1, 5], [4, 9], [0, 3, 6]]


def network(generator: torch.Generator, width: int, hidden: int) -> FeedForward:
    weights = noise(generator, 2 * hidden, width), noise(generator, width, hidden)
    return FeedForward(DenseLinear(weights[0]), DenseLinear(weights[1]), torch.nn.functional.silu)


def test_a_mixture_packed_is_the_same_mixture() -> None:
    """Against `Experts` itself, whose networks must be what they were; experts left out are not even read."""
    generator = torch.Generator().manual_seed(5)
    mixture = Experts(DenseLinear(noise(generator, 6, 16)), [network(generator, 16, 8) for _ in range(6)], 3, True)
    x, betas, marked = (
        noise(generator, 5, 16),
        torch.tensor([0.4, 0.9], device=DEVICE),
        torch.tensor([1], device=DEVICE),
    )
    weights, index = skip(*mixture.route(x), betas, 2, torch.ones(5, dtype=torch.bool, device=DEVICE), True)
    before, thin = mixture(x), mixture.combine(x, weights, index)
    mixture.pack()
    assert mixture.gate_up is not None and mixture.down is not None
    assert torch.equal(mixture(x), before)
    assert mixture.experts[4].down.weight.data_ptr() == mixture.down[4].data_ptr()  # type: ignore[union-attr]
    unread = sorted(set(range(6)) - set(index.unique().tolist()))
    rest = ("silu", 3, True, torch.tensor([5], device=DEVICE))
    ours = moe.fused_moe(x, mixture.router(x), mixture.gate_up, mixture.down, *rest, cuts=SMALL).sum(0)
    torch.testing.assert_close(ours, before, atol=1e-3, rtol=1e-4)
    mixture.gate_up[unread] = float("nan")
    ours = moe.fused_moe(
        x, mixture.router(x), mixture.gate_up, mixture.down, *rest, (betas, 2, marked), cuts=SMALL
    ).sum(0)
    torch.testing.assert_close(ours, thin, atol=1e-3, rtol=1e-4)
    assert not torch.allclose(thin, before, atol=1e-2)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_a_mixture_of_quantised_experts_is_that_of_the_weights_they_stand_for(kind: Kind) -> None:
    generator = torch.Generator().manual_seed(5)
    networks = [network(generator, 64, 32) for _ in range(5)]
    plain = []
    for net in networks:
        net.gate_up, net.down = (quantise(linear.weight.cpu(), kind) for linear in (net.gate_up, net.down))  # type: ignore[union-attr]
        for linear in (net.gate_up, net.down):
            quantised.prepare(linear, expert=True)
        floats = (DenseLinear(linear.dequantised()) for linear in (net.gate_up, net.down))
        plain.append(FeedForward(*floats, torch.nn.functional.silu))
    router = DenseLinear(noise(generator, 5, 64).cpu())
    mixture, exact = (Experts(router, each, 2, True) for each in (networks, plain))
    x = noise(generator, 6, 64).cpu()
    want, before = exact(x), mixture(x)
    torch.testing.assert_close(before, want, atol=1e-4, rtol=1e-4)
    mixture.pack()
    assert isinstance(mixture.gate_up, QuantisedLinear) and isinstance(mixture.down, QuantisedLinear)
    assert quantised_moe.suited(mixture.gate_up, x) and quantised_moe.suited(mixture.down, x)
    torch.testing.assert_close(mixture(x), before, atol=0, rtol=0)
    counts = torch.tensor([2, 1, 2])  # of three sequences with two places each; one place is empty
    made = moe.fused_moe(x, router(x), mixture.gate_up, mixture.down, "silu", 2, True, counts).sum(0)
    want[3] = 0
    torch.testing.assert_close(made, want, atol=1e-3, rtol=1e-4)


LAYOUTS: list[tuple[Kind, tuple[int, int], bool, bool]] = [
    ("fp8", (1, 0), False, True), ("fp8", (32, 32), False, False), ("int8", (1, 0), True, False),
    ("int8", (1, 32), False, True), ("int4", (1, 32), True, False), ("int4", (1, 64), False, True),
    ("fp4", (1, 16), False, True), ("fp4", (1, 32), False, False),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "block", "zeros", "gains"), LAYOUTS)
def test_quantised_experts_of_every_layout(kind: Kind, block: tuple[int, int], zeros: bool, gains: bool) -> None:
    """Against their weights in float64; of an expert that nobody picked, scales are not numbers."""
    generator = torch.Generator().manual_seed(7)
    number, chosen, width, hidden, rows = 4, 2, 96, 64, 5

    def experts(outputs: int, inputs: int) -> QuantisedLinear:
        made = []
        for _ in range(number):
            codes = torch.randint(
                0, 256, (outputs, inputs // (2 if kind in ("int4", "fp4") else 1)), generator=generator
            )
            codes = codes.to(torch.uint8)
            if kind == "fp8":
                codes = torch.where(codes & 0x7F == 0x7F, codes ^ 1, codes).view(torch.float8_e4m3fn)  # no NaN
            elif kind == "int8":
                codes = codes.view(torch.int8)
            shared = (block[0], block[1] or inputs)
            groups = (-(-outputs // shared[0]), -(-inputs // shared[1]))
            scales = torch.rand(groups, generator=generator) + 0.5
            zero = torch.randint(0, 16, groups, generator=generator).float() if zeros else None
            gain = torch.rand(outputs, generator=generator) + 0.5 if gains else None
            made.append(QuantisedLinear(kind, codes, scales, shared, zero, gain))
            quantised.prepare(made[-1], expert=True)
        return stack(made)

    gate_up, down = experts(2 * hidden, width), experts(width, hidden)
    x = noise(generator, rows, width).cpu() / 100
    logits = noise(generator, rows, number).cpu()
    logits[:, 3] = -99.0  # nobody picks it
    assert quantised_moe.suited(gate_up, x) and quantised_moe.suited(down, x)
    rest = ("silu", chosen, True, torch.tensor([rows]))
    exact = reference.fused_moe(
        x.double(), logits.double(), gate_up.dequantised(torch.float64), down.dequantised(torch.float64), *rest
    )
    gate_up.scales[3] = down.scales[3] = float("nan")
    near(moe.fused_moe(x, logits, gate_up, down, *rest), exact, 1e-5)


@pytest.mark.parametrize("kinds", [("fp8", "int8"), ("fp8", None), (None, "int8")], ids=str)
def test_experts_of_several_layouts_are_dequantised(kinds: tuple[Kind | None, Kind | None]) -> None:
    """None: a checkpoint may leave some of a layer's experts plain."""
    generator = torch.Generator().manual_seed(5)
    networks = [network(generator, 32, 16) for _ in range(2)]
    for net, kind in zip(networks, kinds, strict=True):
        weight = net.gate_up.weight.cpu()  # type: ignore[union-attr]
        net.gate_up = DenseLinear(weight) if kind is None else quantise(weight, kind)
        net.down = DenseLinear(net.down.weight.cpu())  # type: ignore[union-attr]
    mixture = Experts(DenseLinear(noise(generator, 2, 32).cpu()), networks, 1, True)
    x = noise(generator, 3, 32).cpu()
    before = mixture(x)
    mixture.pack()
    assert isinstance(mixture.gate_up, torch.Tensor)
    torch.testing.assert_close(mixture(x), before)


def test_an_expert_of_more_tokens_than_a_tile_serves_all() -> None:
    generator = torch.Generator().manual_seed(6)
    x, logits = noise(generator, 70, 16), torch.zeros(70, 3, device=DEVICE)
    logits[:, 1] = 9.0  # everybody's favourite; more than the 64 rows of the largest tile
    gate_up, down = noise(generator, 3, 16, 16), noise(generator, 3, 16, 8)
    rest = ("silu", 1, False, torch.tensor([70], device=DEVICE))
    exact = reference.fused_moe(x.double(), logits.double(), gate_up.double(), down.double(), *rest)
    near(moe.fused_moe(x, logits, gate_up, down, *rest), exact, 1e-5)


def test_logits_that_are_no_numbers_lead_nowhere_else() -> None:
    generator = torch.Generator().manual_seed(7)
    x, logits = noise(generator, 2, 16), noise(generator, 2, 3)
    logits[0] = float("nan")
    gate_up, down = noise(generator, 3, 16, 16), noise(generator, 3, 16, 8)
    rest = ("silu", 2, True, torch.tensor([2], device=DEVICE))
    ours = moe.fused_moe(x, logits, gate_up, down, *rest, cuts=SMALL)
    exact = reference.fused_moe(
        x[1:].double(), logits[1:].double(), gate_up.double(), down.double(), *rest[:3], rest[3] - 1
    )
    near(ours[:, 1:], exact, 1e-5)


@given(
    batches(), st.sampled_from(sorted(TYPES, key=str)), st.sampled_from([(16, 40), (24, 200)]), st.booleans(),
    st.booleans(), st.sampled_from([1e-30, 0.3, 1.5, 1e9]), st.integers(0, 99),
)  # fmt: skip
@few
def test_some_channels(batch, dtype, sizes, silu, biased, threshold, seed) -> None:  # type: ignore[no-untyped-def]
    (counts, marks, queries), (width, number) = batch, sizes
    generator, rows = torch.Generator().manual_seed(seed), len(counts) * queries
    x, gate = noise(generator, rows, width, dtype=dtype), noise(generator, rows, number, dtype=dtype) * 2
    up, down = (noise(generator, number, width, dtype=dtype) * 0.3 for _ in range(2))
    biases = [noise(generator, n, dtype=dtype) if biased else None for n in (number, width)]
    numbers = [torch.tensor(n, device=DEVICE) for n in (counts, marks)]
    activation = "silu" if silu else "gelu_pytorch_tanh"
    exact = reference.sparse_mlp(
        x.double(), gate.double(), up.double(), biases[0] if biases[0] is None else biases[0].double(), down.double(),
        biases[1] if biases[1] is None else biases[1].double(), activation, threshold, *numbers,
    )[0]  # fmt: skip
    if all(marks):  # what nobody needs is not read
        act = torch.nn.functional.silu(gate) if silu else torch.nn.functional.gelu(gate, approximate="tanh")
        inside = (torch.arange(queries, device=DEVICE) < numbers[0][:, None]).flatten()
        unread = ~((act.abs() >= threshold * 0.99) & inside[:, None]).any(0)
        up[unread] = down[unread] = float("nan")
    ours = sparse_mlp.sparse_mlp(x, gate, up, biases[0], down, biases[1], activation, threshold, *numbers, cuts=SMALL)
    assert ours.dtype == torch.float32
    near(ours.sum(0), exact, 2 * TYPES[dtype])


def test_a_list_that_ends_inside_a_tile() -> None:
    """Seven channels of forty, where tiles have 16 and 32: what lies behind them in memory is not read, or is zero."""
    generator = torch.Generator().manual_seed(8)
    x, gate = noise(generator, 3, 16), torch.zeros(3, 40, device=DEVICE)
    gate[:, 5:40:5] = 2.0 + noise(generator, 3, 7).abs()
    up, down = noise(generator, 40, 16), noise(generator, 40, 16)
    numbers = (torch.tensor([3], device=DEVICE), torch.tensor([1], device=DEVICE))
    ours = sparse_mlp.sparse_mlp(x, gate, up, None, down, None, "silu", 0.5, *numbers, cuts=SMALL)
    made = torch.nn.functional.silu(gate) * (x @ up.t())
    near(ours.sum(0), (made @ down).double(), 1e-5)


def test_cuts_fit_into_the_card() -> None:
    for cut in (*moe.CUTS, *sparse_mlp.CUTS):
        for rows in (16, 64):
            for itemsize in (2, 4):
                fitted = cut.fit(rows, 2 * cut.columns, Card(132, 100_000), itemsize)
                assert fitted.stages * fitted.depth * (2 * cut.columns + rows) * itemsize <= 100_000
                assert fitted.depth >= 16
    assert moe.CUTS[0].fit(16, 64, Card(132, 227 * 1024), 2) == moe.CUTS[0], "a large card changes nothing"


@pytest.mark.parametrize(("rows", "tile"), [(1, 16), (16, 16), (17, 32), (64, 64), (512, 64)])
def test_tiles_hold_all_tokens_up_to_64(rows: int, tile: int) -> None:
    assert moe.height(rows, 2) == tile and moe.height(rows, 4) == 16
