"""What a chat request may ask of the model's chat template, and what it may not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from semspec.serve.limits import Limits, Settings
from tests.serve.live import WAIT, Live, serving
from tests.serve.scripted import scripted_pair

ANSWERS = {"hello": ["Good day."], "quickly": ["Bye."], "effort high": ["At length."], "Once": [" upon a time."]}
SETTINGS = Settings(name="s", limits=Limits(new_tokens=500))
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    pair = scripted_pair(ANSWERS)
    with serving(lambda: pair, SETTINGS) as live:
        yield live


def ask(live: Live, **more: Any) -> Any:
    return live.post("/v1/chat/completions", {"model": "s", "messages": HELLO, "temperature": 0} | more)


def content(live: Live, **more: Any) -> str:
    answer = ask(live, **more)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_a_template_gets_its_variables(live: Live):
    assert content(live) == "Good day."
    assert content(live, chat_template_kwargs={"enable_thinking": False}) == "Bye."
    assert content(live, chat_template_kwargs={"enable_thinking": True}) == "Good day."
    assert content(live, reasoning_effort="high") == "At length."
    client = live.openai().chat.completions
    assert client.create(model="s", messages=HELLO, reasoning_effort="high").choices[0].message.content == "At length."


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "documents", "add_generation_prompt", "chat_template", "conversation", "tokenize", "self",
     "bos_token", "eos_token", "range", "namespace", "lipsum", "raise_exception", "__class__", "a b", "", "x" * 65,
     "return_dict", "tokenizer_kwargs", "padding", "max_length"],
)  # fmt: skip
def test_nothing_of_ours_can_be_replaced(live: Live, name: str):
    refusal = ask(live, chat_template_kwargs={name: "x"})
    assert refusal.status_code == 400 and "may not set" in refusal.json()["error"]["message"]


def test_what_a_template_does_not_use_is_told_and_may_be_ignored(live: Live, caplog: pytest.LogCaptureFixture):
    refusal = ask(live, chat_template_kwargs={"verbose": True})
    assert refusal.status_code == 400 and "does not use 'verbose'" in refusal.json()["error"]["message"]
    for more in ({"surprise": 1}, {"web_search_options": {}}, {"messages": [HELLO[0] | {"mood": "good"}]}):
        assert ask(live, **more).status_code == 400
    pair = scripted_pair(ANSWERS)
    caplog.set_level("INFO", "semspec.serve")
    with serving(lambda: pair, replace(SETTINGS, ignore_unknown=True)) as lenient:
        more = {"surprise": 1, "web_search_options": {}, "chat_template_kwargs": {"verbose": True}}
        assert content(lenient, messages=[HELLO[0] | {"mood": "good"}], **more) == "Good day."
        assert ask(lenient, temperature="warm", surprise=1).status_code == 400, "what is known is checked as ever"
        assert ask(lenient, chat_template_kwargs={"messages": []}).status_code == 400
    named = [record.fields["fields"] for record in caplog.records if record.getMessage() == "ignored"]
    assert ["messages.mood", "surprise", "web_search_options"] in named and ["verbose"] in named


def test_hostile_values_of_variables_end_as_a_400(live: Live):
    for value in ({"__class__": 1}, "{{ 7 * 7 }}", ["x"] * 1000, {"a": {"b": {}}}, 10**400, "\x00"):
        answer = ask(live, chat_template_kwargs={"reasoning_effort": value})
        assert answer.status_code in (200, 400), answer.text
    assert ask(live, chat_template_kwargs={"reasoning_effort": "x" * 10_001}).status_code == 400


NEST = '{"a":' * 500 + "1" + "}" * 500
CALLED = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": NEST}}]}]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f", "parameters": "NEST"}}]}),
        ("/v1/chat/completions", {"chat_template_kwargs": {"reasoning_effort": "NEST"}}),
        ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": "NEST"}}}),
        ("/v1/chat/completions", {"guided_json": NEST}),
        ("/v1/chat/completions", {"messages": CALLED}),
        ("/v1/messages", {"max_tokens": 5, "tools": [{"name": "f", "input_schema": "NEST"}]}),
        ("/v1/responses", {"messages": None, "input": "x", "metadata": "NEST"}),
        ("/api/chat", {"format": "NEST"}),
    ],
)
def test_what_is_nested_too_deep_is_told(live: Live, path: str, more: dict[str, Any]):
    body = json.dumps({"model": "s", "messages": HELLO} | more).replace('"NEST"', NEST)
    answer = httpx.post(live.url + path, content=body, headers={"content-type": "application/json"}, timeout=WAIT)
    error = answer.json()["error"]
    told = error if path.startswith("/api/") else error["message"]  # Ollama's errors are texts
    assert answer.status_code == 400 and "deep" in told, answer.text[:300]


def test_an_answer_that_has_begun_is_gone_on_with():
    template = "{% for m in messages %}<go>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<go>{% endif %}"
    pair = scripted_pair({"tell": ["Once", " upon a time."]}, template=template)
    with serving(lambda: pair, SETTINGS) as live:
        messages = [{"role": "user", "content": "tell"}, {"role": "assistant", "content": "Once"}]
        assert content(live, messages=messages, continue_final_message=True) == " upon a time."
        both = ask(live, messages=messages, continue_final_message=True, add_generation_prompt=True)
        assert both.status_code == 400 and "exclude each other" in both.text


def test_a_developer_is_the_system_to_templates_that_know_none(live: Live):
    def tokens(role: str) -> list[int]:
        return live.post("/tokenize", {"messages": [{"role": role, "content": "be kind"}]}).json()["tokens"]

    assert tokens("developer") == tokens("system") != tokens("user")


@pytest.mark.parametrize(
    "more",
    [
        {"n": None, "top_k": None, "tools": None, "tool_choice": None, "parallel_tool_calls": None, "priority": None},
        {"reasoning_effort": None, "chat_template_kwargs": None, "logit_bias": None, "response_format": None},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "tool_choice": "auto"},
        {"skip_special_tokens": True, "use_beam_search": False, "length_penalty": 1.0, "verbosity": "medium"},
        {"stream_options": None, "functions": [], "function_call": "auto", "top_logprobs": 0, "store": False},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]},
        {"messages": [{"role": "assistant", "content": None, "reasoning": "a", "reasoning_content": "a"}, *HELLO]},
    ],
)
def test_values_that_ask_for_nothing_are_taken(live: Live, more: dict[str, Any]):
    assert content(live, **more) == "Good day."
