"""Products of few rows, turned round: the same numbers, taken where they pay and nowhere else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semspec.model import few
from semspec.model.experts import Linear

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LARGE = few.CACHED  # parameters: four times the bytes a cache may hold


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, few.ROWS), st.integers(1, 70), st.integers(1, 90), st.booleans())
def test_a_turned_product_is_the_plain_one(rows: int, inputs: int, outputs: int, strided: bool) -> None:
    x = noise(inputs, rows).t() if strided else noise(rows, inputs)
    weight = noise(outputs, inputs, seed=1)
    found = few.product(x, weight)
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

    monkeypatch.setattr(few, "product", product)
    x, weight, bias = noise(rows, inputs), noise(6, inputs, seed=1), noise(6, seed=2)
    made = Linear(weight, bias, few=True)(x)
    assert taken == ([rows] if expected else [])
    torch.testing.assert_close(made, F.linear(x, weight, bias), atol=1e-4, rtol=1e-5)
    assert Linear(weight, bias)(x).shape == made.shape and len(taken) == expected  # without the mark, never


def test_both_halves_of_a_product_go_its_way() -> None:
    gate, up = Linear(noise(8, 4), noise(8), few=True).halves
    assert gate.few and up.few
    torch.testing.assert_close(up(noise(1, 4)), F.linear(noise(1, 4), noise(8, 4)[4:], noise(8)[4:]))


def test_large_float32_models_on_a_cpu_have_products_worth_turning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert few.pays(LARGE, CPU, torch.float32)
    assert not few.pays(LARGE // 8, CPU, torch.float32), "a cache holds these"
    assert not few.pays(LARGE, CPU, torch.bfloat16) and not few.pays(LARGE, GPU, torch.float32)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not few.pays(LARGE, CPU, torch.float32), "others multiply otherwise"
