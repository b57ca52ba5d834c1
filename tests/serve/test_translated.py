"""Bodies of other APIs as ours: what is said twice, or has no place in the answer, is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from semspec.serve.limits import Limits, Settings
from tests.serve.live import Live, serving
from tests.serve.scripted import scripted_pair

ROME = {"role": "user", "content": "rome"}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    pair = scripted_pair({"hello": ["Good day."], "rome": ["It is sunny."], "raw text": [" goes on"]})
    with serving(lambda: pair, Settings(name="s", limits=Limits(new_tokens=100))) as live:
        yield live


@pytest.mark.parametrize(
    ("path", "asked", "more"),
    [
        ("/v1/responses", {"input": "hello"}, {"messages": [ROME]}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 50}, {"max_tokens": 3}),
        ("/v1/responses", {"input": "hello", "text": {"format": {"type": "json_object"}}},
         {"response_format": {"type": "text"}}),
        ("/v1/messages", {"messages": [ROME], "max_tokens": 5, "stop_sequences": ["a"]}, {"stop": ["b"]}),
        ("/v1/messages", {"messages": [ROME], "max_tokens": 5, "thinking": {"type": "disabled"}},
         {"reasoning_effort": "low"}),
        ("/api/chat", {"messages": [ROME], "stream": False}, {"options": {"messages": []}}),
        ("/api/chat", {"messages": [ROME], "stream": False}, {"options": {"model": "t"}}),
        ("/api/chat", {"messages": [ROME], "stream": False}, {"options": {"stream": True}}),
        ("/api/generate", {"prompt": "hello", "raw": True}, {"options": {"prompt": "rome"}}),
    ],
)  # fmt: skip
def test_what_is_said_twice_is_not_guessed(live: Live, path: str, asked: dict[str, Any], more: dict[str, Any]):
    """A field under its name in another API does not replace the one that this API has."""
    asked = {"model": "s"} | asked
    assert live.post(path, asked).status_code == 200
    refusal = live.post(path, asked | more)
    assert refusal.status_code == 400 and "given twice" in str(refusal.json()["error"])


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": True},
        {"prompt_logprobs": 1},
        {"speculation": {"trace": True}},
        {"logprobs": True, "top_logprobs": 0},
    ],
)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/api/chat"])
def test_what_an_answer_has_no_place_for_is_refused(live: Live, path: str, more: dict[str, Any]):
    body: dict[str, Any] = {"model": "s", "max_tokens": 5, "messages": [ROME]} | more
    if path == "/v1/responses":
        body = {"model": "s", "input": "rome"} | more
    if path == "/api/chat":
        body = {"model": "s", "messages": [ROME], "stream": False, "options": more}
    refusal = live.post(path, body)
    assert refusal.status_code == 400 and "no place" in str(refusal.json()["error"]), refusal.text


@pytest.mark.parametrize(
    "more", [{"system": "be brief"}, {"think": True}, {"options": {"echo": True}}, {"options": {"logprobs": 0}}]
)
def test_a_raw_prompt_is_all_there_is(live: Live, more: dict[str, Any]):
    asked = {"model": "s", "prompt": "raw text", "raw": True, "stream": False}
    assert live.post("/api/generate", asked | {"think": False, "system": ""}).status_code == 200
    assert live.post("/api/generate", asked | more).status_code == 400
