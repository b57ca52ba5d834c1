"""Step rules: whole steps are accepted or rejected, for the reasons the rules give."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec.errors import BadRequest
from semspec.probe.evidence import CONFIDENCE, GROUPS, NAMES, evidence
from semspec.probe.evidence import WIDTH as ALL
from semspec.probe.features import Features
from semspec.sampling import noise
from semspec.types import Sampling
from semspec.verify import DraftBatch, make
from semspec.verify.collate import verdicts
from semspec.verify.probe_inputs import probe_inputs
from semspec.verify.semantic import Semantic
from semspec.verify.semantic_plus import SemanticPlus
from semspec.verify.specreason import SpecReason
from semspec.verify.step_controls import AcceptAllSteps
from tests.probe.test_evidence import plain_confidence
from tests.verify.binding import OF_TARGET, WIDTH, RuleResources
from tests.verify.build import GREEDY, One, build, hot, outcomes, random_one

VOCAB = 6


class FirstFeature:
    """A probe that reads its answer off the first feature of the first state."""

    layers = (0,)
    features = Features((0,))

    def __call__(self, states: dict[int, Any], first_row: Any, counts: Any, shown: None = None) -> torch.Tensor:
        assert shown is None, "a probe of hidden states only gets nothing else"
        return states[0][first_row, 0]


def semantic(**options: Any) -> Semantic:
    return Semantic(target_probe=FirstFeature(), draft_probe=FirstFeature(), **options)  # type: ignore[arg-type]


def with_probabilities(drafts: DraftBatch, p: list[float], q: list[float]) -> DraftBatch:
    """The probability that each probe gives each step."""
    target, draft = torch.zeros(len(drafts.target_logits), 1), torch.zeros(int(drafts.counts.sum()), 1)
    target[drafts.first_row, 0] = torch.tensor(p)
    draft[drafts.first_draft.clamp_max(max(0, len(draft) - 1)), 0] = torch.tensor(q)
    return replace(drafts, hidden={0: target}, draft_hidden={0: draft})


def unlikely(ids: list[int]) -> list[list[float]]:
    """A target that ranks every token of a step third, and token 0 first after it."""
    rows = []
    for token in ids:
        row = [0.0] * VOCAB
        row[(token + 1) % VOCAB], row[(token + 2) % VOCAB], row[token] = 9.0, 8.0, 7.0
        rows.append(row)
    return [*rows, hot(0)]


def accepts(rule: Semantic, p: float, q: float, sampling: Sampling = GREEDY, ids: tuple[int, ...] = (1, 2)) -> bool:
    drafts = with_probabilities(build(One(unlikely(list(ids)), list(ids), None, sampling)), [p], [q])
    found = rule.verify(drafts).accepted.item()
    assert found in (0, len(ids)), "all of a step or nothing"
    return bool(found)


@pytest.mark.parametrize(("p", "q", "tau", "wanted"), [
    (0.5, 0.5, 1.0, True), (0.49, 0.5, 1.0, False), (0.26, 0.5, 0.5, True), (0.24, 0.5, 0.5, False),
    (0.001, 0.0, 0.5, False), (0.011, 0.0, 0.5, True),  # a q of nothing counts as 0.02
])  # fmt: skip
def test_with_tau_the_ratio_decides(p: float, q: float, tau: float, wanted: bool) -> None:
    assert accepts(semantic(tau=tau), p, q) == wanted


def test_without_tau_a_coin_decides_at_the_rate_of_the_ratio() -> None:
    for p, q, rate in [(0.2, 0.5, 0.4), (0.9, 0.5, 1.0), (0.0, 0.5, 0.0), (0.015, 0.001, 0.75)]:
        found = [accepts(semantic(), p, q, Sampling(seed=seed)) for seed in range(600)]
        assert sum(found) / 600 == pytest.approx(rate, abs=0.07)
        for seed in (3, 4):
            coin = noise.uniform(torch.tensor(seed), torch.tensor(0), torch.tensor(noise.stream(noise.ACCEPT, 0)))
            assert found[seed] == (coin.item() * max(q, Semantic.min_prob) < p), "the noise is a function of the seed"


def test_the_floor_rejects_what_a_coin_would_accept() -> None:
    assert not any(accepts(semantic(floor=0.5), 0.2, 0.5, Sampling(seed=seed)) for seed in range(50))
    assert accepts(semantic(floor=0.5, tau=0.1), 0.26, 0.5)


def test_the_fast_path_accepts_a_step_of_likely_tokens() -> None:
    second = [[0.0, 9.0, 8.0, 0.0, 0.0, 0.0], [0.0, 8.0, 9.0, 0.0, 0.0, 0.0], hot(5)]
    drafts = with_probabilities(build(One(second, [2, 1])), [0.0], [1.0])
    decisions = semantic(tau=0.5).verify(drafts)
    assert decisions.accepted.tolist() == [2] and decisions.next.tolist() == [5]
    (verdict,) = verdicts(decisions)
    assert verdict.relaxed == (0, 1) and verdict.target_tokens == (1, 2)
    assert "among the target's 2 likeliest" in semantic(tau=0.5).reason(verdict.evidence[0])
    for rule in (semantic(tau=0.5, top=0), semantic(tau=0.5, top=1)):
        assert rule.verify(drafts).accepted.tolist() == [0]


def test_a_rejected_step_is_replaced_from_the_targets_own_choice_on() -> None:
    (row, *_) = unlikely([1, 2])
    for sampling in (Sampling(), Sampling(0.9, seed=5)):
        drafts = with_probabilities(build(One(unlikely([1, 2]), [1, 2], None, sampling)), [0.0], [1.0])
        decisions = semantic(tau=0.5).verify(drafts)
        assert decisions.next.tolist() == drafts.target_choice()[:, 0].tolist()
    assert max(range(VOCAB), key=row.__getitem__) == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=5), st.booleans())
def test_batches_equal_singles(steps: list[tuple[int, float, float]], greedy: bool) -> None:
    sampling = Sampling() if greedy else Sampling(0.7, top_p=0.9)
    ones = [random_one(i, k, sampling, VOCAB, certain=True) for i, (k, _, _) in enumerate(steps)]
    for rule in (semantic(), semantic(tau=0.5, top=0), make("random-step:rate=0.5")):
        together = rule.verify(with_probabilities(build(*ones), [p for _, p, _ in steps], [q for _, _, q in steps]))
        for i, (one, (_, p, q)) in enumerate(zip(ones, steps, strict=True)):
            single = rule.verify(with_probabilities(build(one), [p], [q]))
            assert single.accepted[0] == together.accepted[i] and single.next[0] == together.next[i]


def test_protected_tokens_are_neither_added_nor_left_out() -> None:
    protected = torch.zeros(VOCAB, dtype=torch.bool)
    protected[3] = True
    everything = make("random-step:rate=1")
    for rows, ids, wanted in [
        ([hot(1), hot(2), hot(0)], [1, 3], 0),  # the draft adds one
        ([hot(1), hot(3), hot(0)], [1, 2], 0),  # the target chose one
        ([hot(1), hot(3), hot(0)], [1, 3], 2),  # both chose it
        ([hot(1), hot(4), hot(0)], [1, 2], 2),
    ]:
        drafts = replace(build(One(rows, ids)), protected=protected)
        assert everything.verify(drafts).accepted.tolist() == [wanted]


def test_the_bonus_is_drawn_cooler_than_the_rest() -> None:
    flat = [hot(1), [1.0, 0.5, 0.0, 0.0, 0.0, 0.0]]
    hot_ones, cool_ones = set(), set()
    for seed in range(40):
        one = One(flat, [1], None, Sampling(1.0, seed=seed))
        hot_ones.add(outcomes(make("random-step:rate=1,bonus_temperature=1"), one)[0][1])
        cool_ones.add(outcomes(make("random-step:rate=1,bonus_temperature=0.02"), one)[0][1])
    assert cool_ones == {0} and len(hot_ones) > 3
    greedy = [outcomes(make("none"), One(flat[1:], [], None, Sampling(1.0, seed=s, top_k=1)))[0][1] for s in range(5)]
    assert greedy == [0] * 5


def test_random_step_holds_its_rate_and_its_limits() -> None:
    ones = [One([hot(1), hot(2)], [4], None, Sampling(seed=seed)) for seed in range(500)]
    for rate in (0.0, 0.3, 1.0):
        found = [accepted for accepted, _ in outcomes(make(f"random-step:rate={rate}"), *ones)]
        assert sum(found) / 500 == pytest.approx(rate, abs=0.07) and (rate not in (0, 1) or set(found) == {int(rate)})


def test_specreason_reads_the_digit_after_its_question() -> None:
    rule = SpecReason(threshold=7, question="ok?").bind(RuleResources())
    assert isinstance(rule, SpecReason) and rule.layout([1, 2]) == [1, 2, *(ord(c) % 50 for c in "ok?")]
    for digit in range(10):
        rows = [hot(1, 50), hot(2, 50), hot(3, 50), *[hot(0, 50)] * 2, hot(ord(str(digit)) % 50, 50)]
        assert outcomes(rule, One(rows, [1, 2])) == [(2, 3) if digit >= 7 else (0, 1)]
    with pytest.raises(BadRequest, match="a token for every digit"):
        SpecReason().bind(RuleResources(remark=[4, 5]))


@pytest.mark.parametrize("spec", [
    "semantic:tau=-1", "semantic:top=-1", "semantic:lead=-1", "semantic:max_step_tokens=0",
    "semantic:bonus_temperature=0", "random-step:rate=1.5", "specreason:threshold=10",
])  # fmt: skip
def test_bad_options_are_refused(spec: str) -> None:
    with pytest.raises(BadRequest, match="; give"):
        make(spec)


def test_semantic_plus_follows_its_judge() -> None:
    rule = make("semantic+").bind(RuleResources())
    assert isinstance(rule, SemanticPlus) and rule.threshold == 0.25, "what the judge was calibrated to"
    asked = make("semantic+:threshold=0.7").bind(RuleResources())
    assert isinstance(asked, SemanticPlus) and asked.threshold == 0.7 and asked.layers == (2,)
    for sure, passes in ((0.7, True), (0.69, False)):

        class Sure:
            features = Features((), evidence=OF_TARGET)
            layers = ()

            def __call__(self, states: Any, first_row: Any, counts: Any, seen: torch.Tensor) -> torch.Tensor:
                assert seen.shape == (1, ALL)
                return torch.tensor([sure])  # noqa: B023

        one = One([hot(1), hot(2), hot(0)], [1, 3])
        decisions = replace(asked, judge_probe=Sure(), numbers=torch.zeros(VOCAB, dtype=torch.bool)).verify(build(one))
        assert decisions.accepted.tolist() == [2 if passes else 1], "what the target would have written too is accepted"
        assert decisions.next.tolist() == [0 if passes else 2]


def test_evidence_undoes_each_sequences_own_temperature() -> None:
    """Greedy and sampled drafts in one batch, against plain Python on each sequence's own logits."""
    options = [Sampling(0.5, top_k=4), Sampling(), Sampling(2.0), Sampling(0.5, top_p=0.7)]
    ones = [random_one(seed, k, options[seed], VOCAB) for seed, k in enumerate([3, 2, 5, 1])]
    shown = probe_inputs(build(*ones), ("draft",), torch.zeros(VOCAB, dtype=torch.bool))
    assert shown is not None
    for one, row in zip(ones, shown.tolist(), strict=True):
        assert one.draft is not None
        warm = [[x * (one.sampling.temperature or 1.0) for x in logits] for logits in one.draft]
        assert row[-4:] == pytest.approx(plain_confidence(warm, one.ids), abs=1e-4)


def plain_evidence(rows: list[list[float]], ids: list[int], numbers: set[int]) -> list[float]:
    logp = [[x - math.log(sum(math.exp(y) for y in row)) for x in row] for row in rows]
    own = [row[i] for row, i in zip(logp, ids, strict=False)]
    entropy = [-sum(math.exp(x) * x for x in row) for row in logp[: len(ids)]]
    low = sorted([*own, 0.0])[:2] if len(own) < 2 else sorted(own)[:2]
    return [
        *low,
        sum(own) / len(own),
        min([x for x, i in zip(own, ids, strict=True) if i in numbers] + [0.0]),
        max(max(row) - x for row, x in zip(logp, own, strict=False)),
        sum(entropy) / len(ids),
        max(entropy),
        math.log(len(ids)),
    ]


def test_evidence_is_what_plain_python_finds() -> None:
    ones = [random_one(seed, k, Sampling(0.8), VOCAB, certain=True) for seed, k in enumerate([3, 1, 6, 2])]
    drafts, numbers = build(*ones), torch.tensor([i in (2, 4) for i in range(VOCAB)])
    found = evidence(drafts.target_logits, drafts.rows[:, :-1], drafts.safe_ids, drafts.exists, numbers)
    for one, row in zip(ones, found.tolist(), strict=True):
        assert row == pytest.approx(plain_evidence(one.target, one.ids, {2, 4}), abs=1e-4)


@pytest.mark.parametrize("groups", [OF_TARGET, ("numbers",), tuple(GROUPS)], ids=["target's", "one", "draft's too"])
@pytest.mark.parametrize("layers", [(2,), ()], ids=["with states", "without states"])
def test_the_evidence_of_semantics_target_probe_is_that_of_each_sequence_by_itself(
    groups: tuple[str, ...], layers: tuple[int, ...]
) -> None:
    """Ragged rows of several sequences, against plain Python on each sequence's own rows, token by token."""
    rule = make("semantic:tau=0.7").bind(RuleResources(target=Features(layers, evidence=groups)))
    assert isinstance(rule, Semantic) and rule.target_probe is not None and rule.layers == layers
    assert rule.keeps_draft_logits == ("draft" in groups)
    options = [Sampling(0.5, top_k=4), Sampling(), Sampling(0.8), Sampling(2.0, top_p=0.7)]
    ones = [random_one(seed, k, options[seed], 50) for seed, k in enumerate([3, 1, 6, 2])]
    torch.manual_seed(1)
    drafts = build(*ones)
    states, own = torch.randn(len(drafts.target_logits), WIDTH), torch.randn(int(drafts.counts.sum()), WIDTH)
    drafts = replace(drafts, hidden={2: states} if layers else None, draft_hidden={1: own})
    decisions = rule.verify(drafts)
    assert decisions.evidence is not None
    for b, one in enumerate(ones):
        assert one.draft is not None
        warm = [[x * (one.sampling.temperature or 1.0) for x in logits] for logits in one.draft]
        found = [*plain_evidence(one.target, one.ids, {48, 49}), *plain_confidence(warm, one.ids)]
        named = dict(zip((*NAMES, *CONFIDENCE), found, strict=True))
        wanted = {name for group in groups for name in GROUPS[group]}
        first = int(drafts.first_row[b])
        mean = states[first : first + len(one.ids)].mean(0).tolist() if layers else []
        features = torch.tensor([[*mean, *(value for name, value in named.items() if name in wanted)]])
        p = rule.target_probe.calibrator(rule.target_probe.head(features)).item()
        assert decisions.evidence[b, 0, 0].item() == pytest.approx(p, abs=1e-5)


def test_semantic_gets_number_tokens_only_if_its_probe_uses_them() -> None:
    class Slow(RuleResources):
        def numbers(self) -> torch.Tensor:
            raise AssertionError("it takes a second for a large vocabulary")

    rule = make("semantic").bind(Slow())
    assert isinstance(rule, Semantic) and rule.numbers is None and not rule.keeps_draft_logits
    with pytest.raises(AssertionError, match="a second"):
        make("semantic").bind(Slow(target=Features((2,), evidence=("length",))))


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_the_bonus_token_obeys_the_requests_filters(filters: dict[str, Any]) -> None:
    for seed in range(40):
        one = random_one(seed, 3, Sampling(1.5, **filters), VOCAB)
        ((accepted, follows),) = outcomes(AcceptAllSteps(bonus_temperature=1.0), one)
        assert accepted == 3 and follows == max(range(VOCAB), key=lambda i: one.target[3][i])
