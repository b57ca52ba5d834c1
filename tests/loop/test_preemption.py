"""Caches that are too small for all who write: the youngest give way and go on later, and no text changes by that."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import semspec
from semspec.draft import ModelDrafter, NoDrafter
from semspec.draft.tree import CHAIN, TreeOptions
from semspec.draft.within_context import WithinContext
from semspec.errors import SemspecError
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.loop.work import Task
from semspec.model import ModelRunner
from semspec.model.paged_cache import PagedCache
from semspec.model.prefix_cache import PrefixCache
from semspec.model.restricted import RestrictedRunner
from semspec.types import Drafter, Runner, Sampling, Score
from tests.fakes import FakeRunner, greedy
from tests.test_every_rule import DRAFT, RULES, TARGET, VOCAB, rule_of

prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)


def answers(
    jobs: Sequence[Job], room: int | None, budget: int = 512, tree: TreeOptions = CHAIN
) -> tuple[list[Task], list[PrefixCache]]:
    inner = [FakeRunner(language, VOCAB, slots=4, max_seq_len=90, room=room) for language in (TARGET, DRAFT)]
    target, draft = (PrefixCache(runner) for runner in inner)
    executor, tasks = Executor(budget=budget), list[Task]()
    for job in jobs:
        stats, drafter = Stats(), ModelDrafter(draft, tree=tree) if job.rule.speculates else NoDrafter()
        tasks.append(executor.submit(Decoder(job, target, drafter, stats).decode(), stats))
    executor.run()
    assert target.free == draft.free == 4 and not target._lost and not draft._lost
    return tasks, [target, draft]


def written(tasks: Sequence[Task]) -> list[list[int]]:
    for task in tasks:
        if task.error is not None:
            raise task.error
    return [[token for event in task.events for token in event.tokens] for task in tasks]


@settings(max_examples=40)
@given(st.lists(st.tuples(prompts, st.sampled_from(["none", "exact"])), min_size=3, max_size=6), st.integers(8, 60))
def test_everybody_gets_the_whole_text_in_a_cache_for_two(jobs: list[tuple[list[int], str]], budget: int) -> None:
    made = [Job(prompt, rule_of(name), 3, 40) for prompt, name in jobs]
    tasks, _ = answers(made, room=100, budget=budget)
    assert written(tasks) == [greedy(TARGET, job.prompt, 40) for job in made]


@pytest.mark.parametrize("one", range(20, 64, 4))
def test_a_pool_of_full_size_has_room_for_everybody(one: int) -> None:
    """Without a prefix cache nobody can be preempted; and nobody has to be, to the end of the context."""
    for other in range(20, 64, 3):
        jobs = [Job([i] * n, rule_of("none"), 1, 64 - n) for i, n in enumerate((one, other))]
        tasks = run(jobs, FakeRunner(TARGET, VOCAB, slots=2, max_seq_len=64, room=10**6))
        assert written(tasks) == [greedy(TARGET, job.prompt, 64 - len(job.prompt)) for job in jobs]


@pytest.mark.parametrize("name", RULES)
def test_no_rules_text_depends_on_room(name: str) -> None:
    jobs = [Job([i, 2, 3] * 8, rule_of(name), 4, 40, Sampling(0.9 * (i % 2), seed=i), protected=None) for i in range(5)]
    (plenty, _), (short, _) = answers(jobs, room=None), answers(jobs, room=100)
    assert written(short) == written(plenty)
    assert sum(task.stats.preempted for task in short) > 0 == sum(task.stats.preempted for task in plenty)


@pytest.mark.parametrize("budget", [7, 512])
@pytest.mark.parametrize("room", [95, 110])
@pytest.mark.parametrize("name", ["exact", "sampling"])
def test_trees_give_way_and_are_read_again(name: str, room: int, budget: int) -> None:
    """A draft model grows a tree in several passes; whoever is in the middle of one gives way as all others do."""
    jobs = [Job([i, 2, 3] * 8, rule_of(name), 4, 40, Sampling(0.9 * (i % 2), seed=i)) for i in range(5)]
    tree = TreeOptions(12, 0, 3)
    (plenty, _), (short, _) = answers(jobs, None, budget, tree), answers(jobs, room, budget, tree)
    assert written(short) == written(plenty)
    assert [task.stats.drafts for task in short] == [task.stats.drafts for task in plenty]
    assert sum(task.stats.preempted for task in short) > 0


def test_the_oldest_is_never_preempted_and_ends_first() -> None:
    jobs = [Job([i, 2, 3] * 8, rule_of("exact"), 4, 50) for i in range(4)]
    tasks, _ = answers(jobs, room=95)
    assert tasks[0].stats.preempted == 0 < tasks[-1].stats.preempted


def test_idle_slots_give_way_before_anybody_is_preempted() -> None:
    target = PrefixCache(FakeRunner(TARGET, VOCAB, slots=4, max_seq_len=90, room=100))
    executor = Executor()
    for start in range(3):
        stats = Stats()
        job = Job([start, 2, 3] * 10, rule_of("none"), 1, 20)
        task = executor.submit(Decoder(job, target, NoDrafter(), stats).decode(), stats)
        executor.run()
        assert written([task]) == [greedy(TARGET, job.prompt, 20)] and not stats.preempted


def test_a_long_beginning_that_all_share_takes_room_once() -> None:
    """Four answers to a prompt of 60 tokens in a cache of 100: nobody waits, and nobody is preempted."""
    tasks, _ = answers([Job([1, 2, 3] * 20, rule_of("none"), 1, 8, Sampling(1.0, seed=i)) for i in range(4)], 100)
    assert not any(task.stats.preempted for task in tasks)
    plenty, _ = answers([Job([1, 2, 3] * 20, rule_of("none"), 1, 8, Sampling(1.0, seed=i)) for i in range(4)], None)
    assert written(tasks) == written(plenty)


def test_a_conversation_is_not_dropped_to_admit_its_own_next_turn() -> None:
    target = PrefixCache(FakeRunner(TARGET, VOCAB, slots=4, max_seq_len=90, room=100))
    first, other = [1, 2, 3] * 13, [4, 5, 6] * 13
    for prompt in (first, other):
        slot = target.acquire(prompt)
        target.score([Score(target, slot, prompt, 1)])
        target.release(slot)
    assert target.can_admit([*first, *[7] * 30])
    assert target.acquire([*first, *[7] * 30]) == 0 and target.reused == 39, "the other one has given way"
    assert [text[:39] for text in target._index.tokens.values()] == [first]


def run(jobs: Sequence[Job], target: Runner, drafter: Callable[[], Drafter] = NoDrafter) -> list[Task]:
    executor, tasks = Executor(), list[Task]()
    for job in jobs:
        stats = Stats()
        tasks.append(executor.submit(Decoder(job, target, drafter(), stats).decode(), stats))
    executor.run()
    return tasks


def test_where_nobody_can_give_way_one_who_holds_room_is_ended_and_nobody_who_waits() -> None:
    """A bare runner of two slots for two long texts, of which one does not fit, and two short ones behind them."""
    jobs = [Job([i] * 24, rule_of("none"), 1, 60) for i in range(2)]
    jobs += [Job([i] * 6, rule_of("none"), 1, 4) for i in range(2)]
    tasks = run(jobs, FakeRunner(TARGET, VOCAB, slots=2, max_seq_len=90, room=100))
    assert [task.error is None for task in tasks] == [True, False, True, True]
    assert "nothing in it can be preempted" in str(tasks[1].error)
    del jobs[1], tasks[1]
    assert written(tasks) == [greedy(TARGET, job.prompt, job.max_new_tokens) for job in jobs]


def test_one_that_has_taken_over_a_slot_and_read_nothing_yet_gives_way() -> None:
    rng = random.Random(1)
    first, older, added = ([rng.randrange(VOCAB) for _ in range(n)] for n in (50, 60, 5))
    target = PrefixCache(FakeRunner(TARGET, VOCAB, slots=4, max_seq_len=90, room=140))
    (before,) = written(run([Job(first, rule_of("none"), 1, 5)], target))
    jobs = [Job(older, rule_of("none"), 1, 30), Job([*first, *before, *added], rule_of("none"), 1, 20)]
    tasks = run(jobs, target)
    assert written(tasks) == [greedy(TARGET, job.prompt, job.max_new_tokens) for job in jobs]
    assert tasks[1].stats.preempted


def test_drafts_through_a_wrapper_share_the_room_of_those_without() -> None:
    """As with other tokenizers: slots are those of the draft, and passes go through a runner around it."""
    jobs = [Job([i, 2, 3] * 10, rule_of("exact"), 3, 40) for i in range(4)]
    target = PrefixCache(FakeRunner(TARGET, VOCAB, slots=4, max_seq_len=90))
    draft = PrefixCache(FakeRunner(DRAFT, VOCAB, slots=4, max_seq_len=90, room=95))
    restricted, made = RestrictedRunner(draft, torch.arange(VOCAB)), list[Drafter]()

    def drafter() -> Drafter:
        made.append(ModelDrafter(restricted if len(made) % 2 else draft))
        made[-1].runners = [draft]  # type: ignore[misc]
        return made[-1]

    tasks = run(jobs, target, drafter)
    assert written(tasks) == [greedy(TARGET, job.prompt, 40) for job in jobs]
    assert sum(task.stats.preempted for task in tasks) > 0


def test_a_prompt_that_is_too_long_for_the_draft_waits_for_no_room_there() -> None:
    target, draft = (FakeRunner(language, VOCAB, 2, n, room=2 * n) for language, n in ((TARGET, 200), (DRAFT, 64)))
    job = Job([1, 2, 3] * 50, rule_of("exact"), 3, 20)
    tasks = run([job], PrefixCache(target), lambda: WithinContext(ModelDrafter(cached := PrefixCache(draft)), cached))
    assert written(tasks) == [greedy(TARGET, job.prompt, 20)]


def test_a_prompt_that_has_to_wait_drops_no_cached_beginning() -> None:
    inner = FakeRunner(TARGET, VOCAB, slots=4, max_seq_len=90, room=130)
    target, executor = PrefixCache(inner), Executor()
    run([Job([1, 2, 3, 4] * 10, rule_of("none"), 1, 2)], target)
    jobs = [Job([4, 5] * 20, rule_of("none"), 1, 45), Job([6, 7] * 44, rule_of("none"), 1, 2)]
    tasks = list[Task]()
    for job in jobs:
        stats = Stats()
        tasks.append(executor.submit(Decoder(job, target, NoDrafter(), stats).decode(), stats))
        executor.tick()
        executor.tick()
    assert executor._waiting and max(len(target._index.tokens[slot]) for slot in target._idle) == 41
    executor.run()
    assert written(tasks) == [greedy(TARGET, job.prompt, job.max_new_tokens) for job in jobs]


def test_what_is_longer_than_the_cache_gets_an_error_and_the_others_their_text() -> None:
    jobs = [Job([1, 2, 3] * 8, rule_of("exact"), 4, 30), Job([1] * 90, rule_of("none"), 4, 30)]
    jobs.append(Job([4, 2, 3] * 8, rule_of("exact"), 4, 30))
    tasks = run(jobs, PrefixCache(FakeRunner(TARGET, VOCAB, slots=4, max_seq_len=90, room=95)))
    assert isinstance(tasks[1].error, SemspecError) and "is full: 90 tokens and 1 more" in str(tasks[1].error)
    assert written([tasks[0], tasks[2]]) == [greedy(TARGET, job.prompt, 30) for job in (jobs[0], jobs[2])]


class Reading(ModelDrafter):
    """Wants the target's states of every token."""

    layers = (1,)

    def observe(self, tokens: list[int], hidden: dict[int, torch.Tensor]) -> None:
        assert len(hidden[1]) == len(tokens)


@pytest.mark.parametrize("room", range(96, 160, 8))
@pytest.mark.parametrize("kind", ["logprobs of the prompt", "states"])
def test_a_prompt_that_is_read_again_although_others_have_it_takes_room_of_its_own(kind: str, room: int) -> None:
    """Its slot begins with pages that it shares and has no use for: they are no room for what it reads."""
    prompt, states = [1, 2, 3, 4, 5] * 9, kind == "states"
    jobs = [Job(prompt, rule_of("none"), 1, 40)]
    jobs += [Job([*prompt, i], rule_of("exact"), 2, 30, prompt_logprobs=None if states else 1) for i in range(2)]
    target = PrefixCache(FakeRunner(TARGET, VOCAB, slots=4, max_seq_len=90, room=room))
    executor, draft, tasks = Executor(), FakeRunner(DRAFT, VOCAB), list[Task]()
    for job in jobs:
        stats, drafter = Stats(), (Reading if states else ModelDrafter)(draft) if tasks else NoDrafter()
        tasks.append(executor.submit(Decoder(job, target, drafter, stats).decode(), stats))
        executor.tick()  # the first has read the prompt when the others come
    executor.run()
    assert written(tasks) == [greedy(TARGET, job.prompt, job.max_new_tokens) for job in jobs]


@pytest.mark.parametrize("rule", ["none", "exact", "block", "fly"])
def test_a_real_pair_in_few_pages(rule: str, target_folder: Path, draft_folder: Path, pair: semspec.Pair) -> None:
    """Its cache is paged, and too small for all: the same tokens, and no page is lost."""
    small = semspec.load(target_folder, draft_folder, device="cpu", slots=4, context=256)
    for name in ("target", "draft"):
        runner = getattr(small, name)
        assert isinstance(runner, ModelRunner)
        setattr(small, name, ModelRunner(runner.transformer, 4, 256, runner.vocab_size, tokens=300, page=8))
    small = small.wrapped(PrefixCache)
    texts = ["the quick brown fox " * n for n in (4, 5, 6, 7)]
    options = {"verifier": rule, "max_new_tokens": 60, "ignore_eos": True, "num_draft_tokens": 3}
    results = small.generate(texts, **options)
    assert [r.tokens for r in results] == [r.tokens for r in pair.generate(texts, **options)]
    assert sum(r.stats.preempted for r in results) > 0
    for cache in (small.target, small.draft):
        assert isinstance(cache, PrefixCache)
        cache.close()
        pages = cache.inner.cache  # type: ignore[attr-defined]
        assert isinstance(pages, PagedCache) and pages.blocks.free == pages.blocks.blocks


def test_trees_of_a_real_draft_model_in_few_pages(target_folder: Path, draft_folder: Path, pair: semspec.Pair) -> None:
    small = semspec.load(target_folder, draft_folder, device="cpu", slots=4, context=256)
    assert isinstance(small.draft, ModelRunner)
    small.draft = ModelRunner(small.draft.transformer, 4, 256, small.draft.vocab_size, tokens=200, page=8)
    texts = ["the quick brown fox " * n for n in (4, 5, 6, 7)]
    options = {"drafter": "model:tree=40,top=6", "max_new_tokens": 60, "ignore_eos": True, "num_draft_tokens": 5}
    results = small.wrapped(PrefixCache).generate(texts, verifier="exact", **options)
    plenty = pair.generate(texts, verifier="exact", **options)
    assert [(r.tokens, r.stats.drafts) for r in results] == [(r.tokens, r.stats.drafts) for r in plenty]
    assert sum(r.stats.preempted for r in results) > 0
