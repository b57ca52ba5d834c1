"""How lossy may a rule be? Its options are chosen so that the loss on prompts not seen stays under a bound.

Learn then test (Angelopoulos et al. 2021) along a fixed sequence: candidates are ordered beforehand, from the strictest
and slowest to the loosest and fastest (`candidates.py`). Of each, "the loss is the bound or more" is tested on the same
problems, until one cannot be rejected; the last one rejected is chosen. The loss is a share: with answers, of the
target's right answers; without, of the distance from the target to the draft, in a measure of `measures.py`. What it is
a share of is estimated from the same problems, so it is a part of the test.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np

from semspec.bench.agreement import Values
from semspec.bench.arms import BASELINE, RESAMPLED, Arm
from semspec.bench.blind import no_loss_in_answers, no_loss_in_measure
from semspec.bench.candidates import PILOT, order_by_speed
from semspec.bench.folder import Sample, key_of, load_run
from semspec.bench.inputs import digest
from semspec.bench.measures import LIKELIHOOD, compare_measures, deciding, draft_of, values_of
from semspec.bench.measures import LOWEST as LEAST_LIKELY
from semspec.bench.pairs import Figures, plain
from semspec.bench.run import Bench, Progress
from semspec.bench.verdict import Margin
from semspec.errors import BadRequest
from semspec.profile import ACCURACY, SHARE, Figure, Profile, lost_of
from semspec.sparse import plan_of
from semspec.statistics import PURSES, Purses, betting_p, difference, fixed_sequence, paired_p

MANY = 1 << 22  # problems; whatever needs as many cannot be shown
LOWEST = {LIKELIHOOD: -2.0, LEAST_LIKELY: -20.0}  # nats; a text that the target likes even less counts as this


@dataclass(frozen=True)
class Choice:
    """A candidate, and what was seen of all."""

    method: str
    measure: str
    losses: dict[str, float]  # candidate -> share that it lost on the calibration's problems
    p: dict[str, float]
    own_samples: float | None = None  # what the target's own other samples lose, where no answers are known


def excess_p(losses: Sequence[float], bound: float, most: float = 1.0, purses: Purses = PURSES) -> float:
    """p of "the mean loss is the bound or more", for losses between -1 and `most`: it holds for any number of them."""
    scaled = (np.asarray(losses, float) + 1) / (most + 1)
    return betting_p(scaled, (bound + 1) / (most + 1), purses)


def loosest_safe(losses: Sequence[Sequence[float]], bound: float, confidence: float, most: float = 1.0) -> int | None:
    """The last candidate, in their order, up to which all keep the mean loss under the bound; None: not even one."""
    rejected = np.array([excess_p(one, bound, most) <= 1 - confidence for one in losses], bool)
    return fixed_sequence(rejected) if len(rejected) else None


def fewest_problems(bound: float, confidence: float, worth: float = 1.0, most: float | None = None) -> int:
    """With fewer, not even a candidate that loses nothing can be shown to be safe. `worth`: the mean of what there is
    to lose, of right answers the target's accuracy; `most`: as in `excess_p`, by default where those are the unit."""

    def shows(n: int) -> bool:
        return excess_p([-bound * worth] * n, 0.0, 1 - bound if most is None else most) <= 1 - confidence

    upper = 8
    while not shows(upper):
        upper *= 2
        if upper > MANY:
            return MANY
    return bisect_left(range(upper), True, key=shows)


@dataclass(frozen=True)
class Losses:
    """What methods lose against the target, problem by problem, in values from 0 to 1."""

    of: dict[str, list[float]]
    worth: list[float]  # what there is to lose: the target's own right answers, or its distance to the draft

    def beyond(self, method: str, share: float) -> list[float]:
        """Above 0 on average: more than that share is lost. With t of the target, m of the method and c of the control
        it is (1 - share) t - m + share c, so between -1 and 1; 1 - share where the target's own values are the unit."""
        return [lost - share * whole for lost, whole in zip(self.of[method], self.worth, strict=True)]

    def share(self, method: str) -> float:
        return fsum(self.of[method]) / fsum(self.worth)


def losses_of(samples: Sequence[Sample], methods: Sequence[str], values: Values, control: str | None = None) -> Losses:
    """`control`: the arm whose distance from the target is the unit; None: the target's own values are.
    In an order that says nothing, since the test bets on one problem after the other, and files are often sorted."""
    means: dict[tuple[str, str], list[float]] = {}
    for sample in samples:
        if key_of(sample) in values:
            means.setdefault((sample["arm"], sample["problem"]), []).append(values[key_of(sample)])
    mean = {key: fsum(seen) / len(seen) for key, seen in means.items()}
    needed = [BASELINE, *methods, *([] if control is None else [control])]
    problems = [p for p in dict.fromkeys(s["problem"] for s in samples) if all((arm, p) in mean for arm in needed)]
    problems = [problems[i] for i in np.random.default_rng(0).permutation(len(problems))]
    own = [mean[BASELINE, p] for p in problems]

    def lost(arm: str) -> list[float]:
        return [value - mean[arm, p] for value, p in zip(own, problems, strict=True)]

    return Losses({name: lost(name) for name in methods}, own if control is None else lost(control))


def bounded(measure: str, values: Values) -> Values:
    """Between 0 and 1, as bounds that hold for any number of problems want it."""
    if measure in LOWEST:
        floor = LOWEST[measure]
        return {key: 1 - max(value, floor) / floor for key, value in values.items()}
    return {key: min(1.0, max(0.0, value)) for key, value in values.items()}


def choose(
    run: Mapping[str, Any], samples: Sequence[Sample], methods: Sequence[str], loss: float, confidence: float,
    extra: Mapping[str, Values],
) -> Choice:  # fmt: skip
    """The loosest safe method of a run, by its right answers or, where it has none, by the measure that `bench` would
    decide by. Refused where the data could not show a loss."""
    scored: Values = {key_of(s): float(s["correct"]) for s in samples if s["correct"] is not None}
    own, control = [s for s in samples if s["arm"] == BASELINE], draft_of(run)
    spread = None
    if scored:
        measure, values, unit, most = ACCURACY, scored, None, 1 - loss
        blind = no_loss_in_answers(own, None if control is None else (control, _distance(samples, control, scored)))
    else:
        found, about = compare_measures(run, samples, Margin(share=loss), extra)
        chosen = deciding(about, len({s["problem"] for s in samples}))
        if chosen is None or control is None:
            raise BadRequest("too few problems have a measure in common; calibrate on more of them")
        measure, values, unit, most = chosen, bounded(chosen, values_of(run, samples, extra)[chosen]), control, 1.0
        blind = no_loss_in_measure(own, chosen, about[chosen], control)
        spread = found.get(RESAMPLED, {}).get(chosen, {}).get("of_distance")
    if blind:
        raise BadRequest(f"nothing can be certified: {blind}")
    losses = losses_of(samples, methods, values, unit)
    beyond = {name: losses.beyond(name, loss) for name in methods}
    at = loosest_safe([beyond[name] for name in methods], 0.0, confidence, most)
    worth = max(1e-6, fsum(losses.worth) / max(1, len(losses.worth)))
    p = {name: excess_p(beyond[name], 0.0, most) for name in methods}
    if at is None:
        seen = fsum(losses.of[methods[0]]) / max(1, len(losses.worth)) / worth
        raise BadRequest(
            f"{len(losses.worth)} problems do not show that {methods[0]} loses less than {100 * loss:g} % of "
            f"{lost_of(measure)} with confidence {confidence:g} (it lost {100 * seen:z.1f} % of it here, "
            f"p = {p[methods[0]]:.2g}); calibrate on more problems"
            f" ({fewest_problems(loss, confidence, worth, most):,} or more, if it loses nothing)"
            ", allow more, or give stricter values"
        )
    return Choice(methods[at], measure, {name: losses.share(name) for name in methods}, p, spread)


def check_bound(loss: float, confidence: float) -> None:
    if not 0 < loss < 1:
        raise BadRequest(f"the loss is {loss:g}; give a share above 0 and below 1, as 0.01")
    if not 0 < confidence < 1:
        raise BadRequest(
            f"the confidence is {confidence:g}; give more than 0 and less than 1, as 0.95: no number of problems shows "
            "a bound for certain"
        )


def _distance(samples: Sequence[Sample], control: str, values: Values) -> Figures:
    """How far a control lies from the target, and whether that may be chance."""
    lost = losses_of(samples, [control], values).of[control]
    gaps, none = [-one for one in lost], [0.0] * len(lost)
    return {"difference": plain(difference(gaps, none)) or {"value": 0.0}, "p": paired_p(gaps, none) or 1.0}


def calibrate(
    bench: Bench, out: Path, loss: float, confidence: float, progress: Progress, extra: Any = lambda run, samples: {},
    by_speed: bool = False,
) -> tuple[Profile, Choice]:  # fmt: skip
    """Run the candidates, which are the bench's methods, and make the profile of the one chosen. `by_speed`: they have
    no order yet, and get one from problems of its own."""
    check_bound(loss, confidence)
    left, spent = len(bench.problems), PILOT if by_speed else 0
    if left - spent < (fewest := fewest_problems(loss, confidence, most=None if bench.task.scored else 1.0)):
        besides = f", besides {spent} that order the candidates" if spent else ""
        raise BadRequest(
            f"{max(0, left - spent)} problems{besides} cannot show a loss under {100 * loss:g} % with confidence "
            f"{confidence:g}, whatever they say; give {fewest + spent} or more with --problems, or allow more"
        )
    for one in (arm for arm in bench.arms if arm.role == "method"):
        if one != Arm(one.name, one.role, one.verifier, one.lossless, one.num_draft_tokens, one.drafter):
            raise BadRequest(
                f"{one.name}: a profile holds a rule's own options, its draft length and drafter, and no others; leave "
                "them out"
            )
    if by_speed:
        order_by_speed(bench, out)
    bench.run(out, progress)
    run, samples = load_run(out)
    methods = list(bench.config.methods)
    choice = choose(run, samples, methods, loss, confidence, extra(run, samples))
    arm = next(arm for arm in bench.arms if arm.name == choice.method)
    own = [s["stats"] for s in samples if s["arm"] == choice.method]
    config, (target, draft) = bench.config, bench.pair.resources.fingerprints
    profile = Profile(
        verifier=arm.verifier,
        num_draft_tokens=arm.num_draft_tokens,
        drafter=arm.drafter,
        temperature=float(config.temperature),
        top_k=config.top_k,
        top_p=float(config.top_p),
        min_p=float(config.min_p),
        target=target,
        draft=draft,
        sparse=str(plan_of(bench.pair.target) or ""),
        task=config.task,
        data=digest(bench.problems),
        problems=len(bench.problems),
        measure=choice.measure,
        loss=loss,
        confidence=confidence,
        seen=choice.losses[choice.method],
        acceptance=Figure.of([s["acceptance_rate"] for s in own if s["drafted"]]),
        entropy=Figure.of([s["mean_entropy"] for s in own if "mean_entropy" in s]),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        unit=SHARE,
        **bench.pair.resources.precisions,
        max_new_tokens=max(bench.task.new_tokens(p, config.max_new_tokens) for p in bench.problems),
    )
    return profile, choice
