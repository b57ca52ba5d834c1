"""Every arm of a run against one of its methods, paired by problem: is a rule better than its honest baseline?

The summary compares with the target alone. That says what a rule costs, not whether it is worth more than another rule,
or than accepting as often at random: intervals of two arms may overlap where the paired difference is plain.
"""

from __future__ import annotations

from math import fsum
from typing import Any

from semspec.bench.answers import paired_test
from semspec.bench.arms import on_trial, shown
from semspec.bench.folder import Sample, deduplicated
from semspec.bench.pairs import Figures, by_problem, paired, plain
from semspec.bench.summary import batch_of, times_faster
from semspec.bench.verdict import correct
from semspec.errors import BadRequest
from semspec.statistics import ratio


def compare_to(run: dict[str, Any], samples: list[Sample], baseline: str) -> dict[str, Figures]:
    """arm -> what it gained and lost against the baseline; ratios above 1 are the arm's favour."""
    names = [arm["name"] for arm in run["arms"]]
    if baseline not in names:
        raise BadRequest(f"the run has no arm {baseline!r} to compare with; it has: {', '.join(names)}")
    samples = deduplicated(samples)
    theirs = [s for s in samples if s["arm"] == baseline]
    drafts = {arm["name"] for arm in run["arms"] if arm["role"] == "draft"}
    found: dict[str, Figures] = {}
    for name in (arm["name"] for arm in shown(run) if on_trial(run, arm)):
        if name == baseline:
            continue
        pairs = paired([s for s in samples if s["arm"] == name], theirs)
        passes = [
            [fsum(row[side]["stats"]["target_passes"] for row in group) for group in by_problem(pairs)]
            for side in (1, 0)
        ]
        found[name] = {
            "problems_in_common": len(by_problem(pairs)),
            **paired_test(pairs),
            "passes_ratio": None if {name, baseline} & drafts else plain(ratio(passes[0], passes[1])),
            "time_ratio": times_faster(pairs, batch_of(run), lambda s: s["seconds"]),
        }
    correct(found, found, "mcnemar_p")
    return found
