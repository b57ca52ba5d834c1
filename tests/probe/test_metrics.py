"""Golden values, worked out by hand, and brute force over pairs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semspec.probe import metrics

SAID = torch.tensor([0.1, 0.4, 0.35, 0.8])
TRUE = torch.tensor([0.0, 0.0, 1.0, 1.0])


def test_golden() -> None:
    assert metrics.mse(SAID, TRUE) == pytest.approx((0.01 + 0.16 + 0.4225 + 0.04) / 4)
    assert metrics.r2(SAID, TRUE) == pytest.approx(1 - 0.6325 / 1.0)
    # deviations: said -.3125, -.0125, -.0625, .3875; true -.5, -.5, .5, .5
    assert metrics.correlation(SAID, TRUE) == pytest.approx(0.325 / math.sqrt(0.251875 * 1.0))
    assert metrics.auroc(SAID, TRUE > 0.5) == 0.75  # of four pairs, only .35 against .4 is wrong
    # two bins: {.1, .4, .35} says .28333 where 1/3 happens, {.8} says .8 where 1 happens
    assert metrics.ece(SAID, TRUE, bins=2) == pytest.approx((3 * (1 / 3 - 0.85 / 3) + 0.2) / 4)
    assert metrics.reliability(SAID, TRUE, bins=2) == [(pytest.approx(0.85 / 3), pytest.approx(1 / 3), 3), (pytest.approx(0.8), 1.0, 1)]  # noqa: E501  # fmt: skip


def test_within_groups_only_pairs_of_a_group_count() -> None:
    scores = torch.tensor([0.9, 0.8, 0.2, 0.3, 0.5])
    positive = torch.tensor([True, False, True, False, True])
    # group x: .9 over .8, right; group y: .2 over .3, wrong; .5 over .3, right
    assert metrics.within_auroc(scores, positive, ["x", "x", "y", "y", "y"]) == pytest.approx(2 / 3)
    assert metrics.auroc(scores, positive) == pytest.approx(3 / 6)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 2)), min_size=1, max_size=25))
def test_auroc_counts_pairs(rows: list[tuple[int, bool, int]]) -> None:
    scores, positive = torch.tensor([float(r[0]) for r in rows]), torch.tensor([r[1] for r in rows])
    groups = [r[2] for r in rows]

    def brute(same_group: bool) -> float:
        pairs = [(a, b) for a in rows if a[1] for b in rows if not b[1] and (not same_group or a[2] == b[2])]
        wins = sum((a[0] > b[0]) + (a[0] == b[0]) / 2 for a, b in pairs)
        return wins / len(pairs) if pairs else math.nan

    assert metrics.auroc(scores, positive) == pytest.approx(brute(False), nan_ok=True)
    assert metrics.within_auroc(scores, positive, groups) == pytest.approx(brute(True), nan_ok=True)


def test_where_nothing_can_be_said_nothing_is() -> None:
    flat = torch.full((3,), 0.5)
    assert math.isnan(metrics.r2(flat, flat)) and math.isnan(metrics.correlation(flat, flat))
    said = metrics.summary(flat, flat, ["x"] * 3)
    assert said["r2"] is None and said["auroc"] is None and said["ece"] == 0.0 and said["n"] == 3


def test_summary_measures_right_steps_where_they_are_known() -> None:
    said = metrics.summary(SAID, TRUE, ["x", "x", "y", "y"], valid=torch.tensor([True, False, False, True]))
    assert said["auroc"] == 0.75 and said["valid_auroc"] == 0.5 and said["valid_within_prefix_auroc"] == 0.5
    assert said["within_prefix_auroc"] is None  # no prefix has both


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=400))
def test_refused_is_what_the_best_threshold_refuses(rows: list[tuple[int, bool]]) -> None:
    scores, right = torch.tensor([float(s) for s, _ in rows]), torch.tensor([r for _, r in rows])
    found = metrics.refused(scores, right)
    good, bad = [s for s, r in rows if r], [s for s, r in rows if not r]
    if not good or not bad:
        assert found != found
        return
    cheap = [t for t in range(8) if sum(s < t for s in good) <= metrics.LOST * len(good)]
    assert found == pytest.approx(max(sum(s < t for s in bad) / len(bad) for t in cheap))
