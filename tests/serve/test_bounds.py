"""Nothing of a body is looked at without end, whatever path it comes on, and no answer breaks a client."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

import semspec
from semspec.options import Options
from semspec.sampling.logit_options import MAX_BAD_WORDS
from semspec.serve.admission import Admission
from semspec.serve.answers import parsed, written
from semspec.serve.completions import Service
from semspec.serve.http_errors import explain
from semspec.serve.limits import Limits, Settings
from semspec.serve.logs import JsonFormatter
from semspec.serve.ollama import OllamaAnswer
from semspec.serve.schema.anthropic import CountRequest, MessagesRequest
from semspec.serve.schema.ollama import OllamaChat, OllamaGenerate, OllamaShow
from semspec.serve.schema.requests import ChatRequest, CompletionRequest
from semspec.serve.schema.responses import ResponsesRequest
from semspec.serve.schema.tokenize import DetokenizeRequest, TokenizeRequest
from semspec.serve.tokenization import Tokenization
from semspec.text import structured
from tests.serve.live import JSON, WAIT, Live, serving, until
from tests.serve.scripted import scripted_pair

BODIES: list[type[BaseModel]] = [
    ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, OllamaChat, OllamaGenerate, TokenizeRequest,
    DetokenizeRequest, CountRequest, OllamaShow,
]  # fmt: skip
USER = [{"role": "user", "content": "x"}]
HUGE = 10**4299  # as many digits as Python reads


def schemas(part: Any) -> Iterator[dict[str, Any]]:
    """Every part of what pydantic makes of a body."""
    if isinstance(part, dict):
        yield part
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else ():
        yield from schemas(inner)


@pytest.mark.parametrize("body", BODIES)
def test_every_list_ends_at_its_first_fault(body: type[BaseModel]):
    lists = [s for s in schemas(body.__pydantic_core_schema__) if s.get("type") == "list"]
    assert all(s.get("fail_fast") or s.get("max_length") == 0 for s in lists), "a million faults take many seconds"


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (MessagesRequest, {"max_tokens": 5, "messages": USER, "stop_sequences": [1] * 300_000}),
        (MessagesRequest, {"max_tokens": 5, "messages": USER, "stop_sequences": ["a"] * 17}),
        (OllamaChat, {"messages": [{"role": "user", "images": [1] * 300_000}]}),
        (ChatRequest, {"messages": USER, "chat_template_kwargs": {"a": [1] * 300_000}}),
    ],
)
def test_garbage_of_other_apis_is_given_up_too(kind: type[BaseModel], fields: dict[str, Any]):
    with pytest.raises(ValidationError) as refusal:
        kind.model_validate({"model": "x"} | fields)
    assert refusal.value.error_count() <= 2


@pytest.mark.parametrize(
    ("kind", "fields", "name"),
    [
        (CompletionRequest, {"prompt": ["a", "b"]}, "n"),
        (CompletionRequest, {"prompt": ["a", "b"]}, "best_of"),
        (CompletionRequest, {"prompt": "a"}, "max_tokens"),
        (ChatRequest, {"messages": USER}, "max_completion_tokens"),
        (ResponsesRequest, {"input": "x"}, "max_output_tokens"),
        (MessagesRequest, {"messages": USER}, "max_tokens"),
    ],
)
def test_no_number_has_thousands_of_digits(kind: type[BaseModel], fields: dict[str, Any], name: str):
    with pytest.raises(ValidationError) as refusal:
        kind.model_validate({"model": "x"} | fields | {name: HUGE})
    told = explain(RequestValidationError([{**e, "loc": ("body", *e["loc"])} for e in refusal.value.errors()]))
    assert told == f"{name} has to be less than 2147483648"


# -- over HTTP

SAID = "a\u2028b\u2029c\x85d"
ANSWERS = {
    "lines": [SAID],
    "nan": ['<tool_call>\n{"name": "f", "arguments": {"a": [NaN, 1e999, -Infinity, 2.5]}}\n</tool_call>'],
    "half": ['<tool_call>\n{"name": "f", "arguments": {"a": "x\\ud800y"}}\n</tool_call>'],
    "named": ['<tool_call>\n{"name": "f\\ud800", "arguments": {"a": 1}}\n</tool_call>'],
    "text": ['<tool_call>\n{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}\n</tool_call>'],
    "list": ['<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>'],
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    settings = Settings(name="s", limits=Limits(new_tokens=500), tool_parser="hermes")
    with serving(lambda: scripted_pair(ANSWERS, slots=16), settings) as live:
        yield live


def asked(words: str, **more: Any) -> dict[str, Any]:
    return {"model": "s", "max_tokens": 300, "temperature": 0, "messages": [{"role": "user", "content": words}]} | more


def test_huge_numbers_over_http(live: Live):
    for name in ("n", "best_of", "max_tokens"):
        body = b'{"model": "s", "prompt": ["a", "b"], "%s": %s}' % (name.encode(), b"9" * 4300)
        refusal = httpx.post(live.url + "/v1/completions", content=body, headers=JSON, timeout=WAIT)
        assert refusal.status_code == 400 and "less than 2147483648" in refusal.text


def test_lines_end_where_they_end(live: Live):
    """Clients that read lines by Python's own idea of them (httpx, and what is built on it) get whole ones."""
    shapes: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {}), ("/v1/responses", {"messages": None, "input": "lines", "max_tokens": None}),
        ("/v1/messages", {}), ("/api/chat", {"max_tokens": None, "temperature": None}),
    ]  # fmt: skip
    for path, more in shapes:
        body = {k: v for k, v in asked("lines", stream=True, **more).items() if v is not None}
        with httpx.stream("POST", live.url + path, json=body, timeout=WAIT) as answer:
            assert answer.status_code == 200
            lines = [line.removeprefix("data: ") for line in answer.iter_lines()]
        kept = [line for line in lines if line and not line.startswith("event: ") and line != "[DONE]"]
        said = json.dumps([json.loads(line) for line in kept], ensure_ascii=False)
        assert all(sign in said for sign in SAID), path
    assert json.loads(written({"a": SAID + "\r\n"})) == {"a": SAID + "\r\n"}
    assert len(written({SAID: [SAID]}).splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "arguments"),
    [("nan", {"a": [None, None, None, 2.5]}), ("half", {"a": "x?y"}), ("list", {}), ("text", {})],
)
def test_what_no_json_has_is_not_sent(live: Live, words: str, arguments: dict[str, Any]):
    """A model may write it; nobody's answer fails of it."""
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    for stream in (False, True):
        message = live.post("/v1/messages", asked(words, tools=tools, stream=stream))
        assert message.status_code == 200 and ("message_stop" in message.text or not stream)
        said = {"model": "s", "messages": asked(words)["messages"], "tools": [TOOL], "stream": stream}
        ollama = live.post("/api/chat", said)
        calls = [
            call
            for line in ollama.text.splitlines()
            for call in json.loads(line, parse_constant=pytest.fail)["message"].get("tool_calls", ())
        ]
        assert [call["function"] for call in calls] == [{"index": 0, "name": "f", "arguments": arguments}]
        chat = live.post("/v1/chat/completions", asked(words, tools=[TOOL], stream=stream))
        assert chat.status_code == 200 and ("[DONE]" in chat.text or not stream)
        if not stream:
            (use,) = [block for block in message.json()["content"] if block["type"] == "tool_use"]
            assert use["input"] == arguments
            assert chat.json()["choices"][0]["finish_reason"] == "tool_calls"
    assert live.idle()


def test_a_name_with_half_a_character_is_no_call(live: Live):
    for stream in (False, True):
        chat = live.post("/v1/chat/completions", asked("named", tools=[TOOL], stream=stream))
        assert chat.status_code == 200 and "tool_calls" not in chat.text and "f\\\\ud800" in chat.text
    assert parsed('{"a": 1') == parsed("[1]") == parsed("{" * 10**5) == {}


def test_a_schema_is_read_once_on_its_way(live: Live, monkeypatch: pytest.MonkeyPatch):
    """Options are checked at every change; a schema of 100,000 characters would hold up everybody's streams."""
    read: list[str] = []
    loads = structured.json.loads

    def counting(text: Any, **more: Any) -> Any:
        read.extend([text] if isinstance(text, str) and '"once"' in text else [])
        return loads(text, **more)

    monkeypatch.setattr(structured.json, "loads", counting)
    schema = json.dumps({"type": "object", "properties": {"once": {"type": "integer"}}, "required": ["once"]})
    assert live.post("/v1/chat/completions", asked("x", n=8, max_tokens=3, guided_json=schema)).status_code == 200
    assert len(read) == 1


def test_words_to_avoid_are_tokenized_once_for_all_answers(pair: semspec.Pair, monkeypatch: pytest.MonkeyPatch):
    """The thread that does it writes for everybody."""
    count, encode = 0, type(pair.tokenizer).encode

    def counting(tokenizer: Any, text: str, **more: Any) -> Any:
        nonlocal count
        count += text.strip().startswith("avoided")
        return encode(tokenizer, text, **more)

    monkeypatch.setattr(type(pair.tokenizer), "encode", counting)
    options = Options(max_new_tokens=1, bad_words=[f"avoided{i}" for i in range(MAX_BAD_WORDS)])
    tickets = pair.submit([([5, 6, 7], options)] * 4)
    pair.executor.run()
    assert count == 2 * MAX_BAD_WORDS and all(ticket.task.done for ticket in tickets)


def test_the_tokenizer_is_copied_before_anybody_is_told_that_it_is_ready(monkeypatch: pytest.MonkeyPatch):
    """For a large vocabulary that takes a second, in which nobody would be answered."""
    threads: list[str] = []
    make = Tokenization.__init__

    def noting(*given: Any) -> None:
        threads.append(threading.current_thread().name)
        make(*given)

    monkeypatch.setattr(Tokenization, "__init__", noting)
    with serving(lambda: scripted_pair({}), Settings(name="s")) as live:
        assert threads == ["semspec-engine"] and live.post("/tokenize", {"prompt": "the"}).status_code == 200
        assert live.server.config.app.openapi_schema, "nor is the description of all routes made then"  # type: ignore[union-attr]
    assert len(threads) == 1


def test_a_line_of_the_log_repeats_little(live: Live, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "semspec.serve")
    assert live.get("/" + "a" * 40_000).status_code == 404
    assert until(lambda: any(getattr(record, "fields", {}).get("status") == 404 for record in caplog.records))
    lines = [JsonFormatter().format(record) for record in caplog.records if record.message == "request"]
    assert lines and all(len(line) < 1000 for line in lines)


# -- what holds up others

PART, CALLED = {"type": "text", "text": "a"}, {"function": {"name": "f"}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [PART] * 255}


@pytest.mark.parametrize(
    ("kind", "name", "message", "inside"),
    [
        (ChatRequest, "messages", {"role": "user", "content": [PART] * 256}, 256),
        (ChatRequest, "messages", {"role": "assistant", "tool_calls": [CALLED] * 128}, 128),
        (MessagesRequest, "messages", {"role": "user", "content": [PART] * 256}, 256),
        (MessagesRequest, "messages", {"role": "user", "content": [RESULT]}, 256),
        (CountRequest, "messages", {"role": "user", "content": [PART] * 256}, 256),
        (ResponsesRequest, "input", {"role": "user", "content": [PART] * 256}, 256),
        (TokenizeRequest, "messages", {"role": "user", "content": [PART] * 256}, 256),
        (OllamaChat, "messages", {"role": "assistant", "tool_calls": [CALLED] * 128}, 128),
    ],
)
def test_messages_have_so_many_parts_and_calls(kind: type[BaseModel], name: str, message: Any, inside: int):
    """Each is validated on the event loop, where all others wait: tens of thousands take a second."""
    body = {"model": "s", "max_tokens": 5} if kind is MessagesRequest else {"model": "s"}
    kind.model_validate(body | {name: [message] * (4096 // inside)})
    with pytest.raises(ValidationError, match=f"there are {4096 + inside} parts and calls"):
        kind.model_validate(body | {name: [message] * (4096 // inside + 1)})


def test_long_texts_to_tokenize_come_one_at_a_time():
    """Completions wait for the same thread: for one of them at most."""
    encoding, done = [], asyncio.Event()

    async def encode(*_: Any) -> list[int]:
        encoding.append(1)
        await done.wait()
        return [1]

    async def run() -> tuple[int, list[int]]:
        engine: Any = SimpleNamespace(admission=Admission(Limits()), clock=lambda: 0.0, accepted=())
        service = Service(engine, Settings(name="s"))
        service._tokenization = Mock(encode=encode)
        chat = ChatRequest(model="s", messages=USER)  # type: ignore[arg-type]
        counts = [asyncio.ensure_future(service.count(chat, "me")) for _ in range(3)]
        for _ in range(20):  # as far as they get
            await asyncio.sleep(0)
        begun = len(encoding)
        done.set()
        return begun, list(await asyncio.gather(*counts))

    assert asyncio.run(run()) == (1, [1, 1, 1])


def test_a_prompt_that_cannot_fit_is_not_tokenized_to_be_counted(live: Live):
    text = "a" * (Tokenization(scripted_pair({}))._most_characters + 1)
    refusal = live.post("/v1/messages/count_tokens", {"model": "s", "messages": [{"role": "user", "content": text}]})
    assert refusal.status_code == 400 and "more than fit" in refusal.json()["error"]["message"]


# -- Ollama's habits


@pytest.mark.parametrize(
    "options",
    [
        {"repeat_penalty": 1.1, "num_predict": 3},
        {"mirostat": 0, "mirostat_tau": 5.0, "tfs_z": 1.0, "typical_p": 1, "repeat_last_n": -1, "num_predict": 3},
        {"low_vram": False, "num_ctx": 4096, "num_predict": -1},
    ],
)
def test_options_that_clients_of_ollama_send(live: Live, options: dict[str, Any]):
    body = {"model": "s:latest", "messages": USER, "stream": False, "options": options}
    assert live.post("/api/chat", body).status_code == 200
    refusal = live.post("/api/chat", body | {"options": {"mirostat": 2}})
    assert refusal.status_code == 400 and "mirostat is not supported" in refusal.json()["error"]
    penalty = OllamaChat.model_validate(body).chat(ChatRequest).repetition_penalty
    assert penalty == options.get("repeat_penalty", 1.0)


@pytest.mark.parametrize(("one", "other"), [("num_predict", "max_tokens"), ("repeat_penalty", "repetition_penalty")])
def test_an_option_of_ollama_under_two_names_is_not_guessed(live: Live, one: str, other: str):
    body = {"model": "s", "messages": USER, "stream": False}
    for options in ({one: 3, other: 4}, {other: 3, one: 4}):
        refusal = live.post("/api/chat", body | {"options": options})
        assert refusal.status_code == 400 and f"{other} is given twice" in refusal.json()["error"]
    for options in ({one: 2, other: 2}, {one: None, other: 2}, {other: 2, one: None}):
        assert live.post("/api/chat", body | {"options": options}).status_code == 200, options


def test_who_asks_nothing_of_ollama_has_the_model_loaded(live: Live):
    for path, key in (("/api/chat", "message"), ("/api/generate", "response")):
        for nothing in ({}, {"messages": []}) if path == "/api/chat" else ({}, {"prompt": ""}):
            found = live.post(path, {"model": "s:latest", "keep_alive": "5m"} | nothing)
            assert found.status_code == 200 and found.json()["done_reason"] == "load" and key in found.json()
        assert live.post(path, {"model": "t"}).status_code == 404
    assert OllamaAnswer.media_type == "application/x-ndjson" and live.idle()
