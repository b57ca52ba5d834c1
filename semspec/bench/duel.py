"""Every arm of a run against one of its methods, paired by problem: is a rule better than its honest baseline?

The summary compares with the target alone. That says what a rule costs, not whether it is worth more than another rule,
or than a coin that accepts as often: intervals of two arms may overlap where the paired difference is plain.
"""

from __future__ import annotations

from typing import Any

from semspec.bench.statistics import difference, discordant, mcnemar, ratio
from semspec.bench.summary import Sample, given, once, pair, total
from semspec.errors import BadRequest


def duel(run: dict[str, Any], samples: list[Sample], rival: str) -> dict[str, dict[str, Any]]:
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
        right = [[(a["correct"], b["correct"]) for a, b in group] for group in pairs.values()]
        right = [group for group in right if all(None not in both for both in group)]
        gains = [sum(a - b for a, b in group) / len(group) for group in right]
        gained, lost = discordant(gains)
        passes = [total(pairs, side, lambda s: s["stats"]["target_passes"]) for side in (0, 1)]
        seconds = [total(pairs, side, lambda s: s["seconds"]) for side in (0, 1)]
        found[name] = {
            "problems_in_common": len(pairs),
            "gained": gained,
            "lost": lost,
            "mcnemar_p": mcnemar(gained, lost) if gains else None,
            "accuracy_difference": given(difference(gains)),
            "passes_ratio": None if {name, rival} & drafts else given(ratio(passes[1], passes[0])),
            "time_ratio": given(ratio(seconds[1], seconds[0])),
        }
    return found
