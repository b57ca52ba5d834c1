from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semspec.errors import BadRequest
from semspec.probe.calibrate import Calibrator, interpolate, isotonic, tilted
from semspec.probe.metrics import ece

pairs = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=25)


def test_isotonic_pools_what_is_in_the_wrong_order() -> None:
    """Beside the rows there is a 1 at the first x and a 0 at the last."""
    rows = [(0.1, 0.0)] * 9 + [(0.2, 0.8), (0.3, 0.4)] * 5 + [(0.4, 1.0)] * 9
    pools = isotonic(*torch.tensor(rows, dtype=torch.double).T)
    assert [(p.first, p.last, p.rows) for p in pools] == [(0.1, 0.1, 10), (0.2, 0.3, 10), (0.4, 0.4, 10)]
    assert [p.value for p in pools] == pytest.approx([0.1, 0.6, 0.9])
    x, y = tilted(pools)
    torch.testing.assert_close(x, torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4, 1.0]))
    torch.testing.assert_close(y, torch.tensor([0.05, 0.1, 0.58, 0.62, 0.9, 0.95]))


@given(pairs)
def test_isotonic_is_the_minimax_of_means(pairs: list[tuple[int, int]]) -> None:
    """The known closed form: the fit at x is max over starts <= x of the min over ends >= x of the mean between."""
    pools = isotonic(*torch.tensor(pairs, dtype=torch.double).T / 20)
    pairs = [*pairs, (min(pairs)[0], 20), (max(pairs)[0], 0)]
    x, y = torch.tensor(pairs, dtype=torch.double).T / 20

    def mean(a: float, b: float) -> float:
        return y[(x >= a) & (x <= b)].mean().item()

    seen = x.unique().tolist()
    for at in seen:
        best = max(min(mean(a, b) for b in seen if b >= at) for a in seen if a <= at)
        (pool,) = [p for p in pools if p.first <= at <= p.last]
        assert pool.value == pytest.approx(best, abs=1e-9)
    for pool in pools:
        said = interpolate(x[(x >= pool.first) & (x <= pool.last)].float(), *tilted(pools))
        assert said.mean() == pytest.approx(pool.value, abs=1e-5), "a tilt changes nothing on average"


@given(pairs, st.lists(st.integers(-60, 60), min_size=2, max_size=25, unique=True))
def test_what_a_probe_tells_apart_stays_apart_and_in_order(pairs: list[tuple[int, int]], asked: list[int]) -> None:
    """Also within one pool and beyond the outermost, where a plain isotonic fit has plateaus."""
    x, y = torch.tensor(pairs, dtype=torch.double).T / 20
    calibrator = Calibrator.fit("isotonic", (x * 8 - 4).float(), y)
    said = calibrator(torch.tensor(sorted(asked)) / 10)
    assert (said.diff() > 0).all() and said[0] > 0 and said[-1] < 1


def test_isotonic_keeps_its_word_on_average() -> None:
    """Of rows that it was not fitted to; though hardly any two scores are the same, and knots are few."""
    noise = torch.Generator().manual_seed(3)
    logits, later = (torch.randn(20_000, generator=noise) * 3 for _ in range(2))
    known, labels = ((0.9 * (x > 0) > torch.rand(len(x), generator=noise)).float() for x in (logits, later))  # a jump
    calibrator = Calibrator.fit("isotonic", logits, known)
    said = calibrator(later)
    assert ece(said, labels) < 0.015 and calibrator.knots < 60 and len(said.unique()) > 15_000


def test_interpolation_is_linear_inside_and_constant_outside() -> None:
    x, y = torch.tensor([0.2, 0.4, 0.4, 0.8]), torch.tensor([0.1, 0.3, 0.5, 0.9])
    at = torch.tensor([0.0, 0.3, 0.6, 1.0])
    torch.testing.assert_close(interpolate(at, x, y), torch.tensor([0.1, 0.2, 0.7, 0.9]))


@pytest.mark.parametrize("truth", [0.5, 1.0, 3.0])
def test_temperature_finds_the_one_that_was_used(truth: float) -> None:
    logits = torch.linspace(-4, 4, 101)
    calibrator = Calibrator.fit("temperature", logits, (logits / truth).sigmoid())
    assert calibrator.temperature.item() == pytest.approx(truth, rel=1e-3)
    torch.testing.assert_close(calibrator(logits), (logits / truth).sigmoid(), atol=1e-3, rtol=0)


def test_none_is_the_sigmoid_and_others_are_refused() -> None:
    logits = torch.tensor([-1.0, 2.0])
    assert torch.equal(Calibrator.fit("none", logits, logits)(logits), logits.sigmoid())
    with pytest.raises(BadRequest, match="isotonic"):
        Calibrator("platt")


def test_a_pool_whose_rows_all_but_fill_one_place_has_no_tilt() -> None:
    """The mean of a thousand equal places and one a rounding away is that place: nothing to draw a line through."""
    near = torch.tensor(0.9, dtype=torch.double)
    for place, other in ((near, near.nextafter(torch.ones(()).double())), (near.nextafter(torch.ones(()).double()), near)):  # noqa: E501  # fmt: skip
        x = torch.cat([place.expand(3000), other[None], torch.full((100,), 0.1, dtype=torch.double)])
        y = torch.cat([torch.tensor([1.0, 0.0] * 1500), torch.tensor([0.5]), torch.zeros(100)]).double()
        knots, values = tilted(isotonic(x, y))
        assert knots.isfinite().all() and values.isfinite().all() and (knots.diff() >= 0).all()
        assert interpolate(torch.tensor([0.9]), knots, values).item() == pytest.approx(0.5, abs=0.02)
