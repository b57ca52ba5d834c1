"""Where a run's data cannot show a loss, and why: there nothing is called equivalent and nothing is certified.

Right answers show nothing where the target has next to none, or where its answers are cut before they are given; and
no figure does in which a control that nothing checks, the draft alone or `accept-all`, is as good as the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, log2
from typing import Any

from scipy.stats import norm

from semspec.bench.folder import Sample
from semspec.bench.pairs import Figures
from semspec.bench.verdict import ALPHA, POINTS, problems_alike

CUT = 0.9  # of the target's answers; with so many cut off, what is left are beginnings
ROOM = 2  # the target must be right on this many times the margin, or half of its right answers fit in it
NEXT_TO_NOTHING = 0.05  # right answers of the target, of which nobody can say how many were lost
LONGER = "give longer answers with --max-new-tokens"


def separates(figures: Figures) -> bool:
    """Whether a control lies below the target beyond chance."""
    return bool(figures["p"] < ALPHA and figures["difference"]["value"] < 0)


def cut_share(samples: Sequence[Sample]) -> float:
    """Of answers that ended at the length limit; one that is right all the same was not cut short of anything."""
    cut = [s.get("finish_reason") == "length" and not s["correct"] for s in samples]
    return sum(cut) / max(1, len(cut))


def within_margin(target: Figures, control: tuple[str, Figures] | None, limit: float | None) -> str | None:
    """Why a margin in points of accuracy says nothing here; None: it does. `control`: what nothing checks."""
    right = target["accuracy"]
    if right is None or limit is None:
        return None
    if right["low"] < ROOM * limit:
        cut = (target["cap_rate"] or {}).get("share", 0.0)
        wanted = f"{LONGER}: {100 * cut:.0f} % were cut off" if cut >= CUT else "take problems that it can solve"
        found = f"{100 * right['share']:.1f} % [{100 * right['low']:.1f}, {100 * right['high']:.1f}]"
        return (
            f"the target is right on {found}, too few for a margin of {100 * limit:g} points, within which most of "
            f"them could be lost; {wanted}"
        )
    if control is not None and control[1]["equivalence_p"] is not None and control[1]["equivalence_p"] < ALPHA:
        return (
            f"{_unchecked(control[0])} is within the margin of {100 * limit:g} points itself, so these problems cannot "
            "show what a rule loses; take harder ones, or a smaller --margin"
        )
    return None


def no_loss_in_answers(target: Sequence[Sample], control: tuple[str, Figures] | None) -> str | None:
    """Why right answers cannot certify a rule; None: they can. `control`: its difference in right answers."""
    if (cut := cut_share(target)) >= CUT:
        return f"{100 * cut:.0f} % of the target's answers were cut off before a right one was given; {LONGER}"
    right = sum(float(s["correct"]) for s in target) / max(1, len(target))
    if right < NEXT_TO_NOTHING:
        return (
            f"the target is right on {100 * right:.1f} % of {len(target)} answers, so there is nothing to lose; "
            "calibrate on problems that it can solve, or see whether the answers are compared in the right way (match=)"
        )
    if control is not None and not separates(control[1]):
        return (
            f"by right answers {_unchecked(control[0])} cannot be told from the target ("
            f"{100 * control[1]['difference']['value']:+.1f} points, p = {control[1]['p']:.2g}), so these "
            f"{len(target)} answers cannot show what a rule loses; calibrate on more or harder problems"
        )
    return None


def no_loss_in_measure(target: Sequence[Sample], measure: str, about: Mapping[str, Any], control: str) -> str | None:
    """The same without right answers, by the measure that would decide."""
    if (cut := cut_share(target)) >= CUT:
        return f"{100 * cut:.0f} % of the target's answers were cut off, so only beginnings were compared; {LONGER}"
    if about["separates_random"] is False:
        missed = f"random ({', '.join(about['controls'])})"
    elif not about["separates_draft"]:
        missed = _unchecked(control)
    else:
        return None
    return (
        f"by {measure} {missed} cannot be told from the target on these prompts, so they cannot show what a rule "
        "loses; calibrate on more prompts, or on ones whose answers differ more"
    )


def cut_note(summary: Mapping[str, Any]) -> list[str]:
    """Below a table: that the target's own answers are beginnings."""
    cut = (summary["arms"][summary["baseline"]].get("cap_rate") or {}).get("share", 0.0)
    if cut < CUT:
        return []
    return [f"{100 * cut:.0f} % of the target's answers were cut at their length limit: quality is of beginnings."]


def resolution_note(summary: Mapping[str, Any]) -> list[str]:
    """Below a table: the least damage that this much data could have shown. Less of it is missed, and is not denied."""
    tested = [arm for arm in summary["arms"].values() if arm.get("mcnemar_p_holm") is not None]
    chosen = summary.get("deciding_measure")
    if chosen is not None:
        return _resolution_of(chosen, summary["measures"][chosen], list(summary["arms"].values()))
    if not tested or summary.get("graded"):
        return []
    n, fewest = max(arm["scored_in_common"] for arm in tested), ceil(log2(2 * len(tested) / ALPHA))
    margin = summary.get("margin", {})
    wanted = problems_alike(margin.get("points"), len(tested))
    known = margin.get("points", POINTS) is not None  # else no number would do
    more = f"; with fewer than {wanted} no lossy rule can be called equivalent" if known and n < wanted else ""
    if fewest > n:
        return [f"{n} answer{'s' if n > 1 else ''} cannot show any loss{more}."]
    return [f"Of {n} answers {fewest} lost and none gained ({100 * fewest / n:.1f} %) are the fewest that show{more}."]


def _resolution_of(measure: str, about: Mapping[str, Any], arms: Sequence[Mapping[str, Any]]) -> list[str]:
    """By intervals, which are of one arm and so wider where a verdict is corrected for several."""
    seen = [arm["measures"][measure] for arm in arms if measure in arm["measures"]]
    gaps = [figures["difference"] for figures in seen]
    halves = sorted((gap["high"] - gap["low"]) / 2 for gap in gaps if gap["value"] and gap["high"] is not None)
    if not halves:
        return []
    tests = max(1, sum(figures.get("p_holm") is not None for figures in seen))
    least = halves[len(halves) // 2] * norm.isf(ALPHA / 2 / tests) / norm.isf(ALPHA / 2)
    said = f"By {measure} a difference of about {least:.2g} is the least that shows here"
    limit = about.get("may_change")  # which earlier releases did not keep
    wanted = problems_alike(limit, tests) if limit else 0
    more = f"; with fewer than {wanted} problems no lossy rule can be called equivalent"
    return [f"{said}, less where an arm seldom differs{more if about['problems'] < wanted else ''}."]


def _unchecked(name: str) -> str:
    return "the draft alone" if name == "draft" else f"{name}, which checks nothing,"
