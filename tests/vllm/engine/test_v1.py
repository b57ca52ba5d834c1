"""Model Runner V1: rules in a worker class. The CPU runs it natively."""

from __future__ import annotations

import re

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


@pytest.mark.parametrize("heat", [0.0, 0.8])
def test_a_grammar_holds_whatever_the_rule_accepts(llm, heat: float) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    rules = ["exact", "accept-all", "fly:window=1,theta=0.1", "typical"]
    params = [
        SamplingParams(
            temperature=heat, seed=3, max_tokens=40, extra_args={"semspec_verifier": rule},
            structured_outputs=StructuredOutputsParams(regex="[ab]{5}[cd]{5}"),
        )
        for rule in rules
    ]  # fmt: skip
    for rule, output in zip(
        rules, llm.generate([{"prompt_token_ids": PROMPTS[0]}] * 4, params, use_tqdm=False), strict=True
    ):
        assert re.fullmatch("[ab]{5}[cd]{5}", output.outputs[0].text), rule


def test_tokens_that_are_not_allowed_are_not_relaxed(llm) -> None:
    allowed = list(range(3, 8))
    (text,) = written(llm, PROMPTS[:1], ["accept-all"], n=20, allowed_token_ids=allowed)
    assert set(text) <= set(allowed)


def test_logprobs_are_those_of_the_target(llm) -> None:
    from vllm import SamplingParams

    rule = {"semspec_verifier": "accept-all", "semspec_loop_repeats": 0}
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, logprobs=2, extra_args=rule)
    (output,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], [params], use_tqdm=False)
    tokens, told = list(output.outputs[0].token_ids), output.outputs[0].logprobs
    runner = pair(launch().target, str(launch().draft)).target
    slot = runner.acquire()
    rows = runner.score([Score(runner, slot, [*PROMPTS[0], *tokens[:-1]], len(tokens))])[0].logits.float()
    runner.release(slot)
    own = rows.log_softmax(-1)[range(len(tokens)), tokens]
    assert [row[token].logprob for row, token in zip(told, tokens, strict=True)] == pytest.approx(
        own.tolist(), abs=1e-3
    )
    assert float(own.min()) < -1, "some token is not the target's own choice"
