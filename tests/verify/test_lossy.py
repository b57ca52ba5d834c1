"""Loose rules against the papers' formulas, spelled out in plain Python for one sequence at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from semspec.errors import BadRequest
from semspec.sampling.noise import ACCEPT, SECOND, TARGET, stream, uniform
from semspec.types import Sampling
from semspec.verify import REGISTRY, Rule, make
from tests.race import key, race
from tests.verify.build import One, decide, hot, random_one

Allowed = Callable[[Rule, list[list[float]], list[int], int], bool]  # rule, probabilities, draft, position

SAMPLED = Sampling(temperature=0.9)


def beliefs(one: One) -> list[list[float]]:
    heat = one.sampling.temperature or 1.0
    return (torch.tensor(one.target) / heat).softmax(-1).tolist()


def draw(one: One, row: int, purpose: int) -> int:
    """The target's own token at a row: its argmax, or a draw with the noise of that purpose."""
    p = beliefs(one)[row]
    if one.sampling.greedy:
        return p.index(max(p))
    number = purpose if purpose == TARGET else stream(purpose, one.round)
    return race(p, key(one.sampling.seed, one.position + row, number))


def expected(one: One, allowed: list[bool], protected: frozenset[int] = frozenset()) -> tuple[int, int, list[int]]:
    """(accepted, next, relaxed positions) of a rule that allows these tokens besides the target's own."""
    accepted, relaxed = 0, []
    for j, token in enumerate(one.ids):
        own = draw(one, j, TARGET)
        if token != own:
            if not allowed[j] or {token, own} & protected:
                break
            relaxed.append(j)
        accepted += 1
    return accepted, draw(one, accepted, TARGET), relaxed


def fly(rule: Rule, one: One) -> list[bool]:
    w_max, theta, top = rule.window, rule.theta, rule.top  # type: ignore[attr-defined]
    p, k = beliefs(one), len(one.ids)
    match = [one.ids[j] == draw(one, j, TARGET) for j in range(k)]
    if not one.sampling.greedy:
        match = [m or one.ids[j] == draw(one, j, SECOND) for j, m in enumerate(match)]
    out = []
    for j in range(k):
        window = w_max
        needed = window if rule.reading == "paper" else max(window - 1, 0)  # type: ignore[attr-defined]
        if rule.entropy == "partial":  # type: ignore[attr-defined]
            entropy = -sum(x * math.log(x) for x in sorted(p[j])[-top:] if x > 0)
        else:
            entropy = -sum(x * math.log(x) for x in p[j] if x > 0) / math.log(len(p[j]))
        followed = j + window <= k - 1 and all(match[j + 1 : j + 1 + needed])
        out.append(match[j] or (entropy >= theta and followed))
    return out


def topk(rule: Rule, one: One) -> list[bool]:
    p = beliefs(one)
    rank = [sorted(p[j], reverse=True)[: rule.top] for j in range(len(one.ids))]  # type: ignore[attr-defined]
    delta = rule.delta  # type: ignore[attr-defined]
    return [p[j][t] >= rank[j][-1] and p[j][t] >= rank[j][0] - delta for j, t in enumerate(one.ids)]


def typical(rule: Rule, one: One) -> list[bool]:
    def floor(row: list[float]) -> float:
        entropy = -sum(x * math.log(x) for x in row if x > 0)
        return min(rule.epsilon, rule.alpha * math.exp(-entropy))  # type: ignore[attr-defined]

    return [row[t] > floor(row) for row, t in zip(beliefs(one), one.ids, strict=False)]


def margin(rule: Rule, one: One) -> list[bool]:
    return [row[t] >= rule.ratio * max(row) for row, t in zip(beliefs(one), one.ids, strict=False)]  # type: ignore[attr-defined]


def threshold(rule: Rule, one: One) -> list[bool]:
    out = []
    for j, token in enumerate(one.ids):
        p = beliefs(one)[j][token]
        drawn = 0.0 if one.sampling.greedy else p  # a greedy target never draws another token
        wanted = min(1.0, drawn / rule.acc)  # type: ignore[attr-defined]
        keys = (one.sampling.seed, one.position + j, stream(ACCEPT, one.round))
        toss = uniform(*map(torch.tensor, keys)).item()
        out.append(p >= rule.single or toss < (wanted - drawn) / (1 - drawn))  # type: ignore[attr-defined]
    return out


def regret(rule: Rule, one: One) -> list[bool]:
    spent, mismatches, out = 0.0, 0, []
    for j, token in enumerate(one.ids):
        logits = [x / (one.sampling.temperature or 1.0) for x in one.target[j]]
        cost = max(logits) - logits[token] if token != draw(one, j, TARGET) else 0.0
        spent, mismatches = spent + cost, mismatches + (token != draw(one, j, TARGET))
        within = spent <= rule.budget and mismatches <= rule.mismatches  # type: ignore[attr-defined]
        out.append(rule.budget > 0 and within and cost / (len(one.ids) - j) <= rule.slope)  # type: ignore[attr-defined]
    return out


def mars(rule: Rule, one: One) -> list[bool]:
    out = []
    for row, token in zip(one.target, one.ids, strict=False):
        first, second = sorted(row, reverse=True)[:2]
        out.append(first > 0 and row[token] in (first, second) and row[token] / first >= rule.ratio)  # type: ignore[attr-defined]
    return out


def random(rule: Rule, one: One) -> list[bool]:
    keys = [(one.sampling.seed, one.position + j, stream(ACCEPT, one.round)) for j in range(len(one.ids))]
    return [uniform(*map(torch.tensor, each)).item() < rule.rate for each in keys]  # type: ignore[attr-defined]


CASES: list[tuple[str, Callable[[Rule, One], list[bool]]]] = [
    ("fly", fly),
    ("fly:window=2,theta=0.6", fly),
    ("fly:window=2,reading=released", fly),
    ("fly:window=3,theta=0,entropy=full", fly),
    ("fly:window=2,theta=0.8,entropy=full", fly),
    ("fly:window=0,theta=0.9", fly),
    ("fly:window=1,top=1,theta=0.3", fly),
    ("topk", topk),
    ("topk:top=2,delta=0.2", topk),
    ("typical", typical),
    ("typical:epsilon=0.5,alpha=0.9", typical),
    ("margin", margin),
    ("margin:ratio=0.2", margin),
    ("threshold", threshold),
    ("threshold:single=0.1", threshold),
    ("threshold:single=1,acc=0.4", threshold),
    ("random:rate=0.5", random),
    ("regret", regret),
    ("regret:budget=0.8,slope=0.2", regret),
    ("regret:budget=9,slope=9,mismatches=1", regret),
    ("regret:budget=0", regret),
    ("mars:ratio=0.5", mars),
    ("mars", mars),
    ("accept-all", lambda rule, one: [True] * len(one.ids)),
]


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("spec", "reference"), CASES, ids=[spec for spec, _ in CASES])
def test_a_rule_is_its_formula(spec: str, reference: Callable, sampling: Sampling):
    rule = make(spec)
    ones = [half_right(seed, k=seed % 9, sampling=sampling) for seed in range(400)]
    wanted = [expected(one, reference(rule, one)) for one in ones]
    assert decide(rule, ones) == wanted
    relaxed = sum(len(marks) for _, _, marks in wanted)
    inert = {"fly", "regret:budget=0"} | ({"threshold:single=1,acc=0.4"} if sampling.greedy else set())
    assert relaxed > 0 or spec in inert, "the cases are such that the rule has something to do"


def half_right(seed: int, k: int, sampling: Sampling) -> One:
    """A draft that often is the target's own choice, so that windows of matches occur."""
    one = random_one(seed, k, sampling)
    rng = torch.Generator().manual_seed(seed + 10_000)
    keep = torch.rand(k, generator=rng) < 0.75
    ids = [draw(one, j, TARGET) if keep[j] else token for j, token in enumerate(one.ids)]
    return replace(one, ids=ids)


EAGER = [
    "accept-all",
    "topk:delta=1",
    "fly:window=1,theta=0",
    "margin:ratio=0.01",
    "random:rate=1",
    "threshold:single=0.01",
    "ensemble:weight=0.1",
    "cascade-rule:alpha=1",
    "adaptive:scale=9",
    "regret:budget=99,slope=99,mismatches=9",
    "mars:ratio=0.01",
    "csd:count=0",
]


@pytest.mark.parametrize("spec", EAGER)
def test_protected_tokens_are_never_relaxed(spec: str):
    protected = frozenset({2, 4})
    ones = [half_right(seed, k=6, sampling=Sampling()) for seed in range(200)]
    for one, (accepted, _, relaxed) in zip(ones, decide(make(spec), ones, protected), strict=True):
        for j in relaxed:
            assert not {one.ids[j], draw(one, j, TARGET)} & protected
        assert accepted <= len(one.ids)
    free = sum(len(r) for *_, r in decide(make(spec), ones))
    assert sum(len(r) for *_, r in decide(make(spec), ones, protected)) < free


def possible(one: One, row: int) -> set[int]:
    """The tokens that the target's filters leave."""
    how, p = one.sampling, beliefs(one)[row]
    best = sorted(range(len(p)), key=lambda v: -p[v])
    if how.top_k:
        return set(best[: how.top_k])
    return {v for i, v in enumerate(best) if sum(p[w] for w in best[:i]) < how.top_p}


@pytest.mark.parametrize("sampling", [replace(SAMPLED, top_k=3), replace(SAMPLED, top_p=0.6)], ids=["top_k", "top_p"])
@pytest.mark.parametrize("spec", EAGER)
def test_a_token_to_which_the_target_gives_no_probability_is_never_relaxed(spec: str, sampling: Sampling):
    ones = [replace(half_right(seed, 6, SAMPLED), draft=None) for seed in range(200)]
    ones = [replace(one, sampling=replace(sampling, seed=one.sampling.seed)) for one in ones]
    relaxed = 0
    for one, (_, _, marks) in zip(ones, decide(make(spec), ones), strict=True):
        assert all(one.ids[j] in possible(one, j) for j in marks)
        relaxed += len(marks)
    assert relaxed > 0, "possible tokens are relaxed"
    unfiltered = [replace(one, sampling=replace(SAMPLED, seed=one.sampling.seed)) for one in ones]
    if spec in ("accept-all", "random:rate=1"):
        everything = sum(len(marks) for *_, marks in decide(make(spec), unfiltered))
        assert relaxed < everything, "and there was something to reject"


def test_nor_one_that_a_greedy_target_rules_out():
    never = -math.inf
    one = One([[1.0, 0.5, never], [1.0, 0.5, never], [0.0, 0.0, 1.0]], [1, 2])
    assert decide(make("accept-all"), [one]) == [(1, 0, [0])]


def test_flys_window_in_a_hand_made_draft():
    # The target is undecided at position 1 only, where the draft rewords; six matches follow.
    undecided = [0.0, 1.0, 1.1, 0.0, 0.0, 0.0]
    target = [hot(0), undecided, *[hot(3)] * 7]
    draft = One(target, [0, 1, 3, 3, 3, 3, 3, 3])
    assert decide(make("fly"), [draft]) == [(8, 3, [1])]
    assert decide(make("fly:theta=1.2"), [draft]) == [(1, 2, [])], "the gate: not undecided enough"
    broken = One(target, [0, 1, 3, 3, 3, 3, 3, 5])
    assert decide(make("fly"), [broken]) == [(1, 2, [])], "the window: the sixth token after it does not match"
    assert decide(make("fly:reading=released"), [broken]) == [(7, 3, [1])], "five matches do for the released code"
    short = One(target[:8], [0, 1, 3, 3, 3, 3, 3])
    assert decide(make("fly"), [short]) == [(1, 2, [])], "the window does not fit into what is left of the draft"
    for count in range(1, 7):  # a draft shorter than the window, the mismatch first
        tiny = One([undecided, *[hot(3)] * count], [1, *[3] * (count - 1)])
        assert decide(make("fly"), [tiny]) == [(0, 2, [])], "nothing is relaxed on entropy alone"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fly:window=-1", "fly's window is -1"),
        ("fly:theta=-0.1", "fly's theta is -0.1"),
        ("fly:entropy=some", "give partial"),
        ("fly:reading=mine", "give paper, released or vllm"),
        ("fly:gate=none", "give tempered or raw"),
        ("fly:draws=3", "give 1 or 2"),
        ("fly:carry=7", "give 0 to 6"),
        ("fly:top=0", "fly's top is 0"),
        ("topk:top=0", "topk's top is 0"),
        ("topk:delta=2", "topk's delta is 2.0"),
        ("typical:epsilon=0", "typical's epsilon is 0.0; give a number above 0, at most 1"),
        ("margin:ratio=0", "margin's ratio is 0.0"),
        ("random:rate=1.5", "random's rate is 1.5"),
        ("threshold:single=0", "threshold's single is 0.0"),
        ("threshold:acc=1.1", "threshold's acc is 1.1"),
        ("ensemble:weight=0", "ensemble's weight is 0.0"),
        ("cascade-rule:defer=never", "give chow, diff, opt or token"),
        ("cascade-rule:alpha=-0.5", "with defer=opt give 0 to 1"),
        ("cascade-rule:defer=diff,alpha=2", "give -1 to 1"),
        ("adaptive:start=2", "adaptive's start is 2.0"),
        ("adaptive:scale=-1", "adaptive's scale is -1.0"),
        ("adaptive:memory=1.5", "adaptive's memory is 1.5"),
        ("reflective:alpha=1.5", "reflective's alpha is 1.5"),
        ("regret:budget=-1", "regret's budget is -1.0"),
        ("regret:mismatches=-1", "regret's mismatches is -1"),
        ("mars:ratio=0", "mars's ratio is 0.0"),
        ("ears:tolerance=2", "ears's tolerance is 2.0"),
        ("csd:count=-1", "csd's count is -1"),
        ("csd:ratio=0", "csd's ratio is 0.0"),
        ("glimprouter:threshold=-1", "glimprouter's threshold is -1.0"),
        ("glimprouter:top=1", "glimprouter's top is 1"),
        ("trigreason:overconfident=0", "trigreason's overconfident is 0.0"),
        ("trigreason:circles=0", "trigreason's circles is 0"),
        ("trigreason:steps=2", "trigreason's steps is 2"),
        ("confspec:sure=0.5", "confspec's sure is 0.5"),
        ("ears:tolerance=nan", "give 0 to 1"),
        ("semantic+:lead=-1", "semantic+'s lead is -1; give 0 or more (steps the target writes first)"),
        ("confspec:threshold=11", "confspec's threshold is 11"),
    ],
)
def test_options_out_of_range_are_refused(spec: str, message: str):
    with pytest.raises(BadRequest) as refusal:
        make(spec)
    assert message in str(refusal.value)


def test_every_loose_rule_says_that_it_is_lossy():
    loose = {"fly", "topk", "typical", "margin", "threshold", "ensemble", "cascade-rule", "adaptive", "reflective"}
    loose |= {"top-or-ratio", "spec-thinking", "regret", "mars", "ears", "csd", "glimprouter", "confspec", "trigreason"}
    loose |= {"accept-all", "random"}
    loose |= {"semantic", "semantic+", "specreason", "random-step", "oracle"}
    loose |= {"accept-all-steps", "accept-no-step", "likely-step"}
    assert {name for name, rule in REGISTRY.items() if not rule.lossless} == loose
