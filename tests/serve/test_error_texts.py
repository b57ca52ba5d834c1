"""Whatever is wrong with a body is told in words about its fields: no Python object, no validator, no path."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from semspec.serve.http_errors import explain
from semspec.serve.schema.anthropic import MessagesRequest
from semspec.serve.schema.ollama import OllamaChat, OllamaGenerate
from semspec.serve.schema.requests import ChatRequest, CompletionRequest
from semspec.serve.schema.responses import ResponsesRequest
from semspec.serve.schema.tokenize import DetokenizeRequest, TokenizeRequest

INSIDES = re.compile(
    r"function|functools|lambda|pydantic|validator|<|>|\[|dictionary|None|Union|Literal|builtin|constr|\.py|/|"
    r"instance|object at|str\b|int\b|float\b|bool\b|dict\b|Tag|tagged|union|discriminator|Model"
)
OURS = re.compile(r"a function that is not among|of a function")  # words of our own
WRONG: list[Any] = [
    {}, [], "", "x", "x" * 2000, -1, 1.5, 10**30, True, [[]], [{}], [1, "a"], {"a": {"b": []}}, ["\ud800"], "\ud800",
    [""], {"type": "nonsense"}, [{"type": "nonsense"}], [{"role": "wizard", "content": {}}], {"type": 3}, [None],
    [{"role": "user", "content": [{"type": "text"}]}], ["x"] * 5000, {str(i): 1 for i in range(70)}, float("nan"),
]  # fmt: skip
BODIES: dict[type[BaseModel], dict[str, Any]] = {
    ChatRequest: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    CompletionRequest: {"model": "m", "prompt": "x"},
    ResponsesRequest: {"model": "m", "input": "x"},
    MessagesRequest: {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
    OllamaChat: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    OllamaGenerate: {"model": "m", "prompt": "x"},
    TokenizeRequest: {"prompt": "x"},
    DetokenizeRequest: {"tokens": [1]},
}


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_no_error_shows_the_insides(kind: type[BaseModel]):
    told = set()
    for name in kind.model_fields:
        for wrong in WRONG:
            try:
                kind.model_validate(BODIES[kind] | {name: wrong})
            except ValidationError as error:
                found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
                told.add(explain(RequestValidationError(found)))
    assert len(told) > 3
    for text in told:
        insides = INSIDES.search(OURS.sub("", re.sub(r"'[^']*'", "", text)))
        assert insides is None, f"{insides and insides[0]!r} in: {text}"
        assert text[0].isalpha() or text[0] in "'\"", text
