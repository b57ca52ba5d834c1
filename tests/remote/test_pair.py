"""Step rules over two servers: what is written, by whom, and in how many round trips."""

from __future__ import annotations

import pytest

import semspec
from semspec.errors import BadRequest
from semspec.remote.pieces import KEPT, Pieces, words
from tests.remote.conftest import CHAT, QUESTION, RIGHT, WRONG
from tests.remote.fake import Fake, tokens

TARGETS = "\n\n".join(RIGHT)
MIXED = "\n\n".join([*WRONG[:2], RIGHT[2]])  # the draft's steps, but the target ends the text


@pytest.mark.parametrize(
    ("verifier", "text", "outcomes"),
    [
        ("none", TARGETS, {}),
        ("accept-no-step:lead=0", TARGETS, {"rejected": 2, "target": 2, "handed over": 1}),
        ("accept-all-steps:lead=0", MIXED, {"accepted": 2, "handed over": 1}),
        ("accept-all-steps:lead=0,keep=true", MIXED, {"accepted": 2, "handed over": 1}),
        ("accept-all-steps", MIXED, {"target": 1, "accepted": 1, "handed over": 1}),
        ("likely-step", TARGETS, {"accepted": 1, "rejected": 1, "target": 2, "handed over": 1}),
        ("specreason:lead=0", TARGETS, {"accepted": 1, "rejected": 1, "target": 1, "handed over": 1}),
        (
            "specreason:lead=0,form=chat,score=greedy,question=from 0 (useless) to 9",
            TARGETS,
            {"accepted": 1, "rejected": 1, "target": 1, "handed over": 1},
        ),
    ],
)
def test_each_rule_decides_as_it_would_in_process(
    target: Fake, draft: Fake, verifier: str, text: str, outcomes: dict[str, int]
) -> None:
    pair = semspec.load(target.url, draft=draft.url)
    result = pair.generate(CHAT, verifier=verifier, max_new_tokens=60)
    assert result.text == text and result.finish_reason == "stop"
    assert dict(result.stats.step_outcomes) == outcomes
    assert "".join(pair.spelling(token) for token in result.tokens) == text
    assert result.stats.tokens == len(result.tokens) == result.stats.accepted + result.stats.bonus


def test_a_step_costs_two_round_trips_at_most(target: Fake, draft: Fake) -> None:
    """One of the draft's server to write it, one of the target's to read it; what the target writes itself, one."""
    pair = semspec.load(target.url, draft=draft.url)
    for verifier in ("accept-all-steps:lead=0", "likely-step", "specreason:lead=0", "accept-no-step:lead=0"):
        target.asked.clear()
        draft.asked.clear()
        stats = pair.generate(CHAT, verifier=verifier, max_new_tokens=60).stats
        drafted = sum(stats.step_outcomes[outcome] for outcome in ("accepted", "rejected", "handed over"))
        assert len(draft.asked) == stats.calls["draft"] == drafted
        assert len(target.asked) == stats.calls["target"]
        scored = [body for body in target.asked if body.get("echo")]
        assert len(scored) <= drafted and all(body["max_tokens"] == 1 for body in scored)
        assert len(target.asked) - len(scored) <= stats.step_outcomes["target"] + stats.step_outcomes["handed over"]


def test_relaxed_tokens_say_why_and_what_the_target_would_have_written(target: Fake, draft: Fake) -> None:
    pair = semspec.load(target.url, draft=draft.url)
    result = pair.generate(CHAT, verifier="likely-step:threshold=-3", max_new_tokens=60)
    assert result.text == MIXED and not result.lossless
    found = {
        pair.spelling(event.tokens[i]): (pair.spelling(why.target_token), why.reason)
        for event in result.events
        for i, why in event.relaxed.items()
    }
    assert set(found) == {" owns", " 5"} and found[" owns"][0] == " has" and found[" 5"][0] == " 4"
    assert "log-probability" in found[" 5"][1]


@pytest.mark.parametrize(
    "dialect",
    [
        {"echo", "tokenize"},  # says nothing about stop strings
        {"echo", "ignores", "tokenize"},  # takes any field, and does nothing with it
        {"echo", "names_stop", "tokenize"},
        {"prompt_logprobs", "keeps_stop", "tokenize"},
        {"echo", "keeps_stop"},  # the prompt has to be text
        {"echo", "keeps_stop", "tokenize", "drops", "shows_end"},  # vLLM: special tokens are not echoed, the end is
        {"echo", "keeps_stop", "tokenize", "last"},  # ours
        {"prompt_logprobs", "keeps_stop", "tokenize", "last"},
    ],
)
def test_servers_that_can_do_different_things_write_the_same(target: Fake, draft: Fake, dialect: set[str]) -> None:
    target.dialect = draft.dialect = frozenset(dialect)
    pair = semspec.load(target.url, draft=draft.url)
    prompt = CHAT if "tokenize" in dialect else f"Q: {QUESTION}\nA:\n"
    for verifier, text in (("likely-step", TARGETS), ("accept-all-steps:lead=0", MIXED), ("none", TARGETS)):
        assert pair.generate(prompt, verifier=verifier, max_new_tokens=60).text == text


@pytest.mark.parametrize("form", ["echo", "prompt_logprobs"])
def test_only_the_step_is_scored_where_a_server_can(target: Fake, draft: Fake, form: str) -> None:
    target.dialect = frozenset({form, "keeps_stop", "tokenize", "last"})
    pair = semspec.load(target.url, draft=draft.url)
    target.asked.clear()
    result = pair.generate(CHAT, verifier="likely-step", max_new_tokens=60)
    scored = [body for body in target.asked if body.get(form)]
    assert result.text == TARGETS and result.stats.step_outcomes["accepted"]
    for body, step in zip(scored, WRONG, strict=True):
        assert len(tokens(step)) < body["prompt_logprobs_last"] <= len(f"{step}\n\n".encode()) + 1
    target.dialect -= {"last"}
    pair = semspec.load(target.url, draft=draft.url)
    target.asked.clear()
    assert pair.generate(CHAT, verifier="likely-step", max_new_tokens=60).text == TARGETS
    assert not any("prompt_logprobs_last" in body for body in target.asked)


def test_a_step_with_more_tokens_than_was_thought_is_scored_again(
    target: Fake, draft: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step decides alike whatever was guessed; too few tokens cost one more call."""
    target.dialect |= {"last"}
    pair = semspec.load(target.url, draft=draft.url)
    whole = pair.generate(CHAT, verifier="likely-step:threshold=-3", max_new_tokens=60)
    reasons = [why.reason for event in whole.events for why in event.relaxed.values()]
    for few in (1, 3):
        monkeypatch.setattr("semspec.remote.decoder.TextDecoder.reach", lambda *_, few=few: few)
        target.asked.clear()
        again = pair.generate(CHAT, verifier="likely-step:threshold=-3", max_new_tokens=60)
        assert again.text == whole.text == MIXED
        assert [why.reason for event in again.events for why in event.relaxed.values()] == reasons
        scored = [body for body in target.asked if body.get("echo")]
        assert ["prompt_logprobs_last" in body for body in scored] == [True, False] * (len(scored) // 2)


def test_a_draft_may_have_other_tokens(target: Fake, draft: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is exchanged: a draft that writes letter by letter proposes the same steps."""
    plain = draft.next
    draft.next = lambda context: (plain(context) or "")[:1] or None  # type: ignore[method-assign]
    pair = semspec.load(target.url, draft=draft.url)
    assert pair.generate(CHAT, verifier="accept-all-steps:lead=0", max_new_tokens=60).text == MIXED
    assert pair.generate(CHAT, verifier="likely-step", max_new_tokens=60).text == TARGETS


def test_stop_strings_lengths_and_seeds(target: Fake, draft: Fake) -> None:
    pair = semspec.load(target.url, draft=draft.url)
    for verifier in ("none", "accept-all-steps:lead=0", "likely-step"):
        result = pair.generate(CHAT, verifier=verifier, max_new_tokens=60, stop=" 3")
        assert (result.text, result.finish_reason) == ("Ana has", "stop")
        result = pair.generate(CHAT, verifier=verifier, max_new_tokens=3)
        assert (result.text, result.finish_reason, len(result.tokens)) == ("Ana has 3", "length", 3)
    target.asked.clear()
    pair.generate(CHAT, verifier="likely-step", max_new_tokens=60, temperature=0.7, top_p=0.9, seed=3)
    assert all(body["temperature"] == (0.1 if body.get("echo") else 0.7) for body in target.asked)
    assert len({body["seed"] for body in target.asked}) == len(target.asked)


def test_markers_of_thinking_are_pieces_of_their_own() -> None:
    """Where a server reports no tokens: else the thinking would never be seen to end."""
    text = "<think>\nOne and two.\n</think>\n\nThree <thinker> [THINK]x"
    assert words(text) == ["<think>", "\nOne", " and", " two.", "\n", "</think>", "\n\nThree", " <thinker>", " ",
                           "[THINK]", "x"]  # fmt: skip
    assert words("") == [] and "".join(words(" a  b\n")) == " a  b\n"


def test_only_the_target_ends_the_thinking(target: Fake, draft: Fake) -> None:
    target.script[QUESTION] = ["<think>One.", "Two.", "Three.</think>", "The end."]
    draft.script[QUESTION] = ["<think>One.", "Too.</think>", "Three.</think>", "Never said."]
    pair = semspec.load(target.url, draft=draft.url)
    result = pair.generate(CHAT, verifier="accept-all-steps:lead=0,hand_over=false", max_new_tokens=60)
    assert result.text == "\n\n".join(target.script[QUESTION])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"verifier": "exact"}, "compares single tokens"),
        ({"verifier": "semantic"}, "no hidden states"),
        ({"verifier": "semantic+"}, "no judge"),
        ({"verifier": "spec-thinking"}, "asks inside a step"),
        ({"verifier": "glimprouter"}, "asks inside a step"),
        ({"verifier": "likely-step:steps=2"}, "steps cannot"),
        ({"verifier": "likely-step:candidates=2"}, "candidates cannot"),
        ({"verifier": "none", "logprobs": 2}, "logprobs cannot"),
        ({"verifier": "none", "max_new_tokens": 9999}, "context of 4096"),
        ({"verifier": "none", "ignore_eos": True}, "ignore_eos cannot"),
        ({"verifier": "none", "cache_salt": "mine"}, "cache_salt cannot"),
    ],
)
def test_what_servers_cannot_do_is_refused_before_anything_is_asked(
    target: Fake, draft: Fake, options: dict[str, object], word: str
) -> None:
    pair = semspec.load(target.url, draft=draft.url)
    target.asked.clear()
    with pytest.raises(BadRequest, match=word):
        pair.generate(CHAT, **options)
    assert not target.asked


def test_an_address_may_be_written_in_several_ways(target: Fake, draft: Fake) -> None:
    root = target.url.removesuffix("/v1")
    for given in (root, f"{root}/", f"{root}/v1/", root.upper(), f"{root}/v1#fake", f"{root}/v1/#fake"):
        pair = semspec.load(given, draft=draft.url)
        assert pair.servers.target.connection.url == target.url, given
    for given in (f"{root}/v1/completions", f"{root}/v2"):
        with pytest.raises(BadRequest, match="up to its /v1"):
            semspec.load(given)


def test_pairs_that_cannot_be_are_refused_at_the_start(target: Fake, draft: Fake) -> None:
    for wrong, word in (
        (lambda: semspec.load(target.url, draft="pocket-draft"), "not; give the address"),
        (lambda: semspec.load("pocket", draft=draft.url), "the target pocket is not"),
        (lambda: semspec.load(target.url, dtype="float32"), "dtype is for models loaded here"),
        (lambda: semspec.load(target.url, draft=draft.url, allow_lossy=False), "lossy"),
        (lambda: semspec.load("http://me:secret@host/v1"), "give a key in the environment"),
        (lambda: semspec.load(f"{target.url}#other"), "has no model 'other'"),
        (lambda: semspec.load(target.url).generate(CHAT, verifier="likely-step"), "needs a draft"),
    ):
        with pytest.raises(BadRequest, match=word) as caught:
            wrong()
        assert "secret" not in str(caught.value)
    target.dialect = frozenset({"keeps_stop", "tokenize"})
    with pytest.raises(BadRequest, match="no log-probabilities of prompts"):
        semspec.load(target.url, draft=draft.url)
    assert semspec.load(target.url).generate(CHAT, verifier="none").text == TARGETS


def test_pieces_without_end_are_forgotten_and_no_number_means_two() -> None:
    pieces = Pieces(most=100)
    first = [pieces.number(f"marker {i}") for i in range(KEPT - 1)]
    numbers = [pieces.number(f"word {i}") for i in range(500)]
    assert len(set(first + numbers)) == len(first) + 500
    assert [pieces.text(n) for n in first] == [f"marker {i}" for i in range(KEPT - 1)]
    assert pieces.text(numbers[-1]) == "word 499" and pieces.text(numbers[0]) == ""
    assert pieces.number("word 0") not in numbers
