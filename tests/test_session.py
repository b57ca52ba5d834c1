"""Conversations: what a turn feeds, that its text equals a fresh run's, and what survives interrupts and failures."""

from __future__ import annotations

import gc
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import semspec
from semspec import BadRequest, Options, verify
from semspec.draft import CascadeDrafter, ModelDrafter, NgramDrafter, NoDrafter
from semspec.draft.tree import TreeOptions
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.model.prefix_cache import PrefixCache
from semspec.types import Drafter, Score, ScoreOutput
from tests.fakes import FakeRunner, blend, chain, greedy

VOCAB = 11
LANGUAGE = chain(VOCAB)
SLIPPING = blend(LANGUAGE, chain(VOCAB, seed=1), lambda context: len(context) % 5 == 0)
TURNS = ["Mia has 4 pens. Tom has 5 more pens than Mia. How many pens does Tom have?", "How many pens does Mia have?"]


class Counting(FakeRunner):
    fed = 0  # tokens that passed through it

    def _feed(self, request: Score) -> ScoreOutput:
        self.fed += len(request.tokens)
        return super()._feed(request)


class World:
    """A target and a draft with one slot each, and one conversation."""

    def __init__(self) -> None:
        self.target, self.draft = Counting(LANGUAGE, VOCAB, slots=1), Counting(SLIPPING, VOCAB, slots=1)
        self.cached, self.cached_draft = PrefixCache(self.target), PrefixCache(self.draft)
        self.executor = Executor(budget=16)

    def turn(self, prompt: list[int], drafter: str, n: int = 20, ticks: int | None = None) -> list[int]:
        """Decode, perhaps only so many ticks of it, and return the tokens."""
        drafters: dict[str, Drafter] = {
            "none": NoDrafter(),
            "ngram": NgramDrafter(),
            "model": ModelDrafter(self.cached_draft),
            "cascade": CascadeDrafter(self.cached_draft, NgramDrafter()),
            "tree": ModelDrafter(self.cached_draft, tree=TreeOptions(size=9, top=3)),
        }
        rule, stats = verify.make("none" if drafter == "none" else "exact"), Stats()
        decoder = Decoder(Job(prompt, rule, 4, n), self.cached, drafters[drafter], stats)
        task = self.executor.submit(decoder.decode(), stats)
        while not task.done and ticks != 0:
            self.executor.tick()
            ticks = None if ticks is None else ticks - 1
        self.executor.cancel(task)
        assert task.error is None
        return [token for event in task.events for token in event.tokens]


def test_the_second_turn_feeds_only_what_is_new():
    world = World()
    prompt = [3, 1, 4, 1, 5] * 8
    answer = world.turn(prompt, "none")
    assert world.target.fed == 40 + 19, "the prompt, and the answer but its last token, which is not fed"
    world.target.fed = 0
    follow_up = [*prompt, *answer, 7, 8]
    assert world.turn(follow_up, "none") == greedy(LANGUAGE, follow_up, 20)
    assert world.cached.reused == 59 and world.target.fed == 3 + 19, "that token, and the two new ones"
    world.target.fed = 0
    aside = [*prompt, 9] + [2] * 30
    assert world.turn(aside, "none") == greedy(LANGUAGE, aside, 20)
    assert world.cached.reused == 40 and world.target.fed == 31 + 19, "from where the prompts differ"


def test_nor_does_a_draft_model_read_old_tokens_again():
    world = World()
    prompt = [3, 1, 4, 1, 5] * 8
    answer = world.turn(prompt, "model")
    world.draft.fed = 0
    world.turn([*prompt, *answer, 7, 8], "model", n=1)
    assert world.draft.fed == 0, "with one token left there is no draft"
    world.turn([*prompt, *answer, 7, 8], "model", n=2)
    assert 3 <= world.draft.fed <= 2 + 5, "the new tokens, and at most the last draft's"


@settings(max_examples=60)
@given(st.data())
def test_turns_equal_fresh_runs_whatever_is_cached(data: st.DataObject):
    """Any drafter after any other, turns stopped anywhere, prompts that extend, shorten or replace the last."""
    world, context = World(), list[int]()
    for _ in range(data.draw(st.integers(2, 4))):
        new = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30))
        prompt = context[: data.draw(st.integers(0, len(context)))] + new
        drafter = data.draw(st.sampled_from(["none", "ngram", "model", "cascade", "tree"]))
        ticks = data.draw(st.none() | st.integers(0, 12))
        written = world.turn(prompt, drafter, ticks=ticks)
        assert written == greedy(LANGUAGE, prompt, 20)[: len(written)] and (ticks is not None or len(written) == 20)
        context = prompt + written
    world.cached.close()
    world.cached_draft.close()
    assert world.target.free == world.draft.free == 1


def test_a_request_cancelled_while_waiting_for_a_slot_keeps_the_cache():
    world = World()
    world.turn([1, 2, 3], "none")
    busy = world.draft.acquire()
    assert world.turn([1, 2, 3, 4], "ngram", ticks=0) == [], "cancelled before its first tick"
    stats = Stats()
    waiting = Decoder(
        Job([1, 2, 3, 4], verify.make("exact"), 4, 5), world.cached, ModelDrafter(world.cached_draft), stats
    )
    blocker = world.executor.submit(
        Decoder(Job([1], verify.make("none"), 4, 5), FakeRunner(LANGUAGE, VOCAB), NoDrafter(), Stats()).decode(),
        Stats(),
    )
    task = world.executor.submit(waiting.decode(), stats)
    world.executor.tick()
    world.executor.cancel(task)
    world.executor.cancel(blocker)
    world.draft.release(busy)
    world.turn([1, 2, 3, 4], "model")
    assert world.cached.reused == 3
    world.cached.close()
    world.cached_draft.close()
    assert world.target.free == world.draft.free == 1


@pytest.fixture(scope="module")
def pocket() -> semspec.Pair:
    return semspec.load("pocket", device="cpu", slots=2, context=320)


@pytest.mark.parametrize("options", [Options(), Options(verifier="sampling", temperature=0.8, seed=3)])
def test_a_conversation_with_a_real_pair(pocket: semspec.Pair, options: Options):
    with semspec.Session(pocket) as session:
        for i, text in enumerate([*TURNS, TURNS[0]]):
            asked = [*session.messages, {"role": "user", "content": text}]
            stream = session.ask(text, options, max_new_tokens=30)
            list(stream)
            fresh = pocket.generate(asked, options, max_new_tokens=30)
            assert stream.result().text == fresh.text and stream.result().tokens == fresh.tokens
            before = len(pocket.tokenizer.encode(text)) + 6  # what a turn adds, with the template's own tokens
            assert fresh.prompt_tokens - session.reused <= before and (i == 0) == (session.reused == 0)
        assert [m["role"] for m in session.messages] == ["user", "assistant"] * 3
    assert pocket.target.free == pocket.draft.free == 2


def test_a_stopped_turn_counts_with_the_text_it_has(pocket: semspec.Pair):
    session = semspec.Session(pocket)
    stream = session.ask(TURNS[0], max_new_tokens=100)
    seen = "".join(event.text for event in islice(stream, 3))
    stream.stop()
    assert list(stream) == [] and stream.result().finish_reason == "cancelled"
    assert session.messages[-1] == {"role": "assistant", "content": seen}
    again = session.ask(TURNS[1], max_new_tokens=20)
    list(again)
    assert session.reused > 20, "the stopped turn's cache is used all the same"
    assert again.result().text == pocket.generate(session.messages[:3], max_new_tokens=20).text
    session.ask("never read").stop()
    assert len(session.messages) == 4, "a turn without any text is not in the conversation"
    session.close()
    assert pocket.target.free == pocket.draft.free == 2


def test_a_deleted_session_releases_its_slots(pocket: semspec.Pair):
    session = semspec.Session(pocket)
    list(session.ask(TURNS[0], max_new_tokens=5))
    assert pocket.target.free == 1
    del session
    gc.collect()
    assert pocket.target.free == pocket.draft.free == 2


def test_a_session_is_closed_between_the_passes_of_others(pocket: semspec.Pair, monkeypatch: pytest.MonkeyPatch):
    """Slots are given back while nobody makes a pass: other threads may use the pair."""
    session, held = semspec.Session(pocket), list[bool]()
    list(session.ask("Ana has 2 cats.", max_new_tokens=2))
    release = pocket.target.release

    def watched(slot: int) -> None:
        held.append(pocket.executor.lock._is_owned())  # type: ignore[attr-defined]
        release(slot)

    monkeypatch.setattr(pocket.target, "release", watched)
    session.close()
    assert held == [True]


def test_a_pass_that_breaks_costs_the_cache_but_not_the_conversation(pocket: semspec.Pair, monkeypatch):
    session = semspec.Session(pocket)
    list(session.ask(TURNS[0], max_new_tokens=10))
    with monkeypatch.context() as broken:
        broken.setattr(pocket.target, "score", lambda requests: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(session.ask("what?"))
    assert len(session.messages) == 2 and pocket.target.free == 2
    again = session.ask(TURNS[1], max_new_tokens=10)
    list(again)
    assert session.reused == 0 and again.result().text == pocket.generate(session.messages[:3], max_new_tokens=10).text
    session.close()


def test_an_answer_gets_the_context_that_is_left_and_a_full_one_is_an_error(pocket: semspec.Pair):
    with semspec.Session(pocket) as session:
        list(session.ask(TURNS[0], max_new_tokens=10_000, ignore_eos=True))
        with pytest.raises(BadRequest, match=r"the conversation has .* begin a new one"):
            session.ask(TURNS[1], max_new_tokens=10)
        assert len(session.messages) == 2
        with pytest.raises(BadRequest, match="there is no option 'warmth'"):
            session.ask("hello", warmth=3)
