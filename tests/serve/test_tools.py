"""Tools over HTTP, with the real client: calls whole and streamed, forced and refused, and their results sent back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from semspec.serve.limits import Limits, Settings
from tests.serve.live import Live, serving
from tests.serve.scripted import scripted_pair

CALL = '{"name": "weather", "arguments": {"city": "Rome", "days": [1, 2]}}'
ANSWERS = {
    "hello": ["Good day."],
    "rome": ["I look.", f"\n<tool_call>\n{CALL}\n</tool_call>"],
    "both": [f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n", '{"name": "add", "arguments": {}}\n</tool_call>'],
    "any": ['<tool_call>\n{"name": "', 'weather", "arguments": ', '{"city": "Oslo"}}', "\n</tool_call>"],
    "one": ['<tool_call>\n{"name": "weather", "arguments": ', '{"city": "Oslo"}}', "\n</tool_call>"],
    "think": ["<think>", "hm, hm", "</think>", f"\n\n<tool_call>{CALL}</tool_call>"],
    "sunny": ["It is sunny."],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": f"{name} it", "parameters": {"type": "object"}}}
    for name in ("weather", "add")
]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    pair = scripted_pair(ANSWERS, think=True)
    settings = Settings(name="s", limits=Limits(new_tokens=500), tool_parser="hermes")
    with serving(lambda: pair, settings) as live:
        yield live


def ask(live: Live, content: str, **more: Any) -> Any:
    given = {"model": "s", "messages": [{"role": "user", "content": content}], "temperature": 0, "tools": TOOLS}
    return live.openai().chat.completions.create(**(given | more))


def test_a_call_is_found_and_its_result_sent_back(live: Live):
    choice = ask(live, "rome").choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "weather" and call.id.startswith("call_")
    assert json.loads(call.function.arguments) == {"city": "Rome", "days": [1, 2]}
    messages = [
        {"role": "user", "content": "rome"},
        choice.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    answer = ask(live, "", messages=messages)
    assert answer.choices[0].message.content == "It is sunny." and answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.tool_calls is None
    seen = live.post("/tokenize", {"model": "s", "messages": messages})
    assert seen.status_code == 200, seen.text


@pytest.mark.parametrize("content", ["hello", "rome", "both", "think"])
def test_a_stream_adds_up_to_the_whole(live: Live, content: str):
    whole = ask(live, content).choices[0]
    texts: dict[str, str] = {"content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, str]] = {}
    reason = None
    for chunk in ask(live, content, stream=True):
        delta = chunk.choices[0].delta
        for key in texts:
            texts[key] += getattr(delta, key, None) or ""
        for call in delta.tool_calls or []:
            known = calls.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
            known["arguments"] += call.function.arguments or ""
        assert "<" not in texts["content"], "no part of a marker"
        reason = chunk.choices[0].finish_reason or reason
    assert texts["content"] == (whole.message.content or "") and reason == whole.finish_reason
    assert texts["reasoning_content"] == getattr(whole.message, "reasoning_content", "")
    found = [(call["name"], call["arguments"]) for call in calls.values()]
    assert found == [(c.function.name, c.function.arguments) for c in whole.message.tool_calls or []]
    assert len({call["id"] for call in calls.values()}) == len(calls) == {"hello": 0, "both": 2}.get(content, 1)


def test_one_call_only_where_that_is_asked(live: Live):
    message = ask(live, "both", parallel_tool_calls=False).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["weather"]


@pytest.mark.parametrize(
    ("content", "choice"), [("any", "required"), ("one", {"type": "function", "function": {"name": "weather"}})]
)
def test_a_call_can_be_required(live: Live, content: str, choice: Any):
    choice = ask(live, content, tool_choice=choice).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Oslo"}
    assert choice.message.tool_calls[0].function.name == "weather"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_required_call_fits_the_schema_whatever_the_model_likes(live: Live, choice: Any):
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    schema |= {"additionalProperties": False}
    tools = [{"type": "function", "function": {"name": n, "parameters": schema}} for n in ("weather", "news")]
    choice = ask(live, "hello", tools=tools, tool_choice=choice).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name in ("weather", "news") and json.loads(call.function.arguments) == {"city": "Oslo"}
    with pytest.raises(openai.BadRequestError, match="no other form"):
        ask(live, "hello", tool_choice="required", response_format={"type": "json_object"})


@pytest.mark.parametrize(
    ("size", "words"),
    [(40_000, "the prompt has"), (100_000, "schemas of the tools have 100.* at most 100000")],
)
def test_too_many_schemas_are_told_in_terms_of_tools(live: Live, size: int, words: str):
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo"], "description": "x" * size}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    with pytest.raises(openai.BadRequestError, match=words):
        ask(live, "any", tools=tools, tool_choice="required")


def test_no_call_is_looked_for_where_none_is_allowed(live: Live):
    for more in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}, {"tools": []}):
        message = ask(live, "rome", **more).choices[0].message
        assert "<tool_call>" in message.content and message.tool_calls is None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tools": [], "tool_choice": "required"}, "there are no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "not among the tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools"),
        ({"tools": TOOLS * 65}, "at most 128"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[1"}}]}]}, "JSON object"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be_are_told(live: Live, more: dict[str, Any], words: str):
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(live, "hello", **more)
    message = refusal.value.message
    assert words in message and "function-" not in message and "pydantic" not in message, message


FAMILIES: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "mistral": (("[TOOL_CALLS]",), ["[TOOL_CALLS]", f"[{CALL}]"]),
    "mistral with names": (
        ("[TOOL_CALLS]", "[ARGS]"), ["[TOOL_CALLS]", "weather", "[ARGS]", '{"city": "Rome", "days": [1, 2]}'],
    ),
    "llama3": (("<|python_tag|>",), ["<|python_tag|>", CALL.replace("arguments", "parameters")]),
    "harmony": (
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>"),
        ["<|channel|>", "analysis", "<|message|>", "hm", "<|end|>", "<|start|>", "assistant", "<|channel|>",
         "commentary to=functions.weather ", "<|constrain|>", "json", "<|message|>",
         '{"city": "Rome", "days": [1, 2]}', "<|call|>"],
    ),
    "json": ((), [f"```json\n{CALL}\n```"]),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_markers_that_are_special_tokens_are_seen(family: str):
    """Decoders leave them out of texts, and no answer shows them."""
    specials, pieces = FAMILIES[family]
    pair = scripted_pair({"rome": pieces}, specials)
    with serving(lambda: pair, Settings(name="s", limits=Limits(new_tokens=500))) as live:
        choice = ask(live, "rome").choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "weather", {"city": "Rome", "days": [1, 2]}
        )  # fmt: skip
        assert len(call.id) == 9 or not family.startswith("mistral"), "their templates take no others"
        assert getattr(choice.message, "reasoning", "") == ("hm" if family == "harmony" else "")
