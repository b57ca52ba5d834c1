"""However an answer is cut into pieces, the same content and calls come out of it, and no part of a marker."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec.errors import BadRequest
from semspec.serve.tools.families import STYLES, style_of
from semspec.serve.tools.parser import Parser
from tests.checkpoints import make_tokenizer

NAMES = frozenset({"weather", "add"})
ARGUMENTS = st.dictionaries(
    st.text(max_size=6),
    st.integers() | st.text(max_size=8) | st.lists(st.booleans(), max_size=2) | st.just({"in": {"the": "}]{["}}),
    max_size=3,
)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), max_size=3)
MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|channel|>", "<|message|>",
           "<|end|>", "<|start|>", "analysis", "```json", "```", "[", "]", ",", ";", "{", "}", '"name": "add"',
           '"arguments": ', '"parameters": {"a": 1', '{"name": "weather", "arguments": {"city": "Rome"}}', "\n", " ",
           "<tool", "_call>", "words", '"', "\\", ":", "to=functions.add "]  # fmt: skip


def parsed(parser: Parser, pieces: list[str]) -> tuple[str, str, list[list[str]]]:
    found: dict[str, str] = {"content": "", "reasoning": ""}
    calls: list[list[str]] = []
    for i, text in enumerate([*pieces, ""]):
        for piece in parser.feed(text, final=i == len(pieces)):
            if piece.kind == "call":
                calls.append([piece.text, ""])
            elif piece.kind == "arguments":
                calls[-1][1] += piece.text
            else:
                found[piece.kind] += piece.text
    return found["content"], found["reasoning"], calls


def cut(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def written(family: str, before: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """As models of the family write them."""
    objects = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    if family == "hermes":
        return before + "".join(f"\n<tool_call>\n{each}\n</tool_call>" for each in objects)
    if family == "llama3":
        each = [json.dumps({"type": "function", "name": name, "parameters": given}) for name, given in calls]
        return before + ("<|python_tag|>" + "; ".join(each) if calls else "")
    if family == "mistral":
        return before + (f"[TOOL_CALLS][{', '.join(objects)}]" if calls else "")
    if family == "harmony":
        messages = [
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(given)}<|call|>"
            for name, given in calls
        ]
        last = [f"<|channel|>final<|message|>{before}"] if before else []
        return "<|start|>assistant".join(["<|channel|>analysis<|message|>hm<|end|>", *last, *messages])
    return "```json\n[" + ",\n".join(objects) + "]\n```" if calls else before


@settings(max_examples=60)
@given(st.sampled_from(sorted(STYLES)), st.sampled_from(["", "Let me see.", "a < b"]), CALLS, st.data())
def test_calls_are_found_however_they_are_cut(
    family: str, before: str, calls: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    text = written(family, before, calls)
    content, reasoning, found = parsed(STYLES[family].parser(NAMES), cut(text, data))
    assert [(name, json.loads(given)) for name, given in found] == calls
    assert content == ("" if family == "json" and calls else before)
    assert reasoning == ("hm" if family == "harmony" else "")


@settings(max_examples=200)
@given(
    st.sampled_from(sorted(STYLES)), st.lists(st.sampled_from(MARKERS) | st.text(max_size=5), max_size=12), st.data()
)
def test_any_text_gives_the_same_however_it_is_cut(family: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    make = STYLES[family].parser
    whole = parsed(make(NAMES), [text])
    assert parsed(make(NAMES), cut(text, data)) == whole
    assert parsed(make(NAMES), list(text)) == whole, "character by character"


def test_arguments_come_as_they_are_written_and_no_marker_is_given_out() -> None:
    parser = STYLES["hermes"].parser(NAMES)
    assert parser.feed("Yes.") == [("content", "Yes.")]
    assert parser.feed("\n<tool") == []
    assert parser.feed('_call>\n{"name": "add", "arguments": {"a": 1') == [("call", "add"), ("arguments", '{"a": 1')]
    assert parser.feed(', "b"') == [("arguments", ', "b"')]
    assert parser.feed(": 2}") == [("arguments", ": 2}")]
    assert parser.feed("}\n</tool_call>", final=True) == []


def test_a_mistral_name_before_its_arguments_and_arguments_before_a_name() -> None:
    text = '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{"city": "Rome"}'
    assert parsed(STYLES["mistral"].parser(NAMES), list(text)) == (
        "", "", [["add", '{"a": 1}'], ["weather", '{"city": "Rome"}']]
    )  # fmt: skip
    text = '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>'
    assert parsed(STYLES["hermes"].parser(NAMES), list(text))[2] == [["add", '{"a": 1}']]


@pytest.mark.parametrize("text", ['{"name": "Anna", "age": 7}', '{"a": 1}', "[1, 2]", '```json\n{"x": 1}\n```', "{"])
@pytest.mark.parametrize("family", ["json", "llama3"])
def test_json_that_is_no_call_is_an_answer(family: str, text: str) -> None:
    assert parsed(STYLES[family].parser(NAMES), list(text)) == (text, "", [])


def test_an_unfinished_call_is_no_content() -> None:
    assert parsed(STYLES["hermes"].parser(NAMES), ['Yes. <tool_call>\n{"na']) == ("Yes.", "", [])
    begun = parsed(STYLES["hermes"].parser(NAMES), ['<tool_call>{"name": "add", "arguments": {"a": '])
    assert begun == ("", "", [["add", '{"a": ']])


@pytest.mark.parametrize("family", sorted(STYLES))
def test_a_forced_call_is_read_with_its_beginning(family: str) -> None:
    style = STYLES[family]
    closing = "}" if family != "harmony" else ""
    found = parsed(style.parser(NAMES), [style.forced("add"), '{"a": 1}' + closing])
    assert found == ("", "", [["add", '{"a": 1}']])


@pytest.mark.parametrize(
    ("specials", "template", "family"),
    [
        (("<|channel|>", "<|message|>"), "", "harmony"),
        (("[TOOL_CALLS]",), "", "mistral"),
        (("<tool_call>",), "", "hermes"),
        ((), "{{ '<tool_call>' }}", "hermes"),
        (("<|python_tag|>",), "", "llama3"),
        ((), "{{ tools }}", "json"),
    ],
)
def test_the_family_is_known_by_its_markers(specials: tuple[str, ...], template: str, family: str) -> None:
    tokenizer = make_tokenizer(("<eos>", *specials))
    tokenizer.chat_template = template
    assert style_of(tokenizer) is STYLES[family] and style_of(tokenizer, "json") is STYLES["json"]
    with pytest.raises(BadRequest, match="hermes"):
        style_of(tokenizer, "nonsense")
