"""Drafts of a model with another tokenizer: rows of its logits and states belong to its own tokens."""

from __future__ import annotations

from random import Random

import pytest
import torch

from semspec.probe.evidence import CONFIDENCE, GROUPS, NAMES
from semspec.types import GREEDY, Draft, DraftSteps, ScoreOutput, VerifyRequest
from semspec.verify import make
from semspec.verify.collate import collate
from semspec.verify.probe_inputs import probe_inputs
from semspec.verify.step_rule import StepRule

V, D, WIDTH = 7, 5, 3


def random_draft(rng: Random, tokens: int, steps: int = 1) -> Draft:
    """Some tokens, and own tokens, none to three for each; whole steps and perhaps a rest."""
    ends, total = list[int](), 0
    for i in range(tokens):
        total += rng.randint(0 if i else 1, 3)
        ends.append(total)
    torch.manual_seed(rng.randrange(1000))
    return Draft(
        [rng.randrange(V) for _ in range(tokens)], torch.randn(total, D), {1: torch.randn(total, WIDTH)},
        DraftSteps(tuple(sorted(rng.sample(range(1, tokens + 1), steps)))),
        own=[rng.randrange(D) for _ in range(total)], own_ends=tuple(ends),
    )  # fmt: skip


def requests(drafts: list[Draft]) -> list[VerifyRequest]:
    rule = make("accept-all-steps")
    return [VerifyRequest(rule, d, ScoreOutput(torch.randn(len(d.tokens) + 1, V)), GREEDY, 0, 0) for d in drafts]


@pytest.mark.parametrize("seed", range(8))
def test_a_batch_has_the_own_tokens_of_every_step(seed: int) -> None:
    rng = Random(seed)
    drafts = [random_draft(rng, rng.randint(2, 6), steps=rng.randint(1, 2)) for _ in range(4)]
    batch = collate(requests(drafts))
    ids, rows, exists = batch.own()
    segment, first = 0, 0
    for draft in drafts:
        assert draft.own is not None and draft.logits is not None
        for begin, end in draft.segments:
            low, high = draft.own_count(begin), draft.own_count(end)
            assert batch.own_counts()[segment] == high - low == exists[segment].sum()
            assert ids[segment][: high - low].tolist() == draft.own[low:high]
            assert rows[segment][: high - low].tolist() == list(range(first + low, first + high))
            for part in range(end - begin + 1):  # of the first tokens only
                counts = torch.zeros_like(batch.counts)
                counts[segment] = part
                assert batch.own_counts(counts)[segment] == draft.own_count(begin + part) - low
            segment += 1
        first += len(draft.own)


def test_cutting_and_joining_keep_own_tokens_with_theirs() -> None:
    rng = Random(3)
    one, two = random_draft(rng, 4), random_draft(rng, 3)
    whole = Draft.join([one, two])
    assert whole.own == one.own_tokens + two.own_tokens and whole.own_count(4) == len(one.own_tokens)
    assert whole.own_count(7) == len(whole.own_tokens) == len(whole.logits) == len(whole.hidden[1])  # type: ignore[arg-type]
    for n in range(8):
        part = whole.first(n)
        assert part.tokens == whole.tokens[:n] and len(part.own_tokens) == whole.own_count(n)
        assert part.logits is not None and len(part.logits) == len(part.own_tokens) == len(part.hidden[1])
    plain = Draft.join([Draft([1, 2]), Draft([3])])
    assert plain.own is None and plain.own_tokens == [1, 2, 3] and plain.own_count(2) == 2


def test_a_drafts_confidence_is_in_its_own_tokens() -> None:
    draft = random_draft(Random(5), 4)
    draft.steps = DraftSteps((4,))
    batch = collate(requests([draft]))
    found = probe_inputs(batch, ("tokens", "draft"), torch.zeros(V, dtype=torch.bool), sampled=False)
    assert found is not None and draft.logits is not None
    own = draft.logits.log_softmax(-1)[torch.arange(len(draft.own_tokens)), draft.own_tokens]
    columns = dict(zip((*NAMES, *CONFIDENCE), found[0].tolist(), strict=True))
    assert columns["draft_lowest"] == pytest.approx(own.min().item(), abs=1e-5)
    assert columns["draft_mean"] == pytest.approx(own.mean().item(), abs=1e-5) and set(GROUPS["draft"]) <= set(columns)
    rule = make("accept-all-steps:steps=2")
    assert isinstance(rule, StepRule)
    assert rule.confidence(draft, GREEDY) == pytest.approx(own.mean().exp().item(), abs=1e-5)
