"""A cascade proposes exactly what its model would, with fewer passes over it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semspec import verify
from semspec.draft import CascadeDrafter, ModelDrafter, NgramDrafter
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.types import Drafter, Sampling
from tests.fakes import FakeRunner, Logits, blend, chain, greedy

VOCAB = 7
PROMPT = [1, 2, 3, 1, 2, 3, 1]
LANGUAGE = chain(VOCAB, seed=3, memory=2)  # a short memory: the text soon repeats itself
OTHER = chain(VOCAB, seed=8, memory=2)


def decode(drafter: Drafter, verifier: str, k: int, n: int, target: Logits = LANGUAGE, **sampling: float):
    executor, stats = Executor(), Stats()
    runner = FakeRunner(target, VOCAB)
    job = Job(PROMPT, verify.make(verifier), k, n, Sampling(**sampling))  # type: ignore[arg-type]
    task = executor.submit(Decoder(job, runner, drafter, stats).decode(), stats)
    executor.run()
    if task.error:
        raise task.error
    assert not runner.held
    return [(e.tokens, e.drafted, e.accepted) for e in task.events]


def stacks(draft: FakeRunner) -> list[Drafter]:
    small, smaller = FakeRunner(OTHER, VOCAB), FakeRunner(blend(LANGUAGE, OTHER, lambda c: len(c) % 2 == 0), VOCAB)
    return [
        CascadeDrafter(draft, NgramDrafter()),
        CascadeDrafter(draft, ModelDrafter(small), ahead=3),
        CascadeDrafter(draft, CascadeDrafter(smaller, NgramDrafter(), ahead=4), ahead=5),  # three levels
    ]


@given(st.integers(1, 16), st.integers(1, 40), st.lists(st.booleans(), min_size=1, max_size=9))
def test_any_stack_proposes_what_its_model_would(k: int, n: int, errs: list[bool]):
    draft_language = blend(LANGUAGE, OTHER, lambda c: errs[len(c) % len(errs)])
    plain = decode(ModelDrafter(FakeRunner(draft_language, VOCAB)), "exact", k, n)
    for level in range(3):
        draft = FakeRunner(draft_language, VOCAB)
        assert decode(stacks(draft)[level], "exact", k, n) == plain
        assert not draft.held, "slots are released"


def test_repetitive_text_takes_fewer_passes_over_the_draft_model():
    plain, cascaded = FakeRunner(LANGUAGE, VOCAB), FakeRunner(LANGUAGE, VOCAB)
    decode(ModelDrafter(plain), "exact", 15, 120)
    decode(CascadeDrafter(cascaded, NgramDrafter()), "exact", 15, 120)
    passes = sum(n for p in plain.diary for n in p.rows.values())
    assert len(cascaded.diary) < 0.6 * passes


@pytest.mark.parametrize("verifier", ["sampling", "block"])
def test_rules_that_compare_distributions_get_the_models_own_draws(verifier: str):
    plain = decode(ModelDrafter(FakeRunner(OTHER, VOCAB)), verifier, 5, 40, temperature=1.0, seed=4)
    for drafter in stacks(FakeRunner(OTHER, VOCAB)):
        assert decode(drafter, verifier, 5, 40, temperature=1.0, seed=4) == plain


def test_a_short_context_is_respected():
    draft = FakeRunner(LANGUAGE, VOCAB, max_seq_len=len(PROMPT) + 10)
    events = decode(CascadeDrafter(draft, NgramDrafter()), "exact", 6, 30)
    assert [t for tokens, *_ in events for t in tokens] == greedy(LANGUAGE, PROMPT, 30)
    assert events[-1][1] == 0, "after the end of its context there are no drafts"


def test_lookup_forgets_rejected_text():
    plain, drafted = NgramDrafter(), NgramDrafter()
    context = [1, 2, 3, 4, 1, 2]
    for drafter in (plain, drafted):
        drafter.begin([])
        drafter._index(context)
    drafted._index([*context, 5, 6, 1, 2])  # a rejected draft
    drafted.accept(len(context))
    assert drafted._follower == plain._follower and len(drafted._history) == len(context)
