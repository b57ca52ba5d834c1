"""Whatever the rule: what is committed is what the events say, nothing forbidden is relaxed, caches hold the text and
nothing else, and company changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec.draft import ModelDrafter
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor, Task
from semspec.loop.stats import Stats
from semspec.types import Draft, Event, Sampling
from semspec.verify import REGISTRY, Rule, make
from tests.fakes import FakeRunner, Logits, chain, greedy
from tests.verify.binding import RuleResources

VOCAB = 11
FORBIDDEN = {0, 7}
OPTIONS = {  # so that each has something to relax in a language of eleven words
    "fly": "fly:window=1",
    "threshold": "threshold:single=0.05",
    "adaptive": "adaptive:start=0.9",
    "reflective": "reflective:alpha=0.9",
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
class Asked:
    prompt: list[int]
    rule: Rule
    k: int
    n: int
    sampling: Sampling


class Noted(ModelDrafter):
    """Writes down every draft with the text it was made for."""

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
    running: list[tuple[Decoder, Noted, Task, list[Event]]] = field(default_factory=list)

    def submit(self, asked: Asked) -> None:
        protected = torch.tensor([v in FORBIDDEN for v in range(VOCAB)])
        job = Job(asked.prompt, asked.rule, asked.k, asked.n, asked.sampling, protected=protected)
        drafter = Noted(self.draft)
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
                    self.hold(decoder, drafter)
        assert not self.target.held and not self.draft.held, "all slots are free again"
        return [events for *_, events in self.running]

    def hold(self, decoder: Decoder, drafter: Noted) -> None:
        """The target may be in the middle of a check, the draft of a draft; what they hold before is the text."""
        text = decoder.context
        assert self.target.held[decoder.slot][: len(text) - 1] == text[:-1]
        assert drafter.slot is not None
        known = self.draft.held[drafter.slot]
        assert known[: len(text)] == text[: len(known)]


def as_the_events_say(asked: Asked, events: list[Event], drafts: list[tuple[list[int], Draft]]) -> None:
    text, at = list(asked.prompt), 0
    for event in events:
        while drafts[at][0] != text:
            at += 1
        proposed = drafts[at][1].tokens
        assert event.drafted <= len(proposed)
        assert event.tokens[: event.accepted] == proposed[: event.accepted], "the draft's, relaxed or not"
        assert len(event.tokens) - event.accepted in (0, 1)
        origins = ["relaxed" if i in event.relaxed else "draft" for i in range(event.accepted)]
        assert event.origins == origins + ["target"] * (len(event.tokens) - event.accepted)
        if not asked.rule.needs_draft_logits:
            assert proposed == greedy(DRAFT, text, len(proposed)), "the draft has read this text and no other"
        for i, token in enumerate(event.tokens):
            row = TARGET(text)
            own = row.index(max(row))
            if i in event.relaxed:
                assert not {token, event.relaxed[i].target_token} & FORBIDDEN and token != event.relaxed[i].target_token
            if asked.sampling.greedy:
                assert (event.relaxed[i].target_token == own != token) if i in event.relaxed else token == own
            text.append(token)
    assert len(text) == len(asked.prompt) + asked.n


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 12), st.integers(1, 50), st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(0, 99))
@pytest.mark.parametrize("heat", [0.0, 0.9])
@pytest.mark.parametrize("name", RULES)
def test_events_tell_what_was_committed_and_caches_hold_it(name, heat, k: int, n: int, prompt: list[int], seed: int):
    asked, world = Asked(prompt, rule_of(name), k, n, Sampling(heat, seed=seed)), World()
    world.submit(asked)
    (events,) = world.run()
    as_the_events_say(asked, events, world.running[0][1].notes)
    stats = world.running[0][0].stats
    assert stats.relaxed == sum(len(e.relaxed) for e in events) and stats.tokens == n
    assert stats.accepted == sum(e.accepted for e in events)


@pytest.mark.parametrize("heat", [0.0, 0.9])
def test_a_batch_of_all_rules_is_each_by_itself(heat: float):
    asked = [
        Asked([1 + i % 9, *range(i % 4)], rule_of(name), 1 + i % 7, 40 + i, Sampling(heat, seed=i))
        for i, name in enumerate(RULES * 2)
    ]
    together = World(FakeRunner(TARGET, VOCAB, slots=64), FakeRunner(DRAFT, VOCAB, slots=64))
    for one in asked:
        together.submit(one)
    relaxed = dict.fromkeys(RULES, 0)
    for one, events in zip(asked, together.run(), strict=True):
        alone = World()
        alone.submit(one)
        assert events == alone.run()[0]
        relaxed[one.rule.name] += sum(len(e.relaxed) for e in events)
    assert {name for name, n in relaxed.items() if n} == set(LOOSE), "each loose rule has had something to relax"
    assert len(together.target.diary) < 80, "and they did share passes"
