"""The loop of step rules in plain Python: greedy, token by token, without caches. And what its tests share."""

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
from semspec.text.steps import StepDelimiters
from semspec.tree import MAX_TREE
from semspec.types import Draft, Event, Sampling
from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.step_rule import StepRule
from tests.fakes import FakeRunner, Logits

END, BLANK, CLOSE, VOCAB = 0, 1, 2, 9  # end of text, a token that ends a step, end of thinking
PROMPT = [3, 4, 5]
STEPS = StepDelimiters(frozenset([BLANK]), frozenset([BLANK]), frozenset(), frozenset(), CLOSE, frozenset([END]), 7)


@dataclass(frozen=True)
class Picky(StepRule):
    """Accepts a step if the sum of its tokens is even; the draft is confident unless that is a multiple of 3."""

    name = "picky"

    def confidence(self, draft: Draft, sampling: Sampling) -> float:
        return 0.9 if sum(draft.tokens) % 3 else 0.5

    def verify(self, drafts: DraftBatch) -> Decisions:
        return self.conclude(drafts, (drafts.safe_ids * drafts.exists).sum(-1) % 2 == 0)


@dataclass(frozen=True)
class Choosy(Picky):
    """The same, and of several accepted candidates it takes the one whose sum is worth most by a table."""

    name = "choosy"

    def verify(self, drafts: DraftBatch) -> Decisions:
        sums = (drafts.safe_ids * drafts.exists).sum(-1)
        return self.conclude(drafts, sums % 2 == 0, (sums * 7 % 11,))


def language(seed: int) -> Logits:
    """Random texts in which steps end now and then, thinking seldom, and the text only after it."""

    def logits(context: list[int]) -> list[float]:
        rng = random.Random(repr((seed, context[-2:], len(context))))  # by position too, so that texts do not repeat
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
    assert runners[0].free == runners[1].free == slots, "slots are released"
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
    rule: StepRule, draft: Logits, new: list[int], begun: list[int], left: int, min_p: float
) -> tuple[list[list[int]], list[int], str]:
    """What the draft writes: whole steps, what follows them, and why that is no step."""
    whole: list[list[int]] = []
    so_far: list[int] = []
    while True:
        step: list[int] = []
        unsure = False
        while len(so_far + step) < left and not ends(begun, step):
            context = PROMPT + new + so_far + step
            unsure = unsure or highest(draft, context) < min_p
            if step and unsure:  # but at least one token
                return whole, step, "unfinished"
            step.append(best(draft, context))
        if not ends(begun, step):
            return whole, step, "unfinished" if whole else "no space"
        if step[-1] in (CLOSE, END):
            return whole, step, "the end"
        whole.append(step)
        so_far += step
        if len(whole) == rule.steps or rule.confidence(Draft(step), Sampling()) < rule.ahead:
            return whole, [], ""
        begun, left = [], min(left, rule.max_step_tokens)


def candidates_of(
    rule: StepRule, draft: Logits, new: list[int], begun: list[int], left: int, first: list[int], min_p: float
) -> list[list[int]]:
    """All candidates for a step, of which a greedy draft has written the first: each begins with another token."""
    context, found, room = PROMPT + new, [first], MAX_TREE - len(first)
    if room < len(first):
        return found
    row = draft(context)
    likeliest = sorted(range(VOCAB), key=lambda token: -row[token])[: rule.candidates]
    for token in [token for token in likeliest if token != first[0]][: rule.candidates - 1]:
        if room < min(map(len, found)):
            break
        step, unsure = [token], False
        while len(step) < min(left, room) and not ends(begun, step):
            unsure = unsure or highest(draft, context + step) < min_p
            if unsure and len(step) > 1:  # it stops there, but at least one token later
                break
            step.append(best(draft, context + step))
        if ends(begun, step) and step[-1] not in (CLOSE, END):
            found.append(step)
            room -= len(step)
    return found


def choice_of(rule: StepRule, target: Logits, new: list[int], candidates: list[list[int]]) -> int:
    """Which of the candidates is taken, or kept a part of."""
    accepted = [i for i, step in enumerate(candidates) if sum(step) % 2 == 0]
    if accepted:
        return max(accepted, key=lambda i: sum(candidates[i]) * 7 % 11)
    lengths = [len(matching_prefix(target, new, step)) if rule.keep else 0 for step in candidates]
    return lengths.index(max(lengths))


def by_hand(
    rule: Picky, target: Logits, draft: Logits, n: int, min_p: float = 0.0, chosen: list[tuple[int, int]] | None = None
) -> tuple[list[int], Counter[str]]:
    """The text, and the outcomes of steps. With several candidates, `chosen` gets which was accepted of how many."""
    new: list[int] = []
    outcomes: Counter[str] = Counter()
    lead, target_only = rule.lead, False
    target_writes = lead > 0

    def begun() -> list[int]:
        return new[([0, *STEPS.cuts(new)])[-1] :]

    def own() -> None:
        """The target's token, which may end a step."""
        nonlocal lead, target_writes, target_only
        so_far = begun()
        new.append(best(target, PROMPT + new))
        if not target_only and CLOSE not in new[:-1] and not begun():
            outcomes["target"] += len(so_far) > 0 or new[-1] == BLANK
            lead = max(0, lead - 1)
            target_writes = lead > 0

    while len(new) < n and END not in new:
        if target_writes or target_only or CLOSE in new:
            own()
            continue
        whole, rest, why = steps_of(rule, draft, new, begun(), n - len(new) - 1, min_p)
        over = why in ("the end", "no space")
        if over and not (rule.keep and (whole or rest)):
            if not whole:
                outcomes["handed over"] += bool(rest) and len(begun() + rest) > 1
                target_only = rule.hand_over or why == "no space"
                target_writes = True
                continue
            rest, over = [], False
        refused, count = False, 1
        if whole and not why and rule.candidates > 1:
            several = candidates_of(rule, draft, new, begun(), n - len(new) - 1, whole[0], min_p)
            count, which = len(several), choice_of(rule, target, new, several)
            whole = [several[which]]
        for step in whole:
            same = matching_prefix(target, new, step)
            refused = sum(step) % 2 == 1 and not (rule.keep and same == step)
            if refused:
                new += same if rule.keep else []
                break
            new += step
            outcomes["accepted"] += 1
            if count > 1 and chosen is not None:
                chosen.append((which, count))
        outcomes["rejected"] += refused
        over = over and not refused
        outcomes["handed over"] += over and len((begun() if not whole else []) + rest) > 1
        target_writes = refused or over
        if not refused:
            before, same = begun(), matching_prefix(target, new, rest)
            new += same
            outcomes["target"] += (
                over and why == "the end" and same == rest and len(before + rest) > 1
            )  # in the target's own words
        if END not in new:
            own()
        target_only = target_only or (over and (rule.hand_over or why == "no space"))
    return new, +outcomes


def matching_prefix(target: Logits, new: list[int], tokens: list[int]) -> list[int]:
    """The beginning of these tokens that the target would write as well."""
    so_far: list[int] = []
    for token in tokens:
        if best(target, PROMPT + new + so_far) != token:
            break
        so_far.append(token)
    return so_far


def highest(logits: Logits, context: list[int]) -> float:
    """The probability of the likeliest token."""
    weights = [math.exp(x) for x in logits(context)]
    return max(weights) / sum(weights)
