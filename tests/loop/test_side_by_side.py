"""A draft and a target on two devices: their passes are made at the same time, and nothing else is different."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from semspec import verify
from semspec.draft import ModelDrafter
from semspec.errors import SemspecError
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.side_by_side import AGAIN, Alternation
from semspec.loop.stats import Stats
from semspec.loop.work import Task, Work
from semspec.model import graphs
from semspec.types import Acquire, Decode, DecodeOutput, Runner, Sampling, Score, ScoreOutput, SequenceGenerator
from tests.fakes import FakeRunner, chain, greedy

VOCAB = 11
HERE = torch.device("cpu")
ELSEWHERE = torch.device("cpu:0")  # is another than "cpu", where the draft is; what differs is the name alone
PATIENCE = 20.0  # seconds after which a pass that nobody meets has failed


class Always(Alternation):
    """Measures nothing: halves alternate whenever they can."""

    def _alternate(self, target: Runner, size: int) -> bool:
        return True


@dataclass
class Watched(FakeRunner):
    """Calls `inside` within each of its passes."""

    inside: Callable[[], Any] = lambda: None

    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        self.inside()
        return super().score(requests)

    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]:
        inside, self.inside = self.inside, lambda: None  # not for its parts
        try:
            inside()
            return super().decode(requests)
        finally:
            self.inside = inside


class World:
    def __init__(self, device: torch.device = ELSEWHERE, alternation: Alternation | None = None) -> None:
        self.language = chain(VOCAB)
        self.target = Watched(self.language, VOCAB, slots=16, device=device)
        self.draft = Watched(self.language, VOCAB, slots=16)
        self.executor = Executor()
        self.executor.alternation = alternation or Always()
        self.beside = 0  # pairs of passes that were made at once
        made = self.executor._side_by_side._made

        def counted(calls: list[Any]) -> Any:
            self.beside += len(calls) == 2
            self.together = len(calls) == 2
            return made(calls)

        self.executor._side_by_side._made = counted  # type: ignore[method-assign]

    def submit(self, prompt: list[int], rule: str = "exact", k: int = 4, n: int = 30) -> Task:
        decoder = Decoder(Job(prompt, verify.make(rule), k, n), self.target, ModelDrafter(self.draft), Stats())
        return self.executor.submit(decoder.decode(), decoder.stats)

    def meet(self) -> None:
        """From now on a pass that is made beside another waits until both are under way."""
        both = threading.Barrier(2)
        self.target.inside = self.draft.inside = lambda: both.wait(PATIENCE) if self.together else None

    def check(self, tasks: Sequence[Task], n: int = 30) -> None:
        for i, task in enumerate(tasks):
            assert task.error is None and tokens(task) == greedy(self.language, [1 + i, 2], n)
        assert not self.target.held and not self.draft.held


def tokens(task: Task) -> list[int]:
    return [t for e in task.events for t in e.tokens]


def test_a_draft_and_a_target_are_inside_their_passes_at_once() -> None:
    world = World()
    world.meet()
    tasks = [world.submit([1 + i, 2]) for i in range(6)]
    world.executor.run()
    world.check(tasks)
    assert world.beside >= 8, "most passes were made beside another"
    both = [p for p in world.target.diary if len(p.rows) == 3]
    assert len(both) >= 8 and max(len(p.rows) for p in world.draft.diary) == 3, "each for one half"


def test_a_batch_that_grows_and_shrinks_has_halves_of_about_one_size() -> None:
    world = World()
    tasks = [world.submit([1 + i, 2], n=60) for i in range(4)]
    for i in range(4, 9):
        world.executor.tick()
        world.executor.tick()
        tasks.append(world.submit([1 + i, 2], n=60))
    for _ in range(4):
        world.executor.tick()
    before = len(world.target.diary)
    for _ in range(4):
        world.executor.tick()
    assert all(len(p.rows) in (4, 5) for p in world.target.diary[before:])
    world.executor.run()
    world.check(tasks, 60)


@pytest.mark.parametrize("count", [1, 6])
def test_on_one_device_there_is_no_thread(count: int) -> None:
    world = World(HERE)
    tasks = [world.submit([1 + i, 2]) for i in range(count)]
    world.executor.run()
    world.check(tasks)
    assert not world.beside and world.executor._side_by_side._threads is None
    rounds = [p for p in world.target.diary if len(p.rows) == count]
    assert len(rounds) >= 6, "and all share every pass"


def test_one_sequence_has_nothing_beside_it_and_a_prompt_keeps_rounds_together() -> None:
    world = World()
    task = world.submit([1, 2])
    world.executor.run()
    assert not world.beside and tokens(task) == greedy(world.language, [1, 2], 30)
    world.executor.budget = 64
    world.submit([1] * 1500, n=3)
    others = [world.submit([1 + i, 2], n=400) for i in range(2)]
    for _ in range(10):
        world.executor.tick()
    assert not world.beside and min(len(tokens(t)) for t in others) >= 20, "a round in every tick"
    world.executor.run()
    assert world.beside


@pytest.mark.parametrize("broken", ["target", "draft"])
def test_an_error_in_one_pass_ends_those_in_it_and_no_other(broken: str) -> None:
    world = World()
    world.meet()
    tasks = [world.submit([1 + i, 2]) for i in range(6)]
    while world.beside < 3:
        world.executor.tick()
    runner, meeting = getattr(world, broken), world.target.inside
    failed = list[int]()

    def fail() -> None:
        meeting()
        if world.together and not failed:
            failed.append(1)
            raise MemoryError("no memory left")

    runner.inside = fail
    world.executor.run()
    bad = [task for task in tasks if task.error is not None]
    assert len(bad) == 3 and all(isinstance(task.error, MemoryError) for task in bad)
    for i, task in enumerate(tasks):
        assert task in bad or tokens(task) == greedy(world.language, [1 + i, 2], 30)
    assert not world.target.held and not world.draft.held


def test_an_interrupt_waits_for_the_pass_beside_it() -> None:
    """What that writes into is given back afterwards."""
    world = World()
    tasks = [world.submit([1 + i, 2]) for i in range(4)]
    while world.beside < 3:
        world.executor.tick()
    interrupted, ended = threading.Event(), list[bool]()

    def interrupt() -> None:
        if world.together:
            interrupted.set()
            raise KeyboardInterrupt

    def slow() -> None:
        if world.together:
            assert interrupted.wait(PATIENCE)
            ended.append(all(not task.done for task in tasks))

    world.target.inside, world.draft.inside = interrupt, slow
    with pytest.raises(KeyboardInterrupt):
        world.executor.run()
    assert ended == [True], "it was under way, and its sequences were still there"
    assert all("interrupted in the middle of a pass" in str(task.error) for task in tasks)
    assert not world.target.held and not world.draft.held
    world.target.inside = world.draft.inside = lambda: None
    after = [world.submit([1 + i, 2]) for i in range(2)]
    world.executor.run()
    world.check(after)


@pytest.mark.parametrize("way", ["cancel", "discard", "tick"])
def test_what_a_pass_calls_beside_another_neither_waits_nor_changes_anything(way: str) -> None:
    """As destructors may, which run in any thread."""
    world = World()
    tasks = [world.submit([1 + i, 2]) for i in range(4)]
    while world.beside < 3:
        world.executor.tick()
    gone = next(task for task in reversed(tasks) if not task.done)
    called = list[bool]()

    def call() -> None:
        if world.together and not called:
            called.append(True)
            if way == "tick":
                with pytest.raises(SemspecError, match="a pass is under way"):
                    world.executor.tick()
            else:
                getattr(world.executor, way)(gone)
                assert not gone.done

    world.draft.inside = call
    world.executor.run()
    assert called and gone.done
    for i, task in enumerate(tasks):
        if way == "tick" or task is not gone:
            assert tokens(task) == greedy(world.language, [1 + i, 2], 30)
    assert len(tokens(gone)) == 30 or way != "tick"
    assert not world.target.held and not world.draft.held


def test_a_cancel_from_another_thread_waits_for_both_passes() -> None:
    world = World()
    tasks = [world.submit([1 + i, 2]) for i in range(4)]
    while world.beside < 3:
        world.executor.tick()
    gone, asked, passes = tasks[3], threading.Event(), list[bool]()

    def cancel() -> None:
        asked.set()
        world.executor.cancel(gone)
        passes.append(gone.done)

    canceller = threading.Thread(target=cancel)

    def inside() -> None:
        if world.together and not asked.is_set():
            canceller.start()
            assert asked.wait(PATIENCE) and not gone.done

    world.target.inside = inside
    world.executor.tick()
    canceller.join(PATIENCE)
    assert passes == [True]
    world.executor.run()
    world.check(tasks[:3])


def test_halves_alternate_as_long_as_it_is_faster() -> None:
    def chosen(apart: Callable[[int], float], together: Callable[[int], float], ticks: int = AGAIN - 1) -> list[bool]:
        """With 8 sequences, and seconds of ticks by number of sequences in a pass."""
        alternation, found = Alternation(), list[bool]()
        gpu: Any = SimpleNamespace(device=torch.device("cuda:0"))
        for _ in range(ticks):
            alternation.begin()
            alternation._now = (alternation._alternate(gpu, 4), 4)
            found.append(alternation._now[0])
            alternation.end(apart(4) if found[-1] else together(8))
        return found

    weights = chosen(lambda n: max(20.0, 8.0), lambda n: 28.0)  # a pass takes what reading the weights takes
    assert sum(weights) == weights.index(False) <= 12, "two passes beside drafts take longer than one after a draft"
    arithmetic = chosen(lambda n: max(5.0 * n, 4.0 * n), lambda n: 9.0 * n)
    assert all(arithmetic[30:]) and sum(not one for one in arithmetic) <= 12
    assert not Alternation()._alternate(FakeRunner(chain(VOCAB), VOCAB), 4), "on a CPU no text depends on a clock"
    again = chosen(lambda n: 20.0, lambda n: 28.0, 3 * AGAIN)
    assert 2 * 9 <= sum(again[30:]) <= 2 * 12, "what was slower is tried again, rarely"


def test_a_tick_in_which_a_graph_was_captured_says_nothing_of_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves and wholes have sizes of their own: whichever was captured first would seem slower for 256 ticks."""
    monkeypatch.setattr(graphs, "_captured", 0.0)
    told = list[float]()

    class Told(Always):
        def end(self, seconds: float) -> None:
            told.append(seconds)
            super().end(seconds)

    world, ticks = World(alternation=Told()), 0
    tasks = [world.submit([1 + i, 2]) for i in range(4)]
    world.executor.tick()

    def captures() -> None:
        graphs._captured += 0.25

    before = len(told)
    world.target.inside = captures
    for _ in range(4):
        world.executor.tick()
    assert graphs.captured_seconds() >= 1.0 and len(told) == before
    world.target.inside = lambda: None
    while world.executor.tasks:
        ticks += 1
        world.executor.tick()
    assert len(told) == before + ticks
    world.check(tasks)


def test_a_sequence_that_asks_both_models_at_once_is_in_one_pass_at_a_time() -> None:
    """What its requests share, such as what a grammar remembers, is no matter for two threads."""
    world, pairs = World(), list[list[set[Task]]]()

    def both() -> SequenceGenerator:
        slots = yield Acquire([world.target, world.draft])
        for _ in range(6):
            draft = Decode(world.draft, slots[1], [5], 4, Sampling(), 0, drafting=True)
            yield draft, Score(world.target, slots[0], [7], 1)
        for runner, slot in zip((world.target, world.draft), slots, strict=True):
            runner.release(slot)

    passes = world.executor._passes

    def watched(some: list[list[Work]]) -> float | None:
        pairs.append([{item.task for item in work} for work in some])
        return passes(some)

    world.executor._passes = watched  # type: ignore[method-assign]
    task = world.executor.submit(both(), Stats())
    tasks = [world.submit([1 + i, 2]) for i in range(2)]
    world.executor.run()
    assert task.error is None and sum(len(pair) == 2 for pair in pairs) > 5
    assert all(pair[0].isdisjoint(pair[1]) for pair in pairs if len(pair) == 2)
    world.check(tasks)
