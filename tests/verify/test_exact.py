"""`exact` (and `none`): a draft token is accepted if it is the target's own; batches change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import semspec
from semspec.sampling import noise
from semspec.sampling.draw import draw
from semspec.types import Draft, Sampling, ScoreOutput, Verdict, VerifyRequest
from semspec.verify import make
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.collate import collate, verdicts
from semspec.verify.exact import Exact
from semspec.verify.none import NoSpeculation
from tests.verify.build import One, build, hot, outcomes, random_one

WARM = Sampling(1.0, seed=11)


def rows_of(*tokens: int) -> list[list[float]]:
    """The rows of a target that generates these tokens."""
    return [hot(token) for token in tokens]


def test_a_draft_that_is_never_right_leaves_the_targets_first_token() -> None:
    assert outcomes(Exact(), One(rows_of(1, 2, 3, 4), [0, 0, 0])) == [(0, 1)]


def test_a_draft_that_is_always_right_is_accepted_and_gets_the_bonus_token() -> None:
    assert outcomes(Exact(), One(rows_of(1, 2, 3, 4), [1, 2, 3])) == [(3, 4)]


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_the_first_wrong_token_is_replaced_by_the_targets_and_the_rest_rejected(wrong: int) -> None:
    ids = [1, 2, 3]
    ids[wrong] = 5
    assert outcomes(Exact(), One(rows_of(1, 2, 3, 4), ids)) == [(wrong, wrong + 1)]


def test_no_draft_leaves_the_targets_token() -> None:
    assert outcomes(Exact(), One(rows_of(3), [])) == [(0, 3)]
    assert outcomes(Exact(), One(rows_of(3), []), One(rows_of(2), [])) == [(0, 3), (0, 2)]


def test_drafts_of_all_lengths_in_one_batch() -> None:
    ragged = [
        One(rows_of(1), []),
        One(rows_of(1, 2, 3, 4, 5), [1, 2, 3, 4]),
        One(rows_of(1, 2), [0]),
        One(rows_of(0, 0), [0]),
        One(rows_of(4), []),
        One(rows_of(2, 2, 2), [2, 1]),
    ]
    assert outcomes(Exact(), *ragged) == [(0, 1), (4, 5), (0, 1), (1, 0), (0, 4), (1, 2)]


def test_padding_after_a_shorter_draft_is_never_accepted() -> None:
    """Its row would be the bonus row, which here agrees with token 0, the filler that gathers use."""
    assert outcomes(Exact(), One(rows_of(0, 0), [0]), One(rows_of(0, 0, 0, 0), [0, 0, 0])) == [(1, 0), (3, 0)]


def test_rows_after_the_bonus_row_are_ignored() -> None:
    """A rule's layout may have more scored than the draft."""
    longer = One(rows_of(1, 2, 3, 5, 5, 5), [1, 2])
    assert outcomes(Exact(), longer, One(rows_of(4, 4), [4])) == [(2, 3), (1, 4)]


def test_ties_go_to_the_first_token_as_in_plain_decoding() -> None:
    flat = [0.0] * 6
    assert outcomes(Exact(), One([flat, flat], [0])) == [(1, 0)]
    assert outcomes(Exact(), One([flat, flat], [1])) == [(0, 0)]
    mixed = outcomes(Exact(), One([flat, flat], [1]), One([flat], [], sampling=WARM))  # another code path, same choice
    assert mixed[0] == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 10**6)), min_size=1, max_size=7))
def test_a_batch_equals_singles(batch: list[tuple[int, bool, int]]) -> None:
    ones = [random_one(seed, k, Sampling(1.0) if warm else Sampling()) for k, warm, seed in batch]
    for rule in (Exact(), NoSpeculation()):
        assert outcomes(rule, *ones) == [outcomes(rule, one)[0] for one in ones]


@given(st.integers(0, 5), st.integers(0, 10**6), st.sampled_from([Sampling(1.0), Sampling(0.7, 3, 0.9, 0.05)]))
def test_with_temperature_it_is_the_targets_own_draw_at_each_position(k: int, seed: int, sampling: Sampling) -> None:
    one = random_one(seed, k, sampling)
    rows = torch.tensor(one.target)
    positions = range(one.position, one.position + k + 1)
    own = draw(rows, [one.sampling] * (k + 1), positions, [noise.TARGET] * (k + 1))[0].tolist()
    agreed = next((i for i in range(k) if one.ids[i] != own[i]), k)
    assert outcomes(Exact(), one) == [(agreed, own[agreed])]


def test_the_targets_own_draw_is_the_same_in_every_round() -> None:
    one = random_one(3, 4, Sampling(1.0))
    again = One(one.target, one.ids, one.draft, one.sampling, one.position, round=one.round + 5)
    assert torch.equal(build(one).target_choice(), build(again).target_choice())


def test_a_guess_of_the_targets_draw_is_accepted() -> None:
    one = random_one(8, 4, Sampling(1.0))
    own = build(one).target_choice()[0].tolist()
    assert outcomes(Exact(), One(one.target, own[:4], None, one.sampling, one.position)) == [(4, own[4])]


def test_none_accepts_nothing_and_writes_the_targets_token() -> None:
    assert outcomes(NoSpeculation(), One(rows_of(1, 2), [1]), One(rows_of(3), [])) == [(0, 1), (0, 3)]
    warm = random_one(4, 2, Sampling(1.0))
    assert outcomes(NoSpeculation(), warm) == [(0, build(warm).target_choice()[0, 0].item())]


def test_collating_requests_gives_the_drafts_of_the_definition() -> None:
    ones = [random_one(seed, k, Sampling(0.8, top_k=seed)) for seed, k in [(1, 3), (2, 0), (3, 5), (4, 1)]]
    requests = [
        VerifyRequest(
            Exact(),
            Draft(one.ids, torch.tensor(one.draft).view(-1, 6)),
            ScoreOutput(torch.tensor(one.target)),
            one.sampling,
            one.position,
            one.round,
        )
        for one in ones
    ]
    collated, expected = collate(requests), build(*ones)
    for field in ("ids", "counts", "target_logits", "first_row", "draft_logits", "first_draft", "seed", "position"):
        torch.testing.assert_close(getattr(collated, field), getattr(expected, field), rtol=0, atol=0)
    assert torch.equal(collated.round, expected.round)
    assert torch.equal(collated.target_probs, expected.target_probs)
    assert collated.state is None and collated.hidden is None and collated.draft_hidden is None


def test_collating_keeps_state_and_hidden_states_in_order() -> None:
    def request(k: int, mark: float) -> VerifyRequest:
        rows = ScoreOutput(torch.zeros(k + 1, 6), {2: torch.full([k + 1, 4], mark)})
        draft = Draft([0] * k, None, {1: torch.full([k, 3], -mark)})
        return VerifyRequest(Exact(), draft, rows, Sampling(), 0, 0, torch.tensor([mark, mark]))

    drafts: DraftBatch = collate([request(1, 1.0), request(2, 2.0)])
    assert drafts.draft_logits is None
    assert drafts.state is not None and drafts.state.tolist() == [[1, 1], [2, 2]]
    assert drafts.hidden is not None and drafts.hidden[2][:, 0].tolist() == [1, 1, 2, 2, 2]
    assert drafts.draft_hidden is not None and drafts.draft_hidden[1][:, 0].tolist() == [-1, -2, -2]


def test_verdicts_name_the_relaxed_positions_among_the_accepted() -> None:
    decisions = Decisions(
        torch.tensor([2, 0]),
        torch.tensor([7, 8]),
        torch.tensor([[True, False, True], [True, True, True]]),
        torch.tensor([[1.0], [2.0]]),
    )
    first, second = verdicts(decisions)
    assert first == Verdict(2, 7, (0,), state=first.state) and second == Verdict(0, 8, (), state=second.state)
    assert first.state is not None and first.state.tolist() == [1.0]


def test_a_coupled_draft_draws_with_the_targets_noise() -> None:
    warm = Sampling(0.8, seed=3)
    coupled, plain = make("exact:couple=true").request(4, warm, round=2), make("exact").request(4, warm, round=2)
    assert coupled.sampling == warm and coupled.stream == noise.TARGET
    assert plain.sampling.greedy and plain.stream != noise.TARGET


@pytest.mark.parametrize("drafter", ["model", "cascade"])
def test_a_coupled_draft_that_is_the_target_is_always_right(drafter: str, target_folder: Path) -> None:
    pair = semspec.load(target_folder, target_folder, device="cpu", slots=1)
    options = {"temperature": 0.9, "seed": 5, "max_new_tokens": 40, "ignore_eos": True, "drafter": drafter}
    result = pair.generate("the quick brown", verifier="exact:couple=true", **options)
    assert result.tokens == pair.generate("the quick brown", verifier="none", **options).tokens
    assert result.stats.acceptance_rate > 0.95 > pair.generate("the quick", **options).stats.acceptance_rate
