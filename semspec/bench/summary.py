"""From recorded samples to the figures that are compared. No figure of speed is made without its quality.

Every arm is paired with the target alone on the same (problem, repeat), hence the same prompt and seed. Repeats of one
problem are then pooled, and the test is McNemar's on problems: one counts as lost where the arm's share of right
answers is lower than the target's, as gained where it is higher. With one repeat that is the textbook test; with
several it needs no rule for ties of a majority, and equal repeats do not pass for evidence.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from math import fsum
from pathlib import Path
from typing import Any

from semspec.bench.statistics import Estimate, Share, difference, discordant, mcnemar, mean, more_often, ratio
from semspec.errors import BadRequest
from semspec.loop.repetition import find_loop

Sample = dict[str, Any]
Pairs = dict[str, list[tuple[Sample, Sample]]]  # problem -> (of the arm, of the target alone)
ENOUGH = 5  # problems in common without which nothing is said about speed or quality
ALPHA = 0.05
MARGIN = 0.05  # an arm is "the same" if it is shown to lose no more than this share of right answers


def load_run(folder: Path) -> tuple[dict[str, Any], list[Sample]]:
    """What a run's folder holds, also while the run is under way or after it was killed."""
    try:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        lines = (folder / "samples.jsonl").read_bytes().split(b"\n")
    except FileNotFoundError as missing:
        name = Path(missing.filename).name
        raise BadRequest(f"{folder} is not a run: it has no {name}; make one with `semspec bench --out`") from None
    except (ValueError, OSError) as error:
        raise BadRequest(f"{folder} cannot be read as a run ({error}); run it again into another folder") from None
    if not isinstance(run, dict) or not isinstance(run.get("arms"), list):
        raise BadRequest(f"{folder / 'run.json'} lists no arms; it was not written by `semspec bench`")
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    samples = []
    for number, line in filled:
        try:
            sample = json.loads(line)
            sample["arm"], sample["problem"], sample["repeat"]
        except (ValueError, KeyError, TypeError):
            if number == filled[-1][0]:  # it was being written when the run was killed
                break
            where = f"line {number} of {folder / 'samples.jsonl'}"
            raise BadRequest(f"{where} is damaged; remove it and start the run again to fill the gap") from None
        samples.append(sample)
    return run, once(samples)


def once(samples: Iterable[Sample]) -> list[Sample]:
    """Each (arm, problem, repeat) once, the first that was recorded."""
    kept: dict[tuple[str, str, int], Sample] = {}
    for sample in samples:
        kept.setdefault((sample["arm"], sample["problem"], sample["repeat"]), sample)
    return list(kept.values())


def summarise(run: dict[str, Any], samples: list[Sample]) -> dict[str, Any]:
    """All figures of a run as one JSON document; the order in which samples were recorded does not matter."""
    ordered = sorted(once(samples), key=lambda s: (s["index"], s["problem"], s["repeat"]))
    arms = {arm["name"]: arm for arm in run["arms"]}
    by_arm: dict[str, list[Sample]] = {name: [] for name in arms}
    for sample in ordered:
        if sample["arm"] not in arms:
            raise BadRequest(f"the samples have an arm {sample['arm']!r} that run.json does not know")
        by_arm[sample["arm"]].append(sample)
    baseline = next((name for name, arm in arms.items() if arm["role"] == "target"), None)
    if baseline is None:
        raise BadRequest("the run has no arm with the target alone, so there is nothing to compare with")
    loops = {id(s): find_loop(s["tokens"]) is not None for s in ordered}
    figures = {}
    for name, arm in arms.items():
        alone = describe(arm, by_arm[name], loops)
        figures[name] = alone | compare(arm, alone, pair(by_arm[name], by_arm[baseline]), loops)
    return {
        "label": run.get("label", ""),
        "task": run.get("config", {}).get("task"),
        "baseline": baseline,
        "problems": len({s["problem"] for s in ordered}),
        "samples": len(ordered),
        "pareto": pareto(figures),
        "arms": figures,
    }


def by_problem(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample["problem"], []).append(sample)
    return groups


def pair(mine: list[Sample], theirs: list[Sample]) -> Pairs:
    """Samples of the same problem and repeat, by problem."""
    others = {(s["problem"], s["repeat"]): s for s in theirs}
    found: Pairs = {}
    for sample in mine:
        other = others.get((sample["problem"], sample["repeat"]))
        if other is not None:
            found.setdefault(sample["problem"], []).append((sample, other))
    return found


def describe(arm: dict[str, Any], samples: list[Sample], loops: dict[int, bool]) -> dict[str, Any]:
    """What an arm did by itself."""
    problems = list(by_problem(samples).values())
    scored = [s for s in samples if s["correct"] is not None]
    counts = {k: sum(s["stats"][k] for s in samples) for k in ("steps", "drafted", "accepted", "relaxed", "tokens")}
    passes = sum(s["stats"]["target_passes"] for s in samples) if arm["role"] != "draft" else None
    histogram: Counter[int] = Counter()
    for s in samples:
        histogram.update({int(n): steps for n, steps in s["stats"]["histogram"].items()})
    seconds = [fsum(s["seconds"] for s in group) for group in problems]
    return {
        "role": arm["role"],
        "verifier": arm.get("verifier"),
        "lossless": arm.get("lossless"),
        "samples": len(samples),
        "problems": len(problems),
        "accuracy": share(problems, lambda s: s["correct"]) if scored else None,
        "tau_pooled": 1 + counts["accepted"] / counts["steps"] if counts["steps"] else None,
        "tau_interval": given(tau(problems)),
        "tau_per_request_mean": fsum(s["stats"]["tau"] for s in samples) / len(samples) if samples else None,
        "acceptance_rate": per(counts["accepted"], counts["drafted"]),
        "acceptance_histogram": {str(n): histogram[n] for n in sorted(histogram)},
        "accepted_per_position": at_positions(s["stats"]["accepted_per_position"] for s in samples),
        "drafted_per_position": at_positions(s["stats"]["drafted_per_position"] for s in samples),
        "target_passes": passes,
        "tokens_per_target_pass": per(counts["tokens"], passes),
        "tokens": sum(len(s["tokens"]) for s in samples),
        "relaxed_share": per(counts["relaxed"], counts["accepted"]),  # of the draft tokens that stood
        "divergence": per(counts["relaxed"], counts["tokens"]),  # of all committed tokens
        "steps_accepted": over_steps(problems, stood),  # of those the draft wrote and the rule judged
        "invalid_refused": over_steps(
            problems, lambda j: None if j["valid"] is not False or stood(j) is None else not stood(j)
        ),
        "cap_rate": share(problems, lambda s: s["finish_reason"] == "length"),
        "loop_rate": share(problems, lambda s: loops[id(s)]),
        "seconds_per_problem": given(mean([t / len(group) for t, group in zip(seconds, problems, strict=True)])),
        "seconds_per_correct": given(
            ratio(
                [fsum(s["seconds"] for s in group if s["correct"] is not None) for group in problems],
                [float(sum(bool(s["correct"]) for s in group)) for group in problems],
            )
        ),
        "groups": {
            name: share(by_problem(s for s in scored if s.get("group") == name).values(), lambda s: s["correct"])
            for name in sorted({str(s["group"]) for s in scored if s.get("group")})
        },
    }


def tau(problems: list[list[Sample]]) -> Estimate | None:
    """Tokens that a check commits, pooled over all checks, with an interval over problems."""
    steps = [fsum(s["stats"]["steps"] for s in group) for group in problems]
    accepted = [fsum(s["stats"]["accepted"] for s in group) for group in problems]
    return ratio([a + b for a, b in zip(accepted, steps, strict=True)], steps)


Scored = list[list[tuple[bool, bool]]]
"""By problem, whether the one and the other were right."""


def both_scored(pairs: Pairs) -> Scored:
    scores = [[(a["correct"], b["correct"]) for a, b in group] for group in pairs.values()]
    kept = [[both for both in group if None not in both] for group in scores]
    return [group for group in kept if group]


def paired_test(right: Scored) -> dict[str, Any]:
    """On how many problems the one side is better and worse than the other, and whether that may be chance."""
    gains = [fsum(a - b for a, b in group) / len(group) for group in right]
    gained, lost = discordant(gains)
    return {
        "gained": gained if right else None,
        "lost": lost if right else None,
        "mcnemar_p": mcnemar(gained, lost) if right else None,
        "accuracy_difference": given(difference(gains)),
    }


def compare(arm: dict[str, Any], alone: dict[str, Any], pairs: Pairs, loops: dict[int, bool]) -> dict[str, Any]:
    """What an arm did next to the target alone, and what may be said about it."""
    right = both_scored(pairs)
    answers = paired_test(right)
    gained, lost, p = answers["gained"], answers["lost"], answers["mcnemar_p"]
    looping = excess(pairs, lambda s: loops[id(s)])
    capped = excess(pairs, lambda s: s["finish_reason"] == "length")
    times = ratio(total(pairs, 1, lambda s: s["seconds"]), total(pairs, 0, lambda s: s["seconds"]))
    found: dict[str, Any] = {
        "problems_in_common": len(pairs),
        **answers,
        "retention": given(ratio([fsum(a for a, _ in g) for g in right], [fsum(b for _, b in g) for g in right])),
        "length_ratio": given(
            ratio(total(pairs, 0, lambda s: len(s["tokens"])), total(pairs, 1, lambda s: len(s["tokens"])))
        ),
        "identical_outputs": Share.clustered(
            (sum(a["tokens"] == b["tokens"] for a, b in group), len(group)) for group in pairs.values()
        ).as_dict()
        if pairs
        else None,
        "time_ratio": given(times),
        "target_time_ratio": None
        if arm["role"] == "draft"
        else given(ratio(total(pairs, 1, target_seconds), total(pairs, 0, target_seconds))),
        "speedup": None,
        "speedup_refused": None,
    }
    if arm["role"] == "target":
        return found | {"quality": "baseline", "quality_reasons": []}
    worse = []
    if p is not None and p < ALPHA and lost > gained:
        worse.append(f"right answers lost on {lost} problems and gained on {gained} (p = {p:.2g})")
    if looping:
        worse.append(f"loops in {looping}")
    if capped:
        worse.append(f"cut off at the length limit in {capped}")
    if worse:
        found |= {"quality": "worse", "quality_reasons": worse}
    elif len(right) < ENOUGH:
        found |= {"quality": "unmeasured", "quality_reasons": []}
    elif p is not None and p < ALPHA:
        found |= {"quality": "better", "quality_reasons": []}
    else:
        found |= {"quality": "same" if _no_worse(found) else "unclear", "quality_reasons": []}
    if len(pairs) < ENOUGH:
        reason = f"{len(pairs)} problems in common with the target alone are too few; {ENOUGH} are needed at least"
    elif looping:
        reason = f"loops in {looping}"
    elif alone["accuracy"] is None:
        reason = "the task has no scorer, so quality is not known"
    elif len(right) < ENOUGH:
        reason = (
            f"{len(right)} scored problems in common with the target alone are too few; {ENOUGH} are needed at least"
        )
    else:
        return found | {"speedup": found["time_ratio"]}
    return found | {"speedup_refused": reason}


def _no_worse(found: dict[str, Any]) -> bool:
    """Whether a loss beyond the margin is ruled out: by equal outputs, or by the interval of the difference."""
    identical, gap = found["identical_outputs"], found["accuracy_difference"]
    return (identical is not None and identical["share"] == 1) or (gap is not None and gap["low"] >= -MARGIN)


def excess(pairs: Pairs, what: Callable[[Sample], bool]) -> str | None:
    """In words, if something befalls the arm more often than the target alone, and not by chance."""
    gaps = [fsum(what(a) - what(b) for a, b in group) for group in pairs.values()]
    if more_often(*discordant(gaps)) >= ALPHA:
        return None
    both = [(what(a), what(b)) for group in pairs.values() for a, b in group]
    mine, theirs = (100 * sum(column) / len(both) for column in zip(*both, strict=True))
    return f"{mine:.1f} % of outputs, the target alone in {theirs:.1f} %"


def share(problems: Iterable[list[Sample]], what: Callable[[Sample], bool | None]) -> dict[str, Any] | None:
    """How often, over all samples for which that is known, with an interval over problems."""
    known = [[hit for s in group if (hit := what(s)) is not None] for group in problems]
    return Share.clustered((sum(group), len(group)) for group in known).as_dict() if any(known) else None


def stood(step: dict[str, Any]) -> bool | None:
    """Nobody knows of a step that was handed over to the target: nobody has judged it."""
    return None if step["fate"] == "handed over" else step["fate"] == "accepted"


def over_steps(problems: Iterable[list[Sample]], what: Callable[[Sample], bool | None]) -> dict[str, Any] | None:
    """How often among the whole steps that a draft wrote, for which it is known, with an interval over problems."""
    known = [[hit for s in group for j in s.get("judged", ()) if (hit := what(j)) is not None] for group in problems]
    return Share.clustered((sum(group), len(group)) for group in known if group).as_dict() if any(known) else None


def total(pairs: Pairs, side: int, what: Callable[[Sample], float]) -> list[float]:
    return [fsum(what(both[side]) for both in group) for group in pairs.values()]


def target_seconds(sample: Sample) -> float:
    """What the target took: its passes, and judging, which waits for them where a device works ahead."""
    spent = sample["stats"]["seconds"]
    return float(spent["score"] + spent["judge"])


def at_positions(lists: Iterable[list[int]]) -> list[int]:
    sums: Counter[int] = Counter()
    for entries in lists:
        sums.update(dict(enumerate(entries)))
    return [sums[i] for i in range(len(sums))]


def per(count: float, whole: float | None) -> float | None:
    return count / whole if whole else None


def given(estimate: Estimate | None) -> dict[str, float | None] | None:
    return estimate.as_dict() if estimate else None


def pareto(arms: dict[str, dict[str, Any]]) -> list[str]:
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
