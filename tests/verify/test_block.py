"""`block`: the target's distribution, round after round, with at least as many accepted tokens as `sampling`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semspec.model.limited_head import LOWEST
from semspec.types import Sampling
from semspec.verify import Rule
from semspec.verify.block import Block
from semspec.verify.exact import Exact
from semspec.verify.sampling import SpeculativeSampling
from tests.verify.build import AcceptsEverything, Crowd, Language, One, fit, outcomes, random_one
from tests.verify.test_sampling import FILTERED, FLOORED, PLAIN, languages

RULE = Block()


def accepted(target: Language, draft: Language, k: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """What `block` and `sampling` accept of the same 100,000 drafts, with the same noise."""
    drafts = Crowd.of(target, draft, 100_000, k + 1, PLAIN).drafts(k, round=0)
    return RULE.verify(drafts).accepted.double(), SpeculativeSampling().verify(drafts).accepted.double()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
@pytest.mark.parametrize("sampling", [PLAIN, FILTERED], ids=["plain", "filtered"])
def test_four_tokens_have_the_targets_joint_distribution(seed: int, certain: bool, sampling: Sampling) -> None:
    assert fit(RULE, *languages(seed), sampling, certain) > 1e-4


def test_min_p_and_a_high_temperature_change_nothing() -> None:
    assert fit(RULE, *languages(7), FLOORED) > 1e-4


@pytest.mark.parametrize("distance", [0.0, 0.3, 4.0])
def test_drafts_from_perfect_to_hopeless_change_nothing(distance: float) -> None:
    target = Language(vocab=6, memory=3, seed=6)
    assert fit(RULE, target, target.near(distance, seed=9), PLAIN) > 1e-4


@pytest.mark.parametrize("sampling", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("rule", [RULE, SpeculativeSampling()], ids=lambda rule: rule.name)
def test_a_draft_whose_head_has_only_some_tokens_changes_nothing(rule: Rule, sampling: Sampling) -> None:
    target, draft = languages(11)
    draft.table[:, [1, 4]] = LOWEST
    assert fit(rule, target, draft, sampling) > 1e-4
    assert fit(AcceptsEverything(), target, draft, sampling) < 1e-6, "the test sees what is left out"


@pytest.mark.parametrize("seed", [0, 1, 2, 5])
@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_two_rounds_that_overlap_keep_the_distribution(seed: int, certain: bool) -> None:
    """The second round starts after what the first emitted, among positions the first has drafted and tested."""
    target = Language(vocab=4, memory=2, seed=seed)
    assert fit(RULE, target, target.near(1.0, seed + 100), PLAIN, certain, rounds=(0, 1)) > 1e-4


@pytest.mark.parametrize("seed", [0, 1, 2, 5])
def test_the_same_noise_in_both_rounds_would_be_caught(seed: int) -> None:
    """Why every round has streams of its own: prefixes that failed in round one failed because of that noise."""
    target = Language(vocab=4, memory=2, seed=seed)
    assert fit(RULE, target, target.near(1.0, seed + 100), PLAIN, rounds=(0, 0)) < 1e-6


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("distance", [0.3, 1.0, 2.0])
def test_block_accepts_more_than_sampling(seed: int, distance: float) -> None:
    block, sampling = accepted(*languages(seed, distance))
    gain = block - sampling
    assert gain.mean() > 5 * gain.std() / len(gain) ** 0.5


def test_block_accepts_no_less_where_it_can_gain_nothing() -> None:
    """A draft with the target's own distribution: both accept everything."""
    block, sampling = accepted(*languages(0, distance=0.0))
    assert (block == 3).all() and (sampling == 3).all()


def test_the_papers_example_accepts_eleven_ninths_against_ten_ninths() -> None:
    """Target (1/3, 2/3), draft (2/3, 1/3) whatever the context, two draft tokens: the motivating example."""
    target, draft = Language(2, memory=1, seed=0), Language(2, memory=1, seed=0)
    target.table = torch.tensor([[1.0, 2.0]] * 2).log()
    draft.table = torch.tensor([[2.0, 1.0]] * 2).log()
    block, sampling = accepted(target, draft, k=2)
    assert sampling.mean().item() == pytest.approx(10 / 9, abs=0.01)
    assert block.mean().item() == pytest.approx(11 / 9, abs=0.01)


def test_a_draft_of_one_token_is_verified_as_by_sampling() -> None:
    drafts = Crowd.of(*languages(1), 100_000, 2, PLAIN).drafts(1, round=0)
    block, sampling = RULE.verify(drafts), SpeculativeSampling().verify(drafts)
    assert torch.equal(block.accepted, sampling.accepted)
    assert torch.equal(block.next, sampling.next)


@given(st.integers(0, 4), st.integers(0, 10**6), st.booleans())
def test_greedy_is_exact(k: int, seed: int, certain: bool) -> None:
    one = random_one(seed, k, Sampling(), vocab=3, certain=certain)
    assert outcomes(RULE, one) == outcomes(Exact(), one)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 10**6)), min_size=1, max_size=7),
       st.booleans())  # fmt: skip
def test_a_batch_equals_singles(batch: list[tuple[int, bool, int]], certain: bool) -> None:
    ones = [random_one(seed, k, FILTERED if warm else Sampling(), certain=certain) for k, warm, seed in batch]
    assert outcomes(RULE, *ones) == [outcomes(RULE, one)[0] for one in ones]


def test_a_later_token_can_save_an_earlier_one() -> None:
    """Token by token, 0 would be rejected with probability 1/2; the block is accepted because of what follows."""
    p = [[0.25, 0.75], [0.8, 0.2], [0.5, 0.5]]
    q = [[0.5, 0.5], [0.4, 0.6]]
    rows, own = torch.tensor(p).log().tolist(), torch.tensor(q).log().tolist()
    for seed in range(200):
        assert outcomes(RULE, One(rows, [0, 0], own, Sampling(1.0, seed=seed)))[0][0] == 2


def test_nan_logits_give_no_token() -> None:
    nan = [[float("nan")] * 4] * 3
    for count, token in outcomes(RULE, One(nan, [1, 2], [[0.0] * 4] * 2, PLAIN), One(nan, [3], [[0.0] * 4], PLAIN)):
        assert 0 <= count <= 2 and token == -1, "so the sequence ends, whatever was accepted"
