"""Draft lengths of a batch: against a search of all of them, and through the loop on fake clocks."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec import verify
from semspec.draft import ModelDrafter, NgramDrafter
from semspec.loop import stopwatch
from semspec.loop.batch_length import Account, BatchLengths, Member
from semspec.loop.batch_plan import Batch
from semspec.loop.costs import Array, Curve, PassCosts
from semspec.loop.decoder import Decoder, Job
from semspec.loop.draft_length import AdaptiveLength, DraftLengthPolicy, FixedLength, RepeatableLength, Situation
from semspec.loop.executor import Executor
from semspec.loop.joint_length import BatchCosts, Lengths, joint_lengths, outcome
from semspec.loop.stats import Stats
from semspec.model import graphs
from semspec.types import Decode, DecodeOutput, Score, ScoreOutput
from tests.fakes import Clock, FakeRunner, Logits, blend, chain, greedy

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
    close = Curve()
    for size, taken in ((8, 1.0), (9, 2.0)):
        close.add(size, taken)
    assert close.at(90) == pytest.approx(2.0), "two sizes that hardly differ tell no slope"


def test_a_curve_grows_with_the_text_and_tells_one_length_of_text_from_another() -> None:
    def taken(size: float, text: float) -> float:
        return 1.0 + 0.1 * size + 1e-5 * text

    curve = Curve()
    checks = Curve(like=curve)
    for size in (4, 5, 6) * 3:
        curve.add(size, taken(size, 600), 600)
        checks.add(8 * size, taken(8 * size, 600), 600)
    assert curve.growth == 0 and curve.at(6, 60_000) == pytest.approx(taken(6, 600)), "nothing is known of longer texts"
    for size in (1, 2, 3) * 3:
        curve.add(size, taken(size, 60_000), 60_000)
    assert curve.growth == pytest.approx(1e-5, rel=0.1), "although no size was met with both"
    checks.add(8, taken(8, 600), 600)
    assert checks.at(40, 60_000) == pytest.approx(taken(40, 60_000), rel=0.1), (
        "passes with drafts are taken to grow, too"
    )
    assert curve.at(2, 600) == pytest.approx(taken(2, 600), rel=0.1)


def test_before_a_large_pass_was_made_a_prompt_tells_what_it_takes() -> None:
    costs, slot = PassCosts(), FakeRunner(chain(5, 1), 5)
    costs.begin(4)
    costs.passed([DecodeOutput([1, 2])] * 4, 2.0)
    costs.end(0.2)
    assert costs.target_only.at(4) == pytest.approx(1.1)
    assert costs.check([8, 500]) == pytest.approx([1.5, 1.5]), (
        "the host's work of a tick with rules is twice one without"
    )
    costs.begin(4)
    costs.passed([Score(slot, 0, [1] * 100, 1)], 10.0)
    costs.end(0.1)
    assert costs.check([8, 500]) == pytest.approx([1.5, 35.0]) and costs.disturbed == 2 and not costs.checks
    more = costs.check([8, 500], row_cost=0.05)
    assert more == pytest.approx([1.5 + 4 * 0.07, 1.5 + 496 * 0.07]), (
        "where a further token costs something, these more"
    )


def plan(left: int, unread: int, chance: float = 0.8) -> tuple[list[int], list[bool]]:
    """The lengths of four sequences, and who would draft with better drafts; a target token of all takes 1."""
    policy = AdaptiveLength(max_tokens=4)
    policy.accepted, policy.tested = [1e3 * chance] * 4, [1e3] * 4
    costs = BatchCosts(1.0, lambda rows: 1.0 + 0.02 * rows, 0.05, 0.01)
    batch = Batch([(policy, Situation(unread + 10, 10, left, unread))] * 4, costs, reading=0.01)
    return batch.best()[0].tolist(), batch.hoped().tolist()


def test_a_text_is_read_for_drafts_only_if_enough_is_left_to_write() -> None:
    assert plan(200, 0)[0] == plan(4, 0)[0] == [4] * 4, "nothing has to be read"
    assert plan(200, 300)[0] == [4] * 4 and plan(20, 300)[0] == [0] * 4
    assert plan(200, 3000)[0] == [0] * 4, "nor if it is long"
    assert plan(200, 0, chance=0.05) == ([0] * 4, [False] * 4), "what was tested a thousand times is not hoped for"


def test_who_has_much_to_read_is_left_out() -> None:
    policy = AdaptiveLength(max_tokens=4)
    policy.accepted, policy.tested = [900.0] * 4, [1e3] * 4
    costs = BatchCosts(1.0, lambda rows: 1.0 + 0.02 * rows, 0.05, 0.01)
    where = [Situation(text, 10, 100, text - 10) for text in (90, 90, 20_000, 20_000)]
    assert Batch([(policy, at) for at in where], costs, reading=0.01).best()[0].tolist() == [4, 4, 0, 0]


# -- through the loop

VOCAB = 13
LANGUAGE, OTHER = chain(VOCAB, seed=1), chain(VOCAB, seed=2)


@dataclass
class Machine(FakeRunner):
    """Its passes take `seconds`, `row` more for each token beyond the first `free_rows` (`read` in prompts), and as
    much again for a token with `reach` tokens before it."""

    row: float = 0.0
    free_rows: int = 1
    read: float | None = None
    reach: float = float("inf")

    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        prompt = any(len(r.tokens) > r.logits_to_keep + 2 for r in requests)
        row = self.read if prompt and self.read is not None else self.row
        before = sum(len(r.tokens) * len(self.held[r.slot]) for r in requests)
        self.clock.now += row * max(sum(len(r.tokens) for r in requests) - self.free_rows, 0)
        self.clock.now += self.seconds * before / self.reach
        return super().score(requests)


class Load:
    """Batches one after the other, on one executor."""

    def __init__(
        self, length: int | DraftLengthPolicy, verifier: str, target: Machine, draft: Machine, clock: Clock
    ) -> None:
        self.length, self.verifier, self.target, self.draft, self.clock = length, verifier, target, draft, clock
        self.executor = Executor(clock=clock)

    def batch(self, count: int, prompt: int, tokens: int) -> tuple[float, list[Stats]]:
        """Seconds."""
        began, tasks = self.clock.now, []
        for i in range(count):
            stats, text = Stats(), [(i * j + i) % VOCAB for j in range(prompt - 3)] + [i % VOCAB, i // VOCAB, 3]
            job = Job(text, verify.make(self.verifier), self.executor.lengths.within(self.length), tokens)
            decoder = Decoder(job, self.target, ModelDrafter(self.draft), stats)
            tasks.append((text, self.executor.submit(decoder.decode(), stats)))
        self.executor.run()
        for text, task in tasks:
            assert task.error is None
            assert [t for e in task.events for t in e.tokens] == greedy(LANGUAGE, text, tokens)
        assert not self.executor.lengths.members
        return self.clock.now - began, [task.stats for _, task in tasks]


def errs(right: float) -> Logits:
    return blend(LANGUAGE, OTHER, lambda context: random.Random(repr(context[-4:])).random() > right)


def seconds(
    length: int | DraftLengthPolicy, batch: int, row: float, free: int, verifier: str = "exact", tokens: int = 100
) -> tuple[float, list[Stats]]:
    clock = Clock()
    target = Machine(LANGUAGE, VOCAB, slots=batch, clock=clock, seconds=1.0, row=row, free_rows=free)
    draft = Machine(errs(0.8), VOCAB, slots=batch, clock=clock, seconds=0.1, row=row / 10, free_rows=free)
    return Load(length, verifier, target, draft, clock).batch(batch, 3, tokens)


@pytest.mark.parametrize("batch", [2, 9])
@pytest.mark.parametrize(("row", "free"), [(0.5, 1), (0.05, 24), (0.0, 1)])
def test_a_batch_is_never_much_slower_than_without_drafts_nor_than_fixed_ones(batch: int, row: float, free: int):
    none, _ = seconds(1, batch, row, free, "none")
    fixed = min(seconds(n, batch, row, free)[0] for n in (3, 8))
    auto, _ = seconds(AdaptiveLength(draft_cost=0.1), batch, row, free)
    assert auto < 1.04 * none and auto < 1.4 * fixed, "which the first rounds, without drafts and with few, are part of"


class Capturing(Machine):
    """The first pass of each size takes as long as thirty, as where graphs are captured."""

    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        self._capture("score", sum(len(r.tokens) for r in requests).bit_length())
        return super().score(requests)

    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]:
        self._capture("decode", len(requests).bit_length())
        return super().decode(requests)

    def _capture(self, *key: object) -> None:
        known = vars(self).setdefault("captured", set())
        if key not in known:
            known.add(key)
            self.clock.now += 30 * self.seconds
            graphs._captured += 30 * self.seconds


def after_captures(batch: int) -> tuple[float, float]:
    """The last of three batches in a row: its seconds but for captures, against the target alone, and those of captures
    as the stats have them."""
    clock = Clock()
    target = Capturing(LANGUAGE, VOCAB, slots=batch, clock=clock, seconds=1.0, row=0.002)
    draft = Capturing(errs(0.9), VOCAB, slots=batch, clock=clock, seconds=0.05)
    load = Load(AdaptiveLength(draft_cost=0.05), "exact", target, draft, clock)
    for _ in range(3):
        seconds, stats = load.batch(batch, 30, 100)
        assert math.isclose(sum(sum(s.seconds.values()) for s in stats), seconds), "what it took is told all the same"
    captures = sum(s.seconds["capture"] for s in stats)
    none, _ = Load(1, "none", target, draft, clock).batch(batch, 30, 100)
    return (seconds - captures) / none, captures


def test_captures_of_graphs_do_not_say_that_drafts_never_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_captured", 0.0)
    ratio, told = after_captures(16)
    assert ratio < 0.6 and told < graphs.captured_seconds()
    monkeypatch.setattr(stopwatch, "captured_seconds", lambda: 0.0)
    ratio, told = after_captures(16)
    assert ratio > 0.9 and not told, "who counts them gives up"


def test_what_was_in_a_pass_is_known_though_its_seconds_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is answered in it would else be charged for the prompt that was read beside, as for drafts of its own."""
    monkeypatch.setattr(graphs, "_captured", 0.0)
    target = Capturing(LANGUAGE, VOCAB, slots=2, clock=Clock())
    executor = Executor(clock=target.clock)
    for prompt in (3, 60):
        job = Job([1, 2, 3] * (prompt // 3), verify.make("exact"), FixedLength(2), 40)
        stats = Stats()
        executor.submit(Decoder(job, target, NgramDrafter(), stats).decode(), stats)
    executor.tick()
    assert graphs.captured_seconds() and executor.costs.disturbed == executor.costs.tick
    while not (executor.costs.rows or executor.tick()):  # of the first check, whose size is new, too
        assert executor.tasks and not executor.costs.checks


def cpu(length: int | DraftLengthPolicy, verifier: str = "exact", right: float = 0.9) -> Load:
    """A small pair on a CPU, in milliseconds: every token costs, and a draft model has little to share."""
    clock = Clock()
    target = Machine(LANGUAGE, VOCAB, slots=8, clock=clock, seconds=3.5, row=0.14, read=0.17)
    draft = Machine(errs(right), VOCAB, slots=8, clock=clock, seconds=0.5, row=0.25, read=0.035)
    return Load(length, verifier, target, draft, clock)


STEPS = {n: (0.5 + 0.25 * (n - 1)) / (3.5 + 0.14 * (n - 1)) for n in (1, 2, 4, 8)}


@pytest.mark.parametrize(
    ("count", "right", "most"),
    [(2, 0.9, 0.85), (2, 0.3, 1.05), (4, 0.9, 0.95), (4, 0.3, 1.05), (8, 0.9, 1.01), (8, 0.3, 1.01)],
)
def test_with_nothing_learnt_a_batch_drafts_where_it_pays_and_loses_next_to_nothing_where_not(
    count: int, right: float, most: float
) -> None:
    auto = AdaptiveLength(draft_cost=0.15, row_cost=0.04, step_costs=STEPS)
    none, _ = cpu(1, "none").batch(count, 90, 110)
    assert cpu(auto, right=right).batch(count, 90, 110)[0] < most * none


def far(length: int | DraftLengthPolicy, verifier: str = "exact") -> Load:
    """Twenty thousand tokens of text cost as much as a pass, for every token of it."""
    clock, room = Clock(), 9000
    rest = {"slots": 4, "clock": clock, "max_seq_len": room, "reach": 20_000.0}
    target = Machine(LANGUAGE, VOCAB, seconds=1.0, row=0.02, read=0.02, **rest)  # type: ignore[arg-type]
    draft = Machine(errs(0.9), VOCAB, seconds=0.1, row=0.002, read=0.002, **rest)  # type: ignore[arg-type]
    return Load(length, verifier, target, draft, clock)


def crowd(length: int | DraftLengthPolicy, verifier: str = "exact") -> Load:
    """So many that their texts are read over several ticks."""
    clock = Clock()
    rest = {"slots": 32, "clock": clock, "max_seq_len": 1200}
    target = Machine(LANGUAGE, VOCAB, seconds=1.0, row=0.0025, read=0.004, **rest)  # type: ignore[arg-type]
    draft = Machine(errs(0.85), VOCAB, seconds=0.05, row=0.0008, read=0.00025, **rest)  # type: ignore[arg-type]
    return Load(length, verifier, target, draft, clock)


def test_what_others_read_is_not_taken_for_what_drafts_cost() -> None:
    """Who reads is in no pass of the target, which the others then share; and drafts share a pass with what is read."""
    auto = AdaptiveLength(draft_cost=0.05, row_cost=0.0025)
    assert crowd(auto).batch(32, 500, 400)[0] < 0.85 * crowd(1, "none").batch(32, 500, 400)[0]


BATCHES = [(4, 30, 100), (4, 8000, 60), (4, 30, 100), (4, 30, 100)]


def test_after_a_batch_of_long_texts_short_ones_are_drafted_as_before() -> None:
    none, fixed, auto = (
        [load.batch(*each)[0] for each in BATCHES]
        for load in (far(1, "none"), far(6), far(AdaptiveLength(draft_cost=0.1, row_cost=0.02)))
    )
    assert fixed[1] > none[1], "with such prompts a draft model's reading does not pay"
    assert auto[1] < 1.02 * none[1], "and is not done"
    for i in (2, 3):
        assert auto[i] < 0.75 * none[i] and auto[i] < 1.35 * fixed[i]


def test_one_account_for_all_texts_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where texts are not told apart, what long ones cost is held against short ones."""
    for module in ("costs", "batch_length", "draft_length"):
        monkeypatch.setattr(f"semspec.loop.{module}.text_class", lambda tokens: 0)
    load = far(AdaptiveLength(draft_cost=0.1, row_cost=0.02))
    load.batch(4, 30, 100)
    load.executor.lengths.accounts[3, 0].rounds = -20.0  # as long texts left it
    assert load.batch(4, 30, 100)[0] > 0.9 * far(1, "none").batch(4, 30, 100)[0]


@pytest.mark.parametrize("from_the_first", [True, False])
def test_what_was_read_keeps_others_from_beginning_and_nobody_from_going_on(
    from_the_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, drafted = far(AdaptiveLength(draft_cost=0.1, row_cost=0.02)), list[int]()
    lengths, observed = load.executor.lengths, Account.add
    load.batch(4, 30, 100)

    def add(self: Account, rounds: float, whole: float) -> None:
        observed(self, rounds, whole)
        drafted.append(sum(n > 0 for n in lengths.lengths.values()))
        if drafted[-1] or from_the_first:
            self.whole = -50.0

    monkeypatch.setattr(Account, "add", add)
    if from_the_first:
        for account in lengths.accounts.values():
            account.whole = -50.0
    load.batch(4, 60, 60)
    if from_the_first:
        assert max(drafted) <= 1, "but for trials, which have their own share of the time"
    else:
        assert sum(n > 1 for n in drafted) > 20


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
