"""What a short run advises: whether speculation pays, what to take, what to try next. One document, for all outputs."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import Any, Literal

from semspec.advise.measure import ALONE, EVERYTHING, Measured
from semspec.advise.predict import Prediction, predict
from semspec.statistics import Estimate

WORTH = 1.05  # a further speedup below this is not worth a lossy rule
MOSTLY_DRAFTING = 0.5  # share of a round's time
SELDOM = 0.4  # acceptance of a first draft token
OFTEN = 0.85


@dataclass
class Advice:
    target: str
    draft: str | None
    device: str
    prompts: int
    temperature: float
    allowed_loss: float  # share of the way to accepting everything
    alone: Estimate  # tokens per second
    predictions: list[Prediction]
    pays: Literal["yes", "no", "unclear"]
    take: Prediction | None  # lossless
    lossy: Prediction | None  # within the allowed loss, and faster
    measures_loss: bool  # the likelihood tells the target's text from that of accepting everything
    steps: list[str]  # what to try next
    passes: dict[int, float]
    draft_token: float | None
    warning: str = ""

    @property
    def headline(self) -> str:
        if self.take is None:
            return "No: nothing was tried."
        expected = f"{described(self.take)}, is expected at {times(self.take.speedup)} the speed of the target alone"
        if self.pays == "yes":
            return f"Yes: {expected}."
        return (
            f"No: even the best, {expected}." if self.pays == "no" else f"Unclear: {expected}; more prompts may tell."
        )

    @property
    def command(self) -> str:
        """The settings as a command."""
        parts = ["semspec", "serve", self.target, *(["--draft", self.draft] if self.draft else [])]
        if self.take is None or self.pays == "no":
            return shlex.join([*parts[:3], "--verifier", "none"])
        chosen = self.take
        return shlex.join([*parts, *_flags(chosen)])

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        which = (("take", self.take), ("lossy", self.lossy))
        chosen = {name: None if p is None else self.predictions.index(p) for name, p in which}
        own = {k: v.as_dict() if isinstance(v, Estimate) else v for k, v in vars(self).items()}
        listed = [p.to_dict() for p in self.predictions]
        return own | chosen | {"predictions": listed, "headline": self.headline, "command": self.command}


def advise(
    found: Measured, target: str, draft: str | None, device: str, temperature: float, allowed: float, warning: str = "",
    task: str = "TASK",
) -> Advice:  # fmt: skip
    alone, predictions = predict(found)
    lossless = [p for p in predictions if p.candidate.lossless]
    take = max(lossless, key=lambda p: p.speedup.value, default=None)
    pays: Literal["yes", "no", "unclear"] = "unclear"
    if take is None or take.speedup.high < 1:
        pays = "no"
    elif take.speedup.low > 1:
        pays = "yes"
    floor = max(take.speedup.value if take else 0.0, 1.0) * WORTH
    within = [
        p
        for p in predictions
        if not p.candidate.lossless and p.candidate.rule != EVERYTHING and not p.loops
        and p.loss is not None and p.loss.high <= allowed and p.speedup.value > floor
    ]  # fmt: skip
    lossy = max(within, key=lambda p: p.speedup.value, default=None)
    measures = all(p.loss is not None for p in predictions)
    steps = next_steps(predictions, take, lossy, pays, measures, target, draft, len(found.answers[ALONE]), task)
    return Advice(
        target, draft, device, len(found.answers[ALONE]), temperature, allowed, alone, predictions, pays, take, lossy,
        measures, steps, found.passes, found.draft_token, warning,
    )  # fmt: skip


def next_steps(
    predictions: list[Prediction], take: Prediction | None, lossy: Prediction | None, pays: str, measures: bool,
    target: str, draft: str | None, prompts: int, task: str,
) -> list[str]:  # fmt: skip
    steps = []
    models = [p for p in predictions if p.candidate.drafter == "model" and p.candidate.lossless]
    heads = [p for p in predictions if p.candidate.has_head]
    on = f"--task {shlex.quote(task)}"
    pair = shlex.join(["--target", target, *(["--draft", draft] if draft else [])])
    if take is not None and (pays == "unclear" or math.isnan(take.speedup.low)):
        steps.append(f"More prompts: {prompts} leave it open. Again with --problems {4 * prompts}.")
    for p in models:
        if p.speedup.high < 1:
            steps.append(
                f"No draft model: with this one {p.candidate.rule} is expected at {times(p.speedup)} the speed."
            )
        if p.draft_share > MOSTLY_DRAFTING:
            share = f"{p.draft_share:.0%} of a round go into drafting"
            steps.append(f"A cheaper draft: {share}. A smaller model, or this one with --draft-dtype int4.")
        if p.acceptance < SELDOM:
            steps.append(
                f"A draft that is nearer to this target: {p.acceptance:.0%} of first draft tokens are accepted. "
                "recipes/smollm2 distils one from the target's own layers."
            )
        elif p.acceptance > OFTEN and p.draft_tokens == p.candidate.draft_tokens:
            steps.append(f"Longer drafts: {p.draft_tokens} tokens, the longest that were predicted, are the best.")
    if not models and not heads:
        steps.append("A draft model: lookups find only what is in the text already. Give one with --draft.")
    if lossy is not None:
        loss = "" if lossy.loss is None else f" for {lossy.loss.value:z.0%} of the way to the drafter's text"
        given = shlex.join([target, *(["--draft", draft] if draft else [])])
        steps.append(
            f"{described(lossy)}, {times(lossy.speedup)}{loss}. That is the likelihood of a text, not its truth. "
            f"Options under a bound: semspec calibrate {given} --verifier {lossy.candidate.rule} {on} --out DIR"
        )
    elif not measures:
        steps.append(
            "Another measure for lossy rules: on these prompts the target finds the text of accepting everything as "
            f"likely as its own. semspec bench {pair} on a task with answers."
        )
    steps.append(f"A check of these figures: semspec bench {pair} {on} --method {_method(take)} --out DIR.")
    return steps


def described(p: Prediction) -> str:
    """The settings in a few words."""
    names = {"model": "the draft model", "ngram": "lookups in the text"}
    drafter = names.get(p.candidate.drafter, p.candidate.drafter)
    return f"{p.candidate.rule} with {drafter}, {p.draft_tokens} tokens a draft"


def times(e: Estimate) -> str:
    interval = "" if math.isnan(e.low) else f" [{e.low:.2f}, {e.high:.2f}]"
    return f"{e.value:.2f}x{interval}"


def _method(p: Prediction | None) -> str:
    return "exact" if p is None else f"{p.candidate.rule}:k={p.draft_tokens},drafter={p.candidate.drafter}"


def _flags(p: Prediction) -> list[str]:
    return ["--verifier", p.candidate.rule, "--drafter", p.candidate.drafter, "-k", str(p.draft_tokens)]
