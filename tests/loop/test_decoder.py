"""The loop, with fake models: what is accepted, what the caches hold after every round, what is counted."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec import verify
from semspec.draft import ModelDrafter, NgramDrafter, NoDrafter
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.repetition import RepetitionGuard
from semspec.loop.stats import Stats
from semspec.loop.thinking import Thinking
from semspec.model.layer_ops import checks
from semspec.types import Drafter, Event, Sampling, Score
from semspec.verify.exact import Exact
from tests.fakes import FakeRunner, Logits, blend, chain, greedy, script

VOCAB = 11
PROMPT = [3, 1, 4, 1, 5]


def decode(target: FakeRunner, drafter: Drafter, verifier: str = "exact", k: int = 4, n: int = 40, **job: object):
    """Decode one sequence; returns tokens, events and stats."""
    stats, executor = Stats(), Executor()
    made = Job(PROMPT, verify.make(verifier), k, n, **job)  # type: ignore[arg-type]
    task = executor.submit(Decoder(made, target, drafter, stats).decode(), stats)
    executor.run()
    if task.error:
        raise task.error
    return [t for e in task.events for t in e.tokens], list(task.events), stats


def wrong(logits: Logits) -> Logits:
    """A model whose most likely token is the other's least likely."""
    return lambda context: [-x for x in logits(context)]


def test_a_draft_that_is_never_right_costs_one_pass_a_token():
    language = chain(VOCAB)
    target, draft = FakeRunner(language, VOCAB), FakeRunner(wrong(language), VOCAB)
    tokens, events, stats = decode(target, ModelDrafter(draft))
    assert tokens == greedy(language, PROMPT, 40)
    assert stats.accepted == 0 and stats.tau == 1.0 and stats.rounds == stats.target_passes == 40
    assert {o for e in events for o in e.origins} == {"target"}


def test_a_draft_that_is_always_right_is_accepted_whole():
    language = chain(VOCAB)
    target, draft = FakeRunner(language, VOCAB), FakeRunner(language, VOCAB)
    tokens, _, stats = decode(target, ModelDrafter(draft), n=40)
    assert tokens == greedy(language, PROMPT, 40)
    assert stats.histogram == {4: 8} and stats.tau == 5.0 and stats.target_passes == 8


def test_a_draft_that_is_right_at_times_is_cut_at_its_first_mistake():
    # The target counts up; the draft is wrong at every position divisible by 7.
    target_tokens = [i % VOCAB for i in range(60)]
    draft_tokens = [(i + (i % 7 == 0)) % VOCAB for i in range(60)]
    target = FakeRunner(script(target_tokens, VOCAB, len(PROMPT)), VOCAB)
    draft = FakeRunner(script(draft_tokens, VOCAB, len(PROMPT)), VOCAB)
    tokens, events, stats = decode(target, ModelDrafter(draft), k=4, n=14)
    assert tokens == target_tokens[:14]
    # Position 0 wrong; then 1-4 right and a bonus at 5; 6 right, 7 wrong; 8-11 right and 12; the last without a draft.
    assert [e.accepted for e in events] == [0, 4, 1, 4, 0]
    assert [e.drafted for e in events] == [4, 4, 4, 4, 0]
    assert events[2].origins == ["draft", "target"]
    assert (stats.drafted, stats.accepted, stats.bonus) == (16, 9, 5)


def sequence_of(pattern: list[bool], k: int, n: int, verifier: str) -> tuple[Decoder, FakeRunner, FakeRunner]:
    """A draft that is right exactly at the positions the pattern says (over and over)."""
    language = chain(VOCAB, seed=5)
    target = FakeRunner(language, VOCAB)
    draft = FakeRunner(blend(wrong(language), language, lambda c: pattern[len(c) % len(pattern)]), VOCAB)
    job = Job(PROMPT, verify.make(verifier), k, n)
    return Decoder(job, target, ModelDrafter(draft), Stats()), target, draft


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=12),
    st.integers(1, 16),
    st.integers(1, 40),
    st.sampled_from(["exact", "sampling", "block"]),
)
def test_caches_positions_and_counts_after_every_round(pattern: list[bool], k: int, n: int, verifier: str):
    sequence, target, draft = sequence_of(pattern, k, n, verifier)
    executor = Executor()
    task = executor.submit(sequence.decode(), sequence.stats)
    expected = greedy(target.logits, PROMPT, n)
    tokens: list[int] = []
    while not task.done:
        executor.tick()
        for event in drain(task):
            tokens += event.tokens
            at = len(PROMPT) + len(tokens) - len(event.tokens)
            right = [pattern[(at + i) % len(pattern)] for i in range(event.drafted)]
            assert event.accepted == ([*right, False].index(False)), "accepted up to the first wrong token"
            assert tokens == expected[: len(tokens)]
            assert event.origins == ["draft"] * event.accepted + ["target"]
        assert sequence.stats.tokens == len(tokens)
        if not task.done:
            context = PROMPT + tokens
            assert sequence.context == context
            if tokens:
                assert target.held[sequence.slot][: len(context) - 1] == context[:-1]
    assert tokens == expected
    assert not target.held and not draft.held, "all slots are free again"


def drain(task) -> list[Event]:
    events = list(task.events)
    task.events.clear()
    return events


@dataclass
class Watched(FakeRunner):
    """Checks at every pass that the slot continues the true sequence, up to the draft being scored."""

    def score(self, requests):
        for r in requests:
            assert self.held[r.slot] + r.tokens[:1] == self.truth[: len(self.held[r.slot]) + 1]  # type: ignore[attr-defined]
        return super().score(requests)


@pytest.mark.parametrize("k", range(1, 17))
def test_exact_equals_none_for_every_draft_length_and_drafter(k: int):
    language, other = chain(VOCAB, seed=1, memory=2), chain(VOCAB, seed=2)
    half = blend(language, other, lambda c: len(c) % 3 == 0)
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=k), Sampling(1.3, top_k=5, top_p=0.9, seed=7 * k)):
        target_only, _, _ = decode(FakeRunner(language, VOCAB), NoDrafter(), "none", sampling=sampling)
        for drafter in (ModelDrafter(FakeRunner(half, VOCAB)), NgramDrafter(), NoDrafter()):
            target = Watched(language, VOCAB)
            target.truth = PROMPT + target_only  # type: ignore[attr-defined]
            assert decode(target, drafter, "exact", k=k, sampling=sampling)[0] == target_only


@pytest.mark.parametrize(
    ("verifier", "temperature"), [("exact", 0.0), ("sampling", 0.0), ("block", 0.0), ("sampling", 1.0), ("block", 1.0)]
)
def test_a_model_that_drafts_for_itself_has_everything_accepted(verifier: str, temperature: float):
    language = chain(VOCAB)
    sampling = Sampling(temperature, seed=3)
    runner = FakeRunner(language, VOCAB)  # one runner serves both, in two slots
    _, _, stats = decode(runner, ModelDrafter(runner), verifier, k=4, n=50, sampling=sampling)
    assert stats.accepted == stats.drafted
    assert stats.target_passes == stats.rounds == 10


def test_the_end_of_text_token_ends_the_answer_inside_a_draft():
    language = script([1, 2, 3, 9, 5, 6], VOCAB, len(PROMPT))
    tokens, events, stats = decode(
        FakeRunner(language, VOCAB), ModelDrafter(FakeRunner(language, VOCAB)), k=6, stop=frozenset({9})
    )
    assert tokens == [1, 2, 3, 9] and events[-1].finish_reason == "stop"
    assert (stats.accepted, stats.bonus, stats.drafted) == (4, 0, 6), "only committed tokens are counted"


@pytest.mark.parametrize("verifier", ["none", "exact"])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9])
def test_never_more_than_max_new_tokens(verifier: str, n: int):
    language = chain(VOCAB)
    tokens, events, stats = decode(
        FakeRunner(language, VOCAB, max_seq_len=len(PROMPT) + n),
        ModelDrafter(FakeRunner(language, VOCAB)),
        verifier,
        n=n,
    )
    assert tokens == greedy(language, PROMPT, n) and events[-1].finish_reason == "length"
    assert stats.tokens == n


def test_halt_cuts_tokens_and_ends_the_answer():
    language = script([1, 2, 3, 4, 5, 6], VOCAB, len(PROMPT))
    seen: list[int] = []

    def halt(tokens: list[int]) -> int | None:
        seen.extend(tokens)
        return tokens.index(5) + 1 if 5 in tokens else None

    tokens, events, _ = decode(
        FakeRunner(language, VOCAB), ModelDrafter(FakeRunner(language, VOCAB)), k=3, n=20, halt=halt
    )
    assert tokens == [1, 2, 3, 4, 5] and events[-1].finish_reason == "stop"
    assert seen[:5] == tokens, "halt sees every committed token once"


def test_a_draft_model_with_a_shorter_context_stops_drafting_and_the_target_goes_on():
    language = chain(VOCAB)
    draft = FakeRunner(language, VOCAB, max_seq_len=len(PROMPT) + 12)
    tokens, events, stats = decode(FakeRunner(language, VOCAB), ModelDrafter(draft), k=5, n=30)
    assert tokens == greedy(language, PROMPT, 30)
    assert 0 < stats.accepted <= 13 and events[-1].drafted == 0


@dataclass(frozen=True)
class Twice(Exact):
    """Scores the draft a second time after a separator, as reflective verification does; verifies the first copy."""

    name = "twice"

    def layout(self, draft: list[int]) -> list[int]:
        return [*draft, 0, *draft]


def test_a_layout_is_scored_and_dropped():
    language = chain(VOCAB, seed=4)
    half = blend(language, wrong(language), lambda c: len(c) % 3 == 0)
    target = FakeRunner(language, VOCAB)
    stats, executor = Stats(), Executor()
    sequence = Decoder(Job(PROMPT, Twice(), 4, 30), target, ModelDrafter(FakeRunner(half, VOCAB)), stats)
    task = executor.submit(sequence.decode(), stats)
    executor.run()
    assert [t for e in task.events for t in e.tokens] == greedy(language, PROMPT, 30)
    assert stats.accepted > 0
    widest = max(rows for entry in target.diary[1:] for rows in entry.rows.values())
    assert widest == 1 + 4 + 1 + 4


def test_a_layout_is_shortened_where_the_context_ends():
    language = chain(VOCAB, seed=4)
    target = FakeRunner(language, VOCAB, max_seq_len=len(PROMPT) + 30)
    stats, executor = Stats(), Executor()
    decoder = Decoder(Job(PROMPT, Twice(), 4, 30), target, ModelDrafter(FakeRunner(language, VOCAB)), stats)
    task = executor.submit(decoder.decode(), stats)
    executor.run()
    assert task.error is None
    assert [t for e in task.events for t in e.tokens] == greedy(language, PROMPT, 30)


@dataclass(frozen=True)
class Curious(Exact):
    """Needs hidden states of both models, as semantic rules do."""

    name = "curious"
    layers = (1,)
    draft_layers = (0, 2)

    def verify(self, drafts):
        assert set(drafts.hidden) == {1} and set(drafts.draft_hidden) == {0, 2}
        assert drafts.hidden[1].shape[0] == drafts.target_logits.shape[0]
        assert drafts.draft_hidden[2].shape[0] == drafts.counts.sum()
        return super().verify(drafts)


def test_a_rule_gets_the_hidden_states_it_asks_for():
    language = chain(VOCAB)
    executor, tasks = Executor(), []
    target, draft = FakeRunner(language, VOCAB), FakeRunner(language, VOCAB)
    for n in (20, 13):
        stats = Stats()
        decoder = Decoder(Job(PROMPT, Curious(), 4, n + 1), target, ModelDrafter(draft), stats)
        tasks.append(executor.submit(decoder.decode(), stats))
    executor.run()
    assert [t.error for t in tasks] == [None, None]


def test_logprobs_come_from_the_target_whatever_the_draft():
    language = chain(VOCAB)
    half = blend(language, wrong(language), lambda c: len(c) % 3 == 0)
    for verifier in ("none", "exact", "sampling"):
        tokens, events, _ = decode(
            FakeRunner(language, VOCAB), ModelDrafter(FakeRunner(half, VOCAB)), verifier, logprobs=2
        )
        entries = [lp for e in events for lp in e.logprobs]
        assert [lp.token for lp in entries] == tokens
        for i, entry in enumerate(entries):
            logp = torch.tensor(language(PROMPT + tokens[:i])).log_softmax(-1)
            assert entry.logprob == pytest.approx(logp[tokens[i]].item(), abs=1e-5)
            assert [t for t, _ in entry.top] == logp.topk(2).indices.tolist()


def run(job: Job, target: Logits, draft: Logits) -> tuple[list[int], list[str], Stats]:
    stats, executor = Stats(), Executor()
    decoder = Decoder(job, FakeRunner(target, VOCAB), ModelDrafter(FakeRunner(draft, VOCAB)), stats)
    task = executor.submit(decoder.decode(), stats)
    executor.run()
    assert task.error is None
    return [t for e in task.events for t in e.tokens], [o for e in task.events for o in e.origins], stats


def test_only_thinking_is_relaxed_if_so_requested():
    begin, end = 8, 9
    target = script([1, begin, 2, 3, 4, 5, end, 6, 7, 1, 2, 3], VOCAB, len(PROMPT))
    draft = script([2, begin, 3, 3, 5, 5, end, 7, 7, 2, 2, 2], VOCAB, len(PROMPT))  # wrong at every other token
    protected = torch.zeros(VOCAB, dtype=torch.bool)
    protected[[begin, end]] = True
    job = Job(
        PROMPT, verify.make("accept-all"), 4, 12, protected=protected, thinking=Thinking(begin, end, relax_only=True)
    )
    tokens, origins, stats = run(job, target, draft)
    # The round in which thinking begins is verified by `exact` to its end, so the 2 after it is the target's.
    assert tokens == [1, begin, 2, 3, 5, 5, end, 6, 7, 1, 2, 3]
    assert [i for i, o in enumerate(origins) if o == "relaxed"] == [4] and stats.relaxed == 1
    everywhere = Job(PROMPT, verify.make("accept-all"), 4, 12, protected=protected)
    assert run(everywhere, target, draft)[2].relaxed > stats.relaxed
    inside = Job(
        [*PROMPT, begin],
        verify.make("accept-all"),
        4,
        4,
        protected=protected,
        thinking=Thinking(begin, end, open=True, relax_only=True),
    )
    assert run(inside, script([1], VOCAB, 0), script([2], VOCAB, 0))[2].relaxed > 0, "a prompt may open the thinking"


def test_a_loose_rule_that_repeats_itself_is_replaced_by_exact(caplog: pytest.LogCaptureFixture):
    target, draft = chain(VOCAB, seed=2), script([3, 4], VOCAB, 0)
    tokens, origins, stats = run(Job(PROMPT, verify.make("accept-all"), 6, 120), target, draft)
    assert stats.loops == 1 and "accept-all wrote" in caplog.text and "going on with exact" in caplog.text
    assert re.search(r"wrote (\d+) tokens \d+ times in a row; going on with exact: '\[.*3, 4, 3.*\]'", caplog.text)
    relaxed = [i for i, o in enumerate(origins) if o == "relaxed"]
    assert relaxed and relaxed[-1] < 60, "nothing is relaxed after the loop was found"
    after = relaxed[-1] + 10
    assert tokens[after:] == greedy(target, PROMPT + tokens[:after], 120 - after)
    assert run(Job(PROMPT, verify.make("exact"), 6, 120), script([3, 4], VOCAB, 0), draft)[2].loops == 0, (
        "a lossless rule is not replaced"
    )


def test_a_prompt_that_repeats_itself_makes_no_rule_strict():
    prompt = [3, 4] * 60
    target, draft = chain(VOCAB, seed=2), chain(VOCAB, seed=3, memory=12)
    assert run(Job(prompt, verify.make("accept-all"), 6, 60), target, draft)[2].loops == 0


def periodic(period: int) -> Logits:
    """A model that repeats a block of so many tokens without repetition inside."""
    block = [*[int(c) for n in range(period) for c in f"{n:03d}"][: period - 1], 10]
    return script(block, VOCAB, len(PROMPT))


@pytest.mark.parametrize(
    ("guard", "period", "found_after"),
    [
        (RepetitionGuard(), 128, 512),  # the longest block that counts by default
        (RepetitionGuard(), 129, None),
        (RepetitionGuard(repeats=2), 128, 256),
        (RepetitionGuard(period=16), 20, None),
        (RepetitionGuard(period=20), 20, 80),
        (RepetitionGuard(repeats=0), 20, None),
        (RepetitionGuard(repeats=2, period=1), 1, 32),  # a token twice is no loop yet
    ],
)
@pytest.mark.parametrize("k", [1, 7])
def test_period_and_repeats_of_a_loop_are_options(guard: RepetitionGuard, period: int, found_after: int | None, k: int):
    language, executor = periodic(period), Executor()
    job = Job(PROMPT, verify.make("accept-all"), k, 600, repetition_guard=guard)
    decoder = Decoder(job, FakeRunner(language, VOCAB), ModelDrafter(FakeRunner(language, VOCAB)), Stats())
    task = executor.submit(decoder.decode(), decoder.stats)
    while not task.done and not decoder.exact_only:
        executor.tick()
    assert task.error is None and decoder.stats.loops == (found_after is not None)
    if found_after is not None:
        assert found_after <= len(decoder.context) - len(PROMPT) <= found_after + k, "in the round that completes it"


def test_what_repeats_is_quoted_as_text_and_shortened(caplog: pytest.LogCaptureFixture):
    job = Job(PROMPT, verify.make("accept-all"), 6, 60, text_of=lambda tokens: "".join("ab"[t == 4] for t in tokens))
    run(job, script([3, 4], VOCAB, len(PROMPT)), script([3, 4], VOCAB, len(PROMPT)))
    assert caplog.messages == ["accept-all wrote 2 tokens 17 times in a row; going on with exact: 'ab'"]
    assert caplog.records[0].public == caplog.messages[0].removesuffix(": 'ab'")  # type: ignore[attr-defined]
    caplog.clear()
    run(replace(job, text_of=lambda tokens: "long " * 40), script([3, 4], VOCAB, 5), script([3, 4], VOCAB, 5))
    assert caplog.messages[0].endswith("long lo...'") and len(caplog.messages[0]) < 160


def test_only_drafts_are_checked_sparsely(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of which every row is asked for looks like a draft, and is none."""
    language = chain(VOCAB)
    target, draft = FakeRunner(language, VOCAB), FakeRunner(language, VOCAB)
    seen, score = list[Score](), target.score
    monkeypatch.setattr(target, "score", lambda requests: seen.extend(requests) or score(requests))
    decode(target, ModelDrafter(draft), n=10, prompt_logprobs=1)
    read, checked = seen[0], seen[1:]
    assert read.tokens == PROMPT[:-1] and read.logits_to_keep == len(read.tokens) and not checks(read)
    assert checked and all(checks(request) for request in checked if len(request.tokens) > 1)
