"""`glimprouter`, `trigreason` and `confspec`: by their formulas, and in the loop with fake models."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import semspec
from semspec.errors import BadRequest
from semspec.types import Draft, Sampling
from semspec.verify import make
from semspec.verify.confspec import ConfSpec
from semspec.verify.glimprouter import GlimpRouter
from semspec.verify.step_controls import AcceptAllSteps, AcceptNoStep
from semspec.verify.trigreason import TrigReason
from tests.fakes import Logits
from tests.steps_by_hand import BLANK, CLOSE, END, PROMPT, STEPS, VOCAB, job, language, run, text
from tests.verify.binding import RuleResources
from tests.verify.build import One, build
from tests.verify.test_baselines import Words


def entropy(row: list[float], top: int = 20) -> float:
    kept = sorted(row, reverse=True)[:top]
    weights = [math.exp(x) for x in kept]
    return -sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights)


def test_glimprouter_looks_at_the_entropy_of_one_token() -> None:
    rows = torch.randn(50, 1, 30, generator=torch.Generator().manual_seed(0)) * 3
    for threshold in (0.5, 1.0, 2.0):
        rule = GlimpRouter(threshold=threshold, top=7)
        for row in rows:
            assert rule.begins(Draft([1], row), Sampling()) == (entropy(row[0].tolist(), 7) < threshold)
            heated = Draft([1], row / 0.5)  # what a draft that samples at 0.5 keeps
            assert rule.begins(heated, Sampling(0.5)) == (entropy(row[0].tolist(), 7) < threshold)


def drafted_at(events: list[Any]) -> list[tuple[int, int]]:
    """Where the draft wrote: (new tokens before, tokens)."""
    found, at = [], 0
    for event in events:
        if event.drafted:
            found.append((at, event.accepted))
        at += len(event.tokens)
    return found


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_only_steps_that_begin_surely_are_the_drafts(seed: int, steps: int) -> None:
    target, draft = language(seed), language(seed + 50)
    rule = GlimpRouter(threshold=1.0, steps=steps, ahead=0.0)
    ((events, _),) = run(job(rule, 60), target=target, draft=draft)
    written = text(events)
    for at, accepted in drafted_at(events):
        starts = [at, *(at + end for end in STEPS.cuts(written[at : at + accepted])[:-1])]
        for start in starts:
            assert entropy(draft(PROMPT + written[:start])) < 1.0
    ((never, _),) = run(job(GlimpRouter(threshold=0.0), 60), target=target, draft=draft)
    ((alone, _),) = run(job(AcceptNoStep(lead=0, hand_over=False), 60), target=target, draft=draft)
    assert not drafted_at(never) and text(never) == text(alone), "and never asked for more than a glimpse"
    ((always, _),) = run(job(GlimpRouter(threshold=99.0), 60), target=target, draft=draft)
    ((all_steps, _),) = run(job(AcceptAllSteps(lead=0, hand_over=False), 60), target=target, draft=draft)
    assert text(always) == text(all_steps) and drafted_at(always) == drafted_at(all_steps)


@pytest.mark.parametrize("options", [{"top_p": 0.3}, {"top_k": 1}, {"min_p": 0.9}, {"top_p": 0.9, "top_k": 5}])
def test_what_a_draw_leaves_out_counts_in_the_entropy(options: dict[str, Any]) -> None:
    """Of a draw with top-p 0.3 mostly one token is left, whose entropy is 0, however undecided the draft is."""
    drafted = 0
    for seed in range(6):
        target, draft = language(seed), language(seed + 50)
        sampling = Sampling(0.8, seed=seed, **options)
        ((events, _),) = run(job(GlimpRouter(threshold=1.0), 60, sampling=sampling), target=target, draft=draft)
        written = text(events)
        for at, _ in drafted_at(events):
            assert entropy(draft(PROMPT + written[:at])) < 1.0
        drafted += len(drafted_at(events))
        ((always, _),) = run(job(GlimpRouter(threshold=99.0), 60, sampling=sampling), target=target, draft=draft)
        ((all_steps, _),) = run(
            job(AcceptAllSteps(lead=0, hand_over=False), 60, sampling=sampling), target=target, draft=draft
        )
        assert text(always) == text(all_steps), "a look changes no draw"
    assert drafted


def words(ids: list[int], sure: float) -> One:
    """A step whose tokens the draft gives this probability each."""
    rest = math.log((1 - sure) / 9)
    rows = [[math.log(sure) if i == token else rest for i in range(10)] for token in ids]
    return One([[0.0] * 10] * (len(ids) + 1), ids, rows)


def test_trigreason_distrusts_a_draft_that_is_too_sure() -> None:
    rule = TrigReason(overconfident=0.9).bind(Words())
    assert rule.verify(build(words([0, 9], 0.95), words([0, 9], 0.8))).accepted.tolist() == [0, 2]
    sampled = [replace(one, sampling=Sampling(0.7)) for one in (words([0, 9], 0.95), words([0, 9], 0.8))]
    heated = [replace(one, draft=[[x / 0.7 for x in row] for row in one.draft or []]) for one in sampled]
    assert rule.verify(build(*heated)).accepted.tolist() == [0, 2], "whatever it samples at"


def test_trigreason_calls_the_target_when_steps_go_in_circles() -> None:
    rule = TrigReason(circles=3).bind(Words())
    plain, hesitant, accepted, state = [0, 9], [0, 1, 9], [], None
    for ids in (hesitant, hesitant, plain, hesitant, hesitant, hesitant, hesitant, hesitant, hesitant):
        decisions = rule.verify(replace(build(words(ids, 0.5)), state=state))
        state = decisions.state
        accepted.append(decisions.accepted.item() > 0)
    assert accepted == [True, True, True, True, True, False, True, True, False], "and counts anew after that"


DIGITS = (3, 3, 3, 3, 3, 3, 3, 4, 5, 6)  # stand-ins for the tokens of 0 to 9


def confspec(**options: Any) -> ConfSpec:
    return ConfSpec(tokens=(7, 8), digits=DIGITS, **options)


@pytest.mark.parametrize(
    ("by_draft", "digit", "accepted"),
    [(0.95, 3, 2), (0.95, 6, 2), (0.05, 6, 0), (0.5, 6, 2), (0.5, 4, 2), (0.5, 3, 0), (0.9, 3, 2), (0.1, 6, 0)],
)
def test_confspec_asks_the_target_where_the_draft_is_not_sure(by_draft: float, digit: int, accepted: int) -> None:
    rows = [[0.0, 0.0, 9.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]] * 4 + [[5.0 * (i == digit) for i in range(9)]]
    drafts = replace(build(One(rows, [1, 1])), self_ratings=torch.tensor([by_draft]))
    decisions = confspec().verify(drafts)
    assert decisions.accepted.tolist() == [accepted]
    assert decisions.evidence is not None
    reason = confspec().reason(decisions.evidence[0, 0].tolist())
    assert ("the target gives the step" in reason) == (by_draft == 0.5)


def test_the_drafts_mark_is_its_probability_of_a_good_digit() -> None:
    logits = torch.tensor([0.0, 0, 0, 1.0, 2.0, 3.0, 0.5, 0, 0])
    good = sum(math.exp(x) for x in (2.0, 3.0, 0.5))
    assert math.isclose(confspec().rate_by_draft(logits), good / (good + 7 * math.e), rel_tol=1e-5)


def judging(own: Logits, digit: int) -> Logits:
    """A model that, asked the question, answers with this token."""

    def logits(context: list[int]) -> list[float]:
        return [30.0 * (i == digit) for i in range(VOCAB)] if context[-2:] == [7, 8] else quiet(own(context))

    def quiet(row: list[float]) -> list[float]:
        return [x if i not in (7, 8) else -9.0 for i, x in enumerate(row)]

    return logits


@pytest.mark.parametrize("seed", range(6))
def test_the_draft_is_asked_in_the_loop_and_forgets_the_question(seed: int) -> None:
    target, own = judging(language(seed), 3), language(seed + 50)
    for digit, control in ((6, AcceptAllSteps()), (3, AcceptNoStep())):
        draft = judging(own, digit)
        ((events, stats),) = run(job(confspec(), 60), target=target, draft=draft)
        ((wanted, same),) = run(job(control, 60), target=target, draft=draft)
        assert text(events) == text(wanted) and stats.step_outcomes == same.step_outcomes


def test_a_glimpse_at_a_draft_with_other_tokens() -> None:
    pair = semspec.load("pocket", draft="pocket-other-draft", device="cpu")
    question = [{"role": "user", "content": "Mia has 4 bags with 6 pens each. How many pens does Mia have?"}]
    rules = ("glimprouter:threshold=99", "accept-all-steps:lead=0,hand_over=false")
    first, second = (pair.generate(question, verifier=rule, max_new_tokens=60) for rule in rules)
    assert first.tokens == second.tokens and first.stats.step_outcomes["accepted"] > 0
    assert pair.generate(question, verifier="trigreason", max_new_tokens=30).tokens


def test_confspec_refuses_models_with_different_tokens() -> None:
    class Other(RuleResources):
        def draft_numbers(self) -> Any:
            return torch.zeros(9, dtype=torch.bool)

    with pytest.raises(BadRequest, match="different tokenizers; choose specreason"):
        make("confspec").bind(Other())


def test_the_special_tokens_of_the_fake_language_are_not_the_questions() -> None:
    assert not {7, 8} & {END, BLANK, CLOSE}
