"""Model Runner V2, interpreted on the CPU: rules as a logits processor."""

from __future__ import annotations

import pytest

from tests.vllm.engine.engines import PROMPTS, K, check_mixed_batch, engine, launch, metric, ours, running, written
from tests.vllm.engine.interpreted import prepare

prepare(v2=True)


LONG = [5 + i % 200 for i in range(150)]


@pytest.fixture(scope="module")
def llm():
    return engine(launch("v2"), max_num_batched_tokens=64)


def test_strict_and_loose_requests_in_one_batch(llm) -> None:
    check_mixed_batch(llm, launch("v2"))


def test_sampled_requests_draw_as_our_engine_does(llm) -> None:
    """The rule's own draws, from the request's seed, decide; only the first token is vLLM's."""
    rules, heat = ["accept-all", "fly:window=1,theta=0.1"], {"temperature": 0.8, "seed": 11}
    drafts, accepted = metric(llm, "draft_tokens"), metric(llm, "accepted_tokens")
    (text,) = written(llm, PROMPTS[:1], rules[:1], n=2 * K + 3, **heat)
    drafts, accepted = metric(llm, "draft_tokens") - drafts, metric(llm, "accepted_tokens") - accepted
    assert drafts == accepted > K, "accept-all accepts all"
    (other,) = written(llm, PROMPTS[:1], rules[1:], n=2 * K + 3, **heat)
    for rule, got in zip(rules, (text, other), strict=True):
        assert got == ours(launch("v2"), PROMPTS[0], rule, 2 * K + 3, start=got[:1], **heat)[0]


@pytest.mark.parametrize("given", ["fly:theta=-1", "semantic+:probes=/etc", "ensemble", "no-such"])
def test_a_request_that_cannot_be_had_is_refused_when_it_is_admitted(llm, given: str) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=given.partition(":")[0].rstrip("+") + "|server is started"):
        written(llm, PROMPTS[:1], [given], n=2)


def test_prompts_in_pieces_and_beginnings_that_are_cached(llm) -> None:
    rules = ["fly:window=1,theta=0.1", "typical"]
    for _ in range(2):  # the second time the long one's beginning is cached
        texts = written(llm, [LONG, PROMPTS[0]], rules, n=14)
        assert texts == [ours(launch("v2"), p, r, 14)[0] for p, r in zip([LONG, PROMPTS[0]], rules, strict=True)]


def test_a_request_that_is_ended_in_the_middle_leaves_the_others_as_they_are(llm) -> None:
    from vllm import SamplingParams

    rule, core, text = "fly:window=1,theta=0.1", llm.llm_engine, list[int]()
    for name, prompt, n in (("gone", PROMPTS[1], 90), ("stays", PROMPTS[0], 14)):
        params = SamplingParams(
            temperature=0.0, max_tokens=n, ignore_eos=True,
            extra_args={"semspec_verifier": rule, "semspec_loop_repeats": 0},
        )  # fmt: skip
        core.add_request(name, {"prompt_token_ids": prompt}, params)
    for step in range(100):
        if step == 2:
            core.abort_request(["gone"])
        for output in core.step():
            text = list(output.outputs[0].token_ids) if output.finished else text
        if not core.has_unfinished_requests():
            break
    assert text == ours(launch("v2"), PROMPTS[0], rule, 14)[0]
    assert written(llm, PROMPTS[1:2], [rule], n=14) == [ours(launch("v2"), PROMPTS[1], rule, 14)[0]]


def test_in_a_cache_that_is_too_small_requests_leave_and_come_back() -> None:
    """Four texts of 1.7 blocks in a cache of seven. Strict ones write the same; loose ones may draft elsewhere then."""
    prompts = [[5 + (7 * i + j) % 200 for j in range(100)] for i in range(4)]
    rules, own = ["fly:window=1,theta=0.1", "regret:budget=3,slope=2,mismatches=9", "accept-all", "exact"], launch("v2")
    with running(own, kv_cache_memory_bytes=3 << 20, enable_prefix_caching=False) as llm:
        texts = written(llm, prompts, rules, n=120)
        (left,) = (m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    assert left > 0 and [len(text) for text in texts] == [120] * 4
    assert texts[0] == ours(own, prompts[0], rules[0], 120)[0], "the oldest never leaves"
    assert texts[3] == ours(own, prompts[3], "exact", 120)[0]
