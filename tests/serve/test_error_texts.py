"""Whatever is wrong with a body is told in words about its fields: no Python object, no validator, no path."""

from __future__ import annotations

import inspect
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from semspec.errors import BadRequest
from semspec.serve.completion_routes import translated
from semspec.serve.http_errors import explain
from semspec.serve.limits import Limits, Settings
from semspec.serve.schema import anthropic, base, messages, ollama, requests, responses, structured, tokenize, tools
from semspec.serve.schema.speculation import Speculation
from semspec.serve.speculation import apply
from tests.serve.hostile import BODIES, WRONG, places, spoilt
from tests.serve.live import JSON, WAIT, Live, serving
from tests.serve.scripted import scripted_pair

CLASSES = {
    name
    for module in (anthropic, base, messages, ollama, requests, responses, structured, tokenize, tools)
    for name, kind in vars(module).items()
    if inspect.isclass(kind) and issubclass(kind, BaseModel)
}
INSIDES = re.compile(
    r"functools|lambda|pydantic|validator|<|>|\[|dictionary|None|Union|Literal|builtin|constr|\.py|"
    r"instance|object at|str\b|int\b|float\b|bool\b|dict\b|Tag|tagged|union|discriminator|f64|failed to compile|%json|"
    r"parse input|\b(?:" + "|".join(sorted(CLASSES, key=len, reverse=True)) + r")\b"
)
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|, got .*|" + "|".join(re.escape(w) for w in WRONG if isinstance(w, str) and w))
KINDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "/v1/chat/completions": requests.ChatRequest.model_validate,
    "/v1/completions": requests.CompletionRequest.model_validate,
    "/v1/responses": lambda b: translated(responses.ResponsesRequest.model_validate(b).chat, requests.ChatRequest),
    "/v1/messages": lambda b: translated(anthropic.MessagesRequest.model_validate(b).chat, requests.ChatRequest),
    "/v1/messages/count_tokens": lambda b: translated(
        anthropic.CountRequest.model_validate(b).chat, requests.ChatRequest
    ),
    "/api/show": ollama.OllamaShow.model_validate,
    "/api/chat": lambda b: translated(ollama.OllamaChat.model_validate(b).chat, requests.ChatRequest),
    "/api/generate": lambda b: translated(ollama.OllamaGenerate.model_validate(b).chat, requests.ChatRequest),
    "/tokenize": tokenize.TokenizeRequest.model_validate,
    "/detokenize": tokenize.DetokenizeRequest.model_validate,
}


def refusal(check: Callable[[dict[str, Any]], object], body: dict[str, Any]) -> str | None:
    """What the server would say; None: nothing is wrong."""
    try:
        check(body)
    except ValidationError as error:
        return explain(RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]))
    except RequestValidationError as error:
        return explain(error)
    except BadRequest as error:
        return str(error)
    return None


def in_words(text: str) -> bool:
    insides = INSIDES.search(QUOTED.sub("", text))
    assert insides is None, f"{insides and insides[0]!r} in: {text[:500]}"
    return (text[0].isalnum() or text[0] in "'\"") and len(text) < 2100


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
def test_no_error_shows_the_insides(path: str, body: dict[str, Any]):
    """Every place of every body, also where it is deep inside, with every wrong value."""
    assert refusal(KINDS[path], body) is None
    told = {
        text
        for place in places(body)
        for wrong in [*WRONG, KeyError]
        if (text := refusal(KINDS[path], spoilt(body, place, wrong))) is not None
    }
    assert len(told) > 3 and all(map(in_words, told))


@pytest.mark.parametrize("planted", ["tool_choice.NamedChoice.type has to be 'function'", "n <function f>", "x is str"])
def test_a_name_of_ours_would_be_seen(planted: str):
    with pytest.raises(AssertionError, match="in: "):
        in_words(planted)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    pair = scripted_pair({"hello": ["Good day."]}, think=True)
    settings = Settings(name="s", limits=Limits(new_tokens=500), tool_parser="hermes", allow_lossy=True)
    with serving(lambda: pair, settings) as live:
        yield live


def test_hundreds_of_hostile_bodies_over_http(live: Live, caplog: pytest.LogCaptureFixture):
    """Those that get past the fields, to templates, grammars and models, are told in words, too."""
    rng, refused = random.Random(3), 0
    cases = [
        (path, spoilt(b, place, wrong)) for path, b in BODIES for place in places(b) for wrong in [*WRONG, KeyError]
    ]
    with httpx.Client(base_url=live.url, headers=JSON, timeout=WAIT) as client:
        for path, body in rng.sample(cases, 500):
            answer = client.post(path, content=json.dumps(body).encode())
            assert answer.status_code in (200, 400, 404), (path, body, answer.text)
            if not answer.is_success:
                error = answer.json()["error"]
                assert in_words(error if isinstance(error, str) else error["message"]), (path, body)
                refused += 1
        endless = b'{"model": "s", "prompt": "x", "seed": ' + b"1" * 5000 + b"}"
        assert client.post("/v1/completions", content=endless).status_code == 400
    assert refused > 300 and live.idle()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/responses", {"model": "s", "input": []}, "input is empty"),
        ("/api/chat", {"model": "s", "messages": [{"role": "user", "images": ["x"]}]}, "leave images out"),
    ],
)
def test_what_is_wrong_is_named_and_not_what_else_could_have_been(
    path: str, body: dict[str, Any], message: str
) -> None:
    assert message in (refusal(KINDS[path], body) or "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"verifier": "fly", "theta": "high"}, "option 'theta' of verifier 'fly' has to be a number, 0 or more"),
        ({"verifier": "fly", "theta": 1e39}, "has to be a number, 0 or more"),
        ({"verifier": "reflective", "prompt": "x" * 201}, "a text, at most 200 characters that can be printed"),
        ({"verifier": "fly", "adapt": 1}, "option 'adapt' of verifier 'fly' has to be true or false"),
        ({"verifier": "semantic+", "threshold": 0.5, "least": 0.6}, "'threshold' .* is given twice, by its old name"),
    ],
)
@pytest.mark.filterwarnings("ignore:option 'least'")
def test_options_of_a_verifier_say_what_they_have_to_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        apply(Speculation.model_validate(given), Settings(allow_lossy=True))
