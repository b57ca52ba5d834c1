"""Rules over memory at fixed addresses decide as they do on their own batch: on a CPU, with graphs that are played."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from semspec.loop.rule_graphs import PATIENCE, SHAPES, RuleGraphs
from semspec.sampling.processors import History, Penalties, Processors
from semspec.types import Draft, DraftSteps, Sampling, ScoreOutput, Verdict, VerifyRequest
from semspec.verify import REGISTRY, Decisions, DraftBatch, Rule, make
from semspec.verify.collate import Packed, collate, join_segments, verdicts
from semspec.verify.exact import Exact
from semspec.verify.lossy import conclude
from tests.verify.binding import WIDTH, RuleResources
from tests.verify.test_own_tokens import random_draft

VOCAB = 50
FREE = Sampling(0.9)
FILTERED = Sampling(0.8, top_k=20, top_p=0.9, min_p=0.01)


class Replayed:
    """As a graph is: the work of the first call is done again each time, whatever later calls bring, and its results
    lie where those of the first lay. So only what was written into the buffers can make a difference."""

    def __init__(self) -> None:
        self.graphs: dict[Hashable, tuple[Callable[[], Packed], Packed]] = {}
        self.replays = 0

    def run(self, key: Hashable, work: Callable[[], Any], state: Tensor) -> Any:
        if key not in self.graphs:
            self.graphs[key] = work, work()
        work, kept = self.graphs[key]
        self.replays += 1
        made = work()
        for one in ("table", "state"):
            if getattr(made, one) is not None:
                getattr(kept, one).copy_(getattr(made, one))
        return kept


def played() -> tuple[RuleGraphs, Replayed]:
    launcher = Replayed()
    return RuleGraphs(lambda device: launcher), launcher


def request(rule: Rule, seed: int, k: int, sampling: Sampling, state: Tensor | None = None) -> VerifyRequest:
    random = torch.Generator().manual_seed(seed)

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=random)

    tokens = torch.randint(VOCAB, [k], generator=random).tolist()
    target = noise(1 + len(rule.layout(tokens)), VOCAB)
    for i, token in enumerate(tokens):  # a draft that is often right
        target[i, token] += 4 * (i % 3 > 0)
    logits = noise(k, VOCAB) if rule.keeps_draft_logits else None
    rows = ScoreOutput(target.bfloat16(), {layer: noise(len(target), WIDTH) for layer in rule.layers})
    draft = Draft(tokens, logits, {layer: noise(k, WIDTH) for layer in rule.draft_layers})
    protected = PROTECTED if rule.unit == "token" else None
    return VerifyRequest(
        rule, draft, rows, replace(sampling, seed=seed), seed % 40, seed % 5, state=state, protected=protected
    )


PROTECTED = torch.arange(VOCAB) % 17 == 3


def plain(rule: Rule, requests: list[VerifyRequest]) -> list[Verdict]:
    return join_segments(verdicts(rule.verify(collate(requests))), requests)


def same(ours: list[Verdict], theirs: list[Verdict]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.state, other.state) if other.state is not None else None
        assert sum(one.evidence, ()) == pytest.approx(sum(other.evidence, ()), rel=1e-5, abs=1e-6)
        assert replace(one, state=None, evidence=()) == replace(other, state=None, evidence=())


@pytest.mark.parametrize("sampling", [Sampling(), FILTERED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_rule_decides_as_it_does_plainly(name: str, sampling: Sampling) -> None:
    rule = make(name).bind(RuleResources())
    rules, launcher = played()
    states: list[Tensor | None] = [None] * 3
    for turn in range(2 * PATIENCE + 4):
        lengths = [[5, 4, 2], [3, 5, 3], [2, 4, 5]][turn % 3]  # rounded up to the same sizes
        if len(rule.layout([1, 2, 3])) > 20:  # a long question: rows for one sequence
            lengths = [5]
        requests = [request(rule, 10 * turn + i, k, sampling, states[i]) for i, k in enumerate(lengths)]
        found = rules.verify(rule, requests)
        same(found, plain(rule, requests))
        if turn > PATIENCE:  # first afresh, then each with what the rule kept of it
            states = [verdict.state for verdict in found]
    stateful = states[0] is not None
    assert len(launcher.graphs) == 1 + stateful and launcher.replays >= 2 + stateful


def test_few_graphs_serve_many_shapes_and_none_is_made_for_a_rare_one() -> None:
    rules, launcher = played()
    for turn in range(60):
        lengths = [1 + (turn * (i + 3)) % 8 for i in range(1 + turn % 8)]
        requests = [request(Exact(), turn + i, k, FREE) for i, k in enumerate(lengths)]
        same(rules.verify(Exact(), requests), plain(Exact(), requests))
    assert 0 < len(launcher.graphs) <= 24
    rules, launcher = played()
    for turn in range(3 * SHAPES):  # every shape once, then again when it has been forgotten
        rule = make(f"typical:alpha={0.1 + turn % (SHAPES + 1) / 1000}")
        rules.verify(rule, [request(rule, 1, 4, FREE)])
    assert not launcher.graphs and len(rules._shapes) == SHAPES


@dataclass(frozen=True)
class Likely(Rule):
    """A user's own, as the documentation has it."""

    name = "likely"
    lossless = False
    p: float = 0.1

    def verify(self, drafts: DraftBatch) -> Decisions:
        p = drafts.soft_target_prob_of_draft()
        return conclude(drafts, allowed=p >= self.p, evidence=(p,))


def test_a_users_own_rule_is_captured_as_well() -> None:
    rules, launcher = played()
    for turn in range(PATIENCE + 4):
        requests = [request(Likely(), 9 * turn + i, 5, FILTERED) for i in range(2)]
        same(rules.verify(Likely(), requests), plain(Likely(), requests))
    assert len(launcher.graphs) == 1 and launcher.replays == 4


@dataclass(frozen=True)
class Peeking(Exact):
    name = "peeking"

    def verify(self, drafts: DraftBatch) -> Decisions:
        if drafts.counts.max().item() > 100:  # a branch on the host
            raise ValueError
        return super().verify(drafts)


@dataclass(frozen=True)
class Masking(Exact):
    name = "masking"

    def verify(self, drafts: DraftBatch) -> Decisions:
        assert len(drafts.ids[drafts.exists]) >= 0
        return super().verify(drafts)


@dataclass(frozen=True)
class Spoiling(Exact):
    name = "spoiling"

    def verify(self, drafts: DraftBatch) -> Decisions:
        drafts.target_logits.mul_(-1)
        return super().verify(drafts)


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (Peeking(), "waits for the device"),
        (Masking(), "waits for the device"),
        (Spoiling(), "changes what it was given"),
    ],
)
def test_a_rule_that_cannot_be_replayed_is_called_each_time_and_that_is_said_once(
    rule: Rule, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    rules, launcher = played()
    with caplog.at_level(logging.WARNING):
        for turn in range(12):
            requests = [request(rule, turn, 4 + turn % 2, FREE)]
            same(rules.verify(rule, requests), plain(rule, requests))
    assert not launcher.graphs
    assert [why in r.getMessage() and rule.name in r.getMessage() for r in caplog.records] == [True]


@dataclass(frozen=True)
class Counting(Exact):
    """A user's rule that has effects and says so."""

    name = "counting"
    captured = False
    calls: list[int] = None  # type: ignore[assignment]

    def __hash__(self) -> int:
        return id(self)

    def verify(self, drafts: DraftBatch) -> Decisions:
        self.calls.append(1)
        return super().verify(drafts)


def test_a_rule_may_ask_to_be_called_each_time() -> None:
    rule, (rules, launcher) = Counting(calls=[]), played()
    for turn in range(7):
        rules.verify(rule, [request(rule, turn, 4, FREE)])
    assert len(rule.calls) == 7 and not launcher.graphs


class Broken:
    def run(self, key: Hashable, work: Callable[[], Any], state: Tensor) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_capture_that_fails_costs_nothing_but_a_line(caplog: pytest.LogCaptureFixture) -> None:
    rules = RuleGraphs(lambda device: Broken())
    for turn in range(6):
        requests = [request(Exact(), turn, 4, FREE)]
        same(rules.verify(Exact(), requests), plain(Exact(), requests))
    assert len(caplog.records) == 1 and "not permitted" in caplog.text


@dataclass(frozen=True)
class Failing(Exact):
    name = "failing"

    def verify(self, drafts: DraftBatch) -> Decisions:
        raise ZeroDivisionError("a mistake of the rule's own")


def test_a_rules_own_error_is_the_one_that_is_raised() -> None:
    rules, _ = played()
    for turn in range(PATIENCE + 2):
        with pytest.raises(ZeroDivisionError):
            rules.verify(Failing(), [request(Failing(), turn, 4, FREE)])


def test_a_draft_too_large_for_a_graph_is_verified_all_the_same() -> None:
    rules, launcher = played()
    for _ in range(PATIENCE + 2):
        requests = [request(Exact(), i, 70, FREE) for i in range(3)]
        same(rules.verify(Exact(), requests), plain(Exact(), requests))
    assert not launcher.graphs


def test_processors_act_before_and_nan_is_no_token() -> None:
    rules, launcher = played()
    for turn in range(PATIENCE + 3):
        one, other = request(Exact(), turn, 4, FREE), request(Exact(), turn + 50, 4, FREE)
        one.history = History(Processors(0, [Penalties([], 2.0, 0.5, 1.0)]), [3, 4, 5, turn])
        other.rows.logits[2] = float("nan")
        found = rules.verify(Exact(), [one, other])
        assert [v.next for v in found] == [v.next for v in plain(Exact(), [one, other])]
        assert found[1].next == -1 or found[1].accepted < 2
    assert launcher.replays


@dataclass(frozen=True)
class OwnSums(Rule):
    """Keeps numbers that depend on every token and row of a draft model with a tokenizer of its own."""

    name = "own-sums"
    lossless = False

    def verify(self, drafts: DraftBatch) -> Decisions:
        ids, rows, exists = drafts.own()
        assert drafts.draft_logits is not None and drafts.draft_hidden is not None and drafts.whole is not None
        logits, states = drafts.draft_logits.sum(-1)[rows] * exists, drafts.draft_hidden[1].sum(-1)[rows] * exists
        numbers = [(ids * exists).sum(-1), logits.sum(-1), states.sum(-1), drafts.own_counts(), drafts.whole]
        return Decisions(
            drafts.counts, torch.zeros_like(drafts.counts), state=torch.stack([n.float() for n in numbers], 1)
        )


def test_drafts_of_other_tokens_and_of_several_steps() -> None:
    rules, launcher = played()
    for seed in range(PATIENCE + 5):
        drafts = [random_draft(Random(i), 6, steps=2) for i in range(2)]  # as many own tokens each time, but others
        for draft in drafts:
            assert draft.logits is not None and draft.own is not None
            draft.steps = DraftSteps((2 + seed % 2, 5))
            draft.logits, draft.own = draft.logits * (seed + 1), [(token + seed) % 5 for token in draft.own]
        rows = [ScoreOutput(torch.randn(7, VOCAB)) for _ in drafts]
        asked = [VerifyRequest(OwnSums(), d, r, FREE, 0, 0) for d, r in zip(drafts, rows, strict=True)]
        same(rules.verify(OwnSums(), asked), plain(OwnSums(), asked))
    assert launcher.replays


def test_buffers_that_move_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    rules, launcher = played()
    batches = [[request(Exact(), turn, 6, Sampling())] for turn in range(PATIENCE + 4)]
    found = []
    for batch in batches:
        rules._buffers.clear()
        for shape in rules._shapes.values():
            shape.numbers = None
        found.append(rules.verify(Exact(), batch)[0].next)
    wanted = [plain(Exact(), batch)[0].next for batch in batches]
    assert launcher.replays and found != wanted
