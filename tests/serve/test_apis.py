"""The same model through other APIs, each with its own client: OpenAI's Responses, Anthropic's Messages, Ollama."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from semspec.serve.limits import Limits, Settings
from semspec.serve.schema.anthropic import MessagesRequest
from semspec.serve.schema.requests import ChatRequest
from tests.serve.live import JSON, WAIT, Live, serving
from tests.serve.scripted import scripted_pair

CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
ANSWERS = {
    "hello": ["<think>", "Hm.", "</think>", "\n\nGood day."],
    "be brief": ["Hi."],
    "rome": ["I look.", f"\n<tool_call>{CALL}</tool_call>"],
    "called weather": ["It is sunny."],
    "raw text": [" goes on"],
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"type": "function", "name": "weather", "parameters": SCHEMA}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    pair = scripted_pair(ANSWERS, think=True)
    settings = Settings(name="s", draft="d", limits=Limits(new_tokens=500), tool_parser="hermes")
    with serving(lambda: pair, settings) as live:
        yield live


# -- OpenAI's Responses


def test_a_response_and_its_events(live: Live):
    responses = live.openai().responses
    whole = responses.create(model="s", input="hello", temperature=0)
    assert whole.status == "completed" and whole.output_text.strip() == "Good day."
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.output[0].content[0].text == "Hm." and whole.usage.output_tokens > 3
    events = list(responses.create(model="s", input="hello", temperature=0, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    for name in (
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ):
        assert f"response.{name}" in kinds
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text and events[-1].response.output_text == text
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "Hm."


def test_a_response_calls_and_gets_the_result(live: Live):
    responses = live.openai().responses
    first = responses.create(model="s", input=[{"role": "user", "content": "rome"}], tools=[TOOL], instructions="x")
    call = first.output[-1]
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Rome"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items: Any = [{"role": "user", "content": "rome"}, *[i.model_dump() for i in first.output], result]
    assert responses.create(model="s", input=items, tools=[TOOL]).output_text == "It is sunny."
    events = list(responses.create(model="s", input="rome", tools=[TOOL], stream=True))
    given = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    assert json.loads(given) == {"city": "Rome"}
    with live.openai().responses.stream(model="s", input="rome", tools=[TOOL]) as stream:
        assert stream.get_final_response().output[-1].type == "function_call", "the client's own accumulation"


def test_a_response_that_is_cut_and_one_that_is_refused(live: Live):
    responses = live.openai().responses
    cut = responses.create(model="s", input="hello", max_output_tokens=4)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    for more, words in (
        ({"previous_response_id": "resp_1"}, "not kept here"),
        ({"input": [{"type": "image"}]}, "type"),
        ({"extra_body": {"surprise": 1}}, "surprise"),
        ({"temperature": 1000}, "temperature"),
    ):
        with pytest.raises(openai.BadRequestError) as refusal:
            responses.create(**{"model": "s", "input": "hello"} | more)
        assert words in refusal.value.message, refusal.value.message
    assert responses.create(model="s", input="hello", instructions="be brief").output_text == "Hi."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", [r'"\ud800"', "NaN", "[-Infinity]", r'{"\udfff": 1}'])
@pytest.mark.parametrize(
    "more",
    [
        '"metadata": {"a": %s}',
        '"tools": [{"type": "function", "name": "f", "parameters": {"a": %s}}]',
        '"text": {"format": {"type": "text", "a": %s}}',
    ],
)
def test_a_response_repeats_only_what_json_can_spell(live: Live, more: str, value: str, stream: bool):
    body = f'{{"model": "s", "input": "hello", "stream": {json.dumps(stream)}, {more % value}}}'
    refusal = httpx.post(live.url + "/v1/responses", content=body, headers=JSON, timeout=WAIT)
    assert refusal.status_code == 400 and refusal.json()["error"]["message"]


# -- Anthropic's Messages


def claude(live: Live) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0)


def test_a_message_and_its_events(live: Live):
    given: Any = {"model": "s", "max_tokens": 100, "messages": [{"role": "user", "content": "hello"}]}
    message = claude(live).messages.create(**given)
    assert [block.type for block in message.content] == ["thinking", "text"] and message.stop_reason == "end_turn"
    assert message.content[0].thinking == "Hm." and message.content[1].text.strip() == "Good day."
    assert message.usage.input_tokens > 3 and message.usage.output_tokens > 3
    with claude(live).messages.stream(**given) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "content_block_delta" in kinds
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in message.content]
    assert final.usage == message.usage
    assert claude(live).messages.create(**given | {"max_tokens": 3}).stop_reason == "max_tokens"
    stops: Any = given | {"stop_sequences": ["never", "d d"]}
    stopped = claude(live).messages.create(**stops)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "d d")
    assert stopped.content[-1].text.strip() == "Goo"
    with claude(live).messages.stream(**stops) as stream:
        assert stream.get_final_message().stop_sequence == "d d"
    system: Any = [{"type": "text", "text": "be brief"}]
    assert claude(live).messages.create(**given, system=system).content[0].text == "Hi."


def test_a_message_says_what_of_its_prompt_was_cached(pocket: Live):
    turns: Any = [{"role": "user", "content": "Mia has 4 bags with 6 pens each. Tom has 5 more. Is that in a cache?"}]
    given: Any = {"model": "pocket", "max_tokens": 3, "messages": turns}

    def counted(usage: Any) -> tuple[int, int]:
        return usage.input_tokens, usage.cache_read_input_tokens

    read, cached = counted(claude(pocket).messages.create(**given).usage)
    whole = pocket.openai().chat.completions.create(**given).usage
    assert read + cached == whole.prompt_tokens and cached < whole.prompt_tokens - 16, "as OpenAI's, but apart"
    expected = (whole.prompt_tokens - (again := whole.prompt_tokens_details.cached_tokens), again)
    assert again > cached and counted(claude(pocket).messages.create(**given).usage) == expected
    events = list(claude(pocket).messages.create(**given, stream=True))
    (start,) = [event.message.usage for event in events if event.type == "message_start"]
    (end,) = [event.usage for event in events if event.type == "message_delta"]
    assert counted(start) == counted(end) == expected and end.output_tokens == 3


def test_a_message_that_ends_with_the_assistants_goes_on_from_it(live: Live):
    """As Anthropic's API has it; a call of the assistant's is complete."""
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Good"}]
    body = {"model": "s", "max_tokens": 5, "messages": turns}
    assert MessagesRequest.model_validate(body).chat(ChatRequest).continue_final_message
    as_chat = {"messages": turns, "continue_final_message": True}
    count = live.post("/tokenize", as_chat).json()["count"]
    assert live.post("/v1/messages", body).json()["usage"]["input_tokens"] == count
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    for last in ([use], [{"type": "text", "text": "I look."}, use], [], ""):
        given = body | {"messages": [turns[0], {"role": "assistant", "content": last}]}
        assert not MessagesRequest.model_validate(given).chat(ChatRequest).continue_final_message


def test_a_message_calls_and_gets_the_result(live: Live):
    client, tools = claude(live), [{"name": "weather", "input_schema": SCHEMA}]
    turns: Any = [{"role": "user", "content": "rome"}]
    message = client.messages.create(model="s", max_tokens=200, messages=turns, tools=tools)
    use = message.content[-1]
    assert (use.type, use.name, use.input) == ("tool_use", "weather", {"city": "Rome"})
    assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    turns += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(model="s", max_tokens=200, messages=turns, tools=tools)
    assert answer.content[0].text == "It is sunny."
    with pytest.raises(anthropic.BadRequestError) as refusal:
        client.messages.create(model="s", max_tokens=10, messages=[{"role": "user", "content": [{"type": "image"}]}])
    assert refusal.value.body["type"] == "error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="t", max_tokens=10, messages=turns[:1])


@pytest.mark.parametrize("tool_choice", [None, {"type": "any"}, {"type": "tool", "name": "weather"}, {"type": "none"}])
@pytest.mark.parametrize(
    "system", [None, "be brief", [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]]
)
def test_tokens_are_counted_as_a_message_has_them(live: Live, system: Any, tool_choice: Any):
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": [{"type": "text", "text": "Good"}]}]
    asked: Any = {"model": "s", "messages": turns[:1], "tools": [{"name": "weather", "input_schema": SCHEMA}]}
    for more in ({}, {"tools": []}, {"messages": turns}, {"thinking": {"type": "disabled"}}):
        given: Any = asked | more | ({"system": system} if system else {})
        if given["tools"] and given["messages"] == asked["messages"] and tool_choice:
            given["tool_choice"] = tool_choice
        usage = claude(live).messages.create(**given, max_tokens=1).usage
        counted = claude(live).messages.count_tokens(**given)
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        assert claude(live).beta.messages.count_tokens(**given).input_tokens == counted.input_tokens
    assert live.idle()


def test_a_count_is_refused_as_a_message_is(live: Live):
    client, asked = claude(live), [{"role": "user", "content": "hello"}]
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.count_tokens(model="t", messages=asked)  # type: ignore[arg-type]
    assert missing.value.body["type"] == "error"
    for more in ({"messages": []}, {"surprise": 1}, {"n": 2}, {"tool_choice": {"type": "any"}}, {"max_tokens": True}):
        refusal = live.post("/v1/messages/count_tokens", {"model": "s", "messages": asked} | more)
        assert refusal.status_code == 400 and refusal.json()["type"] == "error"
    assert live.get("/v1/messages/count_tokens").status_code == 405
    assert live.post("/v1/messages/batches", {}).json()["type"] == "error"


def test_counts_and_descriptions_need_a_key_and_counts_are_counted():
    settings = Settings(name="s", keys=("k",), limits=Limits(client_rate=1))
    asked = {"model": "s", "messages": [{"role": "user", "content": "hello"}]}
    with serving(lambda: scripted_pair(ANSWERS), settings) as live:
        key = {"x-api-key": "k"}
        for path in ("/v1/messages/count_tokens", "/api/show"):
            assert live.post(path, asked).status_code == 401
        assert live.get("/api/ps").status_code == 401 and live.post("/api/show", {"model": "s"}, headers=key).is_success
        assert live.post("/v1/messages/count_tokens", asked, headers=key).status_code == 200
        refusal = live.post("/v1/messages/count_tokens", asked, headers=key)
        assert refusal.status_code == 429 and refusal.headers["retry-after"] and refusal.json()["type"] == "error"


# -- Ollama


def test_ollama_chats_and_generates(live: Live):
    client = ollama.Client(host=live.url)
    assert client.list().models[0].model == "s:latest"
    asked: Any = {
        "model": "s:latest",
        "messages": [{"role": "user", "content": "hello"}],
        "options": {"temperature": 0},
    }
    whole = client.chat(**asked)
    assert whole.message.content.strip() == "Good day." and whole.message.thinking == "Hm." and whole.done
    assert whole.eval_count > 3 and whole.prompt_eval_count > 3 and whole.done_reason == "stop"
    parts = list(client.chat(**asked, stream=True))
    assert "".join(p.message.content for p in parts) == whole.message.content and parts[-1].done
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    called = client.chat(model="s", messages=[{"role": "user", "content": "rome"}], tools=[tool]).message.tool_calls
    assert called[0].function.name == "weather" and called[0].function.arguments == {"city": "Rome"}
    assert client.generate(model="s", prompt="hello", system="be brief").response == "Hi."
    long = client.generate(model="s", prompt="hello", options={"num_predict": 3, "num_ctx": 2048}, keep_alive=5)
    assert long.done_reason == "length"
    with pytest.raises(ollama.ResponseError) as refusal:
        client.chat(model="s", messages=[{"role": "user", "content": "x", "images": ["aGk="]}])
    assert refusal.value.status_code == 400 and "images" in refusal.value.error
    assert isinstance(live.post("/api/chat", {"model": "t", "messages": []}).json()["error"], str)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/show"])
def test_ollamas_bodies_need_not_be_said_to_be_json_but_by_a_browser(live: Live, path: str):
    """Its manual's own commands (curl -d) call them a form, litellm calls them nothing."""
    message = {"role": "user", "content": "hello"}
    said: dict[str, Any] = {"/api/chat": {"messages": [message]}, "/api/generate": {"prompt": "hello"}}
    body = json.dumps({"model": "s"} | said.get(path, {})).encode()
    for kind in ({}, {"content-type": "application/x-www-form-urlencoded"}, {"content-type": "text/plain"}):
        assert httpx.post(live.url + path, content=body, headers=kind, timeout=WAIT).status_code == 200
        for told in ({"origin": live.url}, {"referer": "http://evil.example/"}, {"sec-fetch-site": "cross-site"}):
            refusal = httpx.post(live.url + path, content=body, headers=kind | told, timeout=WAIT)
            assert refusal.status_code == 400 and "application/json" in refusal.json()["error"]


def test_ollama_is_told_of_the_model(live: Live):
    client = ollama.Client(host=live.url)
    for name in ("s", "s:latest"):
        told = client.show(name)
        assert told.capabilities == ["completion", "tools", "thinking"]
        info = told.modelinfo
        assert info[f"{info['general.architecture']}.context_length"] == 4096
    assert live.post("/api/show", {"name": "s", "verbose": True}).json() == told.model_dump(
        by_alias=True, mode="json"
    ) | {"modified_at": live.get("/api/tags").json()["models"][0]["modified_at"]}
    (running,) = client.ps().models
    assert (running.model, running.context_length) == ("s:latest", 4096) and running.expires_at.year > 9000
    with pytest.raises(ollama.ResponseError) as missing:
        client.show("t")
    assert missing.value.status_code == 404 and "'t'" in missing.value.error
    for body in ({}, {"model": "s", "name": "t"}, {"model": 3}, {"model": "s", "surprise": 1}, [], {"model": None}):
        refusal = live.post("/api/show", body)
        assert refusal.status_code == 400 and isinstance(refusal.json()["error"], str)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"), ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"), ("/v1/chat/completion", "/v1/chat/completions"), ("/models", "/v1/models"),
    ],
)  # fmt: skip
def test_a_path_that_is_nearly_right_is_answered_with_the_right_one(live: Live, asked: str, meant: str):
    refusal = live.post(asked, {"model": "s"})
    assert refusal.status_code == 404 and f"did you mean {meant}" in refusal.json()["error"]["message"]


@pytest.mark.parametrize("body", [b'{"prompt": "caf\xe9"}', b'{"max_tokens": 1' + b"0" * 9000 + b"}"])
def test_a_body_that_python_cannot_read_is_refused_in_words(live: Live, body: bytes):
    refusal = httpx.post(f"{live.url}/v1/completions", content=body, headers=JSON, timeout=WAIT)
    assert refusal.status_code == 400 and "send UTF-8" in refusal.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/api/embed", "/api/embeddings", "/v1/embeddings", "/api/pull", "/api/nothing", "/no"]
)
def test_what_cannot_be_had_is_refused_in_words(live: Live, path: str):
    refusal = live.post(path, {"model": "s", "input": "hello"})
    error = refusal.json()["error"]
    told = error if path.startswith("/api/") else error["message"]
    assert refusal.status_code == 404 and len(told.split()) > 5
    assert ("embeddings" in told) == ("embed" in path)
    assert (wrong := live.get("/api/chat")).status_code == 405 and wrong.headers["allow"] == "POST"
    with pytest.raises(ollama.ResponseError, match="embedding model"):
        ollama.Client(host=live.url).embed("s", "hello")


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/responses", {"input": "hello", "n": 2}),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "hello"}], "n": 2}),
        ("/api/generate", {"prompt": "hello", "options": {"n": 2}}),
        ("/api/generate", {"prompt": "hello", "raw": True, "stream": False, "options": {"best_of": 4}}),
    ],
)
def test_these_give_one_answer(live: Live, path: str, more: dict[str, Any]):
    refusal = live.post(path, {"model": "s"} | more)
    error = refusal.json()["error"]
    assert refusal.status_code == 400 and "one answer" in (error if path == "/api/generate" else error["message"])
    assert live.idle()


# -- the rest


def test_tokens_become_text_again(live: Live):
    tokens = live.post("/tokenize", {"prompt": "the quick brown"}).json()["tokens"]
    assert live.post("/detokenize", {"tokens": tokens}).json() == {"prompt": "the quick brown"}
    for wrong in ([], [10**6], [-1], ["a"], [True]):
        assert live.post("/detokenize", {"tokens": wrong}).status_code == 400
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    count = live.post("/tokenize", chat).json()["count"]
    assert live.post("/tokenize", chat | {"add_generation_prompt": False}).json()["count"] == count - 1
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert live.post("/tokenize", chat | {"tools": tools}).json()["count"] > count


def test_a_model_says_what_it_is_and_a_server_how_it_is(live: Live):
    card = live.get("/v1/models").json()["data"][0]
    assert (card["max_model_len"], card["target"], card["draft"]) == (4096, "s", "d")
    assert live.get("/live").status_code == live.get("/ready").status_code == live.get("/health").status_code == 200
    paths = live.get("/openapi.json").json()["paths"]
    assert {"/v1/responses", "/v1/messages", "/api/chat", "/tokenize", "/detokenize", "/live", "/ready"} <= set(paths)
