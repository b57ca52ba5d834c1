"""Noise must be uniform, independent in every argument, and a pure function of them. Also tests the test: chi.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semspec.sampling import noise
from tests import race
from tests.chi import chi_square, count

N = 200_000
AXES = ["seed", "position", "stream"]
PINNED = [0.13870936632156372, 0.5211328864097595, 0.7614006400108337, 0.8883684277534485, 0.1446961760520935]


def along(axis: str, n: int = N, start: int = 0) -> Tensor:
    """n numbers that differ in one argument only, by one each."""
    key = {"seed": torch.tensor([3]), "position": torch.tensor([17]), "stream": torch.tensor([1])}
    key[axis] = torch.arange(start, start + n)
    return noise.uniform(key["seed"], key["position"], key["stream"])


def plain(seed: int, position: int, stream: int) -> float:
    """The same function on Python's whole numbers."""
    return ((race.key(seed, position, stream) >> 41) + 0.5) / (1 << 23)


def test_chi_square_gives_the_textbook_p_value() -> None:
    # (60 - 50)^2 / 50 twice is 4, whose p-value with one degree of freedom is 0.0455.
    assert chi_square(torch.tensor([60, 40]), torch.tensor([0.5, 0.5])) == pytest.approx(0.0455, abs=1e-4)


def test_chi_square_merges_small_bins() -> None:
    # Of 1000 observations 2 and 48 are expected in the small bins; 2 is too few, so they count as one bin of 50.
    merged = chi_square(torch.tensor([940, 12, 48]), torch.tensor([0.95, 0.002, 0.048]))
    assert merged == pytest.approx(chi_square(torch.tensor([940, 60]), torch.tensor([0.95, 0.05])), rel=1e-4)


def test_chi_square_refuses_an_impossible_outcome() -> None:
    assert chi_square(torch.tensor([500, 499, 1]), torch.tensor([0.5, 0.5, 0.0])) == 0.0


def test_chi_square_sees_a_bias_of_one_percent() -> None:
    assert chi_square(torch.tensor([51_000, 49_000]), torch.tensor([0.5, 0.5])) < 1e-6


@pytest.mark.parametrize("axis", AXES)
def test_noise_is_uniform_along_every_argument(axis: str) -> None:
    bins = (along(axis) * 1000).long()
    assert chi_square(count(bins, 1000), torch.full([1000], 1e-3)) > 1e-4


@pytest.mark.parametrize("axis", AXES)
def test_low_bits_are_uniform_too(axis: str) -> None:
    bins = (along(axis) * (1 << 23)).long() % 256
    assert chi_square(count(bins, 256), torch.full([256], 1 / 256)) > 1e-4


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("distance", [1, 2, 8])
def test_neighbours_are_independent_along_every_argument(axis: str, distance: int) -> None:
    bins = (along(axis, N + distance) * 16).long()
    pairs = bins[:-distance] * 16 + bins[distance:]
    assert chi_square(count(pairs, 256), torch.full([256], 1 / 256)) > 1e-4


def test_purposes_and_rounds_are_independent_of_each_other() -> None:
    streams = [noise.stream(purpose, round) for purpose in range(5) for round in range(3)]
    assert len(set(streams)) == len(streams)
    key = torch.arange(50_000)
    numbers = torch.stack([noise.uniform(key, torch.tensor(5), torch.tensor(s)) for s in streams])
    correlation = torch.corrcoef(numbers.double()) - torch.eye(len(streams))
    assert correlation.abs().max() < 5 / 50_000**0.5


def test_swapping_seed_and_position_gives_other_numbers() -> None:
    a, b = torch.arange(1000), torch.arange(1000) + 1000
    assert not (noise.uniform(a, b, a * 0) == noise.uniform(b, a, a * 0)).any()


def test_noise_lies_strictly_between_zero_and_one() -> None:
    numbers = along("position", 1_000_000)
    assert numbers.dtype == torch.float32
    assert numbers.min() > 0 and numbers.max() < 1


def test_numbers_do_not_depend_on_the_shape_of_the_batch() -> None:
    seed, position, stream = torch.arange(6), torch.arange(40), torch.arange(5)
    cube = noise.uniform(seed[:, None, None], position[:, None], stream)
    assert cube.shape == (6, 40, 5)
    for i, j, k in [(0, 0, 0), (5, 39, 4), (2, 17, 3)]:
        alone = noise.uniform(seed[i], position[j], stream[k])
        assert alone.shape == () and alone == cube[i, j, k]


def test_pinned_numbers_never_change() -> None:
    """Results with a seed are reproducible across versions only while these hold."""
    key = torch.tensor([[0, 0, 0], [1, 2, 3], [-1, 100, 8], [2**63 - 1, 4095, 17], [-(2**63), 0, 0]])
    numbers = noise.uniform(key[:, 0], key[:, 1], key[:, 2]).tolist()
    assert numbers == PINNED


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31), st.integers(0, 2**31))
def test_noise_is_the_plain_python_function(seed: int, position: int, stream: int) -> None:
    number = noise.uniform(torch.tensor(seed), torch.tensor(position), torch.tensor(stream)).item()
    assert number == plain(seed, position, stream)


def test_negative_seeds_are_as_good_as_any() -> None:
    bins = (along("seed", start=-N) * 1000).long()
    assert chi_square(count(bins, 1000), torch.full([1000], 1e-3)) > 1e-4
    assert not torch.equal(along("seed", 1000, start=-1000), along("seed", 1000, start=1).flip(0))


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 10**6), st.integers(0, 99), st.integers(1, 300))
def test_every_token_has_noise_of_its_own(seed: int, position: int, stream: int, size: int) -> None:
    key = race.key(seed, position, stream)
    assert noise.key_of(seed, position, stream) == key
    assert noise.key(*(torch.tensor(x) for x in (seed, position, stream))).item() == noise.signed(key)
    expected = [-math.expm1(-race.noise(key, i)) for i in range(size)]  # as uniform numbers, small ones exact
    for found in (
        noise.exponential(torch.tensor([noise.signed(key)]), size)[0],
        noise.exponential_of(key, np.arange(size)),
    ):
        assert [-math.expm1(-x) for x in found.tolist()] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("axis", ["token", "position"])
def test_exponential_noise_has_its_distribution(axis: str) -> None:
    keys = noise.key(torch.tensor(3), torch.arange(1 if axis == "token" else N), torch.tensor(1))
    numbers = noise.exponential(keys, N if axis == "token" else 1).flatten()
    bins = (-torch.expm1(-numbers.double()) * 50).long()  # uniform, if it is exponential
    assert chi_square(count(bins, 50), torch.full([50], 1 / 50)) > 1e-4
    later = noise.exponential(keys, N if axis == "token" else 2).flatten()
    pairs = later[:-1], later[1:]
    correlation = torch.corrcoef(torch.stack([x.log() for x in pairs]))[0, 1]
    assert abs(float(correlation)) < 5 / N**0.5


def test_the_smallest_noise_is_far_below_what_a_float_tells_from_one() -> None:
    """So that tokens of a long tail, each of less than 1e-8, win as often as they should."""
    numbers = noise.exponential(noise.key(torch.tensor(0), torch.arange(200), torch.tensor(0)), 150_000).flatten()
    assert float(numbers.min()) < 2e-7 and len(numbers[numbers < 1e-5].unique()) > 200


def test_no_noise_is_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bits set round up to one: then a token with all the mass would lose to one with none."""
    monkeypatch.setattr(noise, "_mix", lambda x: torch.full_like(x, -1))
    assert noise.exponential(torch.zeros(1, dtype=torch.long), 3).isfinite().all()
