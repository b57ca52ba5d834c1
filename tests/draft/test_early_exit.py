"""Drafts that end where the draft model is not confident: the same tokens, but fewer of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semspec import verify
from semspec.draft import CascadeDrafter, EarlyExit, ModelDrafter, NgramDrafter
from semspec.draft.early_exit import CHUNK
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.types import Draft, Drafter, Event, Sampling
from tests.fakes import FakeRunner, chain, greedy

VOCAB, PROMPT = 9, [1, 2, 3, 1, 2, 3]
LANGUAGE = chain(VOCAB, seed=4, memory=2)
rows = st.lists(st.lists(st.floats(-4, 4), min_size=3, max_size=3), min_size=1, max_size=6)


def is_unsure(early_exit: EarlyExit, row: list[float]) -> bool:
    weights = [math.exp(x) for x in row]
    p = [w / sum(weights) for w in weights]
    entropy = -sum(x * math.log(x) for x in p)
    return max(p) < early_exit.min_p or (early_exit.max_entropy is not None and entropy > early_exit.max_entropy)


@given(rows, st.sampled_from([0.0, 0.45, 0.7]), st.sampled_from([None, 0.3, 0.9]))
def test_the_confident_prefix_is_that_of_plain_python(logits: list[list[float]], p: float, entropy: float | None):
    early_exit = EarlyExit(p, entropy)
    unsure = [is_unsure(early_exit, row) for row in logits]
    assert early_exit.confident_prefix(torch.tensor(logits)) == [*unsure, True].index(True)
    assert early_exit.enabled is (p > 0 or entropy is not None)


def drafts(early_exit: EarlyExit, drafter: str, verifier: str = "exact", k: int = 10, **sampling: float) -> list[Event]:
    runner = FakeRunner(LANGUAGE, VOCAB)
    made: Drafter = ModelDrafter(runner, early_exit)
    if drafter == "cascade":
        made = CascadeDrafter(runner, NgramDrafter(), ahead=3, early_exit=early_exit)
    executor, stats = Executor(), Stats()
    job = Job(PROMPT, verify.make(verifier), k, 60, Sampling(**sampling))  # type: ignore[arg-type]
    task = executor.submit(Decoder(job, FakeRunner(LANGUAGE, VOCAB), made, stats).decode(), stats)
    executor.run()
    assert task.error is None and not runner.held
    return list(task.events)


@pytest.mark.parametrize("drafter", ["model", "cascade"])
@pytest.mark.parametrize(
    "early_exit", [EarlyExit(0.6), EarlyExit(max_entropy=0.8), EarlyExit(0.5, 1.2), EarlyExit(0.999)]
)
def test_a_draft_ends_before_the_first_unsure_token(early_exit: EarlyExit, drafter: str):
    context = list(PROMPT)
    for event in drafts(early_exit, drafter)[:-1]:
        written = greedy(LANGUAGE, context, 10)
        unsure = [is_unsure(early_exit, LANGUAGE(context + written[:i])) for i in range(10)]
        left = 60 - (len(context) - len(PROMPT)) - 1
        assert event.drafted == min(max([*unsure, True].index(True), 1), left), "but at least one token"
        context += event.tokens
    assert context[len(PROMPT) :] == greedy(LANGUAGE, PROMPT, len(context) - len(PROMPT))


def test_no_more_is_drafted_than_the_chunk_of_the_first_unsure_token():
    runner = FakeRunner(LANGUAGE, VOCAB)
    drafter = ModelDrafter(runner, EarlyExit(0.999))
    drafter.begin([runner.acquire()])
    asking = drafter.propose(PROMPT, verify.make("exact").request(20, Sampling(), 0))
    requests = [next(asking)]
    with pytest.raises(StopIteration) as done:
        requests.append(asking.send(runner.decode([requests[0]])[0]))
    draft: Draft = done.value.value
    assert [r.n for r in requests] == [CHUNK] and len(draft.tokens) < CHUNK and draft.logits is None


@pytest.mark.parametrize("verifier", ["sampling", "block"])
def test_drawn_drafts_are_the_same_tokens_and_carry_their_distributions(verifier: str):
    whole = drafts(EarlyExit(), "model", verifier, temperature=1.0, seed=3)
    cut = drafts(EarlyExit(0.5), "model", verifier, temperature=1.0, seed=3)
    first, other = whole[0], cut[0]
    n = min(first.accepted, other.drafted)
    assert first.tokens[:n] == other.tokens[:n]
    assert sum(len(e.tokens) for e in cut) == 60 and max(e.drafted for e in cut) < 10


def test_a_rule_with_a_window_keeps_its_window():
    written, lengths = 0, []
    for event in drafts(EarlyExit(0.999), "model", "fly:window=3"):
        if 60 - written > 4:  # a whole window fits
            lengths.append(event.drafted)
        written += len(event.tokens)
    assert min(lengths) == 4, "the mismatch and three after it, however unsure the model is"
