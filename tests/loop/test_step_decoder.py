"""The loop of step rules, with fake models: which model writes, what is accepted, what the caches hold."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec.draft import EarlyExit, ModelDrafter
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.loop.step_decoder import StepDecoder
from semspec.loop.thinking import Thinking
from semspec.types import Sampling
from semspec.verify import make
from semspec.verify.batch import Decisions, DraftBatch
from tests.fakes import FakeRunner, Logits, blend
from tests.steps_by_hand import BLANK, CLOSE, END, PROMPT, STEPS, VOCAB, Picky, by_hand, job, language, run, text


def near(target: Logits, other: Logits) -> Logits:
    """A draft that agrees with the target two times in three."""
    return blend(target, other, lambda context: (sum(context) + len(context)) % 3 == 0)


@settings(max_examples=250, deadline=None)
@given(
    st.integers(0, 10_000), st.integers(0, 2), st.booleans(), st.integers(1, 80), st.booleans(),
    st.sampled_from([(1, 1.0), (2, 0.0), (3, 0.7), (9, 0.7), (9, 0.0)]), st.sampled_from([0.0, 0.0, 0.4, 0.7]),
    st.sampled_from([8, 500]),
)  # fmt: skip
def test_the_loop_equals_a_plain_one(
    seed: int, lead: int, hand_over: bool, n: int, keep: bool, ahead: tuple[int, float], min_p: float, longest: int
) -> None:
    rule = Picky(
        lead=lead, hand_over=hand_over, keep=keep, steps=ahead[0], ahead=ahead[1], max_step_tokens=longest
    )  # fmt: skip
    target, other = language(seed), language(seed + 1)
    draft = (target, other, near(target, other))[seed % 3]
    ((events, stats),) = run(job(rule, n), target=target, draft=draft, early_exit=EarlyExit(min_p))
    wanted, outcomes = by_hand(rule, target, draft, n, min_p)
    assert text(events) == wanted and stats.step_outcomes == outcomes
    assert stats.tokens == len(text(events)) and stats.accepted == sum(e.accepted for e in events)
    assert Counter(s.outcome for e in events for s in e.drafted_steps) == Counter(
        {k: v for k, v in outcomes.items() if k != "target"}
    )
    for event in events:
        *before, last = [step.outcome for step in event.drafted_steps] or ["accepted"]
        assert set(before) <= {"accepted"}, "no outcome after a rejected step"
        for step in event.drafted_steps:
            committed = wanted[step.start :][: len(step.tokens)] == step.tokens
            assert committed or step.outcome != "accepted"
            assert (step.start in (0, *STEPS.cuts(wanted[: step.start]))) and step.tokens
        if last == "rejected":
            assert event.accepted < event.drafted and event.origins[event.accepted] == "target"


def test_every_branch_occurs() -> None:
    """So that the test above means something."""
    outcomes: Counter[str] = Counter()
    for seed in range(80):
        target = language(seed)
        rule = Picky(hand_over=seed % 2 == 0, steps=4, ahead=0.7, keep=seed % 4 > 1)
        models = {"target": target, "draft": near(target, language(seed + 1))}
        ((events, stats),) = run(job(rule), **models, early_exit=EarlyExit(0.4 if seed % 8 > 3 else 0.0))
        outcomes += stats.step_outcomes
        outcomes["thinking ended"] += CLOSE in text(events)
        for event in events:
            seen = [step.outcome for step in event.drafted_steps]
            outcomes["several"] += seen.count("accepted") > 1
            outcomes["refused after an accepted one"] += seen[-2:] == ["accepted", "rejected"]
            outcomes["handed over after an accepted one"] += seen[-2:] == ["accepted", "handed over"]
            outcomes["stopped inside"] += event.drafted > 0 and not seen
            outcomes["part after an accepted one"] += seen[-1:] == ["accepted"] and event.drafted > event.accepted
    assert min(outcomes.values()) >= 5 and len(outcomes) == 10, outcomes


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, top_p=0.95, seed=7)], ids=["greedy", "sampled"])
def test_when_all_steps_are_rejected_the_text_is_the_targets(sampling: Sampling) -> None:
    refused = 0
    for seed in range(12):
        models = {"target": language(seed), "draft": language(seed + 1)}
        ((baseline, _),) = run(job(make("none"), sampling=sampling), **models)
        ((refusing, stats),) = run(job(make("random-step:rate=0"), sampling=sampling), **models)
        assert text(refusing) == text(baseline) and stats.accepted == 0
        made = job(make("random-step:rate=0,steps=4,ahead=0,keep=true"), sampling=sampling)
        ((refusing, stats),) = run(made, **models, early_exit=EarlyExit(0.4))
        assert text(refusing) == text(baseline) and not stats.relaxed
        ((by_name, stats),) = run(job(make("accept-no-step"), sampling=sampling), **models)
        assert text(by_name) == text(baseline) and stats.accepted == 0
        refused += stats.step_outcomes["rejected"]
    assert refused > 5


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, top_p=0.95, seed=7)], ids=["greedy", "sampled"])
def test_when_all_steps_are_accepted_the_draft_writes_them(sampling: Sampling) -> None:
    accepted = 0
    for seed in range(12):
        models = {"target": language(seed), "draft": language(seed + 1)}
        ((events, stats),) = run(job(make("accept-all-steps:lead=0"), sampling=sampling), **models)
        ((coin, _),) = run(job(make("random-step:rate=1,lead=0"), sampling=sampling), **models)
        assert text(events) == text(coin) and not stats.step_outcomes["rejected"]
        written, context = text(events), list(PROMPT)
        for event in events:
            for step in event.drafted_steps:
                if step.outcome == "accepted":
                    assert written[step.start :][: len(step.tokens)] == step.tokens
                    accepted += 1
                    if sampling.greedy:  # what the draft would write there; the first token may be the target's bonus
                        context = PROMPT + written[: step.start]
                        for i, token in enumerate(step.tokens):
                            favourite = max(range(VOCAB), key=models["draft"](context).__getitem__)
                            assert token == favourite or (i == 0 and step.start > 0)
                            context = [*context, token]
    assert accepted > 20


def test_batches_of_sequences_in_different_phases_equal_singles() -> None:
    models = {"target": language(3), "draft": language(4)}
    jobs = [
        replace(job(rule, n, sampling=Sampling(t, seed=i)), prompt=PROMPT + [6] * (i % 4))
        for i, (rule, n, t) in enumerate(
            [
                (Picky(), 50, 0.0),
                (make("none"), 33, 0.8),
                (make("random-step:rate=0.5"), 60, 0.8),
                (Picky(lead=0), 9, 0.8),
                (Picky(steps=4, ahead=0.7), 60, 0.8),
                (make("random-step:rate=0.8,steps=3,ahead=0.1,keep=true"), 60, 0.5),
                (make("random-step:rate=0.8,steps=3,ahead=0.1"), 60, 0.0),
            ]
            * 3
        )
    ]
    for slots, early_exit in ((3, EarlyExit()), (21, EarlyExit()), (5, EarlyExit(max_entropy=1.2))):
        together = run(*jobs, **models, slots=slots, early_exit=early_exit)
        for one, (events, stats) in zip(jobs, together, strict=True):
            ((baseline, own),) = run(one, **models, early_exit=early_exit)
            assert text(events) == text(baseline) and stats.step_outcomes == own.step_outcomes
            assert [e.origins for e in events if e.drafted_steps] == [e.origins for e in baseline if e.drafted_steps]


@dataclass(frozen=True)
class Watching(Picky):
    """Checks that it gets the states that predicted the step's tokens, in both models. A fake's states are logits."""

    name = "watching"
    layers = (0,)  # type: ignore[assignment]
    draft_layers = (0,)  # type: ignore[assignment]

    target: Any = None
    draft: Any = None
    context: Any = None  # of the one sequence

    def verify(self, drafts: DraftBatch) -> Decisions:
        assert drafts.hidden is not None and drafts.draft_hidden is not None
        before = list(self.context())
        for b, count in enumerate(drafts.counts.tolist()):
            for i in range(count):
                for states, first, model in (
                    (drafts.hidden[0], drafts.first_row[b], self.target),
                    (drafts.draft_hidden[0], drafts.first_draft[b], self.draft),
                ):
                    assert states[first + i].tolist() == pytest.approx(model(before), abs=1e-5)
                before.append(drafts.ids[b, i].item())
        assert len(drafts.draft_hidden[0]) == drafts.counts.sum() == len(drafts.hidden[0]) - 1
        return super().verify(drafts)

    def __hash__(self) -> int:
        return 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_rule_gets_the_states_that_predicted_the_step(temperature: float, steps: int) -> None:
    verified = 0
    for seed in range(16):
        target, draft = language(seed), language(seed + 1)
        runners = FakeRunner(target, VOCAB), FakeRunner(draft, VOCAB)
        rule = Watching(steps=steps, target=target, draft=draft, context=lambda: decoder.context)  # noqa: B023
        stats, executor = Stats(), Executor()
        made = job(rule, sampling=Sampling(temperature, seed=seed))
        decoder = StepDecoder(made, runners[0], ModelDrafter(runners[1]), stats)
        task = executor.submit(decoder.decode(), stats)
        executor.run()
        assert task.error is None
        verified += stats.step_outcomes["accepted"] + stats.step_outcomes["rejected"]
    assert verified > 10


@pytest.mark.parametrize("steps", [1, 4])
def test_a_referee_is_asked_about_whole_steps(steps: int) -> None:
    """Also for a step that starts with a bonus token, and for several in one draft, up to the first bad one."""
    asked: list[tuple[list[int], list[int]]] = []

    def referee(so_far: list[int], step: list[int]) -> bool:
        asked.append((so_far, step))
        return len(asked) % 3 != 0

    ((events, stats),) = run(
        job(make(f"oracle:steps={steps},ahead=0"), 120, referee=referee), target=language(8), draft=language(9)
    )
    written = text(events)
    assert len(asked) > 4 and stats.step_outcomes["accepted"] + stats.step_outcomes["rejected"] == len(asked)
    assert all(sum(len(step.tokens) for step in e.drafted_steps) >= e.drafted for e in events), (
        "what follows a bad step is not scored"
    )
    for i, (so_far, step) in enumerate(asked):
        assert so_far == written[: len(so_far)] and (not so_far or so_far[-1] == BLANK or STEPS.cuts(so_far))
        assert step[-1] == BLANK or len(step) == STEPS.max_tokens
        assert (written[len(so_far) : len(so_far) + len(step)] == step) >= ((i + 1) % 3 != 0)


def test_a_loop_makes_the_target_write_the_rest() -> None:
    def stuck(context: list[int]) -> list[float]:
        return [0.0, 1.0, -9.0, 0, 0, 0, 0, 0, 0] if context[-1] == 6 else [0.0, 0, -9.0, 0, 0, 0, 1.0, 0, 0]

    ((events, stats),) = run(job(make("random-step:rate=1"), 300), target=stuck, draft=stuck)
    assert stats.loops == 1
    last = max(i for i, event in enumerate(events) if event.drafted_steps)
    assert last < len(events) - 3 and all(set(e.origins) == {"target"} for e in events[last + 1 :])


def test_same_seed_same_text() -> None:
    models = {"target": language(5), "draft": language(6)}
    for spec in ("random-step:rate=0.5", "random-step:rate=0.5,steps=4,ahead=0.1,keep=true"):
        one, again, other = (
            run(job(make(spec), sampling=Sampling(0.9, seed=seed)), **models)[0][0] for seed in (1, 1, 2)
        )
        assert text(one) == text(again) != text(other)


def test_steps_ahead_save_passes() -> None:
    """With a draft that is always accepted: passes shrink about by the number of steps in a draft."""
    passes = []
    for steps in (1, 3):
        rule = make(f"random-step:rate=1,steps={steps},ahead=0,lead=0")
        ((events, stats),) = run(job(rule, 600), target=without_end(language(3)), draft=without_end(language(4)))
        assert max(len(event.drafted_steps) for event in events) == steps and stats.step_outcomes["accepted"] > 60
        passes.append(stats.target_passes)
    assert passes[1] < 0.45 * passes[0]


def without_end(logits: Logits) -> Logits:
    return lambda context: [-9.0 if i in (CLOSE, END) else x for i, x in enumerate(logits(context))]


def test_states_of_a_step_in_chunks_stay_in_order() -> None:
    """A step that pauses at a token which might have ended it is drafted in several decodes."""
    pausing = replace(STEPS, closers=frozenset([7]))  # 7 may close a blank line, but no line is blank so far
    for seed in range(5):
        target, draft = language(seed), language(seed + 1)
        results = [
            run(replace(job(Picky()), steps=steps), target=target, draft=draft)[0][0] for steps in (STEPS, pausing)
        ]
        assert text(results[0]) == text(results[1])
        assert torch.equal(*(torch.tensor([e.accepted for e in events if e.drafted_steps]) for events in results))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, top_p=0.95, seed=7)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("spec", ["keep=true", "rewrite=exact", "keep=true,rewrite=exact,rewrite_tokens=2,lead=2"])
def test_keep_and_rewrite_do_not_change_the_targets_text(spec: str, sampling: Sampling) -> None:
    """With a lossless rewriter the text is the target's."""
    accepted = passes = baseline_passes = 0
    for seed in range(12):
        target = language(seed)
        models = {"target": target, "draft": lambda context: [2 * x for x in target(context)]}  # noqa: B023
        ((baseline, own),) = run(job(make("none"), sampling=sampling), **models)
        rewriter = make("exact") if "rewrite" in spec else None
        made = job(make(f"random-step:rate=0,{spec}"), sampling=sampling, rewriter=rewriter)
        ((refusing, stats),) = run(made, **models)
        assert text(refusing) == text(baseline)
        assert stats.tokens == len(text(baseline)) and stats.accepted == sum(e.accepted for e in refusing)
        accepted += stats.accepted
        passes, baseline_passes = passes + stats.target_passes, baseline_passes + own.target_passes
    assert accepted > 20 and passes < 0.9 * baseline_passes


def test_after_a_dropped_draft_the_rewriter_has_fresh_noise() -> None:
    """A draft that wants to end the thinking is no sample of the draft's any more: if the rewriter got the same tokens,
    it would accept them with p/q, and thinking would end half as often again as with the target only."""

    def chances(close: float) -> Logits:
        first = [-9e9, -9e9, math.log(close), math.log(1 - close), *[-9e9] * (VOCAB - 4)]
        return lambda context: first if context == PROMPT else [9.0 * (i == BLANK) for i in range(VOCAB)]

    rule, n = make("random-step:rate=0,lead=0,rewrite=sampling"), 600
    jobs = [job(rule, 12, sampling=Sampling(1.0, seed=i), rewriter=make("sampling")) for i in range(n)]
    results = run(*jobs, target=chances(0.3), draft=chances(0.5), slots=100)
    stopped = sum(text(events)[0] == CLOSE for events, _ in results)
    assert stopped / n == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / n))


@pytest.mark.parametrize("opened", [False, True])
def test_outside_the_thinking_nothing_is_relaxed(opened: bool) -> None:
    """Neither a step before the thinking, nor a token after it that a loose rewriter would accept."""
    relaxed: Counter[str] = Counter()
    for seed in range(20):
        begins = 6 if opened else -1
        made = job(
            make("random-step:rate=1,lead=0,rewrite=accept-all"),
            rewriter=make("accept-all"),
            thinking=Thinking(begins, CLOSE, relax_only=True),
        )
        models = {"target": language(seed), "draft": language(seed + 1)}
        ((events, _),) = run(replace(made, prompt=[*PROMPT, 6]), **models)
        context = [*PROMPT, 6]
        for token, origin in ((t, o) for e in events for t, o in zip(e.tokens, e.origins, strict=True)):
            inside = next((t == begins for t in reversed(context) if t in (begins, CLOSE)), False)
            relaxed["inside" if inside else "outside"] += origin == "relaxed"
            relaxed["after"] += CLOSE in context
            context.append(token)
    assert not relaxed["outside"] and relaxed["after"] and bool(relaxed["inside"]) == opened


def test_a_loop_ends_a_loose_rewriter_too() -> None:
    def always(token: int) -> Logits:
        return lambda context: [float(i == token) for i in range(VOCAB)]

    made = job(make("random-step:rate=0,lead=99,rewrite=accept-all"), 300, rewriter=make("accept-all"))
    ((events, stats),) = run(made, target=always(5), draft=always(6))
    last = max(i for i, event in enumerate(events) if event.relaxed)
    assert stats.loops == 1 and 3 < last < len(events) - 3
    assert set(text(events[last + 1 :])) == {5}, "the target's own tokens again"


def test_an_end_after_steps_that_were_not_verified_hands_nothing_over() -> None:
    """The referee rejects a step that the target would have written too, so `keep` accepts it. What the draft had after
    it, an end of thinking as well, was dropped before."""
    target = without_end(language(0))

    def ending(context: list[int]) -> list[float]:
        return [99.0 * (i == CLOSE) for i in range(VOCAB)] if len(context) == 18 else target(context)

    rule = make("oracle:steps=9,ahead=0,keep=true,lead=0")
    made = replace(job(rule, 40, referee=lambda so_far, step: False), steps=replace(STEPS, max_tokens=4))
    ((events, stats),) = run(made, target=target, draft=ending)
    tried = [step for event in events for step in event.drafted_steps]
    assert all(step.tokens[-1] == CLOSE for step in tried if step.outcome == "handed over")
    assert sum(step.start < 15 for step in tried) > 3 and stats.step_outcomes["handed over"] == 1


@pytest.mark.parametrize("end_tokens", [1, 3, 5])
def test_the_target_may_be_limited_once_it_writes_the_rest(end_tokens: int) -> None:
    """Whether the target ended the thinking or the draft wanted to: so many tokens more, and no others are lost."""
    limited: Counter[bool] = Counter()
    for seed in range(60):
        closes = seed % 2 == 0  # the draft wants to end the thinking with its first token
        target = language(seed)
        closing: Logits = lambda context: [9.0 * (v == CLOSE) for v in range(VOCAB)]  # noqa: E731
        models = {"target": target, "draft": closing if closes else near(target, language(seed + 1))}
        ((free, _),) = run(job(Picky(hand_over=closes), 70), **models)
        ((events, _),) = run(job(Picky(hand_over=closes, end_tokens=end_tokens), 70), **models)
        whole, short = text(free), text(events)
        assert short == whole[: len(short)]
        if len(short) < len(whole):
            limited[closes] += 1
            first = STEPS.step_end(whole)
            assert first is not None
            begins = first if closes else whole.index(CLOSE) + 1
            assert len(short) - begins == end_tokens and events[-1].finish_reason == "length"
    assert min(limited[True], limited[False]) > 0


@dataclass(frozen=True)
class Brief(Picky):
    """The target writes three tokens in place of a rejected step, and four more if the last of those is a 5."""

    name = "brief"

    def takeover_tokens(self) -> int:
        return 3

    def prolong(self, tokens: Any) -> int:
        return 4 * (tokens[-1] == 5)


def test_the_target_takes_over_for_as_long_as_the_rule_says() -> None:
    lengths: Counter[int] = Counter()
    for seed in range(60):
        models = {"target": language(seed), "draft": near(language(seed), language(seed + 1))}
        ((events, _),) = run(job(Brief(lead=0, hand_over=False), 60), **models)
        written, taken = text(events), 0
        count: list[int] | None = None  # what the target has written since a step was rejected
        for event in events:
            outcomes = [step.outcome for step in event.drafted_steps]
            if count is not None and (event.drafted or outcomes):
                wanted = 7 if count[2:3] == [5] else 3
                assert len(count) == wanted or CLOSE in written[:taken], (count, wanted)
                lengths[len(count)] += 1
                count = None
            if outcomes[-1:] == ["rejected"]:
                count = []
            if count is not None:
                count += event.tokens[event.accepted :]
            taken += len(event.tokens)
    assert lengths[3] > 5 and lengths[7] > 0, lengths
