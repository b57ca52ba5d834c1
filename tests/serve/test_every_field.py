"""Every field that clients know, through the official client: 64 mixed requests at a time are answered as alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from typing import Any

import pytest

from semspec import Pair
from semspec.serve.limits import Limits, Settings
from tests.serve.live import Live, serving, until
from tests.serve.scripted import scripted_pair
from tests.serve.test_client import ASK, chat, itself, said
from tests.serve.test_options import SCHEMA, complete

CLIENTS = 64
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ANSWERS = {
    "hello": ["<think>", "Hm.", "</think>", "\n\nGood day."],
    "rome": ["I look.", f"\n<tool_call>\n{CALL}\n</tool_call>"],
    "called weather": ["It is sunny."],
    "be kind": ["Dear friend."],
    "any": ['<tool_call>\n{"name": "weather", "arguments": ', '{"city": "Oslo"}}', "\n</tool_call>"],
    "quickly": ["Bye."],
    "effort high": ["At length."],
    "thought of you": ["So I said."],
    "Once": [" upon a time."],
}


def mixed(requests: list[Callable[[], Any]], live: Live) -> list[Any]:
    """All of them at a time, again and again until there are enough, give what each gives alone, which is returned."""
    alone = [request() for request in requests]
    with ThreadPoolExecutor(CLIENTS) as threads:
        answers = list(threads.map(lambda request: request(), islice(cycle(requests), CLIENTS)))
    assert answers == list(islice(cycle(alone), CLIENTS)) and live.idle()
    return alone


def words(answer: Any) -> list[Any]:
    """What has to be the same: texts, thinking, calls, how they end, and which tokens have logprobs."""
    found: list[Any] = []
    for choice in answer.choices:
        logprobs = choice.logprobs and choice.logprobs.model_dump()
        tokens = logprobs and (logprobs.get("tokens") or [[t["token"], t["bytes"]] for t in logprobs["content"]])
        message = getattr(choice, "message", None)
        calls = [(c.function.name, c.function.arguments) for c in (message and message.tool_calls) or []]
        text = choice.text if message is None else [said(message), message.content]
        found.append([choice.finish_reason, text, calls, tokens])
    scored = getattr(answer, "prompt_logprobs", None) or getattr(answer.choices[0], "prompt_logprobs", None)
    return [*found, answer.usage.completion_tokens, scored and [list(entry or {}) for entry in scored]]


@pytest.fixture(scope="module")
def token(pocket_pair: Pair) -> int:
    """One that the target writes."""
    return itself(pocket_pair).tokens[9]


def test_how_tokens_are_chosen_and_where_answers_end(pocket: Live, token: int):
    chats: list[dict[str, Any]] = [
        {},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"logit_bias": {str(token): -100}},
        {"extra_body": {"repetition_penalty": 1.3, "min_tokens": 40}},
        {"extra_body": {"bad_words": ["pens"]}},
        {"extra_body": {"allowed_token_ids": list(range(200, 600))}},
        {"extra_body": {"structured_outputs": {"json": SCHEMA}, "max_thinking_tokens": 6}},
        {"extra_body": {"guided_choice": ["a b c", "a b d"], "max_thinking_tokens": 3}},
        {"response_format": {"type": "json_object"}, "extra_body": {"max_thinking_tokens": 3}},
        {"temperature": 0.9, "seed": 5, "presence_penalty": 0.7, "top_p": 0.9, "extra_body": {"top_k": 9}},
        {"temperature": 0.9, "seed": 5, "extra_body": {"guided_regex": "[a-z]{9}", "max_thinking_tokens": 3}},
        {"temperature": 0.9, "seed": 7, "n": 2, "extra_body": {"min_p": 0.02}},
        {"logprobs": True, "top_logprobs": 2, "frequency_penalty": 0.4},
        {"extra_body": {"stop_token_ids": [token]}},
        {"stop": ["e"], "extra_body": {"include_stop_str_in_output": True}},
        {"extra_body": {"ignore_eos": True}, "max_tokens": 60},
        {"extra_body": {"prompt_logprobs": 1}, "max_tokens": 3},
        {"extra_body": {"priority": -5}, "user": "somebody", "stop": None},
    ]
    texts: list[dict[str, Any]] = [
        {"echo": True, "logprobs": 2},
        {"echo": True, "max_tokens": 0, "logprobs": 0},
        {"best_of": 2, "temperature": 1.0, "seed": 3},
        {"extra_body": {"prompt_logprobs": 2}},
    ]
    rules = [{"num_draft_tokens": 4}, {"off": True}]

    def asking(ask: Callable[..., Any], more: dict[str, Any], rule: dict[str, Any]) -> Callable[[], Any]:
        extra = more.get("extra_body", {}) | {"speculation": rule}
        return lambda: words(ask(pocket, **{"max_tokens": 30} | more | {"extra_body": extra}))

    kinds = [(chat, more) for more in chats] + [(complete, more) for more in texts]
    requests = [asking(ask, more, rule) for rule in rules for ask, more in kinds]
    alone = mixed(requests, pocket)
    assert alone[: len(kinds)] == alone[len(kinds) :], "drafts change nothing about what is asked for"


def test_an_answer_may_be_kept_from_ending(pocket: Live):
    free = chat(pocket, max_tokens=250)
    assert free.choices[0].finish_reason == "stop"
    longer = chat(pocket, max_tokens=250, extra_body={"ignore_eos": True})
    assert longer.choices[0].finish_reason == "length" and longer.usage.completion_tokens == 250
    assert said(longer.choices[0].message).startswith(said(free.choices[0].message)[:40])


@pytest.fixture(scope="module")
def scripted() -> Iterator[Live]:
    pair = scripted_pair(ANSWERS, think=True)
    settings = Settings(name="s", limits=Limits(new_tokens=500), tool_parser="hermes")
    with serving(lambda: pair, settings) as live:
        yield live


def test_details_of_chats_and_tools(scripted: Live):
    user = {"role": "user", "content": "hello"}
    call = {"id": "call_1", "type": "function", "function": json.loads(CALL) | {"arguments": '{"city": "Rome"}'}}
    turns = [
        {"role": "user", "content": "rome"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    named = {"type": "function", "function": {"name": "weather"}}
    earlier = {"role": "assistant", "content": "x", "reasoning_content": "of you"}
    kinds: dict[str, dict[str, Any]] = {
        "Good day.": {"messages": [user]},
        "Good day.\n": {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]},
        "Bye.": {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        "At length.": {"reasoning_effort": "high"},
        "Dear friend.": {"messages": [{"role": "developer", "content": "be kind"}, user | {"content": "go"}]},
        "So I said.": {"messages": [earlier, user]},
        "I look.": {"messages": turns[:1], "tools": [TOOL]},
        "It is sunny.": {"messages": turns, "tools": [TOOL], "parallel_tool_calls": False},
        "Oslo": {"messages": [user | {"content": "any"}], "tools": [TOOL], "tool_choice": named},
        "Oslo ": {"messages": [user | {"content": "any"}], "tools": [TOOL], "tool_choice": "required"},
        "Good day. ": {"tools": [TOOL], "tool_choice": "none"},
    }
    client = scripted.openai().chat.completions

    def asking(more: dict[str, Any]) -> Callable[[], Any]:
        given: Any = {"model": "s", "messages": [user], "temperature": 0} | more
        return lambda: words(client.create(**given))

    requests = [asking(more) for more in kinds.values()]
    for expected, request in zip(kinds, requests, strict=True):
        assert expected.strip() in json.dumps(request()), expected
    mixed(requests, scripted)


def test_a_client_prefers_some_of_its_own_requests():
    """One slot: of those that wait, the one with the lowest number is next, although it came last."""
    pair = scripted_pair(ANSWERS, slots=1, think=True)
    with serving(lambda: pair, Settings(name="s")) as live, ThreadPoolExecutor(3) as threads:

        def ask(priority: int) -> float:
            extra: Any = {"priority": priority}
            answer = live.openai().chat.completions.create(model="s", messages=ASK, max_tokens=5, extra_body=extra)
            return float(answer.model_dump()["metrics"]["queue_time_ms"])

        def queued(count: int) -> bool:
            return len(live.engine.accepted) == count and all(r.submitted for r in list(live.engine.accepted))

        waits = []
        with live.held(after=1):
            for i, priority in enumerate((0, 3, -3)):
                waits.append(threads.submit(ask, priority))
                assert until(lambda count=i + 1: queued(count))
        _, late, early = (wait.result() for wait in waits)
    assert early < late, "who came last was served before"
