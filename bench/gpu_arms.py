"""Which of the ways that `Choices` offers is fastest here: `bench/gpu.py --only arms`.

Arms are measured in turns, so that what the machine does beside them meets all alike; the sections that come after use
the winners.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch

from semspec.model import ModelRunner
from semspec.model.fast import Fast
from semspec.model.fast_roll import Rolls
from semspec.model.kernels import MEASURED, Choices
from semspec.types import Roll, Sampling, Score

if TYPE_CHECKING:
    from bench.gpu import Bench

OURS = MEASURED
DRAFT = [  # the first group is launched as ever; the second early, for which there is less experience
    [
        replace(OURS, small=0),
        OURS,
        replace(OURS, gate=True),
        replace(OURS, gate=True, turn=True),
        replace(OURS, norm=True, gate=True, turn=True),
    ],
    [
        replace(OURS, small=0, turn=True, early=True),
        replace(OURS, gate=True, turn=True, early=True),
        replace(OURS, gate=True, turn=True, early=True, ahead=True),
        replace(OURS, norm=True, gate=True, turn=True, early=True),
        replace(OURS, norm=True, gate=True, turn=True, early=True, ahead=True),
    ],
]  # fmt: skip
ALL_OURS = replace(OURS, small=10**12, gate=True)
TARGET = [
    [OURS, replace(OURS, crowded=True), ALL_OURS],
    [
        replace(OURS, early=True),
        replace(OURS, early=True, crowded=True),
        replace(ALL_OURS, early=True, ahead=True, crowded=True),
    ],
]
ROUNDS = 4


def parse(text: str) -> Choices:
    """From "gate,turn,small=0", say; nothing means the defaults."""
    chosen = MEASURED
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in {f.name for f in fields(Choices)} or (name == "small") != bool(value):
            raise ValueError(f"{part!r} is no choice; there are {', '.join(f.name for f in fields(Choices))}")
        chosen = replace(chosen, small=int(value)) if value else replace(chosen, **{name: True})
    return chosen


def told(choices: Choices) -> str:
    on = [f.name for f in fields(Choices) if getattr(choices, f.name) is True]
    products = {0: "cuBLAS", OURS.small: "ours if small"}.get(choices.small, "ours")
    return "+".join([products, *on])


def in_turns(arms: dict[Choices, Callable[[], float]]) -> dict[Choices, float]:
    """Medians of what each measures, one round after the other. An arm that fails is told and left out."""
    taken: dict[Choices, list[float]] = {choices: [] for choices in arms}
    for round in range(ROUNDS + 1):  # the first makes graphs
        for choices, measure in arms.items():
            if choices not in taken:
                continue
            try:
                ms = measure()
            except Exception as failure:
                print(f"    {told(choices)}: {type(failure).__name__}: {str(failure)[:200]}", flush=True)
                del taken[choices]
                continue
            if round:
                taken[choices].append(ms)
    return {choices: statistics.median(times) for choices, times in taken.items()}


def compare(bench: Bench, which: str, what: str, groups: list[list[Choices]], measure: Callable[..., float]) -> None:
    """Group by group, each against the best so far; `measure(choices)` gives milliseconds."""
    best: Choices | None = None
    for group in groups:
        choices = ([best] if best else []) + group
        times = in_turns({c: (lambda c=c: measure(c)) for c in choices})  # type: ignore[misc]
        for arm, ms in times.items():
            bench.add(f"{what}: {told(arm)}", ms)
        best = min(times, key=lambda arm: times[arm]) if times else best
    if best is not None:
        bench.choices[which] = best
        print(f"    from here on {which}: {told(best)}", flush=True)


class Ways:
    """One model and one cache, with the graphs of every way."""

    def __init__(self, bench: Bench, which: str, slots: int, capacity: int) -> None:
        self.runner = bench.runner(which, slots, capacity)
        self.made: dict[Choices, tuple[Fast | None, Rolls | None]] = {}

    def by(self, choices: Choices) -> ModelRunner:
        runner = self.runner
        if choices not in self.made:
            runner.use(Fast.of(runner.transformer, runner.cache, choices))
            self.made[choices] = runner.fast, runner.rolls
        runner.fast, runner.rolls = self.made[choices]  # both: graphs know the addresses of either's buffers
        return runner


def draft_arms(bench: Bench) -> None:
    context = bench.asked.context
    ways = Ways(bench, "draft", 1, context + 128)
    exact: list[torch.Tensor] = []

    def token(choices: Choices) -> float:
        runner = ways.by(choices)

        def roll(n: int) -> None:
            runner.cache.lengths[0] = context
            runner.roll([Roll(runner, 0, [3], n, Sampling(), 0)])

        if bench.device.type == "cuda":
            same(choices, runner)
        short, long = (bench.ms(lambda n=n: roll(n), repeats=3, warm=1) for n in (8, 72))  # type: ignore[misc]
        return (long - short) / 64

    def same(choices: Choices, runner: ModelRunner) -> None:
        """A way that gives other logits is not faster but wrong."""
        runner.cache.lengths[0] = context
        rolled = runner.roll([Roll(runner, 0, [3], 1, Sampling(), 0, keep_logits=True)])[0].logits
        assert rolled is not None
        exact.append(rolled[0].float())
        off = float((exact[-1] - exact[0]).norm() / exact[0].norm())
        assert off < 0.7, f"logits are off by {off:.2f} of their size"  # unrelated ones by 1.4; rounding by some 0.05
        del exact[1:]

    compare(bench, "draft", "draft token", DRAFT, token)


def pass_arms(bench: Bench, which: str, context: int, tokens: int, what: str, slots: int = 1) -> None:
    ways = Ways(bench, which, slots, context + 32)

    def measure(choices: Choices) -> float:
        runner = ways.by(choices)

        def score() -> None:
            for slot in range(slots):
                runner.cache.lengths[slot] = context - tokens
            runner.score([Score(runner, slot, list(range(1, tokens + 1)), tokens) for slot in range(slots)])

        return bench.ms(score, repeats=5, warm=1)

    compare(bench, which, what, TARGET, measure)


def all_arms(bench: Bench) -> None:
    draft_arms(bench)
    pass_arms(bench, "target", bench.asked.context, 9, "target pass of 9 tokens")


def long_arms(bench: Bench) -> None:
    bench.drop("target", "draft")
    pass_arms(bench, "8B", bench.asked.longest, 16, "8B pass of 16 tokens, longest context")
