"""Products of few rows, turned round: the same numbers, taken where they pay and nowhere else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semspec.model import cpu_gemm as few
from semspec.model.experts import Linear

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, few.ROWS), st.integers(1, 70), st.integers(1, 90), st.booleans())
def test_a_turned_product_is_the_plain_one(rows: int, inputs: int, outputs: int, strided: bool) -> None:
    x = noise(inputs, rows).t() if strided else noise(rows, inputs)
    weight = noise(outputs, inputs, seed=1)
    found = few.turned_product(x, weight)
    torch.testing.assert_close(found, F.linear(x, weight), atol=1e-4, rtol=0)
    assert found.is_contiguous()


@pytest.mark.parametrize(
    ("rows", "inputs", "expected"),
    [(1, 576, True), (1, 2047, True), (1, 2048, False), (4, 576, True), (4, 1024, False), (7, 576, True),
     (8, 576, False), (9, 64, True), (10, 64, False)],
)  # fmt: skip
def test_only_few_rows_are_turned(rows: int, inputs: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def product(x: Tensor, weight: Tensor) -> Tensor:
        taken.append(len(x))
        return F.linear(x, weight)

    monkeypatch.setattr(few, "turned_product", product)
    x, weight, bias = noise(rows, inputs), noise(6, inputs, seed=1), noise(6, seed=2)
    made = Linear(weight, bias, turned=True)(x)
    assert taken == ([rows] if expected else [])
    torch.testing.assert_close(made, F.linear(x, weight, bias), atol=1e-4, rtol=1e-5)
    assert Linear(weight, bias)(x).shape == made.shape and len(taken) == expected  # without the mark, never


def test_both_halves_of_a_product_go_its_way() -> None:
    gate, up = Linear(noise(8, 4), noise(8), turned=True).halves
    assert gate.turned and up.turned
    torch.testing.assert_close(up(noise(1, 4)), F.linear(noise(1, 4), noise(8, 4)[4:], noise(8)[4:]))


@pytest.mark.skipif(not few.can_pack(), reason="this build of torch packs no weights for oneDNN")
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 90), st.booleans(), st.booleans())
def test_a_product_with_packed_weights_is_the_plain_one(
    rows: int, inputs: int, outputs: int, strided: bool, biased: bool
) -> None:
    x = noise(inputs, rows).t() if strided else noise(rows, inputs)
    weight, bias = noise(outputs, inputs, seed=1), noise(outputs, seed=2) if biased else None
    found = few.packed_product(x, few.pack(weight), bias)
    torch.testing.assert_close(found, F.linear(x, weight, bias), atol=1e-4, rtol=0)


@pytest.mark.parametrize("turned", [False, True])
def test_rows_go_the_way_of_their_number(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[str] = []
    monkeypatch.setattr(few, "turned_product", lambda x, w: (ways.append("turned"), F.linear(x, w))[1])
    monkeypatch.setattr(few, "packed_product", lambda x, p, b: (ways.append("packed"), F.linear(x, p, b))[1])
    weight = noise(6, 64, seed=1)
    linear = Linear(weight, noise(6, seed=2), turned, packed=weight)
    for rows in (1, 2, 3, 9, 100):
        torch.testing.assert_close(linear(noise(rows, 64)), F.linear(noise(rows, 64), weight, noise(6, seed=2)))
    assert ways == (["turned"] * 2 + ["packed"] * 3 if turned else ["packed"] * 4)


def test_nothing_is_packed_where_operators_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr(few, "pack", gone)
    few.can_pack.cache_clear()
    try:
        assert not few.can_pack()
        assert not few.GemmPaths.of(few.LEAST, CPU, torch.float32).packed
    finally:
        few.can_pack.cache_clear()


def test_which_models_have_which_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(few, "can_pack", lambda: True)

    def ways(size: int, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> few.GemmPaths:
        return few.GemmPaths.of(size // 4, device, dtype)

    assert ways(few.CACHED * 2) == few.GemmPaths(turned=True, packed=True)
    assert ways(few.CACHED) == few.GemmPaths(turned=False, packed=True), "a cache holds these"
    assert ways(few.LEAST // 2) == few.GemmPaths(), "calls cost more than products"
    assert ways(few.MOST * 2) == few.GemmPaths(turned=True, packed=False), "nobody wants a second copy of these"
    assert ways(few.CACHED * 2, GPU) == ways(few.CACHED * 4, CPU, torch.bfloat16) == few.GemmPaths()
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert ways(few.CACHED * 2) == few.GemmPaths(turned=False, packed=True), "others multiply otherwise"
