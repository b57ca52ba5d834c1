"""Loose rules that look at the draft's probabilities, against their formulas in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from semspec.sampling.noise import ACCEPT, RESIDUAL, stream, uniform
from semspec.types import Sampling
from semspec.verify import Rule, make
from semspec.verify.exact import Exact
from semspec.verify.sampling import SpeculativeSampling
from tests.race import key, race
from tests.verify.build import One, build, decide, hot, random_one

WARM = Sampling(temperature=0.9)
MIXED = [Sampling(), WARM]
Row = list[float]


def softmax(logits: Row, heat: float = 1.0) -> Row:
    weights = [math.exp((x - max(logits)) / heat) for x in logits]
    return [w / sum(weights) for w in weights]


def only(token: int, size: int) -> Row:
    return [float(i == token) for i in range(size)]


def noise(one: One, j: int, purpose: int) -> float:
    keys = (one.sampling.seed, one.position + j, stream(purpose, one.round))
    return uniform(*map(torch.tensor, keys)).item()


class Reading:
    """One draft's distributions: both models' probabilities, and what their tokens are drawn from."""

    def __init__(self, one: One) -> None:
        self.one, self.k, size = one, len(one.ids), len(one.target[0])
        heat = one.sampling.temperature or 1.0
        self.p = [softmax(row, heat) for row in one.target]
        self.q = [softmax(row) for row in one.draft] if one.draft else [only(t, size) for t in one.ids]
        self.drawn_p, self.drawn_q = self.p, self.q
        if one.sampling.greedy:
            self.drawn_p = [only(row.index(max(row)), size) for row in self.p]
            self.drawn_q = [only(t, size) for t in one.ids]

    def passes(self, j: int) -> bool:
        """Speculative sampling's test."""
        token = self.one.ids[j]
        return noise(self.one, j, ACCEPT) * self.drawn_q[j][token] < self.drawn_p[j][token]

    def replacement(self, j: int) -> int:
        """What speculative sampling draws if token j is rejected, or after the draft."""
        p = self.drawn_p[j]
        q = self.drawn_q[j] if j < self.k else [0.0] * len(p)
        rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        rest = rest if sum(rest) > 0 else p
        return race(rest, key(self.one.sampling.seed, self.one.position + j, stream(RESIDUAL, self.one.round)))


def expected(one: One, allowed: list[bool], protected: frozenset[int] = frozenset()) -> tuple[int, int, list[int]]:
    reading, relaxed = Reading(one), []
    for j, token in enumerate(one.ids):
        if not reading.passes(j):
            if not allowed[j] or {token, reading.replacement(j)} & protected:
                return j, reading.replacement(j), relaxed
            relaxed.append(j)
    return len(one.ids), reading.replacement(len(one.ids)), relaxed


def ensemble(rule: Rule, one: One) -> list[bool]:
    r, w = Reading(one), rule.weight  # type: ignore[attr-defined]
    out = []
    for j, token in enumerate(one.ids):
        v = [w * a + (1 - w) * b for a, b in zip(r.p[j], r.q[j], strict=True)]
        chance = 1 - w + w * r.p[j][token] / r.q[j][token]
        out.append(v.index(max(v)) == token if one.sampling.greedy else noise(one, j, ACCEPT) < chance)
    return out


def cascade(rule: Rule, one: One) -> list[bool]:
    r, alpha = Reading(one), rule.alpha  # type: ignore[attr-defined]
    out = []
    for j, token in enumerate(one.ids):
        p, q = r.p[j], r.q[j]
        apart = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
        defers = {
            "chow": max(q) < 1 - alpha,
            "diff": max(q) < max(p) - alpha,
            "opt": max(q) < max(p) - alpha * apart,
            "token": p[token] < (1 - alpha) * max(p),
        }[rule.defer]  # type: ignore[attr-defined]
        out.append(not defers)
    return out


def js(p: Row, q: Row) -> float:
    def kl(a: Row, b: Row) -> float:
        return sum(x * math.log2(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return math.sqrt(max(0.0, (kl(p, middle) + kl(q, middle)) / 2))


def adaptive(rule: Rule, one: One) -> list[bool]:
    r = Reading(one)
    return [js(r.p[j], r.q[j]) <= rule.scale * rule.start for j in range(r.k)]  # type: ignore[attr-defined]


CASES: list[tuple[str, Callable[[Rule, One], list[bool]]]] = [
    ("ensemble", ensemble),
    ("ensemble:weight=0.3", ensemble),
    ("cascade-rule", cascade),
    ("cascade-rule:defer=chow,alpha=0.6", cascade),
    ("cascade-rule:defer=diff,alpha=0.1", cascade),
    ("cascade-rule:defer=token,alpha=0.5", cascade),
    ("adaptive:start=0.4", adaptive),
    ("adaptive:start=0.3,scale=1.5", adaptive),
]


@pytest.mark.parametrize("kind", ["greedy", "sampled", "mixed", "looked up"])
@pytest.mark.parametrize(("spec", "reference"), CASES, ids=[spec for spec, _ in CASES])
def test_a_rule_is_its_formula(spec: str, reference: Callable, kind: str):
    rule = make(spec)
    choose = {"greedy": [Sampling()], "sampled": [WARM], "mixed": MIXED, "looked up": MIXED}[kind]
    ones = [random_one(seed, seed % 6, choose[seed % len(choose)], certain=kind == "looked up") for seed in range(90)]
    wanted = [expected(one, reference(rule, one)) for one in ones]
    assert decide(rule, ones) == wanted
    hopeless = kind == "looked up" and spec.startswith("adaptive")  # a lookup has the largest distance
    assert hopeless or sum(len(marks) for *_, marks in wanted) > 0, "the rule has something to do"


@pytest.mark.parametrize(
    ("loose", "strict"),
    [
        ("ensemble:weight=1", SpeculativeSampling()),
        ("cascade-rule:defer=diff,alpha=-1", SpeculativeSampling()),
        ("adaptive:scale=0", SpeculativeSampling()),
    ],
)
def test_at_its_limit_a_rule_is_lossless(loose: str, strict: Rule):
    ones = [random_one(seed, seed % 7, MIXED[seed % 2]) for seed in range(120)]
    found, wanted = make(loose).verify(build(*ones)), strict.verify(build(*ones))
    assert torch.equal(found.accepted, wanted.accepted) and torch.equal(found.next, wanted.next)
    assert found.relaxed is not None and not found.relaxed.any()


def test_token_deferral_at_its_limits_when_greedy():
    ones = [random_one(seed, seed % 7, Sampling()) for seed in range(90)]
    strict, loose = (make(f"cascade-rule:defer=token,alpha={a}").verify(build(*ones)) for a in (0, 1))
    assert torch.equal(strict.accepted, Exact().verify(build(*ones)).accepted)
    assert torch.equal(loose.accepted, build(*ones).counts)


@pytest.mark.parametrize("spec", ["ensemble:weight=0.1", "cascade-rule:defer=chow,alpha=1", "adaptive:scale=9"])
@pytest.mark.parametrize("sampling", MIXED, ids=["greedy", "sampled"])
def test_protected_tokens_are_never_relaxed(spec: str, sampling: Sampling):
    protected, rule = frozenset({2, 4}), make(spec)
    ones = [random_one(seed, 6, sampling) for seed in range(90)]
    reference = {"ensemble": ensemble, "cascade-rule": cascade, "adaptive": lambda rule, one: [True] * 6}[rule.name]
    found = decide(rule, ones, protected)
    assert found == [expected(one, reference(rule, one), protected) for one in ones]
    assert sum(len(r) for *_, r in found) < sum(len(r) for *_, r in decide(rule, ones))


def test_a_draft_of_one_word_of_the_same_meaning_in_hand_made_rows():
    # The target hesitates between 1 and 2 and leans to 2; the draft is sure of 1.
    target = [[0.0, 2.0, 2.4, 0.0, 0.0, 0.0], hot(3)]
    draft = One(target, [1], [hot(1)])
    assert decide(make("ensemble:weight=0.7"), [draft]) == [(1, 3, [0])]
    assert decide(make("ensemble:weight=1"), [draft]) == [(0, 2, [])]
    assert decide(make("cascade-rule"), [draft]) == [(1, 3, [0])], "the draft is more confident than the target"
    assert decide(make("cascade-rule"), [replace(draft, target=[hot(2), hot(3)])]) == [(1, 3, [0])], (
        "and equally confident, where both cannot be right: what this rule may break"
    )
    assert decide(make("cascade-rule:defer=token"), [replace(draft, target=[hot(2), hot(3)])]) == [(0, 2, [])]


def adapted(rule: Rule, texts: list[list[One]]) -> list[list[tuple[int, list[int]]]]:
    """The adaptive rule by its docstring, over several rounds of several sequences."""
    out = []
    for rounds in texts:
        sums, counts, found = [0.0, 2 * rule.start], [1.0, 1.0], []  # type: ignore[attr-defined]
        for one in rounds:
            threshold = rule.scale * (sums[0] / counts[0] + sums[1] / counts[1]) / 2  # type: ignore[attr-defined]
            reading = Reading(one)
            distances = [js(reading.p[j], reading.q[j]) for j in range(reading.k)]
            accepted, _, relaxed = expected(one, [d <= threshold for d in distances])
            found.append((accepted, relaxed))
            for i in (0, 1):
                share = max(rule.memory, 1e-3 / counts[i])  # type: ignore[attr-defined]
                sums[i], counts[i] = sums[i] * share, counts[i] * share
            for j in range(min(accepted + 1, reading.k)):
                which = 0 if reading.passes(j) else 1
                sums[which] += distances[j]
                counts[which] += 1
        out.append(found)
    return out


@pytest.mark.parametrize("spec", ["adaptive:start=0.3", "adaptive:start=0.1,memory=0.5", "adaptive:start=0.4,memory=0"])
def test_the_threshold_moves_with_each_sequences_own_past(spec: str):
    rule, sampling = make(spec), Sampling()
    texts = [[random_one(100 * text + round, 1 + round % 5, sampling) for round in range(12)] for text in range(20)]
    found: list[list[tuple[int, list[int]]]] = [[] for _ in texts]
    state = None
    for round in range(12):
        drafts = build(*(text[round] for text in texts))
        drafts.state = state
        d = rule.verify(drafts)
        state = d.state
        assert d.relaxed is not None and state is not None and state.isfinite().all()
        for b, (accepted, row) in enumerate(zip(d.accepted.tolist(), d.relaxed.tolist(), strict=True)):
            found[b].append((accepted, [i for i, r in enumerate(row) if r]))
    assert found == adapted(rule, texts)
    fixed = [[decide(rule, [one])[0] for one in text] for text in texts]
    assert [[(a, r) for a, _, r in text] for text in fixed] != found, "a fixed threshold would differ"
