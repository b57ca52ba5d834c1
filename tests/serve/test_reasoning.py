"""However tokens arrive, thinking and answer come out the same; only tokens mark the thinking, never text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import semspec
from semspec.pocket import problem
from semspec.serve.answers import Choice
from semspec.serve.deltas import TokenOrigin, delta_of
from semspec.serve.reasoning import Splitter
from semspec.text.tokenizer import opens_thinking
from tests.checkpoints import make_tokenizer
from tests.fakes import FakeRunner, script
from tests.serve.live import Live

OPEN, CLOSE = "<think>", "</think>"  # as tokens of their own; the same text may also be spelled by others
TOKENS = st.lists(st.sampled_from([(OPEN, True), (CLOSE, False), ("", True), ("", False)]) | st.sampled_from(
    [(text, None) for text in ("<think>", "</think>", " ", "\n", "a", " words", "")]
))  # fmt: skip


def reference(tokens: list[tuple[str, bool | None]], thinking: bool) -> tuple[str, str]:
    found, blank, answering = {True: "", False: ""}, "", False
    for text, marker in tokens:
        if marker is not None:
            thinking, blank = marker, "" if marker else blank
        elif not thinking and not answering and not text.strip():
            blank += text
        else:
            found[False] += blank
            found[thinking] += text
            blank, answering = "", not thinking
    return found[True], found[False] + blank


@given(TOKENS, st.booleans(), st.data())
def test_the_split_does_not_depend_on_how_tokens_arrive(
    tokens: list[tuple[str, bool | None]], thinking: bool, data: st.DataObject
) -> None:
    splitter, at, parts = Splitter(thinking), 0, []
    while at < len(tokens):
        end = at + data.draw(st.integers(1, 4))
        own = list(enumerate(tokens))[at:end]
        spans = [(text, TokenOrigin("target", i)) for i, (text, _) in own if text]
        parts += splitter.feed(spans, [(i, bool(marker)) for i, (_, marker) in own if marker is not None])
        at = end
    parts += splitter.feed([], final=True)
    found = {"reasoning": "", "content": ""}
    for channel, text, origin in parts:
        found[channel] += text
        assert text == tokens[origin.token][0], "every piece keeps its token"
    assert (found["reasoning"], found["content"]) == reference(
        [t for t in tokens if t[0] or t[1] is not None], thinking
    )


def test_nothing_is_held_back_but_white_space_before_the_answer() -> None:
    def span(text: str, token: int) -> list[tuple[str, TokenOrigin]]:
        return [(text, TokenOrigin("draft", token))]

    splitter = Splitter()
    assert splitter.feed(span("\n", 0)) == []
    assert splitter.feed(span(OPEN, 1), [(1, True)]) == []
    assert [part[:2] for part in splitter.feed(span("I see", 2))] == [("reasoning", "I see")]
    assert [part[:2] for part in splitter.feed(span(CLOSE, 3))] == [("reasoning", CLOSE)], "spelled out, it is text"
    assert splitter.feed([], [(4, False)]) == [], "a special token has no text"
    assert [part[:2] for part in splitter.feed(span("two", 5))] == [("content", "two")]
    assert [part[:2] for part in Splitter(enabled=False).feed(span(OPEN, 0), [(0, True)])] == [("content", OPEN)]


@pytest.mark.parametrize("opened_by_the_prompt", [False, True])
def test_markers_that_are_special_tokens_split_an_answer_too(opened_by_the_prompt: bool) -> None:
    """Their text is skipped by every decoder, and a marker that the user quotes opens nothing."""
    tokenizer = make_tokenizer(("<eos>", OPEN, CLOSE))
    opens, closes = tokenizer.convert_tokens_to_ids([OPEN, CLOSE])
    words = [tokenizer.encode(text, add_special_tokens=False) for text in ("the quick", "brown fox")]
    prompt = [*tokenizer.encode("one two"), opens, *words[0], *([opens] if opened_by_the_prompt else [])]
    answer = [*([] if opened_by_the_prompt else [opens]), *words[0], closes, *words[1]]
    pair = semspec.Pair(FakeRunner(script(answer, len(tokenizer), len(prompt)), len(tokenizer)), tokenizer)
    (ticket,) = pair.submit([(prompt, semspec.Options(verifier="none", max_new_tokens=len(answer), ignore_eos=True))])
    pair.executor.run()
    choice, start = Choice(Splitter(opens_thinking(tokenizer, prompt, (opens, closes)))), 0
    for event in ticket.collect():
        choice.add(delta_of(pair, 0, event, start))
        start += len(event.tokens)
    assert choice.texts["reasoning"].strip() == "the quick" and choice.texts["content"].strip() == "brown fox"
    assert not opens_thinking(tokenizer, [*prompt, *words[0]], (opens, closes)), "quoted further up"


def test_thinking_can_be_bounded_and_a_length_that_ends_inside_it_is_told(pocket: Live) -> None:
    question = problem(2, 3, "test").text
    body = {"model": "pocket", "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 200}

    def ask(**more: Any) -> dict[str, Any]:
        answer = pocket.post("/v1/chat/completions", body | more)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    whole = ask()
    assert whole["finish_reason"] == "stop" and "99" in whole["message"]["content"] and "stop_reason" not in whole
    bounded = ask(max_thinking_tokens=9)
    assert bounded["finish_reason"] == "stop" and bounded["message"]["content"].strip()
    assert whole["message"]["reasoning_content"].startswith(bounded["message"]["reasoning_content"].rstrip())
    assert bounded == ask(max_thinking_tokens=9, speculation={"off": True})
    short = ask(max_tokens=9)
    assert (short["finish_reason"], short["stop_reason"]) == ("length", "thinking")
    assert short["message"]["content"] == ""
    for wrong in (-1, "many", 2**40):
        assert pocket.post("/v1/chat/completions", body | {"max_thinking_tokens": wrong}).status_code in (400, 422)


@pytest.mark.parametrize("off", [True, False], ids=["alone", "drafted"])
def test_tokens_of_thinking_are_counted_from_ids(pocket: Live, off: bool) -> None:
    question = problem(2, 3, "test").text
    body = {"model": "pocket", "temperature": 0, "speculation": {"off": off}}
    chat = pocket.post(
        "/v1/chat/completions", body | {"messages": [{"role": "user", "content": question}], "max_tokens": 200}
    ).json()
    reasoning, usage = chat["choices"][0]["message"]["reasoning_content"], chat["usage"]
    tokens = pocket.post("/tokenize", {"model": "pocket", "prompt": reasoning}).json()
    assert usage["completion_tokens_details"] == {"reasoning_tokens": tokens["count"]} and tokens["count"] > 20
    response = pocket.post("/v1/responses", body | {"input": question, "max_output_tokens": 200}).json()
    assert response["usage"]["output_tokens_details"] == usage["completion_tokens_details"]
    bounded = pocket.post(
        "/v1/responses", body | {"input": question, "max_output_tokens": 200, "max_thinking_tokens": 9}
    )
    assert bounded.json()["usage"]["output_tokens_details"] == {"reasoning_tokens": 9}
