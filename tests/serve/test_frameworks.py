"""Small programs of two frameworks against the server: chat, stream, tools, a JSON schema."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from semspec.serve.limits import Limits, Settings
from tests.serve.live import Live, serving
from tests.serve.scripted import scripted_pair

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches a list of prices
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
ANSWERS = {
    "hello": ["Good day."],
    "rome": ["I look.", f"\n<tool_call>{CALL}</tool_call>"],
    "called weather": ["It is sunny."],
    "person": ['{"name": "Anna", "age": 7}'],
}


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    pair = scripted_pair(ANSWERS)
    settings = Settings(name="s", limits=Limits(new_tokens=500), tool_parser="hermes")
    with serving(lambda: pair, settings) as live:
        yield live


def test_langchain(live: Live):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def weather(city: str) -> str:
        """The weather in a city."""
        return f"sunny in {city}"

    for responses in (False, True):
        model = ChatOpenAI(
            model="s", base_url=f"{live.url}/v1", api_key="none", max_retries=0, use_responses_api=responses
        )  # type: ignore[arg-type]
        assert model.invoke("hello").text == "Good day."
        assert "".join(chunk.text for chunk in model.stream("hello")) == "Good day."
        asked: list[Any] = [HumanMessage("rome")]
        called = model.bind_tools([weather]).invoke(asked)
        assert [(call["name"], call["args"]) for call in called.tool_calls] == [("weather", {"city": "Rome"})]
        asked += [
            called,
            ToolMessage(weather.invoke(called.tool_calls[0]["args"]), tool_call_id=called.tool_calls[0]["id"]),
        ]
        assert model.bind_tools([weather]).invoke(asked).text == "It is sunny."
        streamed = None
        for chunk in model.bind_tools([weather]).stream("rome"):
            streamed = chunk if streamed is None else streamed + chunk
        assert streamed is not None and streamed.tool_calls[0]["args"] == {"city": "Rome"}
        found = model.with_structured_output(Person, method="json_schema").invoke("person")
        assert found == Person(name="Anna", age=7)


def test_litellm(live: Live):
    import litellm

    given: Any = {"model": "openai/s", "api_base": f"{live.url}/v1", "api_key": "none", "num_retries": 0}

    def ask(content: str, **more: Any) -> Any:
        return litellm.completion(messages=[{"role": "user", "content": content}], **given, **more)

    assert ask("hello").choices[0].message.content == "Good day."
    parts = [chunk.choices[0].delta.content or "" for chunk in ask("hello", stream=True)]
    assert "".join(parts) == "Good day."
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    (call,) = ask("rome", tools=tools).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Rome"}')
    answer = ask("person", response_format=Person).choices[0].message.content
    assert Person.model_validate_json(answer) == Person(name="Anna", age=7)
    ours = litellm.completion(  # it asks for more tokens than there are
        model="anthropic/s", api_base=live.url, api_key="none", messages=[{"role": "user", "content": "hello"}]
    )
    assert ours.choices[0].message.content == "Good day."
    for route in ("ollama", "ollama_chat"):  # which do not say that their bodies are JSON
        given = {"model": f"{route}/s", "api_base": live.url}
        assert ask("hello").choices[0].message.content == "Good day."
        parts = [chunk.choices[0].delta.content or "" for chunk in ask("hello", stream=True)]
        assert "".join(parts) == "Good day."
