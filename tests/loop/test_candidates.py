"""Several candidates for a reasoning step: which are judged, which is taken, and what the caches hold afterwards."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec.draft import EarlyExit, ModelDrafter, NgramDrafter
from semspec.errors import BadRequest
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.loop.step_decoder import StepDecoder
from semspec.loop.target_scorer import TargetScorer
from semspec.sampling import noise
from semspec.sampling.logit_options import LogitOptions
from semspec.sampling.processors import Processors
from semspec.tree import MAX_TREE, paths, side_by_side
from semspec.types import GREEDY, Draft, DraftSteps, Event, Sampling, ScoreOutput, Verdict, VerifyRequest
from semspec.verify import REGISTRY, make
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.collate import collate
from semspec.verify.decide import decide
from semspec.verify.step_rule import StepRule
from tests.fakes import FakeRunner, Logits, blend
from tests.steps_by_hand import (
    BLANK,
    CLOSE,
    END,
    PROMPT,
    STEPS,
    VOCAB,
    Choosy,
    Picky,
    by_hand,
    job,
    language,
    run,
    text,
)

BEST = Verdict.best
HOT = Sampling(0.9, top_p=0.95, seed=7)


def near(seed: int) -> dict[str, Logits]:
    """A target, and a draft that agrees with it two times in three."""
    target = language(seed)
    return {
        "target": target,
        "draft": blend(target, language(seed + 1), lambda context: (sum(context) + len(context)) % 3 == 0),
    }


def equals_a_plain_one(seed: int, rule: Picky, n: int, min_p: float = 0.0) -> Counter[str]:
    """Decode, compare with the loop in plain Python, and count what happened."""
    models, chosen = near(seed), list[tuple[int, int]]()
    ((events, stats),) = run(job(rule, n), **models, early_exit=EarlyExit(min_p))
    wanted, outcomes = by_hand(rule, models["target"], models["draft"], n, min_p, chosen)
    assert text(events) == wanted and stats.step_outcomes == outcomes
    steps = [step for event in events for step in event.drafted_steps]
    assert [(s.candidate, s.candidates) for s in steps if s.outcome == "accepted" and s.candidates > 1] == chosen
    assert stats.taken_candidates == Counter(which for which, _ in chosen)
    rejected = [s for s in steps if s.outcome == "rejected" and s.candidates > 1]
    assert stats.candidates == Counter([count for _, count in chosen] + [s.candidates for s in rejected])
    assert all(s.candidate == 0 for s in rejected)
    for step in steps:
        assert step.outcome != "accepted" or wanted[step.start :][: len(step.tokens)] == step.tokens
    seen = Counter({"first": stats.taken_candidates[0], "all rejected": len(rejected)})
    seen["later"] = stats.taken_candidates.total() - seen["first"]
    seen["alone"] = sum(s.candidates == 1 for s in steps)
    seen["kept a part"] = sum(
        0 < e.accepted < e.drafted and e.drafted_steps[0].outcome == "rejected" for e in events if e.drafted_steps
    )
    return seen


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10_000), st.integers(2, 8), st.integers(0, 2), st.booleans(), st.booleans(), st.integers(1, 80),
    st.sampled_from([0.0, 0.0, 0.4]),
)  # fmt: skip
def test_the_loop_equals_a_plain_one(
    seed: int, candidates: int, lead: int, hand_over: bool, keep: bool, n: int, min_p: float
) -> None:
    equals_a_plain_one(seed, Choosy(candidates=candidates, lead=lead, hand_over=hand_over, keep=keep), n, min_p)


def seen_in_all() -> Counter[str]:
    return sum((equals_a_plain_one(seed, Choosy(candidates=3, keep=True), 60) for seed in range(40)), Counter[str]())


def test_every_kind_of_choice_occurs() -> None:
    """So that the test above means something."""
    seen = seen_in_all()
    assert min(seen.values()) >= 5 and len(seen) == 5, seen


def longest(parts: Any, begins: Any) -> Verdict:
    """As token rules choose a path."""
    for part in parts:
        part.worth = -math.inf
    return BEST(parts, begins)


@pytest.mark.parametrize("fault", ["the longest", "the last", "cache not put together", "one place in the noise"])
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "the longest":
        monkeypatch.setattr(Verdict, "best", longest)
    elif fault == "the last":
        monkeypatch.setattr(Verdict, "best", lambda parts, begins: BEST(parts[-1:], begins[-1:]))
    elif fault == "cache not put together":
        monkeypatch.setattr(TargetScorer, "compact", lambda self, rows, path: rows)
    else:
        monkeypatch.setattr(noise, "round_of", lambda round, candidate: round)
        with pytest.raises(AssertionError):
            test_sampled_candidates_have_noise_of_their_own()
        return
    with pytest.raises(AssertionError):
        seen_in_all()


def test_one_candidate_is_decoded_as_ever() -> None:
    """By what was written, drafted and recorded before there were candidates."""
    found = hashlib.sha256()
    for seed in range(10):
        for spec in (
            "random-step:rate=0.6",
            "random-step:rate=0.6,keep=true,lead=0,steps=3,ahead=0.1",
            "picky",
            "oracle",
        ):
            rule = Picky(keep=True) if spec == "picky" else make(spec)
            made = [job(rule, sampling=s, referee=lambda so_far, step: sum(step) % 2 == 0) for s in (GREEDY, HOT)]
            for events, stats in run(*made, **near(seed)):
                drafted = [(s.outcome, s.tokens, s.start) for e in events for s in e.drafted_steps]
                counts = sorted(stats.step_outcomes.items()), stats.drafted, stats.target_passes
                found.update(repr((text(events), [e.origins for e in events], drafted, counts)).encode())
                assert not stats.candidates and not stats.taken_candidates
    assert found.hexdigest()[:16] == "9583ca6808ca01ee"


def test_sampled_candidates_have_noise_of_their_own() -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        sampling = Sampling(0.9, seed=seed)
        made = [job(make(f"random-step:rate=0.4,lead=0{more}"), sampling=sampling) for more in ("", ",candidates=3")]
        (one, _), (several, stats) = run(*made, **near(seed))
        first = [next((s for e in events for s in e.drafted_steps), None) for events in (one, several)]
        if first[0] and first[1] and first[1].candidate == 0:
            assert first[0].tokens == first[1].tokens, "the first candidate is what one alone would be"
            seen["same first"] += 1
        seen["several"] += stats.candidates.total()
        seen["later"] += stats.taken_candidates.total() - stats.taken_candidates[0]
    assert seen["several"] > 20 and seen["later"] > 5 and seen["same first"] > 2, seen


def test_more_candidates_are_accepted_more_often() -> None:
    shares = []
    for candidates in (1, 2, 4):
        rule = make(f"random-step:rate=0.4,candidates={candidates},lead=0,hand_over=false")
        jobs = [job(rule, sampling=Sampling(1.5, seed=seed)) for seed in range(60)]
        stats = Stats.pooled(stats for _, stats in run(*jobs, **near(3), slots=60))
        shares.append(stats.step_outcomes["accepted"] / (stats.step_outcomes.total() - stats.step_outcomes["target"]))
    assert shares[0] + 0.1 < shares[1] and shares[1] + 0.1 < shares[2], shares


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("spec", ["random-step:rate=0,candidates=3", "accept-no-step:candidates=4,keep=true,lead=0"])
def test_when_all_candidates_are_rejected_the_text_is_the_targets(spec: str, sampling: Sampling) -> None:
    judged = 0
    for seed in range(12):
        ((baseline, _),) = run(job(make("none"), sampling=sampling), **near(seed))
        ((refusing, stats),) = run(job(make(spec), sampling=sampling), **near(seed))
        assert text(refusing) == text(baseline) and not stats.relaxed
        judged += stats.candidates.total()
    assert judged > 5


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_without_evidence_the_first_is_taken(sampling: Sampling) -> None:
    for seed in range(8):
        made = [job(make(f"accept-all-steps:candidates={n}"), sampling=sampling) for n in (1, 3)]
        (one, _), (several, stats) = run(*made, **near(seed))
        assert text(one) == text(several) and set(stats.taken_candidates) <= {0}


def test_batches_equal_singles_and_seeds_repeat() -> None:
    rules = [Choosy(candidates=3), make("random-step:rate=0.5,candidates=4"), Choosy(candidates=2, keep=True, lead=0)]
    jobs = [
        replace(job(rule, 40 + 5 * i, sampling=Sampling(t, seed=i)), prompt=PROMPT + [6] * (i % 4))
        for i, (rule, t) in enumerate((rule, t) for rule in [*rules, make("none"), Picky()] for t in (0.0, 0.8, 0.8))
    ]
    for slots in (3, len(jobs)):
        together = run(*jobs, **near(3), slots=slots)
        for one, (events, stats) in zip(jobs, together, strict=True):
            ((alone, own),) = run(one, **near(3))
            assert text(events) == text(alone) and stats.candidates == own.candidates
            assert stats.taken_candidates == own.taken_candidates and stats.step_outcomes == own.step_outcomes
    hot = [job(rules[1], sampling=Sampling(0.9, seed=seed)) for seed in (1, 1, 2)]
    one, again, other = (text(events) for events, _ in run(*hot, **near(3)))
    assert one == again != other


@dataclass(frozen=True)
class Watching(Choosy):
    """Checks that each candidate comes with the states that predicted its tokens, in both models."""

    name = "watching"
    layers = (0,)  # type: ignore[assignment]
    draft_layers = (0,)  # type: ignore[assignment]

    models: Any = None
    context: Any = None  # of the one sequence

    @property
    def keeps_draft_logits(self) -> bool:
        return True

    def verify(self, drafts: DraftBatch) -> Decisions:
        assert drafts.hidden is not None and drafts.draft_hidden is not None and drafts.draft_logits is not None
        for b, count in enumerate(drafts.counts.tolist()):
            before = list(self.context())
            assert drafts.position[b] == len(before)
            for i in range(count):
                row, own = drafts.rows[b, i], drafts.draft_rows[b, i]
                assert row == drafts.first_row[b] + i and own == drafts.first_draft[b] + i
                for found in (drafts.hidden[0][row], drafts.target_logits[row]):
                    assert found.tolist() == pytest.approx(self.models["target"](before), abs=1e-5)
                wanted = pytest.approx(self.models["draft"](before), abs=1e-5)
                assert drafts.draft_hidden[0][own].tolist() == wanted
                if drafts.target_sampling.all_greedy:  # else divided by the temperature
                    assert drafts.draft_logits[own].tolist() == wanted
                before.append(int(drafts.ids[b, i]))
        return super().verify(drafts)

    def __hash__(self) -> int:
        return 0


def watched(seed: int, candidates: int, sampling: Sampling, **more: Any) -> Iterator[tuple[StepDecoder, Event]]:
    """Every event of a sequence, with its decoder as it is then."""
    models = near(seed)
    runners = FakeRunner(models["target"], VOCAB, **more), FakeRunner(models["draft"], VOCAB)
    rule = Watching(candidates=candidates, models=models, context=lambda: decoder.context)
    stats, executor = Stats(), Executor()
    made = job(rule, sampling=sampling, logprobs=0)
    decoder = StepDecoder(made, runners[0], ModelDrafter(runners[1]), stats)
    task, events = executor.submit(decoder.decode(), stats), 0
    while not task.done:
        executor.tick()
        for event in list(task.events)[events:]:
            yield decoder, event
        events = len(task.events)
    if task.error:
        raise task.error
    assert not runners[0].held and not runners[1].held


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_a_rule_sees_each_candidate_as_if_it_were_alone(sampling: Sampling) -> None:
    """And what is asked for of the accepted one is its own: logprobs. Caches hold what was written, and no more."""
    later = 0
    for seed in range(16):
        written = list(PROMPT)
        for decoder, event in watched(seed, 3, sampling):
            later += any(step.candidate for step in event.drafted_steps)
            for token, found in zip(event.tokens, event.logprobs or [], strict=True):
                row = torch.tensor(decoder.step_rule.models["target"](written))  # type: ignore[attr-defined]
                assert found.token == token and found.logprob == pytest.approx(
                    float(row.log_softmax(-1)[token]), abs=1e-4
                )
                written.append(token)
            if event.finish_reason is None and decoder.context == written:
                target, draft = decoder.target, decoder.drafter.runners[0]
                assert isinstance(target, FakeRunner) and isinstance(draft, FakeRunner)
                assert target.held[decoder.slot] == written[:-1]
                (held,) = draft.held.values()
                assert held == written[: len(held)], "the drafter has gone back to the context"
    assert later > 5


def test_cancelled_at_any_time_nothing_leaks() -> None:
    for ticks in range(1, 60):
        target, draft = (FakeRunner(logits, VOCAB) for logits in near(4).values())
        executor, stats = Executor(chunk=1), Stats()
        made = job(make("random-step:rate=0.7,candidates=3,lead=0"), sampling=Sampling(0.9, seed=2))
        task = executor.submit(StepDecoder(made, target, ModelDrafter(draft), stats).decode(), stats)
        for _ in range(ticks):
            executor.tick()
        executor.cancel(task)
        assert target.free == draft.free == 8 and not target.held and not draft.held


def long_steps(length: int) -> Logits:
    """Steps of so many tokens, whose first token may be any; no end of thinking."""

    def logits(context: list[int]) -> list[float]:
        new = context[len(PROMPT) :]
        at = len(new) - max((i + 1 for i, token in enumerate(new) if token == BLANK), default=0)
        if at == length - 1:
            return [9.0 * (i == BLANK) for i in range(VOCAB)]
        return [
            -9.0 if i in (END, CLOSE, BLANK) else float(i == 3 + (len(new) * 5 + new[-1:].count(4)) % 6)
            for i in range(VOCAB)
        ]

    return logits


@pytest.mark.parametrize(("length", "most"), [(5, 7), (15, 4), (20, 3), (30, 2), (40, 1)])
def test_a_tree_has_as_many_candidates_as_fit(length: int, most: int) -> None:
    model = long_steps(length)
    steps = replace(STEPS, max_tokens=50)
    made = replace(job(make("accept-all-steps:candidates=8,lead=0"), 200), steps=steps)
    ((events, _),) = run(made, target=model, draft=model)
    judged = [step.candidates for event in events for step in event.drafted_steps]
    assert max(event.drafted for event in events) <= MAX_TREE
    assert max(judged) == most, judged


def test_candidates_fit_into_the_targets_slot() -> None:
    """Where a further one would not, there are fewer; the answer is as long as the slot allows."""
    counts: Counter[int] = Counter()
    for most in range(20, 50):
        target, draft = FakeRunner(long_steps(5), VOCAB, max_seq_len=most), FakeRunner(long_steps(5), VOCAB)
        executor, stats = Executor(), Stats()
        made = job(make("accept-all-steps:candidates=4,lead=0"), most - len(PROMPT))
        task = executor.submit(StepDecoder(made, target, ModelDrafter(draft), stats).decode(), stats)
        executor.run()
        assert task.error is None and stats.tokens == most - len(PROMPT)
        counts += stats.candidates
    assert set(counts) == {2, 3, 4}


def test_forbidden_tokens_are_in_no_candidate() -> None:
    each = LogitOptions(logit_bias={3: -100.0}, bad_words=("ba",))
    for sampling in (GREEDY, HOT):
        later = 0
        for seed in range(8):
            processors = Processors(len(PROMPT), each.processors(PROMPT, VOCAB, frozenset([END]), lambda text: [4, 5]))
            made = job(make("random-step:rate=0.7,candidates=4"), sampling=sampling, processors=processors)
            ((events, stats),) = run(made, **near(seed))
            written = text(events)
            assert 3 not in written and (4, 5) not in set(pairwise(written))
            later += stats.taken_candidates.total() - stats.taken_candidates[0]
        assert later


def test_a_drafter_without_probabilities_has_one_candidate() -> None:
    target = FakeRunner(long_steps(3), VOCAB)
    executor, stats = Executor(), Stats()
    made = job(make("accept-all-steps:candidates=4,lead=3"), 60)
    task = executor.submit(StepDecoder(made, target, NgramDrafter(), stats).decode(), stats)
    executor.run()
    assert task.error is None and not stats.candidates


# -- parts of it


def test_candidates_side_by_side_are_as_many_paths() -> None:
    for lengths in ([1], [4], [1, 1], [3, 1, 2], [2, 2, 5, 1]):
        parents, ends = side_by_side(lengths), [sum(lengths[: i + 1]) for i in range(len(lengths))]
        wanted = [tuple(range(end - n, end)) for n, end in zip(lengths, ends, strict=True)]
        assert paths(parents) == wanted if len(lengths) > 1 else parents == ()


def test_own_tokens_of_another_tokenizer_stay_with_their_candidate() -> None:
    rng = Random(3)
    torch.manual_seed(3)
    each = []
    for count in (3, 1, 4):
        ends = torch.tensor([rng.randint(1, 3) for _ in range(count)]).cumsum(0).tolist()
        own = [rng.randrange(5) for _ in range(ends[-1])]
        tokens = [rng.randrange(VOCAB) for _ in range(count)]
        each.append(Draft(tokens, torch.randn(len(own), 5), {}, own=own, own_ends=tuple(ends)))
    draft, rows = Draft.side_by_side(each), torch.randn(9, VOCAB)
    rule = make("accept-all-steps:candidates=3")
    batch = collate([VerifyRequest(rule, draft, ScoreOutput(rows), GREEDY, 5, 0)])
    ids, at, exists = batch.own()
    begins = [0, 3, 4]
    for i, one in enumerate(each):
        assert one.own is not None and one.logits is not None and batch.draft_logits is not None
        assert ids[i][exists[i]].tolist() == one.own
        assert torch.equal(batch.draft_logits[at[i][exists[i]]], one.logits)
        wanted = torch.cat([rows[:1], rows[begins[i] + 1 : begins[i] + 1 + len(one.tokens)]])
        assert torch.equal(batch.target_logits[batch.rows[i, : len(one.tokens) + 1]], wanted)


@pytest.mark.parametrize("seed", range(20))
def test_a_verdict_is_that_on_the_best_candidate(seed: int) -> None:
    """Against verdicts on each as a draft of its own."""
    rng = Random(seed)
    torch.manual_seed(seed)
    each = [Draft([rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 5))]) for _ in range(rng.randint(2, 5))]
    draft = Draft.side_by_side(each)
    rows, rule = torch.randn(len(draft.tokens) + 1, VOCAB), Choosy(candidates=8, keep=seed % 2 == 0)
    (found,) = decide(rule, [VerifyRequest(rule, draft, ScoreOutput(rows), GREEDY, 5, 0)])
    alone, begin = [], 0
    for one in each:
        one.steps = DraftSteps((len(one.tokens),))
        own = torch.cat([rows[:1], rows[begin + 1 : begin + 1 + len(one.tokens)]])
        (verdict,) = decide(rule, [VerifyRequest(rule, one, ScoreOutput(own), GREEDY, 5, 0)])
        alone.append((begin, verdict, one.tokens))
        begin += len(one.tokens)
    accepted = [row for row in alone if sum(row[2]) % 2 == 0]
    begin, wanted, _ = max(
        accepted or alone, key=(lambda row: sum(row[2]) * 7 % 11) if accepted else lambda row: row[1].accepted
    )
    assert (found.accepted, found.next, found.relaxed) == (wanted.accepted, wanted.next, wanted.relaxed)
    assert found.path == tuple(range(begin, begin + wanted.accepted))


def test_rules_take_candidates_or_refuse_them_in_words() -> None:
    taking = {"semantic", "semantic+", "likely-step", "random-step", "accept-all-steps", "accept-no-step"}
    names = {name for name, kind in REGISTRY.items() if issubclass(kind, StepRule)}
    for name in names - taking:
        with pytest.raises(BadRequest, match=f"{name}'s candidates is 2; give 1, since it"):
            make(f"{name}:candidates=2")
    assert all(make(f"{name}:candidates=2") != make(name) for name in taking) and len(names) > len(taking) + 3
    for wrong, why in (
        ("candidates=0", "give 1 to 8"),
        ("candidates=9", "give 1 to 8"),
        ("candidates=2,steps=2", "ahead"),
    ):
        with pytest.raises(BadRequest, match=why):
            make(f"likely-step:{wrong}")
