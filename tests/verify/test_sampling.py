"""`sampling`: its text has exactly the target's distribution, and the test of it catches biased rules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semspec.types import Sampling
from semspec.verify import Rule
from semspec.verify.exact import Exact
from semspec.verify.sampling import SpeculativeSampling
from tests.verify.build import (
    AcceptsEverything,
    Crowd,
    Language,
    One,
    ResamplesFromTarget,
    build,
    fit,
    hot,
    outcomes,
    random_one,
)

NEG_INF = float("-inf")
PLAIN = Sampling(1.0)
FILTERED = Sampling(0.7, top_k=3, top_p=0.9)
FLOORED = Sampling(1.4, min_p=0.1)
RULE = SpeculativeSampling()


def languages(seed: int, distance: float = 1.0) -> tuple[Language, Language]:
    """A target and a draft over 5 tokens; the draft errs differently after each of the 125 contexts."""
    target = Language(vocab=5, memory=3, seed=seed)
    return target, target.near(distance, seed + 100)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
@pytest.mark.parametrize("sampling", [PLAIN, FILTERED], ids=["plain", "filtered"])
def test_four_tokens_have_the_targets_joint_distribution(seed: int, certain: bool, sampling: Sampling) -> None:
    assert fit(RULE, *languages(seed), sampling, certain) > 1e-4


def test_min_p_and_a_high_temperature_change_nothing() -> None:
    assert fit(RULE, *languages(7), FLOORED) > 1e-4


@pytest.mark.parametrize("vocab", [4, 6])
@pytest.mark.parametrize("distance", [0.0, 0.3, 4.0])
def test_drafts_from_perfect_to_hopeless_change_nothing(vocab: int, distance: float) -> None:
    target = Language(vocab, memory=3, seed=vocab)
    assert fit(RULE, target, target.near(distance, seed=9), PLAIN) > 1e-4


def test_the_second_round_changes_nothing() -> None:
    assert fit(RULE, *languages(3), PLAIN, rounds=(0, 1)) > 1e-4


@pytest.mark.parametrize("wrong", [ResamplesFromTarget(), AcceptsEverything()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_same_test_catches_a_biased_rule(wrong: Rule, seed: int) -> None:
    assert fit(wrong, *languages(seed), PLAIN) < 1e-6


def test_the_first_token_is_accepted_as_often_as_the_distributions_overlap() -> None:
    target, draft = languages(4)
    crowd = Crowd.of(target, draft, 100_000, 4, PLAIN)
    accepted = RULE.verify(crowd.drafts(3, round=0)).accepted
    overlap = torch.minimum(target.table[0].softmax(-1), draft.table[0].softmax(-1)).sum().item()
    assert (accepted > 0).float().mean().item() == pytest.approx(overlap, abs=0.01)


def test_a_draft_with_the_targets_own_distribution_is_always_accepted() -> None:
    target, draft = languages(5, distance=0.0)
    drafts = Crowd.of(target, draft, 10_000, 4, PLAIN).drafts(3, round=0)
    assert (RULE.verify(drafts).accepted == 3).all()


def test_a_token_the_target_excludes_is_never_accepted_nor_drawn() -> None:
    rows = [[0.0, NEG_INF, 0.0, NEG_INF]] * 2
    for seed in range(200):
        accepted, token = outcomes(RULE, One(rows, [1], [[0.0] * 4], Sampling(1.0, seed=seed)))[0]
        assert accepted == 0 and token in (0, 2)


def test_a_rejected_token_is_replaced_by_one_that_the_target_prefers() -> None:
    """The residual max(p - q, 0) has no mass where the draft has more than the target."""
    p, q = torch.tensor([0.1, 0.5, 0.3, 0.1]).log().tolist(), torch.tensor([0.7, 0.1, 0.1, 0.1]).log().tolist()
    seen = {outcomes(RULE, One([p, p], [0], [q], Sampling(1.0, seed=seed)))[0] for seed in range(400)}
    assert {token for accepted, token in seen if accepted == 0} == {1, 2}


@given(st.integers(0, 4), st.integers(0, 10**6), st.booleans())
def test_greedy_is_exact(k: int, seed: int, certain: bool) -> None:
    one = random_one(seed, k, Sampling(), vocab=3, certain=certain)
    assert outcomes(RULE, one) == outcomes(Exact(), one)


def test_greedy_is_exact_for_right_and_wrong_drafts() -> None:
    rows = [hot(1), hot(2), hot(3)]
    assert outcomes(RULE, One(rows, [1, 2])) == [(2, 3)]
    assert outcomes(RULE, One(rows, [1, 0])) == [(1, 2)]
    assert outcomes(RULE, One(rows, [0, 2])) == [(0, 1)]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 10**6)), min_size=1, max_size=7),
       st.booleans())  # fmt: skip
def test_a_batch_equals_singles(batch: list[tuple[int, bool, int]], certain: bool) -> None:
    ones = [random_one(seed, k, FILTERED if warm else Sampling(), certain=certain) for k, warm, seed in batch]
    assert outcomes(RULE, *ones) == [outcomes(RULE, one)[0] for one in ones]


def test_drafts_of_no_length_get_the_targets_draw() -> None:
    rows = torch.tensor([[0.0, 1.0, 2.0, 0.5]])
    tokens = [outcomes(RULE, One(rows.tolist(), [], sampling=Sampling(1.0, seed=s)))[0] for s in range(300)]
    assert {accepted for accepted, _ in tokens} == {0}
    assert {token for _, token in tokens} == {0, 1, 2, 3}


def test_the_answer_depends_on_seed_position_and_round() -> None:
    ones = [random_one(seed, 3, PLAIN) for seed in range(40)]
    base = outcomes(RULE, *ones)
    assert base == outcomes(RULE, *ones)
    moved = [One(o.target, o.ids, o.draft, o.sampling, o.position + 1, o.round) for o in ones]
    later = [One(o.target, o.ids, o.draft, o.sampling, o.position, o.round + 1) for o in ones]
    reseeded = [One(o.target, o.ids, o.draft, Sampling(1.0, seed=o.sampling.seed + 99), o.position) for o in ones]
    for other in (moved, later, reseeded):
        assert outcomes(RULE, *other) != base


def test_nan_logits_give_no_token() -> None:
    nan = [[float("nan")] * 4] * 3
    for rule in (RULE, Exact()):
        decisions = rule.verify(build(One(nan, [1, 2], [[0.0] * 4] * 2, PLAIN), One(nan, [3, 3], [[0.0] * 4] * 2)))
        assert decisions.next.tolist() == [-1, -1] and decisions.accepted.tolist() == [0, 0]
