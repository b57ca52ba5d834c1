"""Every statistic on samples small enough to be worked out by hand."""

from __future__ import annotations

import json
from itertools import pairwise
from math import comb, exp, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semspec.statistics import (
    Estimate,
    Share,
    bootstrap,
    difference,
    discordant,
    holm,
    isotonic,
    mcnemar,
    mcnemar_greater,
    paired_ratio,
    product_of_ratios,
    quantile,
    ratio,
)


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
    assert Share(0, 10).interval == pytest.approx((0.0, quantile() ** 2 / (10 + quantile() ** 2)))
    assert Share(10, 10).interval[1] == pytest.approx(1.0)
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
    # p = 1/2; variance = 4/3 * (1 + 0 + 1 + 0) / 64 = 1/24; 1/4 : 1/24 = 6 trials, and 3 degrees of freedom
    assert share.effective == pytest.approx(6) and share.degrees == pytest.approx(3)
    assert Share.clustered([(2, 2), (2, 2)]).effective == 2
    assert Share.clustered([(1, 1), (0, 1)]) == Share(1, 2)


def test_scores_between_right_and_wrong_spread_less() -> None:
    """Near the mean of n scores, give or take Student's t standard errors; never beyond 0 and 1."""
    scores = [0.3, 0.5, 0.45, 0.7, 0.6, 0.55, 0.4, 0.5]
    graded = Share.clustered((s, 1) for s in scores)
    assert graded.value == pytest.approx(np.mean(scores)) and graded.hits == pytest.approx(sum(scores))
    half = quantile(7) * np.std(scores, ddof=1) / sqrt(8)
    assert graded.interval == pytest.approx((0.5 - half, 0.5 + half), abs=0.01)
    whole = Share.clustered((round(s), 1) for s in scores).interval
    assert whole[1] - whole[0] > 2 * (graded.interval[1] - graded.interval[0])
    assert Share.clustered([(0.99, 1), (1.0, 1), (0.97, 1)]).interval[1] <= 1.0
    same = Share.clustered([(0.5, 1)] * 4)
    assert same.interval == Share(2, 4).interval, "scores without any spread say nothing about it"


def test_one_large_cluster_is_not_worth_as_many_as_there_are_clusters() -> None:
    """Of 36 alike trials, 30 are one problem's: hardly more than one problem was seen."""
    share = Share.clustered([(30, 30), *[(0, 1)] * 6])
    assert share.effective is not None and share.effective < 2
    low, high = share.interval
    assert low < 0.2 and high > 0.99


def test_mcnemar_by_hand() -> None:
    assert mcnemar(0, 5) == 2 / 32
    assert mcnemar(0, 6) == 2 / 64
    assert mcnemar(1, 9) == pytest.approx(2 * (1 + 10) / 1024)
    assert mcnemar(0, 0) == mcnemar(3, 3) == 1.0
    assert mcnemar_greater(5, 0) == 1 / 32
    assert mcnemar_greater(0, 5) == mcnemar_greater(0, 0) == 1.0


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_twice_the_smaller_tail(gained: int, lost: int) -> None:
    n = gained + lost
    chances = [comb(n, i) / 2**n for i in range(n + 1)]
    tails = sum(chances[: gained + 1]), sum(chances[gained:])
    assert mcnemar(gained, lost) == pytest.approx(min(1.0, 2 * min(tails)))
    assert mcnemar(gained, lost) == mcnemar(lost, gained)
    assert mcnemar_greater(gained, lost) == pytest.approx(tails[1])


def test_thousands_of_pairs_do_not_overflow() -> None:
    assert 0 < mcnemar(2400, 2600) < 0.01


def test_discordant_pairs() -> None:
    assert discordant([1, 0, -1, 0.5, 0]) == (2, 1)


def test_a_ratio_is_one_of_totals() -> None:
    found = ratio([10, 2], [5, 2])
    assert found is not None
    assert found.value == 12 / 7
    weight = (10 / 12 + 5 / 7) / 2  # of the first
    half = 12.7062 * (10 / 12 - 5 / 7) * sqrt(1 / (1 - weight) ** 2 + 1 / weight**2)  # Student's t, one degree
    assert (found.low, found.high) == pytest.approx((12 / 7 * exp(-half), 12 / 7 * exp(half)), rel=1e-4)


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


def test_an_end_that_is_not_known_is_no_number_in_json() -> None:
    found = ratio([1.0], [2.0])
    assert found is not None
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False)) == {"value": 0.5, "low": None, "high": None}


def test_units_that_are_not_typical_count_for_the_value_only() -> None:
    found = ratio([2.0, 4.0, 9.0], [1.0, 2.0, 1.0], [True, True, False])
    assert found is not None and (found.low, found.value, found.high) == pytest.approx((15 / 4,) * 3)


def test_a_ratio_of_ratios_is_paired() -> None:
    """What makes a unit slow on all sides cancels."""
    tops, slow = [3.0, 5.0, 2.0, 7.0], [1.0, 2.0, 9.0, 4.0]
    found = product_of_ratios([[2 * t for t in tops], slow], [slow, tops])
    assert found is not None and (found.low, found.value, found.high) == pytest.approx((2, 2, 2))


def test_the_paired_difference_by_hand() -> None:
    # Bonett and Price: 10 pairs, 1 gained, 3 lost -> (1 + 1) / 12 and (3 + 1) / 12
    found = difference([1, 0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    up, down = 2 / 12, 4 / 12
    half = quantile() * sqrt((up + down - (up - down) ** 2) / 12)
    assert found is not None and found.value == -0.2
    assert (found.low, found.high) == pytest.approx((up - down - half, up - down + half))


def test_ten_pairs_that_agree_do_not_prove_equality() -> None:
    found = difference([1.0] * 10, [1.0] * 10)
    assert found is not None and found.value == 0
    assert found.high == -found.low == pytest.approx(quantile() * sqrt(2 / 12 / 12))
    assert difference([], []) is None


def test_pairs_that_agree_do_not_prove_that_all_is_kept() -> None:
    found = paired_ratio([1.0] * 9 + [0.0], [1.0] * 9 + [0.0])
    assert found is not None and found.value == 1.0 and found.low < 0.9 and found.high > 1.1
    assert paired_ratio([1.0], [0.0]) is None and paired_ratio([], []) is None


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, None]) == [pytest.approx(0.03), pytest.approx(0.06), pytest.approx(0.06), None]
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02] and holm([None]) == [None] and holm([]) == []


def test_the_bootstrap_of_a_mean_is_that_of_its_formula() -> None:
    x = np.random.default_rng(0).normal(size=200)
    low, high = bootstrap(200, lambda counts: np.stack([counts @ x, counts @ x * 0 + 7]) / [[200], [1]])
    half = quantile() * x.std() / sqrt(200)
    assert (low[0], high[0]) == pytest.approx((x.mean() - half, x.mean() + half), abs=0.3 * half)
    assert (low[1], high[1]) == (7, 7), "a figure that is the same in every draw has no spread"


def test_a_figure_that_a_draw_lacks_has_no_interval() -> None:
    low, high = bootstrap(5, lambda counts: np.where(counts[:, :1].T == 0, np.nan, 1.0))
    assert np.isnan(low[0]) and np.isnan(high[0])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=30))
def test_an_isotonic_fit_rises_and_has_its_plateaus_means(rows: list[tuple[int, int]]) -> None:
    y, weights = (np.array(column, float) for column in zip(*rows, strict=True))
    fit, bounds = isotonic(y, weights)
    assert (np.diff(fit) >= 0).all() and bounds[0] == 0 and bounds[-1] == len(y)
    for begin, end in pairwise(bounds):
        mean = np.average(y[begin:end], weights=weights[begin:end])
        assert fit[begin:end] == pytest.approx(mean), "a plateau is the mean of its rows"
