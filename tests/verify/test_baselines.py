"""The baselines of SemanticSpec's tables, against their released rules in plain Python."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from semspec.errors import BadRequest
from semspec.sampling.noise import ACCEPT, TARGET, stream, uniform
from semspec.types import Sampling
from semspec.verify import make
from tests.verify.build import One, build, random_one
from tests.verify.test_fly import draw, softmax


def token_baseline(one: One) -> tuple[int, int]:
    """In the target's top 2, or u < min(1, p / q) with the target's plain probability; its best token in place of a
    rejected one, a draw after the whole draft."""
    assert one.draft is not None
    for j, token in enumerate(one.ids):
        row = one.target[j]
        ranked = sorted(range(len(row)), key=lambda v: -row[v])
        if token in ranked[:2]:
            continue
        p, q = softmax(row)[token], softmax(one.draft[j])[token]
        u = uniform(*(torch.tensor(x) for x in (one.sampling.seed, one.position + j, stream(ACCEPT, one.round)))).item()
        if not u < min(1.0, p / q):
            return j, ranked[0]
    return len(one.ids), draw(one, len(one.ids), TARGET)


@pytest.mark.parametrize("heat", [0.6, 1.0])
def test_the_token_baseline_is_the_released_one(heat: float) -> None:
    ones = [random_one(seed, 1 + seed % 20, Sampling(heat)) for seed in range(500)]
    decisions = make("top-or-ratio").verify(build(*ones))
    found = list(zip(decisions.accepted.tolist(), decisions.next.tolist(), strict=True))
    assert found == [token_baseline(one) for one in ones]
    assert len({accepted for accepted, _ in found}) > 5


def test_its_drafts_have_20_tokens_and_are_sampled() -> None:
    rule = make("top-or-ratio")
    assert rule.default_draft_tokens() == 20
    assert rule.request(20, Sampling(0.6), 0).sampling == Sampling(0.6)
    with pytest.raises(BadRequest, match="top is 0"):
        make("top-or-ratio:top=0")
    one = replace(random_one(3, 4, Sampling(0.6)), ids=[5, 5, 5, 5])
    everything = make("top-or-ratio:top=6").verify(build(one))
    assert everything.accepted.tolist() == [4]
