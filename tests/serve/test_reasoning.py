"""However the text is cut, thinking and answer come out the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semspec.serve.reasoning import Splitter

MARKERS = ("<think>", "</think>")
TEXTS = st.lists(st.sampled_from(["<think>", "</think>", "<", "</thi", "nk>", " ", "\n", "a", "words"])).map("".join)


def reference(text: str, begun: bool) -> tuple[str, str]:
    if not begun:
        if not text.lstrip().startswith("<think>"):
            return "", text
        text = text.partition("<think>")[2]
    thought, _, answer = text.partition("</think>")
    return thought, answer


@given(TEXTS, st.booleans(), st.data())
def test_the_split_does_not_depend_on_the_pieces(text: str, begun: bool, data: st.DataObject):
    splitter, at, parts = Splitter(MARKERS, begun), 0, []
    while at < len(text):
        size = data.draw(st.integers(1, 4))
        parts += splitter.feed([(text[at : at + size], at)])
        at += size
    parts += splitter.feed([], final=True)
    found = {"reasoning": "", "content": ""}
    for channel, piece, mark in parts:
        found[channel] += piece
        assert piece in text[mark : mark + 4], "every piece keeps its mark"
    assert (found["reasoning"], found["content"]) == reference(text, begun)


def test_nothing_is_held_back_longer_than_a_marker_may_take():
    splitter = Splitter(MARKERS)
    assert splitter.feed([("<th", 0)]) == []
    assert splitter.feed([("ink>I see", 1)]) == [("reasoning", "I see", 1)]
    assert splitter.feed([(" <", 2)]) == [("reasoning", " ", 2)]
    assert splitter.feed([("b", 3)]) == [("reasoning", "<", 2), ("reasoning", "b", 3)]
    assert Splitter(None).feed([("<think>", 0)]) == [("content", "<think>", 0)]
