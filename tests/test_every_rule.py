"""For every rule: events report what was committed, no protected token is relaxed, caches hold exactly the text, and
batching changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec.draft import ModelDrafter
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.loop.work import Task
from semspec.types import Draft, Event, Sampling
from semspec.verify import REGISTRY, Rule, make
from tests.fakes import FakeRunner, Logits, chain, greedy
from tests.verify.binding import RuleResources

VOCAB = 11
PROTECTED = {0, 7}
OPTIONS = {  # so that each has something to relax in a language of eleven tokens
    "fly": "fly:window=1",
    "threshold": "threshold:single=0.05",
    "adaptive": "adaptive:start=0.9",
    "reflective": "reflective:alpha=0.9",
    "regret": "regret:budget=9,slope=9",
    "mars": "mars:ratio=0.3",
    "csd": "csd:count=1",
}
RULES = sorted(name for name, rule in REGISTRY.items() if rule.unit == "token" and rule.speculates)
LOOSE = [name for name in RULES if not REGISTRY[name].lossless]


@cache
def rule_of(name: str) -> Rule:
    return make(OPTIONS.get(name, name)).bind(RuleResources(remark=[1, 2]))


def near(one: Logits, other: Logits) -> Logits:
    """A draft of the first that is right about half of the time."""
    return lambda context: [a + b for a, b in zip(one(context), other(context), strict=True)]


TARGET = chain(VOCAB, seed=1)
DRAFT = near(TARGET, chain(VOCAB, seed=9))


@dataclass
class Case:
    prompt: list[int]
    rule: Rule
    k: int
    n: int
    sampling: Sampling


class RecordingDrafter(ModelDrafter):
    """Records every draft with its context."""

    def __init__(self, runner: FakeRunner) -> None:
        super().__init__(runner)
        self.notes: list[tuple[list[int], Draft]] = []

    def propose(self, context, request):
        before = list(context)
        draft = yield from super().propose(context, request)
        self.notes.append((before, draft))
        return draft


@dataclass
class World:
    """Models, and all sequences that are decoded with them."""

    target: FakeRunner = field(default_factory=lambda: FakeRunner(TARGET, VOCAB))
    draft: FakeRunner = field(default_factory=lambda: FakeRunner(DRAFT, VOCAB))
    executor: Executor = field(default_factory=Executor)
    running: list[tuple[Decoder, RecordingDrafter, Task, list[Event]]] = field(default_factory=list)

    def submit(self, case: Case) -> None:
        protected = torch.tensor([v in PROTECTED for v in range(VOCAB)])
        job = Job(case.prompt, case.rule, case.k, case.n, case.sampling, protected=protected)
        drafter = RecordingDrafter(self.draft)
        decoder = Decoder(job, self.target, drafter, Stats())
        self.running.append((decoder, drafter, self.executor.submit(decoder.decode(), decoder.stats), []))

    def run(self) -> list[list[Event]]:
        while any(not task.done for _, _, task, _ in self.running):
            self.executor.tick()
            for decoder, drafter, task, events in self.running:
                events += task.events
                task.events.clear()
                assert task.error is None
                if events and not task.done:
                    self.check_caches(decoder, drafter)
        assert not self.target.held and not self.draft.held, "all slots are free again"
        return [events for *_, events in self.running]

    def check_caches(self, decoder: Decoder, drafter: RecordingDrafter) -> None:
        """Both start with the text; a draft may follow it, for the target while it is scored."""
        text = decoder.context
        assert self.target.held[decoder.slot][: len(text) - 1] == text[:-1]
        assert drafter.slot is not None
        known = self.draft.held[drafter.slot]
        assert known[: len(text)] == text[: len(known)]


def check_events(case: Case, events: list[Event], drafts: list[tuple[list[int], Draft]]) -> None:
    text, at = list(case.prompt), 0
    for event in events:
        while drafts[at][0] != text:
            at += 1
        proposed = drafts[at][1].tokens
        assert event.drafted <= len(proposed)
        assert event.tokens[: event.accepted] == proposed[: event.accepted], "the draft's, relaxed or not"
        assert len(event.tokens) - event.accepted in (0, 1)
        origins = ["relaxed" if i in event.relaxed else "draft" for i in range(event.accepted)]
        assert event.origins == origins + ["target"] * (len(event.tokens) - event.accepted)
        if not case.rule.needs_draft_logits:
            assert proposed == greedy(DRAFT, text, len(proposed)), "the draft has read this text and no other"
        for i, token in enumerate(event.tokens):
            row = TARGET(text)
            own = row.index(max(row))
            if i in event.relaxed:
                assert not {token, event.relaxed[i].target_token} & PROTECTED and token != event.relaxed[i].target_token
            if case.sampling.greedy:
                assert (event.relaxed[i].target_token == own != token) if i in event.relaxed else token == own
            text.append(token)
    assert len(text) == len(case.prompt) + case.n


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 12), st.integers(1, 50), st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(0, 99))
@pytest.mark.parametrize("heat", [0.0, 0.9])
@pytest.mark.parametrize("name", RULES)
def test_events_report_what_was_committed_and_caches_hold_it(name, heat, k: int, n: int, prompt: list[int], seed: int):
    case, world = Case(prompt, rule_of(name), k, n, Sampling(heat, seed=seed)), World()
    world.submit(case)
    (events,) = world.run()
    check_events(case, events, world.running[0][1].notes)
    stats = world.running[0][0].stats
    assert stats.relaxed == sum(len(e.relaxed) for e in events) and stats.tokens == n
    assert stats.accepted == sum(e.accepted for e in events)


@pytest.mark.parametrize("heat", [0.0, 0.9])
def test_a_batch_of_all_rules_equals_singles(heat: float):
    cases = [
        Case([1 + i % 9, *range(i % 4)], rule_of(name), 1 + i % 7, 40 + i, Sampling(heat, seed=i))
        for i, name in enumerate(RULES * 2)
    ]
    together = World(FakeRunner(TARGET, VOCAB, slots=64), FakeRunner(DRAFT, VOCAB, slots=64))
    for one in cases:
        together.submit(one)
    relaxed = dict.fromkeys(RULES, 0)
    for one, events in zip(cases, together.run(), strict=True):
        single = World()
        single.submit(one)
        assert events == single.run()[0]
        relaxed[one.rule.name] += sum(len(e.relaxed) for e in events)
    greedy = set() if heat else {"ears"}  # whose coins are those of sampling
    assert {name for name, n in relaxed.items() if n} == set(LOOSE) - greedy, "each loose rule relaxed something"
    assert len(together.target.diary) < 80, "and they shared passes"
