"""The loop of step rules, with fake models: whose turn it is, what stands, what the caches hold."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec.decode import Decoder, Job
from semspec.draft import ModelDrafter, NoDrafter
from semspec.execute import Executor
from semspec.stats import Stats
from semspec.steps import Steps
from semspec.stepwise import StepDecoder
from semspec.types import Event, Sampling
from semspec.verify import make
from semspec.verify.base import Decisions, Drafts, Rule
from semspec.verify.step import StepRule
from tests.fakes import FakeRunner, Logits

END, BLANK, CLOSE, VOCAB = 0, 1, 2, 9  # end of text, a token that ends a step, end of thinking
PROMPT = [3, 4, 5]
STEPS = Steps(frozenset([BLANK]), frozenset([BLANK]), frozenset(), frozenset(), CLOSE, frozenset([END]), 7)


@dataclass(frozen=True)
class Picky(StepRule):
    """Takes a step if its tokens add up to an even number."""

    name = "picky"

    def judge(self, drafts: Drafts) -> Decisions:
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


def run(*jobs: Job, target: Logits, draft: Logits, slots: int = 8) -> list[tuple[list[Event], Stats]]:
    """Decode as one batch."""
    runners = FakeRunner(target, VOCAB, slots), FakeRunner(draft, VOCAB, slots)
    executor, tasks = Executor(), []
    for job in jobs:
        stats = Stats()
        decoder: Decoder
        if job.rule.unit == "step":
            decoder = StepDecoder(job, runners[0], ModelDrafter(runners[1]), stats)
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


def by_hand(rule: Picky, target: Logits, draft: Logits, n: int) -> list[int]:
    """The loop as the paper tells it: greedily, a token at a time and without caches."""
    new: list[int] = []
    begun: list[int] = []  # what stands of the step being written
    lead, alone = rule.lead, False
    targets_turn = lead > 0
    while len(new) < n and END not in new:
        if targets_turn or alone or CLOSE in new:
            new.append(best(target, PROMPT + new))
            begun.append(new[-1])
        else:
            step: list[int] = []
            while len(step) < n - len(new) - 1 and not ends(begun, step):
                step.append(best(draft, PROMPT + new + step))
            if not ends(begun, step) or step[-1] in (CLOSE, END):
                alone = rule.hand_over or not ends(begun, step)
                targets_turn = True
                continue
            if sum(step) % 2 == 0:
                new += [*step, best(target, PROMPT + new + step)]
                begun = new[-1:]
            else:
                targets_turn = True
                new.append(best(target, PROMPT + new))
                begun.append(new[-1])
        if ends([], begun):
            lead = max(0, lead - 1)
            begun, targets_turn = [], lead > 0
    return new


def ends(begun: list[int], step: list[int]) -> bool:
    return bool(step) and (step[-1] in (BLANK, CLOSE, END) or len(begun + step) == STEPS.max_tokens)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 2), st.booleans(), st.integers(1, 80))
def test_the_loop_does_what_the_paper_tells(seed: int, lead: int, hand_over: bool, n: int) -> None:
    rule = Picky(lead=lead, hand_over=hand_over)
    target, draft = language(seed), language(seed + 1 if seed % 3 else seed)
    ((events, stats),) = run(job(rule, n), target=target, draft=draft)
    assert text(events) == by_hand(rule, target, draft, n)
    assert stats.tokens == len(text(events)) and stats.accepted == sum(e.accepted for e in events)
    fates = Counter(event.fate for event in events if event.fate)
    assert fates == Counter({k: v for k, v in stats.fates.items() if k != "target"})
    for event in events:
        assert (event.fate is not None) == bool(event.step)
        if event.fate == "accepted":
            assert event.accepted == event.drafted and sum(event.tokens[: event.accepted]) % 2 == 0
            assert text(events)[event.begun :][: len(event.step)] == event.step
        if event.fate == "refused":
            assert event.accepted == 0 and sum(event.step[-event.drafted :]) % 2 == 1


def test_every_branch_is_met() -> None:
    """So that the test above means something."""
    fates: Counter[str] = Counter()
    for seed in range(40):
        ((events, stats),) = run(job(Picky(hand_over=seed % 2 == 0)), target=language(seed), draft=language(seed + 1))
        fates += stats.fates
        fates["thought to the end"] += CLOSE in text(events)
    assert min(fates[k] for k in ("target", "accepted", "refused", "handed over", "thought to the end")) >= 10, fates


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, top_p=0.95, seed=7)], ids=["greedy", "sampled"])
def test_when_no_step_stands_the_target_writes_what_it_would_alone(sampling: Sampling) -> None:
    for seed in range(12):
        models = {"target": language(seed), "draft": language(seed + 1)}
        ((alone, _),) = run(job(make("none"), sampling=sampling), **models)
        ((refusing, stats),) = run(job(make("random-step:rate=0"), sampling=sampling), **models)
        assert text(refusing) == text(alone) and stats.accepted == 0


def test_batches_of_sequences_in_different_phases_equal_singles() -> None:
    models = {"target": language(3), "draft": language(4)}
    jobs = [
        replace(job(rule, n, sampling=Sampling(t, seed=i)), prompt=PROMPT + [6] * (i % 4))
        for i, (rule, n, t) in enumerate(
            [
                (Picky(), 50, 0.0),
                (make("none"), 33, 0.8),
                (make("random-step:rate=0.5"), 60, 0.8),
                (Picky(lead=0), 9, 0.8),
            ]
            * 3
        )
    ]
    for slots in (3, 12):
        together = run(*jobs, **models, slots=slots)
        for one, (events, stats) in zip(jobs, together, strict=True):
            ((alone, own),) = run(one, **models)
            assert text(events) == text(alone) and stats.fates == own.fates
            assert [e.origins for e in events if e.fate] == [e.origins for e in alone if e.fate]


@dataclass(frozen=True)
class Watching(Picky):
    """Checks that it sees the states that predicted the step's tokens, in both models. A fake's states are logits."""

    name = "watching"
    layers = (0,)  # type: ignore[assignment]
    draft_layers = (0,)  # type: ignore[assignment]

    target: Any = None
    draft: Any = None
    context: Any = None  # of the one sequence

    def judge(self, drafts: Drafts) -> Decisions:
        assert drafts.hidden is not None and drafts.draft_hidden is not None
        ids = drafts.ids[0, : drafts.counts[0]].tolist()
        so_far = self.context()
        for i in range(len(ids)):
            for states, model in ((drafts.hidden[0], self.target), (drafts.draft_hidden[0], self.draft)):
                assert states[i].tolist() == pytest.approx(model(so_far + ids[:i]), abs=1e-5)
        assert len(drafts.draft_hidden[0]) == len(ids) and len(drafts.hidden[0]) == len(ids) + 1
        return super().judge(drafts)

    def __hash__(self) -> int:
        return 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_rule_sees_the_states_that_predicted_the_step(temperature: float) -> None:
    judged = 0
    for seed in range(6):
        target, draft = language(seed), language(seed + 1)
        runners = FakeRunner(target, VOCAB), FakeRunner(draft, VOCAB)
        rule = Watching(target=target, draft=draft, context=lambda: decoder.context)  # noqa: B023
        stats, executor = Stats(), Executor()
        made = job(rule, sampling=Sampling(temperature, seed=seed))
        decoder = StepDecoder(made, runners[0], ModelDrafter(runners[1]), stats)
        task = executor.submit(decoder.decode(), stats)
        executor.run()
        assert task.error is None
        judged += stats.fates["accepted"] + stats.fates["refused"]
    assert judged > 10


def test_a_referee_is_asked_about_whole_steps() -> None:
    """Also of a step whose first word was the target's bonus."""
    asked: list[tuple[list[int], list[int]]] = []

    def referee(so_far: list[int], step: list[int]) -> bool:
        asked.append((so_far, step))
        return len(asked) % 3 != 0

    ((events, stats),) = run(job(make("oracle"), referee=referee), target=language(8), draft=language(9))
    written = text(events)
    assert len(asked) > 4 and stats.fates["accepted"] + stats.fates["refused"] == len(asked)
    for i, (so_far, step) in enumerate(asked):
        assert so_far == written[: len(so_far)] and (not so_far or so_far[-1] == BLANK or STEPS.cuts(so_far))
        assert step[-1] == BLANK or len(step) == STEPS.max_tokens
        assert (written[len(so_far) : len(so_far) + len(step)] == step) >= ((i + 1) % 3 != 0)


def test_a_loop_makes_the_target_write_the_rest() -> None:
    def stuck(context: list[int]) -> list[float]:
        return [0.0, 1.0, -9.0, 0, 0, 0, 0, 0, 0] if context[-1] == 6 else [0.0, 0, -9.0, 0, 0, 0, 1.0, 0, 0]

    ((events, stats),) = run(job(make("random-step:rate=1"), 300), target=stuck, draft=stuck)
    assert stats.loops == 1
    last = max(i for i, event in enumerate(events) if event.fate == "accepted")
    assert last < len(events) - 3 and all(set(e.origins) == {"target"} for e in events[last + 1 :])


def test_same_seed_same_text() -> None:
    models = {"target": language(5), "draft": language(6)}
    one, again, other = (
        run(job(make("random-step:rate=0.5"), sampling=Sampling(0.9, seed=seed)), **models)[0][0] for seed in (1, 1, 2)
    )
    assert text(one) == text(again) != text(other)


def test_states_of_a_step_in_pieces_stay_in_order() -> None:
    """A step that pauses at a token which might have ended it is drafted in several rolls."""
    pausing = replace(STEPS, closers=frozenset([7]))  # 7 may close a blank line, but no line is blank so far
    for seed in range(5):
        target, draft = language(seed), language(seed + 1)
        results = [
            run(replace(job(Picky()), steps=steps), target=target, draft=draft)[0][0] for steps in (STEPS, pausing)
        ]
        assert text(results[0]) == text(results[1])
        assert torch.equal(*(torch.tensor([e.accepted for e in events if e.fate]) for events in results))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, top_p=0.95, seed=7)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("spec", ["keep=true", "rewrite=exact", "keep=true,rewrite=exact,rewrite_tokens=2,lead=2"])
def test_what_is_refused_may_be_kept_in_part_and_written_with_help(spec: str, sampling: Sampling) -> None:
    """Whatever helps the target, with a lossless rule the text stays its own."""
    helped = passes = alone_passes = 0
    for seed in range(12):
        target = language(seed)
        models = {"target": target, "draft": lambda context: [2 * x for x in target(context)]}  # noqa: B023
        ((alone, own),) = run(job(make("none"), sampling=sampling), **models)
        rewriter = make("exact") if "rewrite" in spec else None
        asked = job(make(f"random-step:rate=0,{spec}"), sampling=sampling, rewriter=rewriter)
        ((refusing, stats),) = run(asked, **models)
        assert text(refusing) == text(alone)
        assert stats.tokens == len(text(alone)) and stats.accepted == sum(e.accepted for e in refusing)
        helped += stats.accepted
        passes, alone_passes = passes + stats.target_passes, alone_passes + own.target_passes
    assert helped > 20 and passes < 0.9 * alone_passes
