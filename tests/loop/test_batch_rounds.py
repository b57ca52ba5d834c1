"""Rounds of a batch: what is known when the next lengths are chosen, what it rests on, and what it costs the host."""

from __future__ import annotations

import pytest

from semspec import verify
from semspec.draft import ModelDrafter
from semspec.draft.within_context import WithinContext
from semspec.loop.costs import PassCosts
from semspec.loop.decoder import Decoder, Job
from semspec.loop.draft_length import AdaptiveLength, Round, Situation
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.types import DecodeOutput, Score
from tests.fakes import Clock, FakeRunner, chain
from tests.loop.test_batch_length import LANGUAGE, Machine, cpu, errs

VOCAB = 13


class Told:
    """Drafts of two tokens; keeps in which tick a length was asked for and a round was told."""

    threshold = 0.0

    def __init__(self, executor: Executor, diary: list[tuple[int, str]]) -> None:
        self.executor, self.diary = executor, diary

    def length(self, at: Situation) -> int:
        self.diary.append((self.executor.costs.tick, "asked"))
        return 2

    def observe(self, made: Round) -> None:
        self.diary.append((self.executor.costs.tick, "told"))

    def target_only_tokens(self, undrafted_rounds: int) -> int:
        return 4

    def close(self) -> None:
        pass


def test_all_tell_what_came_of_their_drafts_before_anybody_asks_for_the_next() -> None:
    """Or lengths that are chosen for all would rest on the first one's round alone."""
    clock, diary = Clock(), list[tuple[int, str]]()
    executor = Executor(clock=clock)
    runners = [FakeRunner(chain(VOCAB, 1), VOCAB, slots=3, clock=clock) for _ in range(2)]
    for i in range(3):
        job = Job([i, 2, 3], verify.make("exact"), Told(executor, diary), 30)
        executor.submit(Decoder(job, runners[0], ModelDrafter(runners[1]), Stats()).decode(), Stats())
    executor.run()
    ticks = [[what for at, what in diary if at == tick] for tick in sorted({tick for tick, _ in diary})]
    assert ["told"] * 3 + ["asked"] * 3 in ticks
    assert all(tick == sorted(tick, reverse=True) for tick in ticks)


def test_a_measured_row_is_not_taken_for_dearer_because_the_host_has_more_to_do_with_drafts() -> None:
    """One size of pass with drafts was met. What it takes above a pass without is no price of its rows."""
    costs, runner = PassCosts(), FakeRunner(chain(5, 1), 5)
    costs.begin(4)
    costs.passed([DecodeOutput([1])] * 4, 4.0)
    costs.end(0.0)
    costs.begin(4)
    costs.passed([Score(runner, i, [1] * 3, 3) for i in range(4)], 7.0)
    costs.end(0.0)
    assert costs.check([12, 20, 36], row_cost=0.03) == pytest.approx([7.0, 7.0 + 8 * 0.12, 7.0 + 24 * 0.12])
    assert costs.check(20) == pytest.approx(7.0 + 8 * 3 / 8), "nothing else tells, where no row was measured"


def test_books_of_a_tick_with_drafts_are_as_much_work_for_eight_as_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, check = list[int](), PassCosts.check

    def counted(self: PassCosts, *args, **kwargs):  # type: ignore[no-untyped-def]
        asked.append(self.tick)
        return check(self, *args, **kwargs)

    monkeypatch.setattr(PassCosts, "check", counted)
    for count in (2, 8):
        load = cpu(AdaptiveLength(draft_cost=0.01, row_cost=0.0, step_costs={1: 0.01, 8: 0.01}))
        asked.clear()
        _, stats = load.batch(count, 30, 60)
        assert sum(each.drafted for each in stats) > 10 * count
        assert max(asked.count(tick) for tick in set(asked)) <= 4, "of the plan, of trees and of rounds"


def test_drafts_are_timed_although_the_first_to_tell_has_looked_its_own_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text is too long for the draft model, and it is the oldest."""
    clock, timed = Clock(), list[int]()
    executor = Executor(clock=clock)
    target = Machine(LANGUAGE, VOCAB, slots=3, clock=clock, seconds=1.0, row=0.02, read=0.02)
    draft = Machine(errs(0.9), VOCAB, slots=3, clock=clock, seconds=0.1, row=0.002, read=0.002, max_seq_len=100)
    add = executor.costs.drafts.add

    def counted(*args: float) -> None:
        timed.append(executor.costs.tick)
        add(*args)

    monkeypatch.setattr(executor.costs.drafts, "add", counted)
    policy = AdaptiveLength(draft_cost=0.1, row_cost=0.02)
    for prompt in (101, 9, 9):
        job = Job([*range(VOCAB)] * 20, verify.make("exact"), executor.lengths.within(policy), 80)
        job.prompt[prompt:] = []
        drafter, stats = WithinContext(ModelDrafter(draft), draft), Stats()
        executor.submit(Decoder(job, target, drafter, stats).decode(), stats)
    executor.run()
    assert len(timed) > 15 and len(set(timed)) == len(timed)
