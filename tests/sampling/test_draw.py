"""From logits to tokens: against a plain-Python reference, against transformers' warpers, and by statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from semspec.errors import BadRequest
from semspec.sampling import noise
from semspec.sampling.draw import FEW, SamplingRows, _winner, choose, draw, logprobs_of, next_tokens, process
from semspec.types import Decode, Sampling, ScoreOutput
from tests.chi import chi_square, count
from tests.fakes import FakeRunner
from tests.race import race

CPU = torch.device("cpu")
SMALLEST = 2.0**-149  # the smallest subnormal float32

options = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.01, 0.3, 1.0, 1.7, 30.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 11, 100]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.51, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 1e-4, 0.05, 0.5, 0.97]),
)


def random_logits(rows: int, vocab: int, seed: int, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def processed(logits: Tensor, *sampling: Sampling) -> Tensor:
    """One option for every row, or one for all."""
    repeats = [len(logits)] if len(sampling) == 1 else [1] * len(sampling)
    return process(logits, SamplingRows.of(sampling, repeats, CPU))


def reference(logits: list[float], sampling: Sampling) -> list[float]:
    """The probabilities by the definition, one filter after the other."""
    if sampling.greedy:
        best = logits.index(max(logits))
        return [float(i == best) for i in range(len(logits))]
    top = max(logits)
    weights = [math.exp((x - top) / sampling.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    kept = order[: sampling.top_k or None]
    total, mass, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        if mass < sampling.top_p:
            nucleus.append(i)
        mass += weights[i] / total
    floor = sampling.min_p * weights[order[0]]
    kept = [i for i in nucleus if weights[i] >= floor]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


def by_transformers(logits: Tensor, sampling: Sampling) -> Tensor:
    warpers = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    for warper in warpers:
        logits = warper(None, logits)
    return logits.softmax(-1)


@given(options, st.integers(0, 1000))
def test_processed_logits_are_the_plain_python_reference(sampling: Sampling, seed: int) -> None:
    logits = random_logits(3, 12, seed)
    expected = [reference(row, sampling) for row in logits.double().tolist()]
    torch.testing.assert_close(processed(logits, sampling).softmax(-1), torch.tensor(expected), atol=1e-5, rtol=1e-4)


@given(options.filter(lambda o: not o.greedy), st.integers(0, 1000))
def test_processed_logits_are_those_of_transformers(sampling: Sampling, seed: int) -> None:
    logits = random_logits(4, 50, seed)
    ours = processed(logits, sampling).softmax(-1)
    torch.testing.assert_close(ours, by_transformers(logits, sampling), atol=1e-5, rtol=1e-4)


@given(st.lists(options, min_size=2, max_size=8), st.integers(0, 1000))
def test_mixed_rows_in_one_call_equal_separate_calls(sampling: list[Sampling], seed: int) -> None:
    logits = random_logits(len(sampling), 30, seed)
    together = processed(logits, *sampling)
    for i, option in enumerate(sampling):
        assert torch.equal(together[i : i + 1], processed(logits[i : i + 1], option))


def test_an_unfiltered_row_keeps_its_whole_tail_beside_a_filtered_one() -> None:
    """Rounded sums of 5,000 probabilities reach 1 before the tail ends; that must cut nothing."""
    logits = random_logits(20, 5000, seed=0)
    together = processed(logits, *[Sampling(1.0)] * 19, Sampling(1.0, top_k=2))[:19]
    assert torch.equal(together, processed(logits[:19], Sampling(1.0)))


def test_greedy_rows_have_all_their_mass_on_the_first_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-5.0, -9.0, -7.0, -5.5]])
    for sampling in (Sampling(), Sampling(0.0, top_k=3, top_p=0.5, min_p=0.5)):
        assert processed(logits, sampling).softmax(-1).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    mixed = processed(logits, Sampling(), Sampling(1.0, top_k=2)).softmax(-1)
    assert mixed[0].tolist() == [0, 1, 0, 0]
    assert mixed[1].count_nonzero() == 2


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-38, 1e-45])
def test_the_smallest_temperatures_are_as_good_as_greedy(temperature: float) -> None:
    logits = random_logits(5, 40, seed=3)
    probs = processed(logits, Sampling(temperature)).softmax(-1)
    torch.testing.assert_close(probs, processed(logits, Sampling()).softmax(-1))


def test_half_precision_logits_are_processed_in_float32() -> None:
    logits = random_logits(2, 20, seed=1).bfloat16()
    assert processed(logits, Sampling(0.7)).dtype == torch.float32
    assert torch.equal(processed(logits, Sampling(0.7)), processed(logits.float(), Sampling(0.7)))


@given(st.lists(st.sampled_from([0.0, SMALLEST, 1e-38, 1e-9, 0.3, 1.0, 7.0]), min_size=1, max_size=9).filter(any),
       st.integers(0, 2**62))  # fmt: skip
def test_choose_takes_the_winner_of_the_race(weights: list[float], key: int) -> None:
    chosen = int(choose(torch.tensor([weights], dtype=torch.float64).log().float(), torch.tensor([key])))
    assert weights[chosen] > 0
    ratio, best = (
        math.log(noise.exponential_of(key, np.arange(9))[i]) - math.log(weights[i])
        for i in (chosen, race(weights, key))
    )
    assert ratio == pytest.approx(best, abs=1e-4)


def test_choose_over_a_large_vocabulary_stays_within_the_support() -> None:
    weights = torch.rand(64, 150_000, generator=torch.Generator().manual_seed(0))
    weights[:, 100_000:] = 0
    weights[:, ::3] = 0
    chosen = choose(weights.log(), torch.arange(64))
    assert (weights.gather(1, chosen[:, None]) > 0).all()


def test_choose_draws_in_proportion_to_weights_of_any_sum() -> None:
    weights = torch.tensor([0.5, 0.0, 2.0, 1.0, 0.25])
    keys = noise.key(torch.tensor(1), torch.arange(100_000), torch.tensor(2))
    chosen = choose(weights.log().expand(len(keys), -1), keys)
    assert chi_square(count(chosen, 5), weights / weights.sum()) > 1e-4


def test_two_models_that_draw_with_the_same_noise_mostly_draw_the_same() -> None:
    """At least the share that no coupling can beat is far from what independent draws give."""
    one, n = random_logits(1, 50, seed=1), 20_000
    other = one + 0.3 * random_logits(1, 50, seed=2)
    p, q = one.softmax(-1), other.softmax(-1)
    keys = noise.key(torch.tensor(1), torch.arange(n), torch.tensor(0))
    same = (choose(one.expand(n, -1), keys) == choose(other.expand(n, -1), keys)).float().mean()
    overlap, chance = torch.minimum(p, q).sum(), (p * q).sum()
    assert float(chance) + 0.1 < float(same) <= float(overlap) + 0.02
    assert float(same) >= float(overlap / (2 - overlap)) - 0.02, "what Gumbel coupling is known to keep"


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(0.7, top_k=3), Sampling(1.0, min_p=0.1)])
@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_not_a_number_is_no_token(sampling: Sampling, rows: int) -> None:
    logits = random_logits(rows, 20, seed=1)
    logits[0, 7] = float("nan")
    tokens = draw(logits, [sampling] * rows, range(rows), [0] * rows)[0].tolist()
    assert tokens[0] == -1 and all(token >= 0 for token in tokens[1:])


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.6, top_k=5), Sampling(1.3, top_p=0.8), Sampling(1.0, min_p=0.1)], ids=repr
)
def test_draws_have_the_processed_distribution(sampling: Sampling) -> None:
    n = 100_000
    logits = random_logits(1, 8, seed=5, spread=1.0)
    tokens, _ = draw(logits.expand(n, -1), [sampling] * n, range(n), [0] * n)
    expected = torch.tensor(reference(logits[0].double().tolist(), sampling))
    assert chi_square(count(tokens, 8), expected) > 1e-4


@given(
    st.sampled_from([0.01, 0.6, 1.0, 30.0]), st.sampled_from([0.0, 0.05, 1.0]), st.integers(0, 1000),
    st.sampled_from([1, 2, 50, 3000]),
)  # fmt: skip
def test_a_row_by_itself_is_drawn_as_among_others(temperature: float, min_p: float, seed: int, size: int) -> None:
    """In another library, but by the same operations."""
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(seed)) * 4
    logits[0, seed % size] = float("-inf") if size > 1 else 1.0
    option = Sampling(temperature, min_p=min_p, seed=seed)
    (alone,), kept = draw(logits, [option], [7], [1], keep=True)
    both, others = draw(logits.expand(2, -1), [option] * 2, [7] * 2, [1] * 2, keep=True)
    torch.testing.assert_close(kept, others[:1])
    assert int(alone) == int(both[0])


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 6, 63, 255, FEW]), st.integers(1, 9))
def test_rows_of_a_small_vocabulary_are_drawn_at_once_as_one_by_one(seed: int, size: int, count: int) -> None:
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, size, generator=random) * 3
    rows[torch.rand(count, size, generator=random) < 0.4] = -torch.inf
    rows[0, seed % size] = torch.nan if seed % 3 == 0 else 1.0
    keys = torch.randint(-(2**63), 2**63 - 1, (count,), generator=random)
    alone = [_winner(row, key) for row, key in zip(rows.numpy(), keys.tolist(), strict=True)]
    assert choose(rows, keys).tolist() == alone


def test_rows_of_a_large_vocabulary_are_drawn_the_same_alone_and_together() -> None:
    """151,936 tokens: sums over so many, in another order or precision, would give other draws."""
    logits = torch.randn(12, 151_936, generator=torch.Generator().manual_seed(3)) * 2
    option = Sampling(1.0, seed=5)
    together, _ = draw(logits, [option] * 12, range(12), [0] * 12)
    assert [int(draw(logits[i : i + 1], [option], [i], [0])[0]) for i in range(12)] == together.tolist()
    noisy = logits + 1e-2 * torch.randn(12, 151_936, generator=torch.Generator().manual_seed(4))
    assert (draw(noisy, [option] * 12, range(12), [0] * 12)[0] == together).sum() >= 11


def test_a_long_tail_of_small_weights_is_drawn_from() -> None:
    """Each weighs too little to be added to the rest in float32; together they are a part in three hundred."""
    logits = torch.full((1, 150_000), -17.75)
    logits[0, 7] = 0.0
    tail = float(logits.double().softmax(-1)[0, 8:].sum())
    found = sum(int(draw(logits, [Sampling(1.0, seed=2)], [position], [1])[0]) > 7 for position in range(3000))
    assert abs(found - 3000 * tail) < 4 * (3000 * tail) ** 0.5, (found, tail)


def test_a_biased_draw_would_be_caught() -> None:
    n = 100_000
    logits = random_logits(1, 8, seed=5, spread=1.0)
    tokens, _ = draw(logits.expand(n, -1), [Sampling(1.05)] * n, range(n), [0] * n)  # five percent too warm
    assert chi_square(count(tokens, 8), logits[0].softmax(-1)) < 1e-6


def test_a_draw_depends_on_seed_position_and_stream_and_on_nothing_else() -> None:
    logits = random_logits(6, 500, seed=2, spread=0.1)
    sampling = [Sampling(1.0, seed=s) for s in range(6)]
    together, _ = draw(logits, sampling, range(6), [3] * 6)
    for i in range(6):
        alone, _ = draw(logits[i : i + 1], [sampling[i]], [i], [3])
        assert alone[0] == together[i]
    for other in (
        draw(logits, [Sampling(1.0, seed=9)] * 6, range(6), [3] * 6),
        draw(logits, sampling, range(1, 7), [3] * 6),
        draw(logits, sampling, range(6), [4] * 6),
    ):
        assert not torch.equal(other[0], together)


def test_draw_keeps_processed_logits_when_asked_but_raw_ones_of_greedy_rows() -> None:
    logits = random_logits(2, 5, seed=0)
    warm = processed(logits, Sampling(0.5, top_k=2))
    for first, second, wanted in [
        (Sampling(), Sampling(), logits),
        (Sampling(0.5, top_k=2), Sampling(0.5, top_k=2), warm),
        (Sampling(), Sampling(0.5, top_k=2), torch.stack([logits[0], warm[1]])),
    ]:
        assert draw(logits, [first, second], [0, 0], [0, 0])[1] is None
        kept = draw(logits, [first, second], [0, 0], [0, 0], keep=True)[1]
        assert kept is not None and torch.equal(kept, wanted)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_k=3, top_p=0.9, min_p=0.1)])
def test_rows_without_a_number_give_no_token(sampling: Sampling) -> None:
    logits = torch.full([3, 7], float("nan"))
    logits[1, :4] = 0.0
    logits[2] = float("-inf")
    tokens, _ = draw(logits, [sampling] * 3, range(3), [0] * 3)
    assert tokens[0] == tokens[1] == -1
    assert tokens[2] == (0 if sampling.greedy else -1), "of equal logits the first, but no distribution of nothing"


@given(st.integers(1, 6), st.integers(0, 8), st.integers(0, 100))
@settings(max_examples=30)
def test_logprobs_are_those_of_log_softmax(rows: int, top: int, seed: int) -> None:
    logits = random_logits(rows, 6, seed)
    tokens = [(seed + i) % 6 for i in range(rows)]
    logp = logits.log_softmax(-1)
    for i, found in enumerate(logprobs_of(logits, tokens, top)):
        assert found.token == tokens[i]
        assert found.logprob == pytest.approx(logp[i, tokens[i]].item())
        best = sorted(range(6), key=lambda t: -logp[i, t].item())[:top]
        assert [t for t, _ in found.top] == best
        assert [lp for _, lp in found.top] == pytest.approx(logp[i, best].tolist())


def test_the_next_token_of_each_sequence_is_drawn_with_its_own_options() -> None:
    runner = FakeRunner(lambda _: [0.0] * 5, 5)
    slots = [runner.acquire() for _ in range(3)]
    for slot, length in zip(slots, [1, 4, 2], strict=True):
        runner.held[slot] = [0] * length
    requests = [
        Decode(runner, slots[0], [0], 3, Sampling(), 0),
        Decode(runner, slots[1], [0], 3, Sampling(1.0, seed=7), 9, keep_logits=True),
        Decode(runner, slots[2], [0], 3, Sampling(), 0, logprobs=2),
    ]
    rows = [ScoreOutput(random_logits(1, 5, i), {1: torch.ones(1, 2) * i}) for i in range(3)]
    plain, kept, scored = next_tokens(requests, rows)
    assert plain.tokens == rows[0].logits.argmax(-1).tolist() and plain.logits is None and plain.logprobs is None
    assert kept.tokens == draw(rows[1].logits, [Sampling(1.0, seed=7)], [4], [9])[0].tolist()
    assert kept.logits is not None and torch.equal(kept.logits, processed(rows[1].logits, Sampling(1.0)))
    assert scored.logprobs == logprobs_of(rows[2].logits, scored.tokens, 2)
    assert kept.hidden is rows[1].hidden


def test_no_writers_need_no_tokens() -> None:
    assert next_tokens([], []) == []


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; give 0 (greedy) or a positive number up to 100"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1; give 0 (off)"),
        ({"top_p": 0.0}, "top_p is 0.0; give a number above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": -0.5}, "min_p is -0.5; give a number from 0 (off) to 1"),
        ({"seed": 2**63}, "at most 64 bits"),
    ],
)
def test_impossible_options_are_refused_with_a_sentence(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(BadRequest) as error:
        Sampling(**wrong)  # type: ignore[arg-type]
    assert says in str(error.value)
