"""Slots that remember: texts are the same as ever, and what was there is not read again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import semspec
from semspec.draft import ModelDrafter, NoDrafter
from semspec.errors import BadRequest, SemspecError
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.loop.work import ScoreWork, Task
from semspec.model.prefix_cache import PrefixCache
from semspec.model.prefix_index import BLOCK, PrefixIndex, common_prefix
from semspec.model.remembered_texts import ONCE
from semspec.sampling.processors import BadWords, LogitsProcessor, OnlyTokens, Processors
from semspec.types import Score, ScoreOutput
from semspec.verify import make
from tests.fakes import FakeRunner, chain, greedy

VOCAB = 12
TARGET, DRAFT = chain(VOCAB, seed=1), chain(VOCAB, seed=2)
prompts = st.builds(
    lambda start, rest: (list(range(VOCAB)) * 3)[:start] + rest,
    st.sampled_from([0, 5, 20, 36]),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
)


def fed(runner: FakeRunner) -> int:
    return sum(n for made in runner.diary if made.kind == "score" for n in made.rows.values())


def read(runner: PrefixCache, tokens: list[int]) -> list[float]:
    """A prompt's last row, as somebody with a slot of his own gets it."""
    slot = runner.acquire(tokens)
    (rows,) = runner.score([Score(runner, slot, tokens, 1)])
    assert runner.length(slot) == len(tokens)
    runner.release(slot)
    return rows.logits[-1].tolist()


@pytest.mark.parametrize("rule", ["none", "exact"])
def test_what_ended_in_nan_is_computed_again(rule: str):
    """A model that gives NaN as long as a slot holds what it computed while it was broken, as a real one does."""
    broken, poisoned = [True], set[tuple[int, ...]]()

    def logits(context: list[int]) -> list[float]:
        return [float("nan")] * VOCAB if tuple(context[:9]) in poisoned else TARGET(context)

    class Poisoned(FakeRunner):
        def _feed(self, request: Score) -> ScoreOutput:
            at = len(self.held[request.slot])
            if at < 9 <= at + len(request.tokens):  # the ninth token is computed now
                text = tuple([*self.held[request.slot], *request.tokens][:9])
                (poisoned.add if broken[0] else poisoned.discard)(text)
            return super()._feed(request)

    target = PrefixCache(Poisoned(logits, VOCAB, slots=3))
    draft = PrefixCache(FakeRunner(DRAFT, VOCAB, slots=3))
    prompt, executor = [*range(VOCAB)] * 2, Executor()

    def answer() -> Task:
        stats, drafter = Stats(), ModelDrafter(draft) if rule == "exact" else NoDrafter()
        task = executor.submit(Decoder(Job(prompt, make(rule), 3, 9), target, drafter, stats).decode(), stats)
        executor.run()
        return task

    slot = target.acquire(prompt)  # one that was cancelled before anybody saw NaN
    target.score([Score(target, slot, prompt[:20], 0)])
    target.release(slot)
    broken[0] = False
    assert "not numbers" in str(answer().error)
    healed = answer()
    assert healed.error is None and [t for e in healed.events for t in e.tokens] == greedy(TARGET, prompt, 9)
    assert target.free == draft.free == 3


@settings(max_examples=60)
@given(st.lists(st.tuples(prompts, st.sampled_from(["none", "exact"])), min_size=2, max_size=6), st.integers(4, 40))
def test_nobodys_text_depends_on_what_was_there_before(jobs: list[tuple[list[int], str]], budget: int):
    target = PrefixCache(FakeRunner(TARGET, VOCAB, slots=2))
    draft = PrefixCache(FakeRunner(DRAFT, VOCAB, slots=2))
    executor, tasks = Executor(budget=budget), []
    for prompt, rule in jobs:  # more sequences than slots, so that most find one with a past
        job = Job(prompt, make(rule), 3, 9)
        drafter: Any = ModelDrafter(draft) if rule == "exact" else NoDrafter()
        stats = Stats()
        tasks.append(executor.submit(Decoder(job, target, drafter, stats).decode(), stats))
    executor.run()
    for (prompt, _), task in zip(jobs, tasks, strict=True):
        assert task.error is None
        assert [t for event in task.events for t in event.tokens] == greedy(TARGET, prompt, 9)
    assert target.free == draft.free == 2


def test_the_longest_known_beginning_is_not_read_again():
    inner = FakeRunner(TARGET, VOCAB, slots=3)
    runner = PrefixCache(inner)
    system, question = [1, 2, 3, 4] * 10, [5, 6, 7] * 5
    read(runner, system)
    before = fed(inner)
    assert read(runner, system + question) == pytest.approx(TARGET(system + question))
    assert fed(inner) - before == len(question)
    before = fed(inner)
    assert read(runner, system + question) == pytest.approx(TARGET(system + question))
    assert fed(inner) - before == 1, "the last token is always read: its row is wanted"
    before = fed(inner)
    read(runner, [9] * 30)
    assert fed(inner) - before == 30
    read(runner, [9] * 30 + [1])
    assert read(runner, [*system, 8]) == pytest.approx(TARGET([*system, 8])), "the newcomer took another slot"
    assert runner.hits == 40 + 54 + 30 + 40


def test_the_slot_that_was_not_used_for_longest_is_given_up():
    inner = FakeRunner(TARGET, VOCAB, slots=2)
    runner = PrefixCache(inner)
    texts = [[n] * 20 for n in (1, 2, 3)]
    for text in texts:
        read(runner, text)
    spared = runner.hits
    read(runner, texts[1])
    assert runner.hits - spared == 19
    read(runner, texts[0])
    assert runner.hits - spared == 19, "the first was forgotten for the third"


def test_a_pass_that_fails_leaves_nothing_to_rely_on(monkeypatch: pytest.MonkeyPatch):
    inner = FakeRunner(TARGET, VOCAB, slots=1)
    runner, text = PrefixCache(inner), [1, 2, 3, 4] * 5
    read(runner, text)

    def break_down(requests: Any) -> Any:
        inner.held[requests[0].slot] += [0, 0, 0]  # half a pass
        raise RuntimeError("broken")

    slot = runner.acquire([*text[:16], 5, 6])
    with monkeypatch.context() as broken:
        broken.setattr(inner, "score", break_down)
        with pytest.raises(RuntimeError, match="broken"):
            runner.score([Score(runner, slot, [*text[:16], 5, 6], 1)])
    runner.release(slot)
    assert read(runner, [*text[:16], 5, 6, 7]) == pytest.approx(TARGET([*text[:16], 5, 6, 7]))


def test_a_real_pair_says_the_same(target_folder: Path, draft_folder: Path, pair: semspec.Pair):
    again = semspec.load(target_folder, draft_folder, device="cpu", slots=2)
    again = again.wrapped(PrefixCache)
    system = "the quick brown fox jumps over the lazy dog " * 3
    for question in ("one", "one two", "the sky is blue", "one two three"):
        for rule in ("none", "exact", "block"):
            options = {"verifier": rule, "max_new_tokens": 24, "ignore_eos": True}
            assert (
                again.generate(system + question, **options).tokens
                == pair.generate(system + question, **options).tokens
            )
    assert again.target.hits > 0.8 * again.target.queries  # type: ignore[attr-defined]


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_beginnings(one: list[int], other: list[int]):
    n = common_prefix(one, other)
    assert one[:n] == other[:n] and (n == min(len(one), len(other)) or one[n] != other[n])


def test_two_chats_with_the_same_instructions_do_not_evict_each_other() -> None:
    """600 tokens of instructions, read in passes of 64: each chat's turn reads what is new in it."""
    inner = FakeRunner(TARGET, VOCAB, slots=4)
    runner, system = PrefixCache(inner), [i % 7 for i in range(600)]
    chats = [[*system, 8], [*system, 9]]
    for turn in range(4):
        for i, chat in enumerate(chats):
            before, executor, stats = fed(inner), Executor(budget=64), Stats()
            task = executor.submit(Decoder(Job(chat, make("none"), 1, 12), runner, NoDrafter(), stats).decode(), stats)
            executor.run()
            written = [token for event in task.events for token in event.tokens]
            assert written == greedy(TARGET, chat, 12)
            read, new = fed(inner) - before, 601 if turn == i == 0 else 1 if turn == 0 else 8
            assert read <= new + 12, "the first reads all, the other copies its instructions, later turns go on"
            chats[i] = [*chat, *written, 10, 11, *[i] * 5]


def test_empty_slots_are_used_before_others_are_overwritten() -> None:
    inner = FakeRunner(TARGET, VOCAB, slots=3)
    runner = PrefixCache(inner)
    texts = [[1, 2, 3, 4, 5, 6, 7, 8, *[n] * 20] for n in (9, 10, 11)]
    for text in texts:
        read(runner, text)
    hits = runner.hits
    for text in texts:
        read(runner, text)
    assert runner.hits - hits == 3 * 27, "all three are still there, though they share eight tokens"


def cached(runner: PrefixCache, tokens: list[int], salt: str = "") -> int:
    """How many tokens of a prompt are found."""
    slot = runner.acquire(tokens, salt)
    (rows,) = runner.score([Score(runner, slot, tokens, 1)])
    runner.release(slot)
    return rows.cached


def test_slots_are_taken_as_they_are_needed_and_given_back() -> None:
    inner = FakeRunner(TARGET, VOCAB, slots=3)
    runner = PrefixCache(inner)
    assert inner.free == runner.free == 3
    slot = runner.acquire([1, 2])
    assert inner.free == runner.free == 2
    runner.release(slot)
    assert inner.free == runner.free == 3, "it holds nothing"
    cached(runner, [1, 2] * 9)
    assert inner.free == 2 and runner.free == 3, "it is kept, and anybody's"
    del runner
    assert inner.free == 3


def test_what_is_read_once_is_given_back_unless_it_is_remembered_for_now() -> None:
    inner = FakeRunner(TARGET, VOCAB, slots=3)
    runner, text = PrefixCache(inner), [1, 2, 3, 4] * 6
    for salt in (ONCE, f"{ONCE}7"):
        assert cached(runner, text, salt) == 0 and inner.free == 3, "nobody could find it again"
    runner.remember([f"{ONCE}7"])
    assert [cached(runner, text, f"{ONCE}7") for _ in range(3)] == [0, 23, 23] and inner.free == 2
    assert cached(runner, text) == 0 and inner.free == 1, "others do not find it, and what they read stays"
    busy = runner.acquire(text, f"{ONCE}7")
    runner.forget([f"{ONCE}7"])
    assert inner.free == 1, "while it is in use"
    runner.release(busy)
    assert inner.free == 2 and cached(runner, text) == 23


def test_a_copy_that_is_interrupted_leaves_nothing_to_rely_on(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = FakeRunner(TARGET, VOCAB, slots=2)
    runner, system = PrefixCache(inner), [1, 2, 3, 4] * 5
    old, other = [9, 8, 7] * 8, [*system, *[5] * 20]
    read(runner, old)
    read(runner, other)
    copy = inner.copy

    def interrupted(*arguments: int) -> None:
        copy(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(inner, "copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner.acquire([*system, *[6] * 9])
    assert read(runner, [*old, 3]) == pytest.approx(TARGET([*old, 3])), "not what was copied over it"


@pytest.mark.parametrize("budget", [48, 64, 512])
def test_several_answers_to_one_prompt_read_it_once(budget: int) -> None:
    """Whether their feeds meet in one pass or follow each other, and whoever is still writing."""
    inner, drafts = FakeRunner(TARGET, VOCAB, slots=4), FakeRunner(DRAFT, VOCAB, slots=4)
    runner, draft, prompt = PrefixCache(inner), PrefixCache(drafts), [i % 7 for i in range(100)]
    executor, tasks = Executor(budget=budget), list[Task]()
    for rule in ("none", "exact", "none", "exact"):
        stats, drafter = Stats(), ModelDrafter(draft) if rule == "exact" else NoDrafter()
        tasks.append(executor.submit(Decoder(Job(prompt, make(rule), 3, 9), runner, drafter, stats).decode(), stats))
    executor.run()
    assert [[t for e in task.events for t in e.tokens] for task in tasks] == [greedy(TARGET, prompt, 9)] * 4
    first, *others = sorted(task.stats.cached_tokens for task in tasks)
    assert first == 0 and min(others) >= 99 - 2 * BLOCK, "less than a block is not worth a copy"
    if budget == 512:
        assert others == [99] * 3, "all but the last token, whose row each wants for itself"
    assert fed(drafts) <= 100 + BLOCK + 2 * 9, "the draft model reads it once, too"


def test_a_prompt_is_found_in_a_slot_that_is_in_use() -> None:
    inner = FakeRunner(TARGET, VOCAB, slots=3)
    runner, system = PrefixCache(inner), [1, 2, 3, 4] * 10
    writing = runner.acquire(system)
    runner.score([Score(runner, writing, [*system, 5, 6], 1)])
    before = fed(inner)
    assert read(runner, [*system, 7]) == pytest.approx(TARGET([*system, 7]))
    assert fed(inner) - before == 1
    (row,) = runner.score([Score(runner, writing, [8], 1)])
    assert row.logits[-1].tolist() == pytest.approx(TARGET([*system, 5, 6, 8])), "it was only read from"


Edit = tuple[str, int, list[int]]
TOKENS = st.sampled_from([0, 256])  # which have most of their bytes in common
edits = st.lists(
    st.tuples(st.sampled_from(["append", "cut", "again", "hide"]), st.integers(0, 2), st.lists(TOKENS, max_size=9)),
    max_size=25,
)


def wrong_about(index: PrefixIndex, history: list[Edit], text: list[int], least: Sequence[int] = (0, 0, 0)) -> bool:
    """Whether the index finds anything else for a text than a look at all lists does; `least`: what each slot can be
    cut to."""
    held: dict[int, list[int]] = {slot: [] for slot in range(3)}
    hidden = set[int]()
    for slot in held:
        index.add(slot)
    for kind, slot, tokens in history:
        if kind == "append":
            index.append(slot, tokens)
            held[slot] = held[slot] + tokens
        elif kind == "hide":
            index.hide(slot)
            hidden.add(slot)
        else:
            length = len(held[slot]) * len(tokens) // 9 if kind == "cut" else 0
            index.cut(slot, length)
            held[slot] = held[slot][:length]
            hidden -= {slot} if not length else set()
    shared = {slot: common_prefix(tokens, text) for slot, tokens in held.items() if slot not in hidden}
    longest = max((count for slot, count in shared.items() if count >= least[slot]), default=0)
    found = index.common(text, shortest=lambda slot: least[slot])
    more = [s for s, own in held.items() if own == text[: len(own)] and max(shared.values(), default=0) >= len(own) + 2]
    if index.block == 2 and not all(index.goes_on(slot, text) for slot in more):
        return True
    if index.tokens != held or any(shared.get(slot) != count for slot, count in found.items()):
        return True
    return longest >= index.block and max(found.values(), default=0) != longest


@settings(max_examples=300)
@given(edits, st.lists(TOKENS, max_size=30), st.lists(st.integers(0, 8), min_size=3, max_size=3))
def test_the_index_finds_what_a_look_at_all_slots_finds(history: list[Edit], text: list[int], least: list[int]) -> None:
    assert not wrong_about(PrefixIndex(block=2), history, text)
    assert not wrong_about(PrefixIndex(block=2), history, text, least)


@pytest.mark.parametrize("fault", ["stale hash", "hash without what came before", "hidden found"])
def test_faults_of_the_index_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "stale hash":
        monkeypatch.setattr(PrefixIndex, "_forget", lambda self, slot, blocks: None)
    elif fault == "hidden found":
        monkeypatch.setattr(PrefixIndex, "hide", lambda self, slot: None)
    else:
        monkeypatch.setattr(PrefixIndex, "_hash", staticmethod(lambda before, tokens: hash((0, *tokens))))
    history: list[Edit] = [("append", 0, [0, 0, 1, 1]), ("append", 1, [1, 1, 0]), ("hide", 1, []), ("cut", 0, [0] * 5)]
    history += [("append", 0, [1, 0, 1, 1]), ("append", 2, [0, 1])]
    texts = [[0, 0, 1, 1], [0, 0, 1, 0, 1, 1], [1, 1, 0], [0, 1, 1, 1]]
    more: list[Edit] = [*history, ("append", 2, [0, 0]), ("again", 1, []), ("append", 1, [0, 1, 1, 1])]
    cases = [*((history, text) for text in texts), (more, [0, 1, 0, 0, 1, 1])]
    assert any(wrong_about(PrefixIndex(block=2), *case) for case in cases)


def test_blocks_of_one_slot_with_one_hash_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixIndex, "_hash", staticmethod(lambda before, tokens: 7))
    index = PrefixIndex(4)
    for slot in range(2):
        index.add(slot)
        index.append(slot, [slot] * 12)
    index.cut(0, 4)
    index.drop(0)
    assert index.common([1] * 9) == {1: 9}


@pytest.mark.parametrize("rule", ["none", "exact"])
def test_a_request_that_allows_no_token_costs_others_no_cached_beginning(rule: str) -> None:
    inner, executor = FakeRunner(TARGET, VOCAB), Executor()
    runner, prompt = PrefixCache(inner), [i * 7 % VOCAB for i in range(60)]

    def answer(*each: LogitsProcessor) -> Task:
        job, stats = Job(prompt, make(rule), 2, 5, processors=Processors(len(prompt), each)), Stats()
        drafter = NoDrafter() if rule == "none" else ModelDrafter(FakeRunner(DRAFT, VOCAB))
        task = executor.submit(Decoder(job, runner, drafter, stats).decode(), stats)
        executor.run()
        return task

    answer()
    refused = answer(OnlyTokens([3], VOCAB), BadWords([[3]]))
    assert isinstance(refused.error, BadRequest) and "no token may follow here" in str(refused.error)
    before = fed(inner)
    assert answer().error is None and fed(inner) - before < 20, "the prompt is still there"
    inner.logits = lambda context: [float("nan")] * VOCAB
    broken = answer(OnlyTokens([3], VOCAB))
    assert not isinstance(broken.error, BadRequest) and "not numbers" in str(broken.error)
    assert not any(tokens for tokens in runner._index.tokens.values()), "what gave NaN is read again"


def test_a_prompt_in_pieces_is_searched_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, hashed, own = FakeRunner(TARGET, VOCAB), [0], PrefixIndex._hash
    runner, prompt = PrefixCache(inner), [i * i % VOCAB for i in range(60 * BLOCK)]

    def counted(before: int, tokens: Sequence[int]) -> int:
        hashed[0] += 1
        return own(before, tokens)

    monkeypatch.setattr(PrefixIndex, "_hash", staticmethod(counted))
    slot = runner.acquire(prompt)
    for at in range(0, len(prompt), 2 * BLOCK):
        runner.score([Score(runner, slot, prompt[at : at + 2 * BLOCK], 0)])
    assert hashed[0] < 3 * 60, "as it is stored, and a look at what comes next"
    other = runner.acquire([*prompt[: 9 * BLOCK], 1])
    assert runner.reused == 9 * BLOCK and runner._index.tokens[other] == prompt[: 9 * BLOCK]


def test_of_many_slots_with_one_beginning_no_list_is_walked() -> None:
    """A search takes as long as the text, not as all slots that share it; tokens of a tree are found by nobody."""

    class Walked(list[int]):
        def __getitem__(self, at: Any) -> Any:
            raise AssertionError("token by token")

    index, text = PrefixIndex(), [70_000 + i for i in range(64)]
    for slot in range(40):
        index.add(slot)
        index.append(slot, [*text[: 32 + slot % 7], ~text[32 + slot % 7], slot])
        index.tokens[slot] = Walked(index.tokens[slot])
    assert index.common(text) == {slot: 32 + slot % 7 for slot in range(40)}


def test_a_slot_more_than_there_are_is_refused_in_words() -> None:
    runner = PrefixCache(FakeRunner(TARGET, VOCAB, slots=1))
    slot = runner.acquire([1, 2])
    with pytest.raises(SemspecError, match="all 1 slots are taken"):
        runner.acquire([1, 2, 3])
    runner.release(slot)
    assert runner.acquire([1, 2, 3]) == slot


def test_what_one_salt_has_read_another_does_not_find() -> None:
    """Neither in an idle slot, nor in one that is in use, nor in the same pass; the same salt finds it."""
    inner = FakeRunner(TARGET, VOCAB, slots=4)
    runner, text = PrefixCache(inner), [1, 2, 3, 4] * 10
    for salt, new in (("a", 40), ("b", 40), ("a", 1), ("", 40), ("b", 1)):
        slot, before = runner.acquire(text, salt), fed(inner)
        (row,) = runner.score([Score(runner, slot, text, 1)])
        assert fed(inner) - before == new and row.cached == 40 - new
        assert row.logits[-1].tolist() == pytest.approx(TARGET(text))
        runner.release(slot)
    before, slots = fed(inner), [runner.acquire([*text, 5] * 2, salt) for salt in ("c", "d", "d")]
    runner.score([Score(runner, slot, [*text, 5] * 2, 1) for slot in slots])
    assert fed(inner) - before == 82 + 82 + 1
    other = runner.acquire([*text, 5] * 2, "e")
    assert runner.reused == 0 and not runner._index.tokens[other], "the last slot held another's text"


def test_rounds_are_handed_on_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """To make a request anew takes longer than all else that a cache does for a round."""
    inner = FakeRunner(TARGET, VOCAB, slots=2)
    runner, seen, score = PrefixCache(inner), list[Score](), inner.score
    slot = runner.acquire([1, 2, 3])
    work = ScoreWork(Task(iter(()), Stats()), Score(runner, slot, [1, 2, 3], 3))  # type: ignore[arg-type]
    monkeypatch.setattr(inner, "score", lambda requests: (seen.extend(requests), score(requests))[1])
    runner.score([work.next_pass(512)])
    assert seen == [work.request] and not work.waiting
