"""Beside greedy text every other is less likely: what the target's own samples show, too, is not called worse."""

from __future__ import annotations

from typing import Any

import pytest

from semspec.bench.measures import compare_measures
from semspec.bench.summary import summarise
from semspec.bench.table import notes
from semspec.bench.verdict import Margin
from tests.bench.test_measures import made_up, same

LOWEST = {"none": -1.0, "draft": -6.0, "fly": -3.0, "margin": -1.0, "random:rate=0.5": -5.0, "resampled": -4.0}


def greedy_run(**lowest: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Numbers and words say nothing here, so the likelihood has to decide; its values are these, and a little noise."""
    wrong = {"fly": same, "margin": same, "random:rate=0.5": same, "draft": same}
    run, samples = made_up(**wrong)
    run["config"]["temperature"] = 0.0
    for s in samples:
        value = (LOWEST | lowest).get(s["arm"].removesuffix(" 2"), 0.0) + 0.01 * ((5 * s["index"] + len(s["arm"])) % 7)
        s["likelihood"] = {"one": -0.5, "request": -0.5, "lowest": value, "tokens": 9}
        s["text"] = "the same words"
    return run, samples


def test_lower_as_the_targets_own_samples_is_unclear_and_says_why() -> None:
    summary = summarise(*greedy_run())
    assert summary["deciding_measure"] == "least likely token"
    for name in ("fly", "random:rate=0.5", "draft"):
        found = summary["arms"][name]
        assert found["quality"] == "unclear" and not found["quality_reasons"], name
        assert found["speedup"] is None and "target's own samples, too" in found["speedup_refused"]
    assert summary["arms"]["margin"]["quality"] == "equivalent" and summary["arms"]["margin"]["speedup"]
    assert any("own samples are lower, too" in line and "least likely token" in line for line in notes(summary))


def test_where_the_targets_own_samples_are_as_likely_lower_is_worse() -> None:
    summary = summarise(*greedy_run(resampled=-1.05))
    assert summary["arms"]["fly"]["quality"] == "worse" and summary["arms"]["fly"]["speedup"]
    assert not any("own samples are lower, too" in line for line in notes(summary))


@pytest.mark.parametrize(("measure", "spreads"), [("number", False), ("meaning", False), ("least likely token", True)])
def test_only_measures_of_likelihood_are_read_so(measure: str, spreads: bool) -> None:
    """Another number than the target's is another number, however often its own samples have one."""
    run, samples = greedy_run()
    for s in samples:
        wrong = 3 * (s["arm"] in ("fly", "draft")) + (s["arm"] == "resampled" and s["index"] % 3 == 0)
        s["text"] = f"There are {10 * s['index'] + wrong} apples."
    found, about = compare_measures(run, samples, Margin())
    assert about[measure].get("own_samples_lower") is spreads
    if not spreads:
        assert found["fly"][measure]["verdict"] == "worse"
