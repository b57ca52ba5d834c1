"""Model Runner V2, interpreted on the CPU: rules as a logits processor."""

from __future__ import annotations

import pytest

from tests.vllm.engine.engines import PROMPTS, K, check_mixed_batch, engine, launch, metric, ours, written
from tests.vllm.engine.interpreted import prepare

prepare(v2=True)


@pytest.fixture(scope="module")
def llm():
    return engine(launch("v2"))


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
