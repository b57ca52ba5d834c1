"""Logprobs of a prompt, as other servers report them: what the model says of every token, from a pass of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from semspec import Options, Pair
from semspec.errors import BadRequest
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


@pytest.mark.parametrize("last", [1, 5, 70, 9999])
def test_those_of_the_last_tokens_are_the_end_of_all(pocket: Live, last: int) -> None:
    """In both forms, whether the server has the beginning in its cache or not."""
    body = {"model": "pocket", "prompt": f"{PROMPT} " * 9 + str(last), "max_tokens": 1, "temperature": 0}
    for form in ({"prompt_logprobs": 2}, {"echo": True, "logprobs": 2}):
        part, whole = (
            pocket.post("/v1/completions", body | form | more).json()["choices"][0]
            for more in ({"prompt_logprobs_last": last}, {})
        )
        rows, every = (c.get("prompt_logprobs") or c["logprobs"]["token_logprobs"] for c in (part, whole))
        written = 1 if "echo" in form else 0
        assert len(rows) == min(last + written, len(every))
        assert part["text"] == whole["text"], "and what follows is the same"
        for ours, theirs in zip(rows, every[-len(rows) :], strict=True):
            if isinstance(ours, dict):
                assert list(ours) == list(theirs)
                ours, theirs = (next(iter(row.values()))["logprob"] for row in (ours, theirs))
            assert ours == (None if theirs is None else pytest.approx(theirs, abs=1e-4))


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"prompt_logprobs_last": 3}, "none are asked for"),
        ({"prompt_logprobs_last": 0, "prompt_logprobs": 1}, "prompt_logprobs_last"),
        ({"prompt_logprobs_last": True, "prompt_logprobs": 1}, "prompt_logprobs_last"),
        ({"prompt_logprobs_last": 2.5, "prompt_logprobs": 1}, "prompt_logprobs_last"),
    ],
)
def test_a_number_of_last_tokens_that_makes_no_sense_is_refused(pocket: Live, more: dict[str, Any], word: str) -> None:
    refusal = pocket.post("/v1/completions", {"model": "pocket", "prompt": PROMPT, "max_tokens": 1} | more)
    assert refusal.status_code == 400 and word in refusal.text
    with pytest.raises(BadRequest, match="prompt_logprobs_last"):
        Options(prompt_logprobs=1, prompt_logprobs_last=0)


def test_few_of_a_long_prompt_are_within_the_limit(pair: Pair) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7, 8, 9] * 4, "max_tokens": 1, "prompt_logprobs": 3}
    with serving(lambda: pair, Settings(name="tiny", limits=Limits(prompt_logprobs=60))) as live:
        assert live.post("/v1/completions", body).status_code == 400
        assert live.post("/v1/completions", body | {"prompt_logprobs_last": 15}).status_code == 200
