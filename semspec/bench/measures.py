"""Quality without right answers: each measure gives every sample a number, and arms are compared in it with the target.

A measure is held against three controls. The target with other seeds shows how far from itself the target lies; the
draft alone how far a bad text lies, which is the unit of the margin; `random` relaxes as often as a method does,
without looking. A measure in which `random` cannot be told from the target on this data decides nothing, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

from semspec.bench.agreement import WORDS, Values, agreements, by_number, by_words, references
from semspec.bench.arms import RESAMPLED, on_trial, shown
from semspec.bench.blind import separates
from semspec.bench.folder import Sample, key_of
from semspec.bench.pairs import Figures, paired, plain, sides_by_problem, two_lists
from semspec.bench.tost import equivalence_p
from semspec.bench.verdict import MIN_PROBLEMS, Margin, correct, decide
from semspec.statistics import difference, paired_p

LIKELIHOOD, AT_REQUEST, LOWEST = "likelihood", "likelihood at the temperature", "least likely token"
LIKELIHOODS = (LIKELIHOOD, AT_REQUEST, LOWEST)
NUMBER, MEANING, JUDGE = "number", "meaning", "judge"
PREFERRED = (NUMBER, MEANING, LOWEST, LIKELIHOOD)  # as they follow accuracy; the first that most problems have decides
CONTROLS = ("random", "random-step")
UNCHECKED = "accept-all"


def values_of(run: Mapping[str, Any], samples: Sequence[Sample], extra: Mapping[str, Values]) -> dict[str, Values]:
    """Every measure that these samples allow; `extra` has those that need another model."""
    found: dict[str, Values] = {}
    for name, field in zip(LIKELIHOODS, ("one", "request", "lowest"), strict=True):
        if name != AT_REQUEST or run.get("config", {}).get("temperature"):
            found[name] = {key_of(s): s["likelihood"][field] for s in samples if s.get("likelihood")}
    roles = {arm["name"]: arm["role"] for arm in run["arms"]}
    others = references(samples, roles)
    found[NUMBER] = agreements(samples, others, by_number(samples))
    if MEANING not in extra:
        found[MEANING] = agreements(samples, others, by_words)
    found |= extra
    return {name: values for name, values in found.items() if values}


def draft_of(run: Mapping[str, Any]) -> str | None:
    """The arm that writes as the draft does: the draft alone or, where nothing drafts without the target, as heads and
    lookups, `accept-all`."""
    alone = [arm["name"] for arm in run["arms"] if arm["role"] == "draft"]
    return next(iter(alone + [arm["name"] for arm in run["arms"] if arm["name"].partition(":")[0] == UNCHECKED]), None)


def compare_measures(
    run: Mapping[str, Any], samples: Sequence[Sample], margin: Margin, extra: Mapping[str, Values] | None = None,
    by: Mapping[str, str] | None = None,
) -> tuple[dict[str, dict[str, Figures]], Figures]:  # fmt: skip
    """arm -> measure -> figures against the target alone; and about each measure, what it can tell on this data.
    `by`: whose the values of `extra` are, in words."""
    by_arm: dict[str, list[Sample]] = {arm["name"]: [] for arm in run["arms"]}
    for sample in samples:
        by_arm[sample["arm"]].append(sample)
    target = next(arm["name"] for arm in run["arms"] if arm["role"] == "target")
    draft = draft_of(run)
    others = [arm["name"] for arm in shown(run) if arm["name"] != target and on_trial(run, arm)]
    elsewhere = references(samples, {arm["name"]: arm["role"] for arm in run["arms"]})
    found: dict[str, dict[str, Figures]] = {name: {} for name in by_arm}
    about: Figures = {}
    for measure, values in values_of(run, samples, extra or {}).items():
        by_arms = {
            name: sides_by_problem(paired(by_arm[name], by_arm[target]), lambda s: values.get(key_of(s)))  # noqa: B023
            for name in by_arm
        }
        unit = by_arms[draft] if draft else {}
        # Of the unit's differences, where an arm has none: a number is right or wrong, and needs no such size.
        usual = sqrt(sum((o - t) ** 2 for o, t in unit.values()) / len(unit)) if unit and measure != NUMBER else None
        gap = difference(*two_lists(unit.values()), bounded=False, usual=usual)
        limit = margin.of_measure(gap.value if gap and (gap.low > 0 or gap.high < 0) else None)
        share = None if gap is None or limit is None else limit / gap.value
        margins = None if share is None else {problem: share * (o - t) for problem, (o, t) in unit.items()}
        worst = max((abs(o - t) for o, t in unit.values()), default=0.0)
        for name, seen in by_arms.items():
            if seen:
                found[name][measure] = _figures(seen, margins, gap.value if gap else None, usual, worst)
        if measure in (LIKELIHOOD, AT_REQUEST):
            for name in found:
                if measure in found[name]:
                    found[name][measure]["spread"] = _spread(by_arm[name], elsewhere, values)
        told = {name: found[name][measure] for name in others if measure in found[name]}
        correct(told, told, "p")
        correct(told, told, "equivalence_p")
        spreads = measure in LIKELIHOODS and _lies_beyond(found.get(RESAMPLED, {}).get(measure), limit)
        for figures in told.values():
            lower = figures["difference"]["value"] < 0
            figures["verdict"] = decide(figures["p_holm"], figures["equivalence_p_holm"], lower)
            figures["as_own_samples"] = spreads and figures["verdict"] == "worse"
        about[measure] = _about(run, told, len(by_arms[target]), limit) | {"own_samples_lower": spreads}
        # The share of answers that may change within the margin, if each loses as much as the draft's worst.
        about[measure]["may_change"] = limit / worst if limit else None
        for figures in told.values():
            blind = figures["verdict"] == "equivalent" and about[measure]["separates_random"] is False
            if figures["as_own_samples"] or blind:
                figures["verdict"] = "unclear"
    for name, whose in ({MEANING: WORDS} | dict(by or {})).items():
        if name in about:
            about[name]["by"] = whose
    return found, about


def _figures(
    sides: Mapping[str, tuple[float, float]], margins: Mapping[str, float] | None, distance: float | None,
    usual: float | None, worst: float,
) -> Figures:  # fmt: skip
    """Of one arm, by problem. `margins`: the share of the draft's own differences that may be lost, by problem;
    `worst`: the largest of its differences."""
    ours, theirs = two_lists(sides.values())
    found = difference(ours, theirs, bounded=False, usual=usual)
    assert found is not None
    common = [] if margins is None else [problem for problem in sides if problem in margins]
    return {
        "problems": len(ours),
        "value": sum(ours) / len(ours),
        "difference": plain(found),
        "of_distance": found.value / distance if distance else None,  # 0: as the target, 1: as the draft alone
        "p": paired_p(ours, theirs),
        "equivalence_p": None
        if margins is None
        else equivalence_p(*two_lists(sides[p] for p in common), [margins[p] for p in common], usual, worst),
    }


def _spread(own: list[Sample], others: dict[str, list[Sample]], values: Values) -> dict[str, float | None] | None:
    """How far outside the target's own samples on the same prompts the arm's lie, in their standard deviations."""
    gaps, squares, degrees = [], 0.0, 0
    for sample in own:
        theirs = [values[key_of(o)] for o in others.get(sample["problem"], ()) if o is not sample]
        if len(theirs) > 1 and key_of(sample) in values:
            mean = sum(theirs) / len(theirs)
            gaps.append(values[key_of(sample)] - mean)
            squares, degrees = squares + sum((t - mean) ** 2 for t in theirs), degrees + len(theirs) - 1
    if not squares:
        return None
    scale = sqrt(squares / degrees)
    return plain(difference([gap / scale for gap in gaps], [0.0] * len(gaps), bounded=False))


def _lies_beyond(resampled: Figures | None, limit: float | None) -> bool:
    """Whether the target's own samples are lower than the text that arms are compared with, by more than the margin. So
    it is beside greedy text: that is the likeliest, and all others are less likely, good or bad."""
    if resampled is None:
        return False
    return separates(resampled) and -resampled["difference"]["value"] > (limit or 0.0)


def _about(run: Mapping[str, Any], told: dict[str, Figures], problems: int, limit: float | None) -> Figures:
    """Whether the measure tells `random` and the draft from the target here."""

    def tells(names: list[str]) -> bool | None:
        seen = [told[name] for name in names if name in told]
        return None if not seen else any(separates(figures) for figures in seen)

    roles, draft = {arm["name"]: arm["role"] for arm in run["arms"]}, draft_of(run)
    coins = [name for name in told if roles[name] == "method" and name.partition(":")[0] in CONTROLS]
    return {
        "problems": problems,
        "margin": limit,
        "separates_draft": tells([] if draft is None else [draft]),
        "separates_random": tells(coins),
        "controls": coins,
    }


def deciding(about: Figures, problems: int) -> str | None:
    """The measure that the verdict rests on: the first of the preferred ones that most problems have and that can tell
    `random` from the target here. The controls choose it, never the methods; where none can tell, the first says so."""
    enough = max(MIN_PROBLEMS, problems / 2)
    there = [name for name in PREFERRED if name in about and about[name]["problems"] >= enough]
    return next(iter([name for name in there if about[name].get("separates_random") is not False] + there), None)


def sentences(about: Figures, chosen: str | None) -> list[str]:
    """What the measures can and cannot tell here, for below a table."""
    lines = []
    if chosen is not None:
        by = f" ({about[chosen]['by']})" if "by" in about[chosen] else ""
        lines.append(f"Without right answers the verdict rests on: {chosen}{by}.")
    lines += [f"{name} is by {one['by']}." for name, one in about.items() if "by" in one and name != chosen]
    blind = [name for name, one in about.items() if one["separates_random"] is False]
    if blind:
        lines.append(f"On this data random cannot be told from the target by: {', '.join(blind)}.")
    own = [name for name, one in about.items() if one.get("own_samples_lower")]
    if own:
        lines.append(f"The target's own samples are lower, too, so lower is unclear, not worse, by: {', '.join(own)}.")
    lost = [name for name, one in about.items() if one["separates_draft"] is False]
    if lost:
        told = "The draft alone cannot be told from the target, so there is no margin and no equivalence"
        lines.append(f"{told}, by: {', '.join(lost)}.")
    return lines
