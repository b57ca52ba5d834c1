"""Logprobs of a prompt, as other servers report them: what the model says of every token, from a pass of its own."""

from __future__ import annotations

import pytest
import torch

from semspec import Pair
from semspec.types import Score
from tests.serve.live import Live

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
