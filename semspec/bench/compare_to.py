"""Every arm of a run against one of its methods, paired by problem: is a rule better than its honest baseline?

The summary compares with the target alone. That says what a rule costs, not whether it is worth more than another rule,
or than a coin that accepts as often: intervals of two arms may overlap where the paired difference is plain.
"""

from __future__ import annotations

from typing import Any

from semspec.bench.statistics import ratio
from semspec.bench.summary import Sample, both_scored, given, once, pair, paired_test, total
from semspec.errors import BadRequest


def compare_to(run: dict[str, Any], samples: list[Sample], rival: str) -> dict[str, dict[str, Any]]:
    """arm -> what it gained and lost against the rival; ratios above 1 are the arm's favour."""
    names = [arm["name"] for arm in run["arms"]]
    if rival not in names:
        raise BadRequest(f"the run has no arm {rival!r} to compare with; it has: {', '.join(names)}")
    kept = once(samples)
    theirs = [s for s in kept if s["arm"] == rival]
    drafts = {arm["name"] for arm in run["arms"] if arm["role"] == "draft"}
    found = {}
    for name in names:
        if name == rival:
            continue
        pairs = pair([s for s in kept if s["arm"] == name], theirs)
        passes = [total(pairs, side, lambda s: s["stats"]["target_passes"]) for side in (0, 1)]
        seconds = [total(pairs, side, lambda s: s["seconds"]) for side in (0, 1)]
        found[name] = {
            "problems_in_common": len(pairs),
            **paired_test(both_scored(pairs)),
            "passes_ratio": None if {name, rival} & drafts else given(ratio(passes[1], passes[0])),
            "time_ratio": given(ratio(seconds[1], seconds[0])),
        }
    return found
