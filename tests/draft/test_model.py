"""The model drafter: what it asks its runner for, and what its cache holds after every possible verdict."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semspec.draft import ModelDrafter
from semspec.sampling import noise
from semspec.sampling.draw import SamplingRows, process
from semspec.types import Decode, Draft, Sampling
from semspec.verify import make
from tests import race
from tests.fakes import FakeRunner, chain, greedy

VOCAB, K = 9, 4
LANGUAGE = chain(VOCAB, seed=4)
PROMPT = [1, 2, 3, 4, 5]
WARM = Sampling(1.0, seed=3)


def new_drafter(capacity: int = 64) -> tuple[FakeRunner, ModelDrafter]:
    runner = FakeRunner(LANGUAGE, VOCAB, max_seq_len=capacity)
    drafter = ModelDrafter(runner)
    drafter.begin([runner.acquire()])
    return runner, drafter


def first_request(drafter: ModelDrafter, rule: str) -> Decode:
    request = next(drafter.propose(PROMPT, make(rule).request(K, WARM, 2)))
    assert isinstance(request, Decode)
    return request


def propose(
    runner: FakeRunner, drafter: ModelDrafter, context: list[int], n: int = K, rule: str = "exact", round: int = 0
) -> Draft:
    """Answer whatever the drafter asks for."""
    asking = drafter.propose(context, make(rule).request(n, WARM, round))
    try:
        request = next(asking)
        while True:
            assert isinstance(request, Decode)
            request = asking.send(runner.decode([request])[0])
    except StopIteration as done:
        draft: Draft = done.value
        return draft


def test_it_needs_one_slot_of_its_runner() -> None:
    runner, drafter = new_drafter()
    assert drafter.runners == [runner] and runner.free == runner.slots - 1


def test_a_rule_that_compares_tokens_gets_greedy_drafts() -> None:
    runner, drafter = new_drafter()
    draft = propose(runner, drafter, PROMPT)
    assert draft.tokens == greedy(LANGUAGE, PROMPT, K)
    assert draft.logits is None


def test_a_rule_that_compares_distributions_gets_draws_and_what_they_were_drawn_from() -> None:
    runner, drafter = new_drafter()
    draft = propose(runner, drafter, PROMPT, rule="sampling", round=1)
    assert draft.logits is not None and draft.logits.shape == (K, VOCAB)
    for i, token in enumerate(draft.tokens):
        row = torch.tensor([LANGUAGE(PROMPT + draft.tokens[:i])])
        expected = process(row, SamplingRows.of([WARM], [1], torch.device("cpu")))
        assert torch.equal(draft.logits[i : i + 1], expected)
        key = race.key(3, len(PROMPT) + i, noise.stream(noise.DRAFT, 1))
        assert token == race.race(expected.softmax(-1)[0].tolist(), key)


def test_drafts_are_drawn_afresh_in_every_round() -> None:
    drawn = set()
    for round in range(12):
        runner, drafter = new_drafter()
        drawn.add(tuple(propose(runner, drafter, PROMPT, rule="sampling", round=round).tokens))
    assert len(drawn) > 6


def test_the_request_is_for_drafting_and_names_its_noise() -> None:
    _, drafter = new_drafter()
    plain, compared = first_request(drafter, "exact"), first_request(drafter, "block")
    assert plain.drafting and plain.sampling.greedy and not plain.keep_logits
    assert compared.drafting and compared.sampling == WARM and compared.keep_logits
    assert compared.stream == noise.stream(noise.DRAFT, 2)
    assert plain.tokens == PROMPT and plain.n == K


@pytest.mark.parametrize("rule", ["exact", "sampling"])
@pytest.mark.parametrize("accepted", range(K + 1))
def test_after_any_verdict_the_cache_is_a_prefix_of_the_text_and_the_next_draft_is_right(
    accepted: int, rule: str
) -> None:
    runner, drafter = new_drafter()
    draft = propose(runner, drafter, PROMPT, rule=rule)
    drafter.accept(len(PROMPT) + accepted)
    correction = (draft.tokens[min(accepted, K - 1)] + 1) % VOCAB
    context = PROMPT + draft.tokens[:accepted] + [correction]

    held = runner.held[0]
    assert held == context[: len(held)]
    assert len(held) == len(PROMPT) + min(accepted, K - 1), "all accepted tokens, but for a last one never fed"

    fresh_runner, fresh = new_drafter()
    again = propose(runner, drafter, context, rule=rule, round=1)
    expected = propose(fresh_runner, fresh, context, rule=rule, round=1)
    assert again.tokens == expected.tokens
    assert runner.held[0] == fresh_runner.held[0]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(0, VOCAB - 1)), max_size=8))
def test_after_any_verdicts_it_drafts_as_if_new(verdicts: list[tuple[int, int, int]]) -> None:
    runner, drafter = new_drafter(capacity=200)
    context = list(PROMPT)
    for n, accepted, correction in verdicts:
        draft = propose(runner, drafter, context, n)
        assert draft.tokens == greedy(LANGUAGE, context, n)
        accepted = min(accepted, n)
        drafter.accept(len(context) + accepted)
        context += [*draft.tokens[:accepted], correction]
        assert runner.held[0] == context[: len(runner.held[0])] and len(runner.held[0]) < len(context)


@pytest.mark.parametrize(("length", "left"), [(5, 4), (7, 4), (8, 3), (9, 2), (10, 1), (11, 0), (13, 0)])
def test_it_drafts_no_further_than_its_own_capacity(length: int, left: int) -> None:
    runner, drafter = new_drafter(capacity=10)
    context = [i % VOCAB for i in range(length)]
    draft = propose(runner, drafter, context)  # the FakeRunner asserts that no slot overflows
    assert draft.tokens == greedy(LANGUAGE, context, left)
    drafter.accept(length)
    assert runner.length(0) <= length


def test_a_request_for_no_tokens_makes_no_pass() -> None:
    runner, drafter = new_drafter()
    assert propose(runner, drafter, PROMPT, n=0).tokens == []
    assert runner.diary == []


def test_close_gives_the_slot_back_once() -> None:
    runner, drafter = new_drafter()
    propose(runner, drafter, PROMPT)
    drafter.close()
    drafter.close()
    assert runner.free == runner.slots


def test_close_before_begin_does_no_harm() -> None:
    runner = FakeRunner(LANGUAGE, VOCAB)
    ModelDrafter(runner).close()
    assert runner.free == runner.slots
