"""Model Runner V1: rules in a worker class. The CPU runs it natively."""

from __future__ import annotations

import pytest
import torch

from semspec.types import Score
from tests.chi import chi_square, count
from tests.vllm.engine.engines import PROMPTS, K, check_mixed_batch, engine, launch, metric, pair, written
from tests.vllm.engine.interpreted import prepare

prepare(v2=False)
HEAT, SAMPLES = 0.7, 768


@pytest.fixture(scope="module")
def llm():
    return engine(launch("v1"), max_num_seqs=64)


def test_strict_and_loose_requests_in_one_batch(llm) -> None:
    check_mixed_batch(llm, launch("v1"))


def test_sampled_accept_all_accepts_all(llm) -> None:
    drafts, accepted = metric(llm, "draft_tokens"), metric(llm, "accepted_tokens")
    written(llm, PROMPTS[:2], ["accept-all"] * 2, n=2 * (K + 1) + 1, temperature=HEAT)
    drafts, accepted = metric(llm, "draft_tokens") - drafts, metric(llm, "accepted_tokens") - accepted
    assert drafts == accepted >= 4 * K


def second_token(prompt: list[int]) -> torch.Tensor:
    """[V] how likely each is to be the second token that the target draws"""
    runner = pair(launch().target, str(launch().draft)).target

    def probs(tokens: list[int]) -> torch.Tensor:
        slot = runner.acquire()
        row = runner.score([Score(runner, slot, tokens, 1)])[0].logits[-1].float().clone()
        runner.release(slot)
        return (row / HEAT).softmax(-1)

    first = probs(prompt)
    return sum(
        (float(p) * probs([*prompt, token]) for token, p in enumerate(first) if p > 1e-6), torch.zeros_like(first)
    )


@pytest.mark.parametrize("rule", ["exact", "threshold:single=1"])
def test_sampled_text_keeps_the_targets_distribution(llm, rule: str) -> None:
    """By vLLM's sampler where the request is strict, and by a loose rule's own draws where it relaxes nothing."""
    prompt = PROMPTS[0]
    texts = written(llm, [prompt] * SAMPLES, [rule] * SAMPLES, n=2, temperature=HEAT)
    found = count(torch.tensor([text[1] for text in texts]), 320)
    assert chi_square(found, second_token(prompt)) > 1e-3


def test_a_request_that_cannot_be_had_is_decoded_strictly(llm, caplog: pytest.LogCaptureFixture) -> None:
    """V1 has no place to refuse it; the log says why."""
    with caplog.at_level("WARNING", "semspec.vllm.setup"):
        texts = written(llm, PROMPTS[:2], ["semantic+", "exact"], n=12)
    assert "reasoning steps" in caplog.text
    assert texts == written(llm, PROMPTS[:2], ["exact", "exact"], n=12)
