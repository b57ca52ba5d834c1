"""From a short run to the speed of every drafter, rule and draft length, with intervals.

A run with long drafts tells the rounds of shorter ones: m accepted tokens and the target's own after them take
ceil((m + 1) / (n + 1)) rounds with drafts of n. Chances by position would not do, since acceptance comes in stretches:
a lookup that has found its place is right for long, and with short drafts there are more rounds in such a stretch. A
round's seconds are the run's, carried over to other lengths by the bare costs of passes: a pass over n + 1 tokens takes
as many times longer than the run's as it does by itself. Reading the prompt and the first round come on top, as they do
in a benchmark.

Intervals are for what another run over as many other prompts would show, so they are wider by the square root of 2 than
those of the mean. They come from prompts that differ in acceptance and in seconds, each drawn with all that was
measured with it. A machine that becomes slower for all is not in them, but a speedup does not mind it much.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from semspec.advise.measure import ALONE, EVERYTHING, Answer, Candidate, Measured
from semspec.errors import BadRequest
from semspec.loop.cost_profile import interpolate
from semspec.loop.draft_length import MIN_SECONDS
from semspec.statistics import Array, Estimate, bootstrap, quantile, ratio

OTHER_PROMPTS = math.sqrt(2.0)  # by which the difference of two means spreads more than one of them


@dataclass
class Prediction:
    """A drafter and a rule at the draft length that is best for them."""

    candidate: Candidate
    draft_tokens: int
    tokens_per_second: Estimate
    speedup: Estimate
    tokens_per_round: float
    acceptance: float  # of the first draft token
    draft_share: float  # of a round's seconds
    relaxed: float  # share of tokens
    loops: int
    loss: Estimate | None  # share of the way from the target's likelihood to that of accepting everything
    by_length: dict[int, Estimate] = field(default_factory=dict)  # speedups

    def to_dict(self) -> dict[str, Any]:
        own = {k: v.as_dict() if isinstance(v, Estimate) else v for k, v in vars(self).items() if k != "candidate"}
        named = {"rule": self.candidate.rule, "drafter": self.candidate.drafter, "lossless": self.candidate.lossless}
        lengths = {str(n): speedup.as_dict() for n, speedup in self.by_length.items()}
        return named | own | {"by_length": lengths}


def predict(found: Measured) -> tuple[Estimate, list[Prediction]]:
    """The target's own tokens per second, and every other candidate's prediction, in the order of the run."""
    alone = found.answers[ALONE]
    speed = ratio([len(a.tokens) for a in alone], [a.seconds for a in alone])
    assert speed is not None
    scale = found.answers.get(next((c for c in found.answers if c.rule == EVERYTHING), ALONE), alone)
    predictions = []
    for candidate, answers in found.answers.items():
        if candidate != ALONE:
            predictions.append(_predict(candidate, answers, alone, found, _loss(candidate, answers, alone, scale)))
    return _wider(speed), predictions


def _predict(
    candidate: Candidate, answers: list[Answer], alone: list[Answer], found: Measured, loss: Estimate | None
) -> Prediction:
    if min(sum(a.rounds for a in each) for each in (answers, alone)) < len(answers):
        raise BadRequest(
            f"the answers are too short to predict from: {candidate.rule} wrote them in a round or two; let them be "
            "longer with --max-new-tokens, or take other prompts"
        )
    lengths = range(1, candidate.draft_tokens + 1) if candidate.any_length else [candidate.draft_tokens]
    seconds_alone = np.array([a.seconds for a in alone])
    whole = np.array([[len(a.tokens), a.first_tokens, a.first_seconds] for a in answers], float)

    def speeds(weights: Array) -> Array:
        """[D, prompts] -> [2 * lengths, D]: times faster than the target with the same prompts, as a benchmark has it,
        then tokens per second. A rule that writes longer answers is slower by the first.

        A prompt that is drawn brings all that was measured with it: a long one is read slowly by both."""
        costs, share = Costs(candidate, answers, found, weights), weights / weights.sum(1, keepdims=True)
        after = {n: costs.tokens(n) / np.maximum(costs.draft(n) + costs.target(n), MIN_SECONDS) for n in lengths}
        tokens, first, first_seconds = (share @ whole).T
        each = np.stack([first_seconds + np.maximum(tokens - first, 0.0) / after[n] for n in lengths])
        return np.concatenate([share @ seconds_alone / each, tokens / each])

    everything = np.ones((1, len(answers)))
    values = speeds(everything)[:, 0]
    low, high = bootstrap(len(answers), speeds)
    few = len(answers)  # draws from few prompts differ too little
    wider = quantile(few - 1) / quantile() * math.sqrt(few / (few - 1)) if few > 1 else math.nan
    halves = np.log(high / low) / 2 * wider
    intervals = [_interval(value, half) for value, half in zip(values, halves, strict=True)]
    predicted, rates = (dict(zip(lengths, some, strict=False)) for some in (intervals, intervals[len(lengths) :]))
    best = max(predicted, key=lambda n: predicted[n].value)
    tokens = sum(len(a.tokens) for a in answers)
    costs = Costs(candidate, answers, found, everything)
    drafting, checking = costs.draft(best), costs.target(best)
    return Prediction(
        candidate,
        best,
        rates[best],
        predicted[best],
        float(costs.tokens(best)[0]),
        1 - sum(a.accepted[0] for a in answers) / sum(a.rounds for a in answers),
        float(drafting[0] / (drafting + checking)[0]),
        sum(a.relaxed for a in answers) / tokens,
        sum(a.loops for a in answers),
        loss,
        predicted,
    )


class Costs:
    """Tokens and seconds of a round by draft length, in draws of prompts [D, prompts]: those of the run, cut into
    shorter drafts, and carried over by the bare costs of passes."""

    def __init__(self, candidate: Candidate, answers: list[Answer], found: Measured, weights: Array) -> None:
        self.answers, self.weights, self.passes = answers, weights, found.passes
        self.rounds = self._drawn([a.rounds for a in answers])
        self.written = self._drawn([sum((m + 1) * count for m, count in a.accepted.items()) for a in answers])
        lengths = sorted({d for a in answers for d in a.drafted})
        self.drafted = {d: self._drawn([a.drafted[d] for a in answers]) for d in lengths}
        spent = {kind: self._drawn([a.spent[kind] for a in answers]) / self.rounds for kind in answers[0].spent}
        elsewhere = self._drawn([a.elsewhere for a in answers]) / self.rounds
        self.score, self.rest = spent["score"], spent["verify"] + spent["host"] + elsewhere
        self.run = self._pass(candidate.draft_tokens)
        length = self._length(candidate.draft_tokens)
        bare = (found.draft_token or 0.0) / 1000 if candidate.drafter == "model" else 0.0
        each = spent["draft"] / np.maximum(length, 1e-9)
        self.token = each if candidate.has_head else np.minimum(bare, each)  # a head does little besides its tokens
        self.call = spent["draft"] - self.token * length

    def _drawn(self, by_prompt: list[Any]) -> Array:
        return np.asarray(np.maximum(self.weights @ np.array(by_prompt, float), 0.0))

    def _more(self, n: int) -> Array:
        """Rounds that drafts of n take beyond those of the run: all of them accept n tokens."""
        return self._drawn([sum(m // (n + 1) * count for m, count in a.accepted.items()) for a in self.answers])

    def _mean(self, n: int, of: Callable[[int], float]) -> Array:
        """Of something that depends on the length of a draft, over the rounds that drafts of at most n take"""
        more = self._more(n)
        total = sum((of(min(n, d)) * rounds for d, rounds in self.drafted.items()), start=of(n) * more)
        return np.asarray(total / np.maximum(self.rounds + more, 1.0))

    def _length(self, n: int) -> Array:
        return self._mean(n, float)

    def _pass(self, n: int) -> Array:
        """Milliseconds of a bare pass"""
        return self._mean(n, lambda drafted: interpolate(self.passes, drafted + 1))

    def tokens(self, n: int) -> Array:
        return np.asarray(self.written / np.maximum(self.rounds + self._more(n), 1.0))

    def draft(self, n: int) -> Array:
        return np.asarray(self.call + self.token * self._length(n))

    def target(self, n: int) -> Array:
        return np.asarray(self.score * self._pass(n) / np.maximum(self.run, 1e-9) + self.rest)


def _loss(candidate: Candidate, answers: list[Answer], alone: list[Answer], scale: list[Answer]) -> Estimate | None:
    """How far the texts have gone from the target's likelihood to that of accepting everything; None where the measure
    cannot tell even those two apart."""
    if candidate.lossless:
        return Estimate(0.0, 0.0, 0.0)
    own = [a.likelihood for a in alone]
    whole, lost = (_gap([a.likelihood for a in texts], own) for texts in (scale, answers))
    if not whole.high < 0:
        return None
    return Estimate(lost.value / whole.value, lost.high / whole.value, lost.low / whole.value)


def _gap(ours: list[float], theirs: list[float]) -> Estimate:
    """The mean of paired differences, with the interval of Student's t"""
    gaps = np.subtract(ours, theirs)
    value, error = float(gaps.mean()), float(gaps.std(ddof=1)) / math.sqrt(len(gaps))
    half = quantile(len(gaps) - 1) * error
    return Estimate(value, value - half, value + half)


def _interval(value: float, half: float) -> Estimate:
    """Around a value, for other prompts, from the relative half width of these prompts' interval"""
    wide = OTHER_PROMPTS * half
    value = float(value)  # of NumPy's no JSON is made
    return Estimate(value, value * math.exp(-wide), value * math.exp(wide))


def _wider(found: Estimate) -> Estimate:
    return _interval(found.value, math.log(found.high / found.low) / 2)
