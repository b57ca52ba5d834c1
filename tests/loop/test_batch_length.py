"""Draft lengths of a batch: against a search of all of them, and through the loop on fake clocks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec import verify
from semspec.draft import ModelDrafter
from semspec.loop.batch_length import BatchLengths, Member
from semspec.loop.costs import Array, Curve, PassCosts
from semspec.loop.decoder import Decoder, Job
from semspec.loop.draft_length import AdaptiveLength, DraftLengthPolicy, FixedLength, RepeatableLength
from semspec.loop.executor import Executor
from semspec.loop.joint_length import BatchCosts, Lengths, joint_lengths, outcome
from semspec.loop.stats import Stats
from semspec.types import Decode, DecodeOutput, Score, ScoreOutput
from tests.fakes import Clock, FakeRunner, blend, chain, greedy

LONGEST = 3
chance = st.floats(0.0, 1.0)


@dataclass
class Tick:
    """A tick of some sequences, each with the chances of its draft's tokens."""

    chances: list[list[float]]
    lookups: list[bool]
    rows: list[float]  # seconds that each further row adds
    step: float
    row: float
    others: int

    def seconds(self, rows: float) -> float:
        return 1.0 + sum(self.rows[: int(rows)])

    @property
    def costs(self) -> BatchCosts:
        check: Callable[[Array], Array] = np.vectorize(self.seconds, otypes=[float])
        alone = 0.9 * self.seconds(len(self.chances) + self.others)
        return BatchCosts(alone, check, self.step, self.row, self.others, 2 * self.others)

    def rate(self, lengths: Sequence[int]) -> float:
        """In plain words."""
        tokens = float(self.others)
        for n, chances in zip(lengths, self.chances, strict=True):
            tokens += 1 + sum(float(np.prod(chances[:j])) for j in range(1, n + 1))
        if not any(lengths):
            return tokens / self.costs.target_only
        made = [n for n, lookup in zip(lengths, self.lookups, strict=True) if not lookup]
        rows = len(lengths) + sum(lengths) + 2 * self.others
        return tokens / (self.seconds(rows) + max(made, default=0) * self.step + sum(made) * self.row)

    def best(self) -> float:
        return max(self.rate(lengths) for lengths in itertools.product(range(LONGEST + 1), repeat=len(self.chances)))


@st.composite
def ticks(draw: st.DrawFn) -> Tick:
    count, others = draw(st.integers(1, 4)), draw(st.integers(0, 2))
    chances = draw(st.lists(st.lists(chance, min_size=LONGEST, max_size=LONGEST), min_size=count, max_size=count))
    rows = draw(st.lists(st.floats(0.0, 1.0), min_size=24, max_size=24))
    model = draw(st.booleans())
    return Tick(chances, [not model] * count, rows, draw(chance), draw(chance), others)


def chosen(tick: Tick, choose: Callable[..., tuple[Lengths, float]] = joint_lengths) -> tuple[list[int], float]:
    survival = np.cumprod(np.array(tick.chances), axis=1)
    drafting = ~np.array(tick.lookups)
    lengths, rate = choose(survival, drafting, tick.costs)
    tokens, seconds = outcome(survival, drafting, lengths, tick.costs)
    assert tokens / seconds == pytest.approx(tick.rate(lengths.tolist()))
    return lengths.tolist(), rate


@settings(max_examples=80, deadline=None)
@given(ticks())
def test_the_chosen_lengths_are_those_of_a_search_of_all(tick: Tick) -> None:
    lengths, rate = chosen(tick)
    assert tick.rate(lengths) == pytest.approx(rate) == pytest.approx(tick.best())


def test_a_choice_that_forgets_the_batch_is_found_out() -> None:
    """Ten rows are free, and each further one takes a fifth of a pass: one sequence should draft, six should not."""

    def alone(survival: Array, drafting: Array, costs: BatchCosts) -> tuple[Lengths, float]:
        each = [joint_lengths(row[None], drafting[:1], replace(costs, target_only=0.9)) for row in survival]
        return np.array([lengths[0] for lengths, _ in each]), sum(rate for _, rate in each)

    tick = Tick([[0.8, 0.7, 0.5]] * 6, [False] * 6, [0.0] * 10 + [0.2] * 20, 0.05, 0.01, 0)
    assert tick.rate(chosen(tick)[0]) == pytest.approx(tick.best())
    assert tick.rate(chosen(tick, alone)[0]) < 0.9 * tick.best()


def test_a_curve_has_lines_between_medians_and_beyond_them() -> None:
    curve = Curve()
    for size in (1, 8, 64) * 5:
        curve.add(size, 1.0 + 0.1 * size)
    assert curve.at([1, 4, 30, 64]) == pytest.approx([1.1, 1.4, 4.0, 7.4])
    assert curve.at(128) == pytest.approx(13.8) and curve.largest == 64
    curve.add(8, 100.0)
    assert curve.at(8) == pytest.approx(1.8), "one slow pass says nothing"


def test_before_a_large_pass_was_made_a_prompt_tells_what_it_takes() -> None:
    costs, slot = PassCosts(), FakeRunner(chain(5, 1), 5)
    costs.begin(4)
    costs.passed([DecodeOutput([1, 2])] * 4, 2.0)
    costs.end(0.2)
    assert costs.target_only.at(4) == pytest.approx(1.1) and costs.check([8, 500]) == pytest.approx([1.1, 1.1])
    costs.begin(4)
    costs.passed([Score(slot, 0, [1] * 100, 1)], 10.0)
    costs.end(0.1)
    assert costs.check([8, 500]) == pytest.approx([1.1, 35.0]) and costs.disturbed == 2 and not costs.checks


# -- through the loop

VOCAB = 13
LANGUAGE, OTHER = chain(VOCAB, seed=1), chain(VOCAB, seed=2)


@dataclass
class Machine(FakeRunner):
    """Its passes take `seconds`, and `row` more for each token beyond the first `free_rows`."""

    row: float = 0.0
    free_rows: int = 1

    def _more(self, rows: int) -> None:
        self.clock.now += self.row * max(rows - self.free_rows, 0)

    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        self._more(sum(len(r.tokens) for r in requests))
        return super().score(requests)

    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]:
        out = super().decode(requests)
        for step in range(max(len(o.tokens) for o in out)):
            self._more(sum(len(o.tokens) > step for o in out))
        return out


def seconds(
    length: int | DraftLengthPolicy, batch: int, row: float, free: int, verifier: str = "exact", tokens: int = 100
) -> tuple[float, list[Stats]]:
    clock = Clock()
    target = Machine(LANGUAGE, VOCAB, slots=batch, clock=clock, seconds=1.0, row=row, free_rows=free)
    errs = blend(LANGUAGE, OTHER, lambda context: random.Random(repr(context[-4:])).random() > 0.8)
    draft = Machine(errs, VOCAB, slots=batch, clock=clock, seconds=0.1, row=row / 10, free_rows=free)
    executor, tasks = Executor(clock=clock), []
    for i in range(batch):
        stats, prompt = Stats(), [i % VOCAB, i // VOCAB, 3]
        job = Job(prompt, verify.make(verifier), executor.lengths.within(length), tokens)
        tasks.append((prompt, executor.submit(Decoder(job, target, ModelDrafter(draft), stats).decode(), stats)))
    executor.run()
    for prompt, task in tasks:
        assert task.error is None
        assert [t for e in task.events for t in e.tokens] == greedy(LANGUAGE, prompt, tokens)
    assert not executor.lengths.members
    return clock.now, [task.stats for _, task in tasks]


@pytest.mark.parametrize("batch", [2, 9])
@pytest.mark.parametrize(("row", "free"), [(0.5, 1), (0.05, 24), (0.0, 1)])
def test_a_batch_is_never_much_slower_than_without_drafts_nor_than_fixed_ones(batch: int, row: float, free: int):
    none, _ = seconds(1, batch, row, free, "none")
    fixed = min(seconds(n, batch, row, free)[0] for n in (3, 8))
    auto, _ = seconds(AdaptiveLength(draft_cost=0.1), batch, row, free)
    assert auto < 1.04 * none and auto < 1.4 * fixed, "which the first rounds, without drafts and with few, are part of"


def test_one_sequence_drafts_where_many_do_not() -> None:
    shared = AdaptiveLength(max_tokens=3, draft_cost=0.1)
    _, alone = seconds(shared, 1, 0.5, 4, tokens=200)
    _, many = seconds(shared, 16, 0.5, 4)
    one, each = (sum(s.drafted for s in stats) / sum(s.tokens for s in stats) for stats in (alone, many))
    assert each < one / 2, "what was learnt alone does not hold for many"


def test_caps_hold_and_repeatable_lengths_know_nothing_of_others() -> None:
    _, stats = seconds(AdaptiveLength(max_tokens=3, draft_cost=0.1), 6, 0.0, 1)
    assert max(n for s in stats for n in s.drafts) == 3
    batch = BatchLengths(PassCosts())
    repeatable = RepeatableLength(0.1, 0.05)
    assert batch.within(repeatable) is repeatable and batch.within(4) == 4
    assert isinstance(batch.within(AdaptiveLength()), Member) and FixedLength(4).length() == 4


def test_repeatable_lengths_are_the_same_alone_and_beside_others() -> None:
    def first(batch: int, row: float) -> dict[int, int]:
        clock = Clock()
        runners = [Machine(LANGUAGE, VOCAB, slots=batch, clock=clock, row=row) for _ in range(2)]
        executor, kept = Executor(clock=clock), list[Stats]()
        for i in range(batch):
            kept.append(Stats())
            length = executor.lengths.within(RepeatableLength(0.1, 0.05))
            job = Job([i, 2, 3], verify.make("exact"), length, 60)
            executor.submit(Decoder(job, runners[0], ModelDrafter(runners[1]), kept[-1]).decode(), kept[-1])
        executor.run()
        return dict(kept[0].drafts)

    assert first(1, 0.0) == first(5, 0.7)
