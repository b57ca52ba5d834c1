"""Draft lengths that learn: on a model of costs and acceptance, and through the loop on fake clocks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from semspec import verify
from semspec.draft import ModelDrafter
from semspec.draft.tree import fixed_shape
from semspec.loop.decoder import Decoder, Job
from semspec.loop.draft_length import (
    NOWHERE,
    TARGET_ONLY_TOKENS,
    AdaptiveLength,
    DraftLengthPolicy,
    FixedLength,
    RepeatableLength,
    Round,
    Situation,
)
from semspec.loop.executor import Executor
from semspec.loop.learnt_lengths import DraftLengths
from semspec.loop.recent import clipped, median
from semspec.loop.round_seconds import Seconds
from semspec.loop.stats import Stats
from semspec.tree import depths
from tests.fakes import Clock, FakeRunner, blend, chain, greedy

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
Chance = Callable[[int, int], float]  # position in the draft, tokens so far -> that the token is accepted


@dataclass
class NoSpeculation:
    threshold: float = 0.0

    def length(self, at: Situation = NOWHERE) -> int:
        return 0

    def observe(self, made: Round) -> None:
        pass

    def target_only_tokens(self, alone: int) -> int:
        return TARGET_ONLY_TOKENS

    def close(self) -> None:
        pass


@dataclass
class World:
    """A simulation: a target pass takes 1 and `row` more per token, a draft token `cost`."""

    chance: Chance
    cost: float
    row: float = 0.0
    noise: float = 0.0  # of the clock
    hiccup: float = 1.0  # slowdown of one round in a hundred
    found: float = 1.0  # share of rounds in which the drafter has anything to propose
    overhead: float = 0.0  # of a round with or without a proposal, against tokens of the target alone
    seed: int = 0
    text: int = 0  # tokens of the prompt
    used: Counter[int] = field(default_factory=Counter)

    def seconds(self, policy: DraftLengthPolicy, tokens: int = 2000) -> float:
        """Per token."""
        rng, clock, done, catching_up = random.Random(self.seed), 0.0, 0, True
        while done < tokens:
            n = policy.length(Situation(self.text + done, done, tokens - done, 0))
            accepted, drafted = 0, n if self.found == 1 or rng.random() < self.found else 0
            while accepted < drafted and rng.random() < self.chance(accepted, done):
                accepted += 1
            slow = (1 + self.noise * (2 * rng.random() - 1)) * (self.hiccup if rng.random() < 0.01 else 1.0)
            got = accepted + 1 if n else TARGET_ONLY_TOKENS
            target = slow * ((1 + self.overhead + self.row * drafted) if n else TARGET_ONLY_TOKENS)
            draft, timed = slow * self.cost * drafted, not (catching_up and n) and done > 0
            policy.observe(Round(n, drafted, got, draft, target, timed, prompt=not done))
            catching_up = n == 0
            clock, done = clock + draft + target, done + got
            self.used[n] += 1
        return clock / done


def against(world: Callable[[int], World], tokens: int = 2000, runs: int = 2) -> tuple[float, float]:
    """How `AdaptiveLength` compares with the best fixed length, and with no drafts: seconds over seconds."""

    def mean(policy: Callable[[], DraftLengthPolicy]) -> float:
        return sum(world(seed).seconds(policy(), tokens) for seed in range(runs)) / runs

    auto = mean(AdaptiveLength)
    return auto / min(mean(lambda n=n: FixedLength(n)) for n in LENGTHS), auto / mean(NoSpeculation)  # type: ignore[misc]


def steady(chance: float, cost: float, row: float = 0.0, runs: int = 3, **clock: float) -> tuple[float, float]:
    """The same where every draft token has the same chance, so that fixed lengths have a formula."""
    slow = 0.99 + 0.01 * clock.get("hiccup", 1.0)
    fixed = [slow * (1 + (row + cost) * n) / sum(chance**i for i in range(n + 1)) for n in range(1, 17)]
    worlds = [World(lambda i, n: chance, cost, row, seed=seed, **clock) for seed in range(runs)]
    auto = sum(world.seconds(AdaptiveLength(), 3000) for world in worlds) / runs
    return auto / min(fixed), auto / slow


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.8, 0.9, 1.0])
@pytest.mark.parametrize("cost", [0.02, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("row", [0.0, 0.05])
def test_it_is_near_the_best_fixed_length_and_never_much_slower_than_no_drafts(chance: float, cost: float, row: float):
    best, target_only = steady(chance, cost, row)
    assert best < 1.10 and target_only < 1.05


@pytest.mark.parametrize(
    "chance",
    [
        lambda i, n: 0.9 if n < 1000 else 0.1,
        lambda i, n: 0.1 if n < 1000 else 0.9,
        lambda i, n: 0.95 if n // 200 % 2 else 0.3,
        lambda i, n: min(0.98, 0.4 + 0.15 * i),
        lambda i, n: 0.95 - 0.12 * i,
    ],
    ids=["decreasing", "increasing", "bursts", "later positions better", "later positions worse"],
)
@pytest.mark.parametrize("cost", [0.05, 0.2, 0.5])
def test_it_follows_a_text_that_changes(chance: Chance, cost: float):
    best, target_only = against(lambda seed: World(chance, cost, 0.02, seed=seed))
    assert best < 1.10 and target_only < 1.05


def test_where_texts_change_it_beats_every_fixed_length():
    best, _ = against(lambda seed: World(lambda i, n: 0.9 if n < 1000 else 0.1, 0.2, 0.02, seed=seed))
    assert best < 0.9


@pytest.mark.parametrize(("chance", "cost"), [(0.3, 0.05), (0.3, 1.0), (0.8, 0.1), (0.8, 1.0), (0.9, 0.3)])
def test_a_clock_that_stutters_does_not_mislead_it(chance: float, cost: float):
    best, target_only = steady(chance, cost, runs=5, noise=0.3, hiccup=5.0)
    assert best < 1.10 and target_only < 1.05


@pytest.mark.parametrize(("chance", "cost", "row"), [(0.0, 0.3, 0.1), (0.8, 0.15, 0.1), (0.95, 0.05, 0.0)])
def test_repeatable_lengths_follow_the_tokens_and_no_clock(chance: float, cost: float, row: float):
    def world(**clock: float) -> World:
        return World(lambda i, n: chance if n < 1000 else 0.5, cost, row, **clock)

    def lengths(policy: RepeatableLength, slow: float) -> list[int]:
        rng, found = random.Random(3), []
        for _ in range(400):
            found.append(policy.length())
            accepted = next((i for i in range(found[-1]) if rng.random() > chance), found[-1])
            made = Round(found[-1], found[-1], accepted + 1, slow * rng.random(), slow, timed=rng.random() < 0.5)
            policy.observe(made)
        return found

    one, other = (lengths(RepeatableLength(cost, row), slow) for slow in (1e-6, 50.0))
    assert one == other and max(one) <= 16
    fixed = min(world().seconds(FixedLength(n)) for n in LENGTHS)
    assert world().seconds(RepeatableLength(cost, row)) < 1.10 * min(fixed, world().seconds(NoSpeculation()))


@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("row", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("found", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("overhead", [0.0, 0.15])
def test_lookups_never_cost_more_than_a_small_share(chance: float, row: float, found: float, overhead: float):
    """Neither in the first answer nor later, whatever a longer pass, an empty lookup or a round of its own costs."""
    for tokens, bound in ((256, 1.04), (2000, 1.025)):
        worlds = [World(lambda i, n: chance, 0.0, row, 0.1, seed=s, found=found, overhead=overhead) for s in range(3)]
        taken = [world.seconds(AdaptiveLength(lookup=True), tokens) for world in worlds]
        assert sum(taken) / 3 < bound
        if chance == 0.9 and found == 0.9:
            assert max(taken) < (0.75 if row < 0.3 else 0.95), "and where they are right, they are used"


@pytest.mark.parametrize(("cost", "row"), [(0.05, 0.3), (0.5, 0.05), (1.0, 0.3)])
def test_nor_do_drafts_that_are_always_wrong(cost: float, row: float):
    for tokens, bound in ((256, 1.06), (2000, 1.025)):
        taken = [
            World(lambda i, n: 0.0, cost, row, 0.1, seed=seed).seconds(AdaptiveLength(), tokens) for seed in range(3)
        ]
        assert sum(taken) / 3 < bound


@pytest.mark.parametrize("row", [0.2, 0.35, 0.6])
def test_short_answers_do_not_pay_for_lookups_whose_cost_is_known(row: float):
    """Of 24 tokens and of 96, with lookups that are always wrong; a cost that is not known is found out by trying."""
    for tokens, most in ((24, 1.05), (96, 1.03)):
        known, unknown = (
            max(
                World(lambda i, done: 0.0, 0.0, row, seed=seed).seconds(
                    AdaptiveLength(lookup=True, row_cost=cost), tokens
                )
                for seed in range(5)
            )
            for cost in (row, None)
        )
        assert known <= most + 1e-9 and known <= unknown
    assert unknown > 1.0


def test_lookups_that_pay_are_taken_though_their_cost_is_known():
    for row in (0.0, 0.1, 0.2):
        world = World(lambda i, done: 0.9, 0.0, row)
        assert world.seconds(AdaptiveLength(lookup=True, row_cost=row), 200) < 0.75


def test_what_a_draft_costs_is_seen_at_once_even_if_it_is_not_timed():
    policy = AdaptiveLength(lookup=True)
    policy.observe(Round(policy.length(), 0, 4, 0.0, 4.0))
    assert policy.length() == 2
    policy.observe(Round(2, 2, 1, 0.0, 6.0, timed=False))
    assert policy.reserve < 0 and policy.length() == 0


def test_a_lookup_that_found_nothing_says_nothing_about_drafts():
    policy = AdaptiveLength(lookup=True)
    policy.observe(Round(0, 0, 4, 0.0, 4.0))
    before = policy.rates
    for _ in range(50):
        policy.observe(Round(4, 0, 1, 0.0, 1.0))
    assert policy.rates == before and policy.reserve > 0
    for _ in range(50):
        policy.observe(Round(4, 0, 1, 0.0, 1.2))
    assert policy.rates == before and policy.reserve < 0 and policy.length() == 0, "but what they cost is counted"


def test_a_cap_holds_for_automatic_lengths():
    lengths = DraftLengths()
    capped = lengths.of(("rule", 3), 3, 1), RepeatableLength(0.01, 0.0, 3)
    for policy in capped:
        world = World(lambda i, n: 0.95, 0.01)
        world.seconds(policy, 400)
        assert max(world.used) == 3
    assert lengths.of(("rule", 3), 3, 1) is capped[0]


def test_hopeless_drafts_are_tried_again_but_rarely():
    world = World(lambda i, n: 0.0, 0.5)
    world.seconds(AdaptiveLength(), 4000)
    drafted = sum(rounds for n, rounds in world.used.items() if n)
    assert 4 < drafted < 0.05 * 4000


def test_no_draft_is_shorter_than_the_rules_minimum():
    world = World(lambda i, n: 0.5, 0.1)
    world.seconds(AdaptiveLength(min_tokens=7), 2000)
    assert min(n for n in world.used if n) == 7 and verify.make("fly").min_draft_tokens() == 7
    assert AdaptiveLength(max_tokens=4, min_tokens=9).max_tokens == 9


def test_seconds_of_lengths_never_tried_are_on_a_line():
    target, draft = Seconds(), Seconds(through_zero=True)
    for n in (2, 10) * 20:
        target.add(n, 1.0 + 0.1 * n)
        draft.add(n, 0.2 * n)
    assert target.of(6) == pytest.approx(1.6, rel=0.02) and target.of(16) == pytest.approx(2.6, rel=0.05)
    assert draft.of(5) == pytest.approx(1.0)
    target.add(0, 0.5)
    assert target.of(0) == 0.5 and target.of(1) == pytest.approx(1.1, rel=0.05), "target-only is not on the line"


def test_one_slow_round_is_clipped():
    target = Seconds()
    for _ in range(5):
        target.add(4, 1.0)
    target.add(8, 50.0)
    assert target.of(8) <= 3.0 and target.of(4) < 1.2
    for _ in range(2):
        target.add(8, 1.2)
    assert target.of(8) < 1.5
    for _ in range(9):
        target.add(8, 4.0)
    assert target.of(8) > 3.0, "but many are"


# -- through the loop

VOCAB = 13
LANGUAGE, OTHER = chain(VOCAB, seed=1), chain(VOCAB, seed=2)


def run(
    policy: int | DraftLengthPolicy, cost: float, chance: float, verifier: str = "exact", n: int = 600
) -> tuple[list[int], Stats, float]:
    clock = Clock()
    target = FakeRunner(LANGUAGE, VOCAB, clock=clock, seconds=1.0)
    errs = blend(LANGUAGE, OTHER, lambda context: random.Random(repr(context[-4:])).random() > chance)
    draft = FakeRunner(errs, VOCAB, clock=clock, seconds=cost)
    executor, stats = Executor(clock=clock), Stats()
    decoder = Decoder(Job([1, 2, 3], verify.make(verifier), policy, n), target, ModelDrafter(draft), stats)
    task = executor.submit(decoder.decode(), stats)
    executor.run()
    assert task.error is None and not target.held and not draft.held
    return [t for e in task.events for t in e.tokens], stats, clock.now


@pytest.mark.parametrize(
    ("cost", "chance", "n"), [(0.02, 0.95, 1500), (0.1, 0.8, 600), (0.5, 0.05, 400), (1.0, 0.6, 400)]
)
def test_through_the_loop_the_text_is_the_same_and_the_speed_near_the_best(cost: float, chance: float, n: int):
    expected = greedy(LANGUAGE, [1, 2, 3], n)
    fixed = {k: run(k, cost, chance, n=n) for k in (1, 2, 4, 8, 16)}
    target_only = run(1, cost, chance, "none", n)
    tokens, stats, seconds = run(AdaptiveLength(), cost, chance, n=n)
    assert tokens == expected == target_only[0]
    assert all(found == expected for found, *_ in fixed.values())
    assert seconds < 1.10 * min(s for *_, s in fixed.values()) and seconds < 1.05 * target_only[2]
    assert stats.tokens == n and sum(stats.seconds.values()) == pytest.approx(seconds)


def test_rounds_with_prefill_are_not_timed():
    seen: list[tuple[int, bool]] = []
    observed = 0

    class Watching(AdaptiveLength):
        def observe(self, made: Round) -> None:
            nonlocal observed
            seen.append((made.requested, made.timed))
            assert made.prompt == (len(seen) == 1)
            observed += made.tokens
            super().observe(made)

    _, stats, _ = run(Watching(), 0.1, 0.8, n=60)
    assert seen[:4] == [(4, False), (2, True), (0, True), (seen[3][0], False)], (
        "nor are those in which the drafter catches up after target-only rounds"
    )
    assert observed < stats.tokens == 60, "nor is the last round, which the end of the answer may have cut"


def test_several_sequences_can_share_what_is_learnt():
    clock, policy = Clock(), AdaptiveLength()
    target, draft = (FakeRunner(LANGUAGE, VOCAB, clock=clock, seconds=s) for s in (1.0, 0.05))
    executor, tasks = Executor(clock=clock), []
    for prompt in ([1], [2, 3], [4, 5, 6]):
        stats = Stats()
        decoder = Decoder(Job(prompt, verify.make("exact"), policy, 200), target, ModelDrafter(draft), stats)
        tasks.append((prompt, executor.submit(decoder.decode(), stats)))
    executor.run()
    for prompt, task in tasks:
        assert [t for e in task.events for t in e.tokens] == greedy(LANGUAGE, prompt, 200)
    assert policy.best >= 8, "a draft that is always right; more than a chunk desynchronises a sequence from the others"


def test_untimed_drafts_are_tried_at_the_initial_length():
    policy = AdaptiveLength()
    for n in [policy.length() for _ in range(6)]:  # six sequences at once, all of them in prefill
        policy.observe(Round(n, n, 1, 5.0, 5.0, timed=False, prompt=True))
    policy.observe(Round(0, 0, 4, 0.0, 4.0))
    assert policy.length() == 4, "drafts have not been timed, which does not make them free"


def test_a_measurement_of_zero_seconds_is_corrected():
    draft = Seconds(through_zero=True)
    draft.add(4, 0.0)
    for _ in range(5):
        draft.add(4, 0.4)
    assert draft.of(4) > 0.3 and draft.of(8) > 0.6


def test_a_model_that_never_proposes_anything_is_not_asked_for_ever():
    """As one whose tokenizer cannot spell what the target writes: each empty draft costs as much as ten tokens."""
    policy, spent, tokens = AdaptiveLength(), 0.0, 0
    for i in range(2000):
        n = policy.length()
        made = Round(n, 0, 1, 10.0, 1.0, timed=i > 0) if n else Round(0, 0, 4, 0.0, 4.0, timed=i > 0)
        policy.observe(made)
        spent, tokens = spent + made.draft + made.target, tokens + made.tokens
    assert spent < 1.05 * tokens, "in tokens of the target alone"


def test_a_token_of_a_tree_has_to_be_worth_its_place() -> None:
    """A pass takes 1 second and 0.02 more for each token of a tree; a round brings 3 tokens in 1.5 seconds."""
    policy = AdaptiveLength(max_tokens=4)
    assert policy.threshold == 0.0, "nothing is known yet"
    policy.observe(Round(0, 0, 4, 0.0, 4.0))
    for _ in range(20):
        policy.observe(Round(4, 4, 3, 0.1, 1.4, scored=20))
    assert policy.rates[policy.best] > 1.5
    assert policy.threshold == pytest.approx(0.02 * policy.rates[policy.best])
    chain_only = AdaptiveLength(max_tokens=4)
    chain_only.observe(Round(0, 0, 4, 0.0, 4.0))
    chain_only.observe(Round(4, 4, 3, 0.1, 1.4, scored=4))
    assert chain_only.threshold == 0.0 == FixedLength(4).threshold
    assert RepeatableLength(0.1, 0.05).threshold == pytest.approx(0.05 * max(RepeatableLength(0.1, 0.05).rates))


ALONE = Round(0, 0, 4, 0.0, 0.04)


@pytest.mark.parametrize("slow", [1, 3, 8])
def test_a_few_slow_passes_do_not_end_trees_for_good(slow: int) -> None:
    """A further token costs 0.2 % of a pass, so trees pay; but the first ones meet a busy machine, ten times slower."""
    policy, sizes = AdaptiveLength(max_tokens=8), list[int]()
    for _ in range(3000):
        n = policy.length()
        assert policy.threshold <= 0.5, "a likely first token is always drafted"
        shape = fixed_shape(16, n, 4, round(policy.threshold, 3)) if n else ()
        sizes.append(len(shape))
        longest = max(depths(shape), default=-1) + 1
        seconds = 0.01 + 0.00002 * len(shape)
        if slow and len(shape) > longest:
            slow, seconds = slow - 1, seconds + 0.1
        tokens = min(longest, 3 if len(shape) > longest else 2) + 1
        policy.observe(Round(n, longest, tokens, 0.001 * n, seconds, scored=len(shape)) if n else ALONE)
    assert sum(sizes[-500:]) > 15 * 500


def test_trees_that_do_not_pay_are_tried_again_seldom_and_small() -> None:
    """A further token costs a third of a pass."""
    policy, extra = AdaptiveLength(max_tokens=4), 0
    for i in range(2000):
        n = policy.length()
        shape = fixed_shape(16, n, 4, round(policy.threshold, 3)) if n else ()
        longest = max(depths(shape), default=-1) + 1
        extra += (len(shape) - longest) * (i > 100)
        made = Round(n, longest, longest + 1, 0.001, 0.01 + 0.003 * len(shape), scored=len(shape))
        policy.observe(made if n else ALONE)
    assert 0 < extra < 100


@pytest.mark.parametrize(("before", "after"), [(1.0, 0.05), (0.05, 1.0)], ids=["dear first", "cheap first"])
def test_what_drafts_cost_after_long_texts_does_not_count_after_short_ones(before: float, after: float):
    """One policy, a text of 20,000 tokens and then one without a prompt: what a draft token costs differs."""
    policy = AdaptiveLength()
    World(lambda i, n: 0.7, before, row=before, text=20_000).seconds(policy, 600)
    second = World(lambda i, n: 0.7, after, seed=1).seconds(policy, 600)
    fixed = [World(lambda i, n: 0.7, after, seed=1).seconds(FixedLength(n), 600) for n in (0, 1, 2, 4, 6, 8)]
    assert second < 1.12 * min(fixed)


def test_repeatable_lengths_are_the_same_for_all_texts():
    short, long = RepeatableLength(0.1, 0.05), RepeatableLength(0.1, 0.05)
    for _ in range(50):
        lengths = [policy.length(Situation(text, 0, 99, 0)) for policy, text in ((short, 10), (long, 50_000))]
        assert lengths[0] == lengths[1] > 0
        for policy in (short, long):
            policy.observe(Round(lengths[0], lengths[0], 2, 0.0, 0.0))


def test_a_slow_moment_counts_little() -> None:
    assert clipped(10.0, 2.0) == 6.0 and clipped(5.0, 2.0) == 5.0
    assert clipped(10.0, 0.0) == 10.0, "nothing is expected yet"
    assert median([9.0, 1.0, 3.0]) == 3.0 and median([9.0, 1.0, 3.0, 2.0]) == 2.0
    assert median([(2.0, 8.0), (1.0, 9.0)]) == (1.0, 9.0)
