"""Drafts of several steps: each is verified as it would be by itself, and nothing after a rejected one is accepted."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec.errors import BadRequest
from semspec.probe.evidence import GROUPS
from semspec.probe.features import Features
from semspec.types import Draft, DraftSteps, Sampling, ScoreOutput, Verdict, VerifyRequest
from semspec.verify import Rule, make
from semspec.verify.collate import collate, join_segments, verdicts
from semspec.verify.semantic_plus import SemanticPlus
from semspec.verify.step_rule import StepRule
from tests.verify.binding import WIDTH, RuleResources
from tests.verify.build import One, build, hot, random_one

VOCAB = 50
ALL = RuleResources(judge=Features((2,), "attention", tuple(GROUPS)))
RULES = {
    "coin": make("random-step:rate=0.6"),
    "coin, keep": make("random-step:rate=0.3,keep=true"),
    "oracle": make("oracle"),
    "semantic": make("semantic:top=0").bind(RuleResources()),
    "semantic+": make("semantic+:threshold=0.5").bind(RuleResources()),
    "semantic+, all evidence": make("semantic+:threshold=0.5,steps=3,part=true").bind(ALL),
}


def request_for(rule: Rule, seed: int, lengths: list[int], whole: int, sampling: Sampling) -> VerifyRequest:
    """For a random draft of segments of these lengths, of which the first few are whole steps."""
    one = random_one(seed, sum(lengths), sampling, VOCAB)
    random, k = torch.Generator().manual_seed(seed), sum(lengths)
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    draft = Draft(
        one.ids,
        torch.tensor(one.draft) if rule.keeps_draft_logits else None,
        {layer: torch.randn(k, WIDTH, generator=random) for layer in rule.draft_layers},
        DraftSteps(tuple(ends[:whole]), tuple(seed * 7 % (i + 3) > 0 for i in range(whole))),
    )
    rows = ScoreOutput(torch.tensor(one.target), {i: torch.randn(k + 1, WIDTH, generator=random) for i in rule.layers})
    return VerifyRequest(rule, draft, rows, one.sampling, position=seed % 50, round=seed % 7)


def one_by_one(rule: Rule, request: VerifyRequest) -> Verdict:
    """Every segment verified by itself, as if the tokens before it were no draft, until one is rejected."""
    draft, rows = request.draft, request.rows
    found = Verdict(0, -1)
    for i, (begin, end) in enumerate(draft.segments):
        segment = Draft(
            draft.tokens[begin:end],
            None if draft.logits is None else draft.logits[begin:end],
            {layer: states[begin:end] for layer, states in draft.hidden.items()},
            DraftSteps((end - begin,) if i < len(draft.steps.ends) else (), draft.steps.valid[i : i + 1]),
        )
        own = ScoreOutput(
            rows.logits[begin : end + 1], {n: states[begin : end + 1] for n, states in rows.hidden.items()}
        )
        single = replace(request, draft=segment, rows=own, position=request.position + begin)
        (verdict,) = verdicts(rule.verify(collate([single])))
        found.relaxed += tuple(begin + j for j in verdict.relaxed)
        found.target_tokens += verdict.target_tokens
        found.accepted, found.next = begin + verdict.accepted, verdict.next
        if verdict.accepted < end - begin:
            break
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.booleans()), min_size=1, max_size=4),
       st.integers(0, 1000), st.sampled_from(sorted(RULES)), st.booleans())  # fmt: skip
def test_each_step_is_verified_as_if_by_itself(
    drafts: list[tuple[list[int], bool]], seed: int, name: str, greedy: bool
) -> None:
    rule, sampling = RULES[name], Sampling() if greedy else Sampling(0.7, top_p=0.95)
    requests = [
        request_for(rule, seed + i, lengths, len(lengths) - rest, sampling) for i, (lengths, rest) in enumerate(drafts)
    ]
    together = join_segments(verdicts(rule.verify(collate(requests))), requests)
    for request, found in zip(requests, together, strict=True):
        wanted = one_by_one(rule, request)
        assert (found.accepted, found.next, found.relaxed) == (wanted.accepted, wanted.next, wanted.relaxed)
        assert found.target_tokens == wanted.target_tokens and len(found.evidence) in (0, len(found.relaxed))
        last = request.draft.segments[-1][0]
        if len(request.draft.steps.ends) < len(request.draft.segments):
            assert not [i for i in found.relaxed if i >= last], "a part of a step is not relaxed"


def test_the_segments_of_a_draft() -> None:
    draft = Draft([1, 2, 3, 4, 5], steps=DraftSteps((2, 4), (True, False)))
    assert draft.segments == [(0, 2), (2, 4), (4, 5)]
    assert draft.first(4).segments == [(0, 2), (2, 4)] and draft.first(4).steps.valid == (True, False)
    assert draft.first(3).segments == [(0, 2), (2, 3)] and draft.first(3).steps.valid == (True,)
    assert Draft([1, 2]).segments == [(0, 2)] and Draft([]).segments == [(0, 0)]
    for segments in (draft.segments, draft.first(1).segments):
        assert all(one[1] == other[0] for one, other in pairwise(segments))


@pytest.mark.parametrize("sample", ["true", "false"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.5), Sampling(0.5, top_k=4)])
def test_confidence_is_that_of_plain_python(sampling: Sampling, sample: str) -> None:
    """By plain Python: the geometric mean of all its probabilities; for semantic+ the product of its numbers only. The
    logits of a draft that did not sample have no temperature in them, whatever the request's is."""
    plain = make(f"random-step:steps=2,sample={sample}")
    plus = make(f"semantic+:steps=2,sample={sample}").bind(RuleResources())
    assert isinstance(plain, StepRule) and isinstance(plus, SemanticPlus) and plain.keeps_draft_logits
    for seed in range(20):
        one = random_one(seed, 5, sampling, VOCAB)
        assert one.draft is not None
        applied = sampling.temperature if sample == "true" and not sampling.greedy else 1.0
        warm = [[x * applied for x in row] for row in one.draft]
        ids = [*one.ids[:4], 49] if seed % 2 and math.isfinite(warm[4][49]) else one.ids
        chances = [math.exp(row[i]) / sum(map(math.exp, row)) for row, i in zip(warm, ids, strict=True)]
        draft = Draft(ids, torch.tensor(one.draft))
        mean = math.prod(chances) ** 0.2
        assert plain.confidence(draft, sampling) == pytest.approx(mean, rel=1e-4)
        numbers = [p for p, i in zip(chances, ids, strict=True) if i >= 48]
        assert plus.confidence(draft, sampling) == pytest.approx(math.prod(numbers) if numbers else mean, rel=1e-4)


def test_the_confidence_of_semantic_is_its_draft_probes() -> None:
    rule = make("semantic:steps=2").bind(RuleResources())
    assert isinstance(rule, StepRule) and not rule.keeps_draft_logits
    states = torch.randn(3, WIDTH)
    _, probe = RuleResources().probes("")
    wanted = probe({1: states}, torch.tensor([0]), torch.tensor([3]))
    assert rule.confidence(Draft([1, 2, 3], None, {1: states}), Sampling()) == pytest.approx(wanted.item())


@dataclass
class Counts:
    """A judge that accepts at most so many tokens."""

    most: int
    features = Features((), evidence=("length",))
    layers = ()

    def __call__(self, states: Any, first_row: Any, counts: torch.Tensor, seen: Any) -> torch.Tensor:
        return torch.where(counts <= self.most, 0.9, 0.2)


@pytest.mark.parametrize(("most", "part", "keep", "wanted"), [
    (4, True, True, (4, 5)), (3, True, True, (2, 3)), (2, True, False, (2, 3)), (1, True, True, (1, 1)),
    (3, False, True, (1, 1)), (3, False, False, (0, 2)), (1, True, False, (0, 2)),
])  # fmt: skip
def test_of_a_rejected_step_the_part_before_its_least_likely_token_is_accepted(
    most: int, part: bool, keep: bool, wanted: tuple[int, int]
) -> None:
    """Token 4 at the third position is the least likely; at the second, the target prefers another token."""
    second = [0.0, 2.0, 0.0, 0.0, 1.5, 0.0]
    one = One([hot(2), second, hot(3), hot(1), hot(5)], [2, 4, 4, 1])
    made = SemanticPlus(
        part=part, keep=keep, threshold=0.5, judge_probe=Counts(most), numbers=torch.zeros(6, dtype=torch.bool)
    )  # type: ignore[arg-type]  # fmt: skip
    decisions = made.verify(build(one))
    assert (decisions.accepted.item(), decisions.next.item()) == wanted
    (verdict,) = verdicts(decisions)
    assert verdict.relaxed == tuple(i for i in (1, 2) if i < wanted[0])
    if verdict.relaxed:
        assert "judge probe 0.90 >= 0.50" in made.reason(verdict.evidence[0]), "the reason is about the accepted part"
    protected = torch.zeros(6, dtype=torch.bool)
    protected[1] = True  # the target's choice at the second position
    strict = made.verify(replace(build(one), protected=protected))
    assert strict.accepted.item() == min(wanted[0], 1)


def test_bad_step_options_are_refused() -> None:
    for spec in ("specreason:steps=2", "semantic+:steps=0", "semantic:ahead=1.5", "oracle:ahead=-1"):
        with pytest.raises(BadRequest, match="; give"):
            make(spec)
