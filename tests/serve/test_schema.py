"""Requests made from the OpenAPI document, sensible and not: no answer is a 5xx."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from bench.serve_fuzz import fuzz
from semspec.serve.schema.requests import CompletionRequest
from tests.serve.live import Live


def test_nothing_made_from_the_document_breaks_it(tiny: Live):
    found = fuzz(tiny.url, "tiny", 25)
    assert not found.wrong, found.wrong[0]
    assert len(found.statuses) >= 18
    # Whether random fields are ever all right is chance; that each of these can be is not.
    chat, how = {"model": "tiny", "messages": [{"role": "user", "content": "a b"}]}, {"model": "tiny", "max_tokens": 2}
    right = {
        "/v1/completions": how | {"prompt": "a b"}, "/v1/chat/completions": how | chat, "/v1/messages": how | chat,
        "/tokenize": {"model": "tiny", "prompt": "a b"},
        "/v1/responses": {"model": "tiny", "input": "a b", "max_output_tokens": 16},
    }  # fmt: skip
    for path, body in right.items():
        assert 400 in found.statuses[f"POST {path}"], f"wrong requests were made of {path}"
        assert tiny.post(path, body).status_code == 200, path
    assert tiny.idle() and tiny.engine.state == "ready"


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
