"""One prefix cache for whoever decodes with a pair: prompts of one call, sessions, and calls beside them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

import semspec
from semspec.model.prefix_cache import PrefixCache
from semspec.types import Score, ScoreOutput

PROMPT = "Laura fills 6 boxes with a dozen beads each. Mila has 9 bags of 3 beads. How many beads does Mila have? " * 2
SYSTEM = "You are a careful teacher who explains each step. " * 6
TURN = "Mia has 4 pens. Tom has 5 more pens than Mia. How many pens does Tom have?"


@pytest.fixture(scope="module")
def pair() -> semspec.Pair:
    return semspec.load("pocket", device="cpu", slots=2, context=320)


@pytest.fixture
def fed(pair: semspec.Pair, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that the target's passes have read."""
    counts, score = list[int](), pair.target.score

    def counted(requests: Sequence[Score]) -> list[ScoreOutput]:
        counts.append(sum(len(r.tokens) for r in requests))
        return score(requests)

    monkeypatch.setattr(pair.target, "score", counted)
    return counts


def ask(session: semspec.Session, text: str = TURN, **options: Any) -> str:
    stream = session.ask(text, max_new_tokens=12, **options)
    list(stream)
    return stream.result().text


def test_a_call_reads_a_prompt_once(pair: semspec.Pair, fed: list[int]) -> None:
    """Four answers in two slots: the later two find what the earlier left."""
    how = {"verifier": "none", "temperature": 1.0, "max_new_tokens": 2}
    options = [semspec.Options(seed=seed, **how) for seed in range(4)]
    alone = [pair.generate(PROMPT, one) for one in options]
    size = alone[0].prompt_tokens
    assert [one.stats.cached_tokens for one in alone] == [0] * 4, "a call finds nothing of those before it"
    fed.clear()
    together = pair.generate([PROMPT] * 4, options)
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert [one.stats.cached_tokens for one in together] == [0, *[size - 1] * 3] and sum(fed) == size + 3 + 4
    assert pair.target.free == pair.draft.free == 2, "and leaves nothing behind"


def test_what_a_sequence_takes_back_and_feeds_again_was_not_cached(pair: semspec.Pair) -> None:
    """The end of its thinking cuts an accepted draft, whose next token the slot has still."""
    messages = [{"role": "user", "content": PROMPT}]
    cut = pair.generate(messages, max_thinking_tokens=10, num_draft_tokens=8, max_new_tokens=20)
    assert cut.thinking_cut and cut.stats.accepted and cut.stats.cached_tokens == 0


def test_prompts_that_begin_alike_share_the_beginning(pair: semspec.Pair, fed: list[int]) -> None:
    prompts = [PROMPT + question for question in ("How many has Laura?", "How many have both?")]
    alone = [pair.generate(prompt, max_new_tokens=10) for prompt in prompts]
    fed.clear()
    together = pair.generate(prompts, max_new_tokens=10)
    assert [one.text for one in together] == [one.text for one in alone]
    assert sorted(one.stats.cached_tokens >= 32 for one in together) == [False, True]


def test_nobody_shares_with_other_salts(pair: semspec.Pair) -> None:
    options = [semspec.Options(max_new_tokens=2, cache_salt=salt) for salt in "aab"]
    assert [bool(r.stats.cached_tokens) for r in pair.generate([PROMPT] * 3, options)] == [False, True, False]


def test_calls_that_fail_or_are_left_keep_no_slots(pair: semspec.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = pair.stream(PROMPT)
    next(stream)
    stream.close()
    with monkeypatch.context() as broken:
        broken.setattr(pair.target, "score", lambda requests: 1 / 0)
        with pytest.raises(semspec.BatchFailed):
            pair.generate([PROMPT] * 4)
    assert pair.target.free == pair.draft.free == 2
    assert pair.generate([PROMPT] * 2, max_new_tokens=2)[1].stats.cached_tokens > 0


def test_nor_does_a_head_that_is_tried_when_it_is_loaded(pair: semspec.Pair) -> None:
    pair.generate(PROMPT, drafter="eagle:pocket", max_new_tokens=4)
    assert pair.target.free == pair.draft.free == 2


def test_sessions_share_their_instructions(pair: semspec.Pair, fed: list[int]) -> None:
    with semspec.Session(pair, SYSTEM) as one, semspec.Session(pair, SYSTEM) as other:
        first = ask(one)
        fed.clear()
        assert ask(other, "How many pens does Mia have?") and sum(fed) < 50
        assert other.reused >= len(pair.tokenizer.encode(SYSTEM)), "the instructions of the first"
        assert ask(one) == pair.generate([*one.messages[:-1]], max_new_tokens=12).text
        assert pair.generate([{"role": "system", "content": SYSTEM}, {"role": "user", "content": TURN}],
                             max_new_tokens=12).text == first  # fmt: skip
    assert pair.target.free == pair.draft.free == 2


def test_more_sessions_than_slots_and_calls_beside_them(pair: semspec.Pair) -> None:
    """Slots of sessions are anybody's between their turns."""
    sessions = [semspec.Session(pair) for _ in range(3)]
    texts = [ask(session) for session in sessions]
    assert pair.target.free == 0, "they are kept"
    found = pair.generate([TURN] * 3, max_new_tokens=12)
    assert len({one.text for one in found}) == 1 and len(set(texts)) == 1
    assert [ask(session, "How many pens does Mia have?") for session in sessions]
    for session in sessions:
        session.close()
    assert pair.target.free == 2


def test_threads_share_a_pair_and_its_caches(pair: semspec.Pair) -> None:
    wanted = pair.generate(PROMPT, max_new_tokens=10).text
    session_text, found = ask(semspec.Session(pair)), list[str]()

    def work(which: int) -> None:
        if which % 2:
            with semspec.Session(pair) as session:
                found.append(ask(session))
        else:
            found.extend(result.text for result in pair.generate([PROMPT] * 2, max_new_tokens=10))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted([wanted] * 4 + [session_text] * 2)
    assert pair.target.free == pair.draft.free == 2


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_integer_weights_share_whole_prompts_only(dtype: str) -> None:
    """What a prompt's rest gets is rounded otherwise when it is read alone, and integer weights make more of that."""
    pair = semspec.load("pocket", device="cpu", slots=3, context=320, dtype=dtype)
    prompts = [PROMPT, PROMPT, PROMPT + "How many has Laura?", PROMPT + "How many has Laura?"]
    alone = [pair.generate(prompt, verifier="none", max_new_tokens=24) for prompt in prompts]
    for verifier in ("none", "exact"):
        together = pair.generate(prompts, verifier=verifier, max_new_tokens=24)
        assert [one.tokens for one in together] == [one.tokens for one in alone]
        found = sorted(one.stats.cached_tokens for one in together)
        assert found == [0, 0, alone[1].prompt_tokens - 1, alone[3].prompt_tokens - 1]


def test_garbage_that_is_collected_while_a_call_gives_its_texts_back(
    pair: semspec.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session's destructor closes the caches, unless somebody is about to change them."""
    forgotten = [semspec.Session(pair, SYSTEM)]
    ask(forgotten[0])
    assert forgotten[0].messages, "its text is settled"
    drop = PrefixCache._drop

    def collected(cache: PrefixCache, slot: int) -> None:
        forgotten.clear()
        drop(cache, slot)

    monkeypatch.setattr(PrefixCache, "_drop", collected)
    answers = pair.generate([PROMPT] * 2, max_new_tokens=4)
    assert len(answers) == 2 and not forgotten
    assert pair.caches is not None and not pair.caches.target._calls and not pair.caches.draft._calls  # type: ignore[union-attr]
    pair.caches.close()
    assert pair.target.free == pair.draft.free == 2


def test_what_is_planned_for_states_holds_for_the_same_models_anew(
    pair: semspec.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pair.caches is not None
    monkeypatch.setattr(pair.caches.target, "states_limit", 12345)
    for other in (pair.fresh(), pair.wrapped(lambda runner: runner)):
        assert other.caches is not None and other.caches is not pair.caches
        assert other.caches.target.states_limit == 12345
