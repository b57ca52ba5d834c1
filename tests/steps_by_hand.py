"""The loop of step rules as it is told: greedily, a token at a time and without caches. And what its tests share."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from semspec.draft import EarlyExit, ModelDrafter, NoDrafter
from semspec.draft.model import NO_EARLY_EXIT
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.loop.step_decoder import StepDecoder
from semspec.text.steps import Steps
from semspec.types import Draft, Event, Sampling
from semspec.verify.base import Decisions, DraftBatch, Rule
from semspec.verify.step_rule import StepRule
from tests.fakes import FakeRunner, Logits

END, BLANK, CLOSE, VOCAB = 0, 1, 2, 9  # end of text, a token that ends a step, end of thinking
PROMPT = [3, 4, 5]
STEPS = Steps(frozenset([BLANK]), frozenset([BLANK]), frozenset(), frozenset(), CLOSE, frozenset([END]), 7)


@dataclass(frozen=True)
class Picky(StepRule):
    """Takes a step if its tokens add up to an even number; the draft counts as sure unless three divide that."""

    name = "picky"

    def confidence(self, draft: Draft, sampling: Sampling) -> float:
        return 0.9 if sum(draft.tokens) % 3 else 0.5

    def verify(self, drafts: DraftBatch) -> Decisions:
        return self.conclude(drafts, (drafts.safe_ids * drafts.exists).sum(-1) % 2 == 0)


def language(seed: int) -> Logits:
    """Random texts in which steps end now and then, thinking seldom, and the text only after it."""

    def logits(context: list[int]) -> list[float]:
        rng = random.Random(repr((seed, context[-2:], len(context))))  # by place too: such texts never go in circles
        row = [rng.gauss(0.0, 2.0) for _ in range(VOCAB)]
        row[CLOSE] = row[CLOSE] - 2.0 if CLOSE not in context else -9.0
        row[END] = row[END] if CLOSE in context else -9.0
        return row

    return logits


def run(
    *jobs: Job, target: Logits, draft: Logits, slots: int = 8, early_exit: EarlyExit = NO_EARLY_EXIT
) -> list[tuple[list[Event], Stats]]:
    """Decode as one batch."""
    runners = FakeRunner(target, VOCAB, slots), FakeRunner(draft, VOCAB, slots)
    executor, tasks = Executor(), []
    for job in jobs:
        stats = Stats()
        decoder: Decoder
        if job.rule.unit == "step":
            decoder = StepDecoder(job, runners[0], ModelDrafter(runners[1], early_exit), stats)
        else:
            decoder = Decoder(job, runners[0], NoDrafter(), stats)
        tasks.append((executor.submit(decoder.decode(), stats), stats))
    executor.run()
    for task, _ in tasks:
        if task.error:
            raise task.error
    assert runners[0].free == runners[1].free == slots, "slots are given back"
    return [(list(task.events), stats) for task, stats in tasks]


def job(rule: Rule, n: int = 60, **more: Any) -> Job:
    return Job(PROMPT, rule, 4, n, stop=frozenset([END]), steps=STEPS, **more)


def text(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.tokens]


def best(logits: Logits, context: list[int]) -> int:
    row = logits(context)
    return max(range(VOCAB), key=row.__getitem__)


def ends(begun: list[int], step: list[int]) -> bool:
    return bool(step) and (step[-1] in (BLANK, CLOSE, END) or len(begun + step) == STEPS.max_tokens)


def steps_of(
    rule: StepRule, draft: Logits, new: list[int], begun: list[int], room: int, min_p: float
) -> tuple[list[list[int]], list[int], str]:
    """What the draft writes: whole steps, what lies behind them, and why that is no step."""
    whole: list[list[int]] = []
    said: list[int] = []
    while True:
        step: list[int] = []
        unsure = False
        while len(said + step) < room and not ends(begun, step):
            context = PROMPT + new + said + step
            unsure = unsure or highest(draft, context) < min_p
            if step and unsure:  # but at least one word
                return whole, step, "unfinished"
            step.append(best(draft, context))
        if not ends(begun, step):
            return whole, step, "unfinished" if whole else "no room"
        if step[-1] in (CLOSE, END):
            return whole, step, "the end"
        whole.append(step)
        said += step
        if len(whole) == rule.steps or rule.confidence(Draft(step), Sampling()) < rule.ahead:
            return whole, [], ""
        begun, room = [], min(room, rule.max_step_tokens)


def by_hand(rule: Picky, target: Logits, draft: Logits, n: int, min_p: float = 0.0) -> tuple[list[int], Counter[str]]:
    """The text, and the fates of steps."""
    new: list[int] = []
    fates: Counter[str] = Counter()
    lead, alone = rule.lead, False
    targets_turn = lead > 0

    def begun() -> list[int]:
        return new[([0, *STEPS.cuts(new)])[-1] :]

    def own() -> None:
        """The target's word, which may end a step."""
        nonlocal lead, targets_turn, alone
        said = begun()
        new.append(best(target, PROMPT + new))
        if not alone and CLOSE not in new[:-1] and not begun():
            fates["target"] += len(said) > 0 or new[-1] == BLANK
            lead = max(0, lead - 1)
            targets_turn = lead > 0

    while len(new) < n and END not in new:
        if targets_turn or alone or CLOSE in new:
            own()
            continue
        whole, rest, why = steps_of(rule, draft, new, begun(), n - len(new) - 1, min_p)
        over = why in ("the end", "no room")
        if over and not (rule.keep and (whole or rest)):
            if not whole:
                fates["handed over"] += bool(rest) and len(begun() + rest) > 1
                alone = rule.hand_over or why == "no room"
                targets_turn = True
                continue
            rest, over = [], False
        refused = False
        for step in whole:
            same = as_far_as_the_same(target, new, step)
            refused = sum(step) % 2 == 1 and not (rule.keep and same == step)
            if refused:
                new += same if rule.keep else []
                break
            new += step
            fates["accepted"] += 1
        fates["refused"] += refused
        over = over and not refused
        fates["handed over"] += over and len((begun() if not whole else []) + rest) > 1
        targets_turn = refused or over
        if not refused:
            before, same = begun(), as_far_as_the_same(target, new, rest)
            new += same
            fates["target"] += (
                over and why == "the end" and same == rest and len(before + rest) > 1
            )  # in the target's own words
        if END not in new:
            own()
        alone = alone or (over and (rule.hand_over or why == "no room"))
    return new, +fates


def as_far_as_the_same(target: Logits, new: list[int], words: list[int]) -> list[int]:
    """The beginning of these words that the target would write as well."""
    said: list[int] = []
    for word in words:
        if best(target, PROMPT + new + said) != word:
            break
        said.append(word)
    return said


def highest(logits: Logits, context: list[int]) -> float:
    """The probability of the likeliest token."""
    weights = [math.exp(x) for x in logits(context)]
    return max(weights) / sum(weights)
