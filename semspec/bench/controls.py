"""The controls below: a rule that relaxes without looking, about as often as the loosest method does; and, where no
model drafts and so none can write alone, one that accepts whatever is drafted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from semspec import verify
from semspec.bench.arms import Arm, parse_arm
from semspec.bench.measures import CONTROLS, UNCHECKED
from semspec.pair.result import Result

PILOT = 8  # problems on which methods are tried to see how often they relax
Answer = Callable[[Arm], list[Result]]


def coin_for(arms: Sequence[Arm], answer: Answer) -> Arm | None:
    """The control that suits these arms, after a few answers of each lossy method; None where there is one already, or
    nothing to control."""
    methods = [arm for arm in arms if arm.role == "method"]
    lossy = [arm for arm in methods if not verify.make(arm.verifier).lossless]
    if not lossy or any(arm.verifier.partition(":")[0] in CONTROLS for arm in methods):
        return None
    rates = {arm.name: relaxing_rate(answer(arm), verify.make(arm.verifier).unit) for arm in lossy}
    loosest = max(lossy, key=lambda arm: rates[arm.name])
    rate = min(1.0, max(0.01, round(rates[loosest.name], 2)))
    step = verify.make(loosest.verifier).unit == "step"
    length = loosest.options(referee=lambda so_far, text: False).draft_length()
    spec = f"random-step:rate={rate:g}" if step else f"random:k={length},rate={rate:g}"
    return replace(parse_arm(spec, drafter=loosest.drafter), control=True)


def unchecked_for(arms: Sequence[Arm]) -> Arm | None:
    """What the drafter at hand writes if nothing is checked; None where an arm shows that, or all is lossless."""
    lossy = [arm for arm in arms if arm.role == "method" and not verify.make(arm.verifier).lossless]
    if not lossy or any(arm.role == "draft" or arm.verifier.partition(":")[0] == UNCHECKED for arm in arms):
        return None
    length = lossy[0].options(referee=lambda so_far, text: False).draft_length()
    return replace(parse_arm(f"{UNCHECKED}:k={length}", drafter=lossy[0].drafter), control=True)


def relaxing_rate(results: Sequence[Result], unit: str) -> float:
    """Of the draft tokens that the target would not have written, or of whole steps, the share that was accepted."""
    if unit == "step":
        outcomes = [step.outcome for r in results for e in r.events for step in e.drafted_steps]
        seen = [outcome for outcome in outcomes if outcome != "handed over"]
        return sum(outcome == "accepted" for outcome in seen) / max(1, len(seen))
    events = [event for r in results for event in r.events if event.finish_reason is None]  # the end cuts a draft, too
    relaxed = sum(len(event.relaxed) for event in events)
    refused = sum(event.accepted < event.drafted for event in events)
    return relaxed / max(1, relaxed + refused)
