"""Products of few rows, transposed or packed: the same numbers, used where they pay and nowhere else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semspec.model import cpu_gemm
from semspec.model.cpu_gemm import CPU_CACHE_BYTES, MAX_PACKED_BYTES, MIN_PACKED_BYTES, GemmPaths
from semspec.model.linear import DenseLinear

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, cpu_gemm.MAX_TRANSPOSED_ROWS), st.integers(1, 70), st.integers(1, 90), st.booleans())
def test_a_transposed_product_is_the_plain_one(rows: int, inputs: int, outputs: int, strided: bool) -> None:
    x = noise(inputs, rows).t() if strided else noise(rows, inputs)
    weight = noise(outputs, inputs, seed=1)
    found = cpu_gemm.transposed_product(x, weight)
    torch.testing.assert_close(found, F.linear(x, weight), atol=1e-4, rtol=0)
    assert found.is_contiguous()


@pytest.mark.parametrize(
    ("rows", "inputs", "expected"),
    [(1, 576, True), (1, 2047, True), (1, 2048, False), (4, 576, True), (4, 1024, False), (7, 576, True),
     (8, 576, False), (9, 64, True), (10, 64, False)],
)  # fmt: skip
def test_only_few_rows_are_transposed(rows: int, inputs: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def product(x: Tensor, weight: Tensor) -> Tensor:
        taken.append(len(x))
        return F.linear(x, weight)

    monkeypatch.setattr(cpu_gemm, "transposed_product", product)
    x, weight, bias = noise(rows, inputs), noise(6, inputs, seed=1), noise(6, seed=2)
    made = DenseLinear(weight, bias, transposed=True)(x)
    assert taken == ([rows] if expected else [])
    torch.testing.assert_close(made, F.linear(x, weight, bias), atol=1e-4, rtol=1e-5)
    assert DenseLinear(weight, bias)(x).shape == made.shape and len(taken) == expected  # without the mark, never


def test_both_halves_of_a_product_keep_its_path() -> None:
    gate, up = DenseLinear(noise(8, 4), noise(8), transposed=True).halves
    assert gate.transposed and up.transposed
    torch.testing.assert_close(up(noise(1, 4)), F.linear(noise(1, 4), noise(8, 4)[4:], noise(8)[4:]))


@pytest.mark.skipif(not cpu_gemm.can_pack(), reason="this build of torch packs no weights for oneDNN")
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 90), st.booleans(), st.booleans())
def test_a_product_with_packed_weights_is_the_plain_one(
    rows: int, inputs: int, outputs: int, strided: bool, biased: bool
) -> None:
    x = noise(inputs, rows).t() if strided else noise(rows, inputs)
    weight, bias = noise(outputs, inputs, seed=1), noise(outputs, seed=2) if biased else None
    found = cpu_gemm.packed_product(x, cpu_gemm.pack(weight), bias)
    torch.testing.assert_close(found, F.linear(x, weight, bias), atol=1e-4, rtol=0)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_path_depends_on_the_number_of_rows(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[str] = []
    monkeypatch.setattr(cpu_gemm, "transposed_product", lambda x, w: (paths.append("transposed"), F.linear(x, w))[1])
    monkeypatch.setattr(cpu_gemm, "packed_product", lambda x, p, b: (paths.append("packed"), F.linear(x, p, b))[1])
    weight = noise(6, 64, seed=1)
    linear = DenseLinear(weight, noise(6, seed=2), transposed, packed=weight)
    for rows in (1, 2, 3, 9, 100):
        torch.testing.assert_close(linear(noise(rows, 64)), F.linear(noise(rows, 64), weight, noise(6, seed=2)))
    assert paths == (["transposed"] * 2 + ["packed"] * 3 if transposed else ["packed"] * 4)


def test_nothing_is_packed_where_operators_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr(cpu_gemm, "pack", gone)
    cpu_gemm.can_pack.cache_clear()
    try:
        assert not cpu_gemm.can_pack()
        assert not GemmPaths.of(MIN_PACKED_BYTES, CPU, torch.float32).packed
    finally:
        cpu_gemm.can_pack.cache_clear()


def test_which_models_have_which_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(cpu_gemm, "can_pack", lambda: True)

    def paths(size: int, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> GemmPaths:
        return GemmPaths.of(size // 4, device, dtype)

    assert paths(CPU_CACHE_BYTES * 2) == GemmPaths(transposed=True, packed=True)
    assert paths(CPU_CACHE_BYTES) == GemmPaths(transposed=False, packed=True), "a cache holds these"
    assert paths(MIN_PACKED_BYTES // 2) == GemmPaths(), "calls cost more than products"
    assert paths(MAX_PACKED_BYTES * 2) == GemmPaths(transposed=True, packed=False), (
        "nobody wants a second copy of these"
    )
    assert paths(CPU_CACHE_BYTES * 2, GPU) == paths(CPU_CACHE_BYTES * 4, CPU, torch.bfloat16) == GemmPaths()
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert paths(CPU_CACHE_BYTES * 2) == GemmPaths(transposed=False, packed=True), "others multiply otherwise"
