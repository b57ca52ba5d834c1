"""Intervals hold the truth about as often as they say, in a few hundred runs of a made-up world. `make coverage` tries
all figures in thousands. With percentile bootstraps over problems, and shares clustered as if clusters were equal, each
of these tests failed."""

from __future__ import annotations

import numpy as np
import pytest

from bench.coverage import simulate
from semspec.statistics import Share


@pytest.mark.parametrize(("problems", "batch", "repeats"), [(5, 1, 1), (24, 4, 1)])
def test_every_interval_holds_the_truth(problems: int, batch: int, repeats: int) -> None:
    found = simulate(problems, batch, repeats, runs=250, truth_from=3000)
    low = {name: row["coverage"] for name, row in found.items() if row["coverage"] is None or row["coverage"] < 0.9}
    assert not low, "250 intervals of 95 % hold fewer than 225 truths once in a thousand times"


def test_shares_of_unequal_clusters_hold_the_truth() -> None:
    """50 problems of 1 to 50 steps each, which are accepted all or none."""
    rng, hits = np.random.default_rng(0), 0
    for _ in range(300):
        totals = np.ceil(rng.lognormal(1.5, 0.9, 50)).astype(int)
        low, high = Share.clustered(zip(totals * (rng.random(50) < 0.7), totals, strict=True)).interval
        hits += low <= 0.7 <= high
    assert hits / 300 >= 0.9
