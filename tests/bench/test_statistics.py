"""Every statistic on samples small enough to be worked out by hand."""

from __future__ import annotations

import json
from math import comb, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semspec.bench.statistics import Estimate, Share, difference, discordant, draws, mcnemar, mean, more_often, ratio


def test_wilson_interval_of_eight_in_ten() -> None:
    share = Share(8, 10)
    assert share.value == 0.8
    assert share.interval == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Newcombe 1998, method 3
    assert str(share) == "80.0 % [49.0, 94.3]"
    assert share.as_dict() == {
        "share": 0.8,
        "low": share.interval[0],
        "high": share.interval[1],
        "hits": 8,
        "total": 10,
    }


def test_wilson_interval_says_something_where_nothing_was_hit() -> None:
    assert Share(0, 10).interval == pytest.approx((0.0, 1.96**2 / (10 + 1.96**2)))
    assert Share(10, 10).interval[1] == 1.0
    assert Share(0, 0).interval == (0.0, 1.0)


def test_repeats_that_are_always_alike_count_once() -> None:
    greedy = Share.clustered([(3, 3)] * 8 + [(0, 3)] * 2)
    assert (greedy.hits, greedy.total) == (24, 30)
    assert greedy.interval == pytest.approx(Share(8, 10).interval)


def test_repeats_that_vary_as_problems_do_count_fully() -> None:
    mixed = Share.clustered([(2, 4)] * 10)
    assert mixed.interval == pytest.approx(Share(20, 40).interval)


def test_repeats_in_between_are_worth_what_their_spread_says() -> None:
    share = Share.clustered([(2, 2), (1, 2), (0, 2), (1, 2)])
    # p = 1/2; variance = 4/3 * (1 + 0 + 1 + 0) / 64 = 1/24; 1/4 : 1/24 = 6 trials
    assert share.effective == pytest.approx(6)
    assert Share.clustered([(2, 2), (2, 2)]).effective == 2
    assert Share.clustered([(1, 1), (0, 1)]) == Share(1, 2)


def test_mcnemar_by_hand() -> None:
    assert mcnemar(0, 5) == 2 / 32
    assert mcnemar(0, 6) == 2 / 64
    assert mcnemar(1, 9) == pytest.approx(2 * (1 + 10) / 1024)
    assert mcnemar(0, 0) == mcnemar(3, 3) == 1.0
    assert more_often(5, 0) == 1 / 32
    assert more_often(0, 5) == more_often(0, 0) == 1.0


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_twice_the_smaller_tail(gained: int, lost: int) -> None:
    n = gained + lost
    chances = [comb(n, i) / 2**n for i in range(n + 1)]
    tails = sum(chances[: gained + 1]), sum(chances[gained:])
    assert mcnemar(gained, lost) == pytest.approx(min(1.0, 2 * min(tails)))
    assert mcnemar(gained, lost) == mcnemar(lost, gained)
    assert more_often(gained, lost) == pytest.approx(tails[1])


def test_thousands_of_pairs_do_not_overflow() -> None:
    assert 0 < mcnemar(2400, 2600) < 0.01


def test_discordant_pairs() -> None:
    assert discordant([1, 0, -1, 0.5, 0]) == (2, 1)


def test_a_ratio_is_one_of_totals() -> None:
    found = ratio([10, 2], [5, 2])
    assert found is not None
    assert found.value == 12 / 7
    assert (found.low, found.high) == (1.0, 2.0)  # both draws of the second problem, both of the first


def test_a_ratio_of_equals_is_one_exactly() -> None:
    times = [0.1, 0.7, 0.30001, 12.0]
    assert ratio(times, times) == Estimate(1.0, 1.0, 1.0)


def test_a_ratio_that_holds_on_every_problem_has_no_spread() -> None:
    found = ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    assert found is not None and (found.low, found.value, found.high) == pytest.approx((2, 2, 2))


def test_the_interval_of_a_ratio_holds_the_truth_about_as_often_as_it_says() -> None:
    rng, held = np.random.default_rng(1), 0
    for _ in range(200):
        length = rng.uniform(1, 10, 40)
        found = ratio(
            (2.0 * length * rng.lognormal(0, 0.3, 40)).tolist(), (length * rng.lognormal(0, 0.3, 40)).tolist()
        )
        assert found is not None
        held += found.low <= 2.0 <= found.high
    assert 178 <= held <= 199


def test_a_ratio_without_a_divisor_is_not_given() -> None:
    assert ratio([], []) is None
    assert ratio([1, 2], [0, 0]) is None
    with pytest.raises(ValueError, match="pairs"):
        ratio([1, 2], [1])


def test_an_end_at_infinity_is_no_number_in_json() -> None:
    found = ratio([1.0, 1.0], [0.0, 1.0])  # a right answer on one problem only; one draw in four has none
    assert found is not None and found.value == 2.0
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False)) == {"value": 2.0, "low": 1.0, "high": None}


def test_the_mean_of_two_problems() -> None:
    assert mean([1.0, 3.0]) == Estimate(2.0, 1.0, 3.0)
    assert mean([]) is None


def test_every_resample_draws_as_many_problems_as_there_are() -> None:
    assert (draws(7, 0).sum(axis=1) == 7).all()
    assert (draws(7, 0) == draws(7, 0)).all()
    assert (draws(7, 0) != draws(7, 1)).any()


def test_the_paired_difference_by_hand() -> None:
    # Bonett and Price: 10 pairs, 1 gained, 3 lost -> (1 + 1) / 12 and (3 + 1) / 12
    found = difference([1, -1, -1, -1, 0, 0, 0, 0, 0, 0])
    up, down = 2 / 12, 4 / 12
    half = 1.96 * sqrt((up + down - (up - down) ** 2) / 12)
    assert found is not None and found.value == -0.2
    assert (found.low, found.high) == pytest.approx((up - down - half, up - down + half))


def test_ten_pairs_that_agree_do_not_prove_equality() -> None:
    found = difference([0.0] * 10)
    assert found is not None and found.value == 0
    assert found.high == -found.low == pytest.approx(1.96 * sqrt(2 / 12 / 12))
    assert difference([]) is None
