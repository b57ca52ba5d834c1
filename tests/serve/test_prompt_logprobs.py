"""Logprobs of a prompt, as other servers report them: what the model says of every token, from a pass of its own."""

from __future__ import annotations

import pytest
import torch

from semspec import Pair
from semspec.serve.deltas import delta_of
from semspec.serve.limits import Limits, Settings
from semspec.serve.schema.requests import ChatRequest, CompletionRequest
from semspec.types import Score
from tests.serve.live import Live, serving

PROMPT = "Ana has 12 books. Tom has 3 more books than Ana."


def test_the_logprobs_of_a_prompt_are_the_models(pocket: Live, pocket_pair: Pair) -> None:
    body = {"model": "pocket", "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 3, "logprobs": 2}
    answer = pocket.post("/v1/completions", body).json()
    rows = answer["choices"][0]["prompt_logprobs"]
    ids = pocket_pair.tokenizer.encode(PROMPT)
    assert rows[0] is None and len(rows) == len(ids) == answer["usage"]["prompt_tokens"]
    slot = pocket_pair.target.acquire()
    logits = pocket_pair.target.score([Score(pocket_pair.target, slot, ids[:-1], len(ids) - 1)])[0].logits
    pocket_pair.target.release(slot)
    own = logits.float().log_softmax(-1)
    best = own.topk(3)
    for i, row in enumerate(rows[1:]):
        first = next(iter(row.items()))
        assert first[0] == str(ids[i + 1]) and first[1]["decoded_token"] == pocket_pair.spelling(ids[i + 1])
        assert first[1]["logprob"] == pytest.approx(own[i, ids[i + 1]].item(), abs=1e-4)
        assert {int(k) for k in row} == {ids[i + 1], *best.indices[i].tolist()}
        assert all(entry["logprob"] <= best.values[i, 0] + 1e-4 for entry in row.values())
    assert not torch.isnan(own).any()


def test_more_of_them_than_a_server_gives_are_refused(pair: Pair) -> None:
    prompt = [5, 6, 7, 8, 9]
    body = {"model": "tiny", "prompt": [prompt, prompt], "n": 2, "max_tokens": 1}
    with serving(lambda: pair, Settings(name="tiny", limits=Limits(prompt_logprobs=60))) as live:
        for more in ({"prompt_logprobs": 3}, {"echo": True, "logprobs": 3}):
            refusal = live.post("/v1/completions", body | more)
            assert refusal.status_code == 400 and "at most 60" in refusal.json()["error"]["message"]
        for more in ({"prompt_logprobs": 2}, {"echo": True, "logprobs": 2}, {"logprobs": 3}):
            assert live.post("/v1/completions", body | more).status_code == 200
        assert live.idle()


def test_only_the_form_that_is_read_is_made(pocket_pair: Pair) -> None:
    event = pocket_pair.generate(PROMPT, max_new_tokens=1, prompt_logprobs=1).events[0]
    for form, others in (("prompt", "echo"), ("echo", "prompt")):
        delta = delta_of(pocket_pair, 0, event, 0, forms={form})
        assert getattr(delta, form) and getattr(delta, others) is None
    text = {"model": "x", "prompt": "y"}
    assert CompletionRequest(**text, echo=True, max_tokens=0).prompt_forms == set()
    assert CompletionRequest(**text, echo=True, logprobs=0).prompt_forms == {"echo"}
    both = CompletionRequest(**text, echo=True, logprobs=0, prompt_logprobs=0)
    assert both.prompt_forms == {"prompt", "echo"}
    messages = [{"role": "user", "content": "y"}]
    assert ChatRequest.model_validate({"model": "x", "messages": messages, "prompt_logprobs": 1}).prompt_forms == {
        "prompt"
    }
