"""Scheduling, with fake runners and a fake clock: what waits for what, how time is split, what a failure ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from semspec import verify
from semspec.draft import ModelDrafter, NoDrafter
from semspec.errors import SemspecError
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.loop.work import Task
from semspec.types import Acquire, Decode, Event, Sampling, Score, SequenceGenerator
from semspec.verify import make
from semspec.verify.exact import Exact
from tests.fakes import Clock, FakeRunner, chain, greedy

VOCAB = 11
CHUNK = 8


class World:
    """A target, a draft and an Executor on one fake clock. A pass takes a second, a decode a second a token."""

    def __init__(self, slots: int = 8, budget: int = 512) -> None:
        self.clock = Clock()
        self.language = chain(VOCAB)
        self.target = FakeRunner(self.language, VOCAB, slots=slots, clock=self.clock)
        self.draft = FakeRunner(self.language, VOCAB, slots=slots, clock=self.clock)
        self.executor = Executor(chunk=CHUNK, budget=budget, clock=self.clock)

    def submit(self, prompt: list[int], verifier: str = "exact", k: int = 4, n: int = 30) -> Task:
        stats = Stats()
        sequence = Decoder(Job(prompt, verify.make(verifier), k, n), self.target, ModelDrafter(self.draft), stats)
        return self.executor.submit(sequence.decode(), stats)


def tokens(task: Task) -> list[int]:
    return [t for e in task.events for t in e.tokens]


def timed(decoding: SequenceGenerator, clock: Clock, waits: list[float]) -> SequenceGenerator:
    """Pass everything through; record how long each Score took from request to answer."""
    answer = None
    while True:
        try:
            request = decoding.send(answer)
        except StopIteration:
            return
        began = clock.now
        answer = yield request
        if isinstance(request, Score):
            waits.append(clock.now - began)


@pytest.mark.parametrize("shared_runner", [False, True])
def test_no_score_waits_longer_than_one_chunk_of_a_long_decode(shared_runner: bool):
    world = World(slots=16)
    if shared_runner:
        world.draft = world.target
    waits: list[float] = []
    for i in range(7):  # different prompts, draft lengths and so phases
        stats = Stats()
        job = Job([1 + i] * (1 + 3 * i), verify.make(["exact", "sampling", "block"][i % 3]), 1 + i, 40 + i)
        sequence = Decoder(job, world.target, ModelDrafter(world.draft), stats)
        world.executor.submit(timed(sequence.decode(), world.clock, waits), stats)

    def long_decode() -> SequenceGenerator:
        (slot,) = yield Acquire([world.draft])
        out = yield Decode(world.draft, slot, [2], 60, Sampling(), 0)
        yield Event(out.tokens, ["target"] * 60)
        world.draft.release(slot)

    decoding = world.executor.submit(long_decode(), Stats())
    world.executor.run()
    assert tokens(decoding) == greedy(world.language, [2], 60)
    assert len(waits) > 50
    assert max(waits) <= CHUNK + 1, "one chunk of another's decode, and its own pass"
    assert max(max(p.rows.values()) for p in world.draft.diary if p.kind == "roll") <= CHUNK


def test_a_single_sequence_decodes_in_one_call():
    world = World()
    world.submit([1, 2], k=16, n=17)
    world.executor.run()
    assert [p.rows for p in world.draft.diary] == [{0: 16}]
    assert [p.rows for p in world.target.diary] == [{0: 2 + 16}]


def test_a_batch_shares_passes_and_equals_single_runs():
    requests = [([1], "exact", 2), ([2, 3, 4], "none", 3), ([5] * 9, "block", 4), ([1, 2], "sampling", 5)]
    batch = World()
    tasks = [batch.submit(prompt, rule, k) for prompt, rule, k in requests]
    batch.executor.run()
    singles = 0
    for (prompt, rule, k), task in zip(requests, tasks, strict=True):
        other = World()
        single = other.submit(prompt, rule, k)
        other.executor.run()
        assert tokens(task) == tokens(single)
        assert task.stats.histogram == single.stats.histogram
        singles += len(other.target.diary)
    assert len(batch.target.diary) < singles
    assert any(len(p.rows) > 1 for p in batch.target.diary)


def test_a_long_prompt_is_prefilled_in_chunks_while_others_go_on():
    world = World(budget=64)
    short = world.submit([1, 2], k=4, n=100)
    world.executor.tick()
    long = world.submit([1 + i % 9 for i in range(500)], n=5)
    world.executor.run()
    assert tokens(long) == greedy(world.language, [1 + i % 9 for i in range(500)], 5)
    assert tokens(short) == greedy(world.language, [1, 2], 100)
    assert max(sum(p.rows.values()) for p in world.target.diary) <= 64
    together = [p for p in world.target.diary if len(p.rows) == 2 and max(p.rows.values()) > 40]
    assert len(together) >= 3, "the short one's scores share passes with the long one's prompt"


def test_prefill_is_not_counted_as_a_target_pass():
    world = World(budget=64)
    task = world.submit([1] * 500, "none", n=10)
    world.executor.run()
    assert task.stats.target_passes == 10


def test_sequences_without_a_slot_wait():
    world = World(slots=2)
    tasks = [world.submit([i], n=10 + i) for i in range(1, 7)]
    world.executor.tick()
    assert world.target.free == 0 and len(world.target.held) == 2
    world.executor.run()
    for i, task in enumerate(tasks, 1):
        assert tokens(task) == greedy(world.language, [i], 10 + i)
    assert world.target.free == world.draft.free == 2


@pytest.mark.parametrize("ticks", range(12))
def test_a_cancelled_sequence_frees_its_slots_at_once_and_changes_no_other(ticks: int):
    world = World(slots=3)
    tasks = [world.submit([1 + i, 2], ["exact", "none", "block", "exact"][i], n=30) for i in range(4)]
    for _ in range(ticks):
        world.executor.tick()
    gone = [t for t in tasks if not t.done][::2]
    free = world.target.free
    holding = [t for t in gone if t not in world.executor._waiting and ticks]
    for task in gone:
        world.executor.cancel(task)
        world.executor.cancel(task)  # twice does nothing more
    assert world.target.free == free + len(holding)
    world.executor.run()
    for i, task in enumerate(tasks):
        if task not in gone:
            assert tokens(task) == greedy(world.language, [1 + i, 2], 30)
    assert not world.target.held and not world.draft.held


@dataclass(frozen=True)
class Faulty(Exact):
    name = "faulty"

    def verify(self, drafts):
        raise RuntimeError("this rule is broken")


def test_a_faulty_rule_fails_only_the_sequences_that_use_it():
    world = World()
    good = world.submit([1, 2])
    stats = Stats()
    bad = world.executor.submit(
        Decoder(Job([1, 2], Faulty(), 4, 30), world.target, ModelDrafter(world.draft), stats).decode(), stats
    )
    world.executor.run()
    assert isinstance(bad.error, RuntimeError) and good.error is None
    assert tokens(good) == greedy(world.language, [1, 2], 30)
    assert not world.target.held and not world.draft.held


def test_a_pass_that_breaks_ends_its_sequences_and_frees_their_slots():
    world = World()
    tasks = [world.submit([i]) for i in (1, 2)]
    world.executor.tick()
    score = world.target.score
    world.target.score = lambda requests: (_ for _ in ()).throw(MemoryError("no memory left"))  # type: ignore[method-assign]
    world.executor.run()
    assert all(isinstance(t.error, MemoryError) for t in tasks)
    assert not world.target.held and not world.draft.held
    world.target.score = score  # type: ignore[method-assign]
    after = world.submit([1])
    world.executor.run()
    assert tokens(after) == greedy(world.language, [1], 30), "the executor goes on"


def test_a_tuple_of_requests_is_answered_together():
    world = World()
    seen = []

    def both() -> SequenceGenerator:
        one, two = yield Acquire([world.target, world.draft])
        answers = yield (Score(world.target, one, [1, 2, 3], 2), Decode(world.draft, two, [4], 5, Sampling(), 0))
        seen.append(answers)
        world.target.release(one)
        world.draft.release(two)

    world.executor.submit(both(), Stats())
    world.executor.run()
    ((rows, out),) = seen
    assert rows.logits.shape == (2, VOCAB) and out.tokens == greedy(world.language, [4], 5)


def test_seconds_add_up_to_the_time_that_passed():
    world = World()
    tasks = [world.submit([i], k=i, n=20) for i in range(1, 5)]
    world.executor.run()
    total = Stats.pooled(t.stats for t in tasks).seconds
    assert sum(total.values()) == pytest.approx(world.clock.now)
    assert total["draft"] > 0 and total["score"] > 0


def test_hidden_states_of_chunks_are_joined():
    world = World(budget=16)
    got = []

    def scoring() -> Iterator:
        (slot,) = yield Acquire([world.target])
        got.append((yield Score(world.target, slot, [1, 2, 3, 4] * 10, 30, layers=(0, 2))))
        out = yield Decode(world.target, slot, [1] * 40, 6, Sampling(), 0, keep_logits=True, layers=(1,))
        got.append(out)
        world.target.release(slot)

    world.executor.submit(scoring(), Stats())  # type: ignore[arg-type]
    world.executor.run()
    rows, out = got
    assert rows.logits.shape == (30, VOCAB) and rows.hidden[2].equal(rows.logits + 2) and set(rows.hidden) == {0, 2}
    assert out.logits.shape == (6, VOCAB) and out.hidden[1].shape == (6, VOCAB)


@dataclass(frozen=True)
class Impossible(Exact):
    name = "impossible"

    def verify(self, drafts):
        decisions = super().verify(drafts)
        decisions.next = decisions.next - 100
        return decisions


def test_an_impossible_verdict_ends_only_its_sequence():
    world = World()
    good = world.submit([1, 2])
    stats = Stats()
    decoder = Decoder(Job([1, 2], Impossible(), 4, 30), world.target, ModelDrafter(world.draft), stats)
    bad = world.executor.submit(decoder.decode(), stats)
    world.executor.run()
    assert "verifier 'impossible' gave an impossible verdict: accepted" in str(bad.error)
    assert tokens(good) == greedy(world.language, [1, 2], 30) and not world.target.held


@pytest.mark.parametrize("where", ["target", "draft", "verify"])
def test_an_interrupt_inside_a_tick_ends_all_sequences_cleanly(where: str, monkeypatch: pytest.MonkeyPatch):
    world = World()
    tasks = [world.submit([i]) for i in (1, 2)]
    for _ in range(3):
        world.executor.tick()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if where == "verify":
            patch.setattr("semspec.verify.decide.collate", interrupt)
        else:
            patch.setattr(getattr(world, where), "score", interrupt)
        with pytest.raises(KeyboardInterrupt):
            world.executor.run()
    assert not world.executor.tasks and not world.target.held and not world.draft.held
    assert all("interrupted in the middle of a pass" in str(t.error) for t in tasks)
    after = world.submit([1])
    world.executor.run()
    assert tokens(after) == greedy(world.language, [1], 30)


def test_a_faulty_generator_ends_only_its_sequence():
    world = World()
    good = world.submit([1, 2])

    def odd() -> Iterator:
        yield "a request that is none"

    def stubborn() -> Iterator:
        try:
            yield Acquire([world.target])
            raise RuntimeError("first")
        finally:
            raise RuntimeError("and in the end")

    bad = [world.executor.submit(g(), Stats()) for g in (odd, stubborn)]  # type: ignore[arg-type]
    world.executor.run()
    assert "which is no request" in str(bad[0].error) and "in the end" in str(bad[1].error)
    assert tokens(good) == greedy(world.language, [1, 2], 30)


def test_thousands_of_slots_can_be_granted_in_one_tick():
    world = World(slots=1500)
    tasks = [world.submit([1 + i % 9], "none", n=2) for i in range(1500)]
    world.executor.run()
    assert all(t.error is None and len(tokens(t)) == 2 for t in tasks)


def test_more_slots_than_there_are_is_an_error():
    world = World(slots=1)
    stats = Stats()
    decoder = Decoder(Job([1], verify.make("exact"), 4, 5), world.target, ModelDrafter(world.target), stats)
    task = world.executor.submit(decoder.decode(), stats)
    other = world.submit([1, 2], n=5)
    world.executor.run()
    assert "needs more slots at once than there are" in str(task.error)
    assert tokens(other) == greedy(world.language, [1, 2], 5)


def test_a_prompt_does_not_starve_among_many_short_rounds():
    world = World(slots=64, budget=128)
    for i in range(40):
        world.submit([1 + i % 9], k=4, n=400)
    world.executor.tick()
    late = world.submit([1 + i % 9 for i in range(200)], n=3)
    for _ in range(60):
        world.executor.tick()
    assert late.done and tokens(late) == greedy(world.language, [1 + i % 9 for i in range(200)], 3)


def test_sequences_whose_prompts_took_several_passes_still_share_every_pass():
    """Prompts that do not fit into one pass leave sequences in different phases. If they stayed there, each half would
    have target passes of its own, and the batch would cost twice what it should."""
    world = World(budget=64)
    tasks = [world.submit([1 + i] * 20, k=8, n=120) for i in range(8)]
    while not all(len(task.events) > 2 for task in tasks):
        world.executor.tick()
    read, drafted = len(world.target.diary), len(world.draft.diary)
    for _ in range(4):
        world.executor.tick()
    rounds = world.target.diary[read:]
    assert len(rounds) == len(world.draft.diary[drafted:]) == 4
    assert all(len(p.rows) == 8 for p in rounds), "every pass is for all sequences"


def test_slots_are_given_back_if_one_of_them_cannot_be_had(monkeypatch: pytest.MonkeyPatch):
    world = World()
    good = world.submit([1, 2])
    world.executor.tick()
    with monkeypatch.context() as patch:
        patch.setattr(world.draft, "acquire", lambda prompt=(), salt="": 1 / 0)
        bad = world.submit([3])
        world.executor.tick()
    world.executor.run()
    assert isinstance(bad.error, ZeroDivisionError) and tokens(good) == greedy(world.language, [1, 2], 30)
    assert not world.target.held and not world.draft.held


def test_a_sequence_that_cannot_have_its_slots_ends_no_other_that_waits(monkeypatch: pytest.MonkeyPatch):
    world = World()
    acquire, failing = world.draft.acquire, [True]

    def once_broken(prompt: list[int], salt: str) -> int:
        return 1 // 0 if failing and failing.pop() else acquire(prompt, salt)

    monkeypatch.setattr(world.draft, "acquire", once_broken)
    bad, *others = (world.submit([i, 2]) for i in range(3))
    world.executor.run()
    assert isinstance(bad.error, ZeroDivisionError)
    assert [tokens(task) for task in others] == [greedy(world.language, [i, 2], 30) for i in (1, 2)]
    assert not world.target.held and not world.draft.held


def test_a_sequence_that_fails_twice_in_one_tick_ends_once():
    runner, executor = FakeRunner(lambda context: [float("nan")] * 4, 4), Executor()

    def decoding():
        slots = yield Acquire([runner, runner])
        yield tuple(Decode(runner, slot, [1, 2], 2, Sampling(), 0) for slot in slots)

    task = executor.submit(decoding(), Stats())
    executor.run()
    assert "not numbers" in str(task.error)


@pytest.mark.parametrize("n", [1, 2])
def test_a_sequence_one_of_whose_requests_fails_ends_alone(n: int):
    """Of several in one pass, the first."""
    language = chain(VOCAB)
    runner = FakeRunner(lambda context: [float("nan")] * VOCAB if context[0] == 3 else language(context), VOCAB)
    executor = Executor()

    def decoding(*firsts: int) -> SequenceGenerator:
        slots = yield Acquire([runner] * len(firsts))
        try:
            yield tuple(Decode(runner, s, [first, 2], n, Sampling(), 0) for s, first in zip(slots, firsts, strict=True))
        finally:
            for slot in slots:
                runner.release(slot)

    bad, good = (executor.submit(decoding(*firsts), Stats()) for firsts in ((3, 1), (1, 2)))
    executor.run()
    assert "not numbers" in str(bad.error) and good.done and good.error is None and not runner.held


@pytest.mark.parametrize("rule", ["exact", "none", "sampling"])
def test_a_model_that_gives_nan_ends_only_its_own_sequence_logprobs_or_not(rule: str):
    def logits(context: list[int]) -> list[float]:
        return [float("nan")] * 4 if context[0] == 3 else [0.0, 1.0, 2.0, 0.5]

    target, draft, executor = FakeRunner(logits, 4), FakeRunner(lambda context: [0.0, 1.0, 2.0, 0.5], 4), Executor()
    tasks = []
    for prompt in ([3, 1], [1, 1]):
        stats, drafter = Stats(), NoDrafter() if rule == "none" else ModelDrafter(draft)
        job = Job(prompt, make(rule), 3, 9, sampling=Sampling(0.7, seed=1), logprobs=2)
        tasks.append(executor.submit(Decoder(job, target, drafter, stats).decode(), stats))
    executor.run()
    assert "not numbers" in str(tasks[0].error) and tasks[1].error is None and len(tokens(tasks[1])) == 9


def test_a_pass_inside_a_pass_is_refused_and_a_round_may_cancel_itself():
    world = World()
    task = world.submit([1, 2])
    language = world.target.logits

    def nested(context: list[int]) -> list[float]:
        with pytest.raises(SemspecError, match="a pass is under way"):
            world.executor.tick()
        return language(context)

    world.target.logits = nested
    world.executor.run()
    assert tokens(task) == greedy(language, [1, 2], 30)


def test_what_is_discarded_while_another_is_cancelled_waits(monkeypatch: pytest.MonkeyPatch):
    """As garbage collection may have it, in the thread that holds the lock."""
    world = World()
    one, other, third = (world.submit([i]) for i in (1, 2, 3))
    for _ in range(2):
        world.executor.tick()
    end = world.executor._end

    def collected(task, error=None):
        world.executor.discard(other)
        assert not other.done
        end(task, error)

    with monkeypatch.context() as patch:
        patch.setattr(world.executor, "_end", collected)
        world.executor.cancel(one)
    world.executor.run()
    assert other.done and tokens(third) == greedy(world.language, [3], 30) and not world.target.held
