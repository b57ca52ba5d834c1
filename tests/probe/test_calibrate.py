from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semspec.errors import BadRequest
from semspec.probe.calibrate import Calibrator, interpolate, isotonic

pairs = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=25)


def test_isotonic_pools_what_is_in_the_wrong_order() -> None:
    x, y = isotonic(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.0, 0.8, 0.4, 1.0]))
    torch.testing.assert_close(x, torch.tensor([0.1, 0.2, 0.3, 0.4]))
    torch.testing.assert_close(y, torch.tensor([0.0, 0.6, 0.6, 1.0]))


@given(pairs)
def test_isotonic_is_the_minimax_of_means(pairs: list[tuple[int, int]]) -> None:
    """The known closed form: the fit at x is max over starts <= x of the min over ends >= x of the mean between."""
    x = torch.tensor([p[0] / 20 for p in pairs])
    y = torch.tensor([p[1] / 20 for p in pairs])
    fitted = interpolate(x, *isotonic(x, y))
    for at, said in zip(x.tolist(), fitted.tolist(), strict=True):
        ends = [b for b in x.unique().tolist() if b >= at]
        starts = [a for a in x.unique().tolist() if a <= at]
        best = max(min(y[(x >= a) & (x <= b)].mean().item() for b in ends) for a in starts)
        assert said == pytest.approx(best, abs=1e-5)


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
