"""Requests made from the OpenAPI document, sensible and not: no answer is a 5xx."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from pydantic import ValidationError
from schemathesis import GenerationMode

from semspec.serve.schema.requests import CompletionRequest
from tests.serve.live import Live

QUICKLY = settings(
    max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)


def test_nothing_made_from_the_document_breaks_it(tiny: Live):
    document = schemathesis.openapi.from_url(tiny.url + "/openapi.json")
    statuses: dict[str, set[int]] = {}
    for operation in document.get_all_operations():
        api = operation.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and not api.body:
                continue  # nothing can be wrong about it

            statuses.setdefault(api.label, set()).update(tried(api.as_strategy(generation_mode=mode)))
    assert len(statuses) >= 18
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/responses", "/v1/messages"):
        # A chat has so many fields that exclude each other that random ones are hardly ever all right.
        both = {400} if "chat" in path else {200, 400}
        assert statuses[f"POST {path}"] >= both, f"both kinds of requests were made of {path}"
    assert tiny.idle() and tiny.engine.state == "ready"


def tried(cases: SearchStrategy[Any]) -> set[int]:
    statuses = set()

    @QUICKLY
    @given(case=cases)
    def call(case: Any) -> None:
        hasten(case)
        status = case.call().status_code
        assert status < 500, case.body
        statuses.add(status)

    call()
    return statuses


def hasten(case: Any) -> None:
    """Nearly every body would be refused for the name of its model, and the rest would write for long."""
    if isinstance(case.body, dict):
        if "model" in case.body and isinstance(case.body["model"], str):
            case.body["model"] = "tiny"
        if isinstance(case.body.get("n"), int) and case.body["n"] > 0:
            case.body["n"] = 1  # or thousands of answers are asked for, every other time
        if case.body.get("prompt") in ("", []) or _ids(case.body.get("prompt")):
            case.body["prompt"] = "as good as any"  # nearly all others are empty, or of words that a tiny model lacks
        case.body.pop("deadline", None)  # a microsecond is too short, and 504 the right word for it
        length = "max_output_tokens" if "responses" in case.path else "max_tokens"
        if isinstance(case.body.get(length), int | None) and case.path.startswith("/v1"):
            case.body[length] = 3
        if case.path.startswith("/api/"):
            case.body["options"] = {"num_predict": 3}


def _ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    "field",
    ["max_thinking_tokens", "max_tokens", "n", "seed", "top_k", "temperature", "logprobs", "deadline"]
    + [f"speculation.{name}" for name in ("num_draft_tokens", "loop_repeats", "draft_min_p", "draft_max_entropy")],
)
def test_true_is_no_number(field: str, given: bool):
    outer, _, inner = field.partition(".")
    with pytest.raises(ValidationError, match=f"{inner or outer} is true or false"):
        CompletionRequest(model="m", prompt="x", **{outer: {inner: given} if inner else given})


@pytest.mark.parametrize("name", ["prompt", "stop_token_ids"])
def test_true_is_no_token(name: str):
    with pytest.raises(ValidationError):
        CompletionRequest(**{"model": "m", "prompt": "x", name: [True, 5]})
    assert CompletionRequest(model="m", prompt="x", ignore_eos=True, stream=False).ignore_eos
