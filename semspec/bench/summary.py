"""From recorded samples to the figures that are compared. No figure of speed is made without its quality.

Every arm is paired with the target alone on the same (problem, repeat), hence the same prompt and seed. Repeats of one
problem are then pooled, and the test is McNemar's on problems: one counts as lost where the arm's share of right
answers is lower than the target's, as gained where it is higher. Its p values are corrected for the number of arms. The
answers of a graded task are right in part: there, shares are means of scores, and the test is a sign test.
Problems that were decoded as one batch share one time, so intervals of seconds are over batches, not over problems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from math import fsum
from typing import Any

from semspec.bench.agreement import Values
from semspec.bench.answers import margins_by_problem, paired_test, right_answers
from semspec.bench.arms import GREEDY_SPREAD, on_trial, shown
from semspec.bench.blind import CUT, within_margin
from semspec.bench.folder import Sample, deduplicated
from semspec.bench.measures import compare_measures, deciding, draft_of
from semspec.bench.names import natural
from semspec.bench.pairs import Figures, Row, by_problem, paired, plain, quotient
from semspec.bench.verdict import ALPHA, MIN_PROBLEMS, Margin, correct, decide, problems_alike
from semspec.errors import BadRequest
from semspec.loop.repetition import find_repetition
from semspec.statistics import (
    Estimate,
    Share,
    difference,
    discordant,
    holm,
    mcnemar_greater,
    paired_ratio,
    ratio,
)


def summarise(
    run: dict[str, Any], samples: list[Sample], margin: Margin | None = None, extra: Mapping[str, Values] | None = None,
    by: Mapping[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """All figures of a run as one JSON document; the order in which samples were recorded does not matter. `extra` has
    measures that needed another model; `by` says whose they are."""
    margin = margin or Margin()
    ordered = sorted(deduplicated(samples), key=lambda s: (s["index"], s["problem"], s["repeat"]))
    arms, batch = {arm["name"]: arm for arm in run["arms"]}, batch_of(run)
    by_arm: dict[str, list[Sample]] = {name: [] for name in arms}
    for sample in ordered:
        if sample["arm"] not in arms:
            raise BadRequest(f"the samples have an arm {sample['arm']!r} that run.json does not know")
        by_arm[sample["arm"]].append(sample)
    baseline = next((name for name, arm in arms.items() if arm["role"] == "target"), None)
    if baseline is None:
        raise BadRequest("the run has no arm with the target alone, so there is nothing to compare with")
    names = [arm["name"] for arm in shown(run)]
    loops = {id(s): find_repetition(s["tokens"]) is not None for s in ordered}
    pairs = {name: paired(by_arm[name], by_arm[baseline]) for name in names}
    draft = draft_of(run)
    lost = difference(*right_answers(pairs[draft])) if draft else None
    limit = margin.of_accuracy(lost.value if lost else None)
    unit = margins_by_problem(pairs[draft], margin.share) if draft and margin.share is not None else None
    figures = {
        name: describe(arms[name], by_arm[name], loops, batch) | compare(arms[name], pairs[name], batch, limit, unit)
        for name in names
    }
    others = [name for name in names if name != baseline and on_trial(run, arms[name])]
    for p in ("mcnemar_p", "equivalence_p"):
        correct(figures, others, p)
    blind = within_margin(figures[baseline], (draft, figures[draft]) if draft else None, limit)
    measures: Figures = {}
    chosen, measured = None, any(arm["role"] == "resampled" or s.get("likelihood") for arm, s in _examples(run, by_arm))
    if measured:
        by_measure, measures = compare_measures(run, ordered, margin, extra, by)
        for name in names:
            figures[name]["measures"] = by_measure[name]
        scored = any(s["correct"] is not None for s in ordered)
        chosen = None if scored else deciding(measures, len({s["problem"] for s in ordered}))
    problems = {
        "loops": excess([pairs[name] for name in others], lambda s: loops[id(s)]),
        "cut off at the length limit": excess(
            [pairs[name] for name in others], lambda s: s["finish_reason"] == "length"
        ),
    }
    enough = problems_alike(measures[chosen]["may_change"] if chosen else limit, len(others))
    for i, name in enumerate(others):
        excesses = {what: often for what, found in problems.items() if (often := found[i])}
        figures[name] |= verdict(figures[name], excesses, chosen, measures, blind, enough)
    for name in (name for name in names if not on_trial(run, arms[name])):
        figures[name] |= {"quality": "spread", "sampled_at": GREEDY_SPREAD}
    return {
        "label": run.get("label", ""),
        "task": run.get("config", {}).get("task"),
        "core_share": run.get("core_share"),  # that a thread got when the run began
        "baseline": baseline,
        "graded": any(isinstance(s["correct"], float) for s in ordered),
        "problems": len({s["problem"] for s in ordered}),
        "samples": len(ordered),
        "margin": {"points": limit, "words": margin.words()},
        "measures": measures,
        "deciding_measure": chosen,
        "pareto": pareto({name: figures[name] for name in (baseline, *others)}),
        "arms": figures,
    }


def _examples(run: dict[str, Any], by_arm: dict[str, list[Sample]]) -> Iterable[tuple[dict[str, Any], Sample]]:
    """Each arm with one of its samples."""
    return ((arm, by_arm[arm["name"]][0]) for arm in run["arms"] if by_arm[arm["name"]])


def batch_of(run: dict[str, Any]) -> int:
    return int(run.get("config", {}).get("batch", 1))


def describe(arm: dict[str, Any], samples: list[Sample], loops: dict[int, bool], batch: int) -> Figures:
    """What an arm did by itself."""
    problems = [[s for (s,) in group] for group in by_problem((s,) for s in samples)]
    scored = [s for s in samples if s["correct"] is not None]
    counts = {k: sum(s["stats"][k] for s in samples) for k in ("accepted", "relaxed", "tokens")}
    rounds = sum(map(rounds_of, samples))
    passes = sum(s["stats"]["target_passes"] for s in samples) if arm["role"] != "draft" else None
    histogram: Counter[int] = Counter()
    for s in samples:
        histogram.update({int(n): times for n, times in s["stats"]["histogram"].items()})
    at_position = tuple(
        sum_positions(s["stats"][f"{what}_per_position"] for s in samples) for what in ("accepted", "drafted")
    )
    return {
        "role": arm["role"],
        "verifier": arm.get("verifier"),
        "control": arm.get("control", False),
        "lossless": arm.get("lossless"),
        "samples": len(samples),
        "problems": len(problems),
        "accuracy": share(problems, lambda s: s["correct"]) if scored else None,
        "tau_pooled": 1 + counts["accepted"] / rounds if rounds else None,
        "tau_interval": plain(tau(problems)),
        "tau_per_request_mean": quotient(fsum(s["stats"]["tau"] for s in samples), len(samples)),
        "acceptance_rate": quotient(counts["accepted"], sum(at_position[1])),  # of the longest paths, of tree drafts
        "acceptance_histogram": {str(n): histogram[n] for n in sorted(histogram)},
        "accepted_per_position": at_position[0],
        "drafted_per_position": at_position[1],
        "acceptance_per_position": [a / d for a, d in zip_longest(at_position[0], at_position[1], fillvalue=0)],
        "target_passes": passes,
        "tokens_per_target_pass": quotient(counts["tokens"], passes),
        "tokens": sum(len(s["tokens"]) for s in samples),
        "relaxed_share": quotient(counts["relaxed"], counts["accepted"]),  # of the accepted draft tokens
        "divergence": quotient(counts["relaxed"], counts["tokens"]),  # of all committed tokens
        "steps_accepted": share_of_steps(problems, accepted),  # of those that the draft wrote and the rule verified
        "invalid_refused": share_of_steps(
            problems, lambda step: None if step["valid"] is not False or accepted(step) is None else not accepted(step)
        ),
        "cap_rate": share(problems, lambda s: s["finish_reason"] == "length"),
        "loop_rate": share(problems, lambda s: loops[id(s)]),
        "seconds_per_problem": time_ratio([(s,) for s in samples], batch, lambda s: s["seconds"], lambda s: 1),
        "seconds_per_correct": time_ratio(
            [(s,) for s in scored], batch, lambda s: s["seconds"], lambda s: float(s["correct"])
        ),
        "groups": {
            name: share([[s for s in g if str(s.get("group")) == name] for g in problems], lambda s: s["correct"])
            for name in sorted({str(s["group"]) for s in scored if s.get("group")}, key=natural)
        },
    }


def rounds_of(sample: Sample) -> int:
    """Of one answer. Files of older versions call them steps."""
    stats = sample["stats"]
    return int(stats["rounds"] if "rounds" in stats else stats["steps"])


def tau(problems: list[list[Sample]]) -> Estimate | None:
    """Tokens that a round commits, pooled over all rounds, with an interval over problems."""
    rounds = [fsum(map(rounds_of, group)) for group in problems]
    drafted = [fsum(s["stats"]["accepted"] for s in group) for group in problems]
    return ratio([a + b for a, b in zip(drafted, rounds, strict=True)], rounds)


def compare(
    arm: dict[str, Any], pairs: list[Row], batch: int, limit: float | None, unit: Mapping[str, float] | None = None
) -> Figures:
    """What an arm did next to the target alone."""
    problems = by_problem(pairs)
    lengths = [[fsum(len(row[side]["tokens"]) for row in group) for group in problems] for side in (0, 1)]
    return {
        "problems_in_common": len(problems),
        "scored_in_common": len(right_answers(pairs)[0]),
        **paired_test(pairs, limit, unit),
        "retention": plain(paired_ratio(*right_answers(pairs))),
        "length_ratio": plain(ratio(lengths[0], lengths[1])),
        "identical_outputs": Share.clustered(
            (sum(a["tokens"] == b["tokens"] for a, b in group), len(group)) for group in problems
        ).as_dict()
        if pairs
        else None,
        "time_ratio": times_faster(pairs, batch, lambda s: s["seconds"]),
        "target_time_ratio": None if arm["role"] == "draft" else times_faster(pairs, batch, target_seconds),
        "quality": "baseline",
        "quality_reasons": [],
        "speedup": None,
        "speedup_refused": None,
    }


def verdict(
    found: Figures, excesses: dict[str, str], chosen: str | None, measures: Figures, blind: str | None, enough: int
) -> Figures:
    """The verdict on an arm's quality and speed. `excesses`: what happens to it more often than by chance. `chosen`:
    the measure that decides where nothing is scored. `blind`: why right answers cannot show a loss, if they cannot.
    `enough`: so many answers that are the same, token for token, make a lossy rule equivalent."""
    p, scored, lost, gained = (found[k] for k in ("mcnemar_p_holm", "scored_in_common", "lost", "gained"))
    same = found["identical_outputs"] is not None and found["identical_outputs"]["share"] == 1
    alike = same and (found["lossless"] or found["problems_in_common"] >= enough)
    worse = [f"{what} in {how_often}" for what, how_often in excesses.items()]
    few = f"in common with the target alone are too few; {MIN_PROBLEMS} are needed at least"
    quality, refused = "unmeasured", None
    if scored >= MIN_PROBLEMS:
        quality = decide(p, None if blind else found["equivalence_p_holm"], (lost or 0) > (gained or 0))
        if quality == "worse":
            worse.insert(0, f"right answers lost on {lost} problems and gained on {gained} (p = {p:.2g})")
        elif blind and quality == "unclear" and not (found["lossless"] or (alike and found["cap_rate"]["share"] < CUT)):
            refused = blind  # the same beginnings, of answers that were cut off, say nothing of a lossy rule
    elif chosen is not None and chosen in found["measures"]:
        own = found["measures"][chosen]
        quality = own["verdict"]
        if quality == "worse":
            worse.insert(0, f"{chosen} is {own['difference']['value']:+.3f} (p = {own['p_holm']:.2g})")
        elif measures[chosen]["separates_random"] is False and not alike:
            quality, refused = "unclear", f"{chosen} cannot tell random from the target here, so quality is not known"
        elif own.get("as_own_samples"):
            refused = f"{chosen} is lower, as it is of the target's own samples, too, so quality is not known"
    if alike and quality == "unclear" and refused is None:
        quality = "equivalent"
    if found["problems_in_common"] < MIN_PROBLEMS:
        refused = f"{found['problems_in_common']} problems {few}"
    elif "loops" in excesses:
        refused = f"loops in {excesses['loops']}"
    elif found["accuracy"] is None and chosen is None:
        refused = "the task has no scorer, so quality is not known"
    elif found["accuracy"] is not None and scored < MIN_PROBLEMS:
        refused = f"{scored} scored problems {few}"
    speedup = None if refused else found["time_ratio"]
    return {
        "quality": "worse" if worse else quality,
        "quality_reasons": worse,
        "speedup": speedup,
        "speedup_refused": refused,
    }


def excess(arms: list[list[Row]], what: Callable[[Sample], bool]) -> list[str | None]:
    """For each arm's pairs, in words, if something happens to it more often than to the target alone, and not by
    chance; corrected for the number of arms."""
    gaps = [[fsum(what(a) - what(b) for a, b in group) for group in by_problem(pairs)] for pairs in arms]
    found: list[str | None] = []
    for pairs, p in zip(arms, holm([mcnemar_greater(*discordant(gap)) for gap in gaps]), strict=True):
        ours, theirs = (100 * (quotient(sum(what(row[side]) for row in pairs), len(pairs)) or 0) for side in (0, 1))
        often = f"{ours:.1f} % of outputs, the target alone in {theirs:.1f} %"
        found.append(often if p is not None and p < ALPHA else None)
    return found


def share(problems: Iterable[list[Sample]], what: Callable[[Sample], float | None]) -> Figures | None:
    """How often, over all samples for which that is known, with an interval over problems; of scores, their mean."""
    known = [[hit for s in group if (hit := what(s)) is not None] for group in problems]
    return Share.clustered((sum(group), len(group)) for group in known).as_dict() if any(known) else None


def share_of_steps(problems: list[list[Sample]], what: Callable[[Sample], bool | None]) -> Figures | None:
    """The same over the reasoning steps that a draft wrote."""
    drafted = "drafted_steps", "judged"  # the latter in files of older versions
    return share([[step for s in group for key in drafted for step in s.get(key, ())] for group in problems], what)


def accepted(step: dict[str, Any]) -> bool | None:
    """Not known of a step that was handed over to the target: no rule has seen it."""
    outcome = step["outcome"] if "outcome" in step else step["fate"]  # as runs before 2026-11-18 have it
    return None if outcome == "handed over" else outcome == "accepted"


def time_ratio(
    rows: list[Row], batch: int, top: Callable[..., float], bottom: Callable[..., float]
) -> dict[str, float | None] | None:
    """Total of `top` over total of `bottom`, functions of a row. The unit is a batch of problems, with all repeats; an
    incomplete one takes another time per problem, so it says nothing about the spread."""
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[0]["index"] // batch, []).append(row)
    tops, bottoms = ([fsum(of(*row) for row in group) for group in groups.values()] for of in (top, bottom))
    complete = [len({row[0]["problem"] for row in group}) == batch for group in groups.values()]
    return plain(ratio(tops, bottoms, complete))


def times_faster(pairs: list[Row], batch: int, seconds: Callable[[Sample], float]) -> dict[str, float | None] | None:
    return time_ratio(pairs, batch, lambda ours, theirs: seconds(theirs), lambda ours, theirs: seconds(ours))


def target_seconds(sample: Sample) -> float:
    """What the target took: its passes, and verification, which waits for them on a device that works ahead."""
    spent = sample["stats"]["seconds"]
    return float(spent["score"] + spent["verify" if "verify" in spent else "judge"])  # as older runs call it


def sum_positions(lists: Iterable[list[int]]) -> list[int]:
    sums: Counter[int] = Counter()
    for entries in lists:
        sums.update(dict(enumerate(entries)))
    return [sums[i] for i in range(len(sums))]


def pareto(arms: dict[str, Figures]) -> list[str]:
    """Arms that no other arm beats in accuracy and seconds per problem at once, the fastest first."""
    points = {
        name: (-arm["accuracy"]["share"], arm["seconds_per_problem"]["value"])
        for name, arm in arms.items()
        if arm["accuracy"] and arm["seconds_per_problem"]
    }
    front = [
        name
        for name, here in points.items()
        if not any(there != here and all(t <= h for t, h in zip(there, here, strict=True)) for there in points.values())
    ]
    return sorted(front, key=lambda name: points[name][1])
