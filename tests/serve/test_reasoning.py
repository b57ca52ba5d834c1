"""However tokens arrive, thinking and answer come out the same; only tokens mark the thinking, never text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semspec.serve.deltas import TokenOrigin
from semspec.serve.reasoning import Splitter

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
