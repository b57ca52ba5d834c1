"""Rules that remember an answer's earlier drafts, `regret` and `csd`, and the coin of `ears`: in plain Python."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

import semspec
from semspec.sampling.noise import ACCEPT, TARGET, stream, uniform
from semspec.types import Sampling
from semspec.verify import make
from semspec.verify.regret import Regret
from tests.verify.build import One, build, random_one
from tests.verify.test_lossy import beliefs, draw, expected, half_right

ROUNDS = 60


def in_rounds(
    spec: str, sampling: Sampling, sequences: int = 3
) -> list[tuple[list[One], list[tuple[int, int, list[int]]]]]:
    """The drafts of several sequences over many rounds, with the decisions; state goes from one round to the next."""
    rule, state, found = make(spec), None, []
    for n in range(ROUNDS):
        ones = [half_right(100 * b + n, 5, sampling) for b in range(sequences)]
        decisions = rule.verify(replace(build(*ones), state=state))
        assert decisions.relaxed is not None and decisions.state is not None
        state = decisions.state
        marks = [[i for i, r in enumerate(row) if r] for row in decisions.relaxed.tolist()]
        found.append((ones, list(zip(decisions.accepted.tolist(), decisions.next.tolist(), marks, strict=True))))
    return found


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9)], ids=["greedy", "sampled"])
def test_regret_spends_one_budget_per_answer(sampling: Sampling) -> None:
    budget, slope = 3.0, 0.6
    spent = [0.0, 0.0, 0.0]
    for ones, decided in in_rounds(f"regret:budget={budget},slope={slope},mismatches=2", sampling):
        for b, (one, (accepted, follows, relaxed)) in enumerate(zip(ones, decided, strict=True)):
            here, mismatches, allowed = spent[b], 0, []
            for j, token in enumerate(one.ids):
                row = [x / (sampling.temperature or 1.0) for x in one.target[j]]
                cost = max(row) - row[token] if token != draw(one, j, TARGET) else 0.0
                here, mismatches = here + cost, mismatches + (token != draw(one, j, TARGET))
                allowed.append(here <= budget and mismatches <= 2 and cost <= slope * (len(one.ids) - j))
                if j in relaxed:
                    spent[b] += cost
            assert (accepted, follows, relaxed) == expected(one, allowed)
    assert all(budget / 2 < each <= budget for each in spent), "the budget is used, and never passed"


def test_a_budget_of_nothing_is_exact() -> None:
    for sampling in (Sampling(), Sampling(0.9)):
        for ones, decided in in_rounds("regret:budget=0", sampling):
            assert decided == [expected(one, [False] * 5) for one in ones]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9)], ids=["greedy", "sampled"])
def test_csd_accepts_what_it_has_met_before(sampling: Sampling) -> None:
    memories: list[Counter[tuple[int, int]]] = [Counter(), Counter(), Counter()]
    relaxed_at = []
    for n, (ones, decided) in enumerate(in_rounds("csd:count=2,ratio=0.2", sampling)):
        for one, memory, decision in zip(ones, memories, decided, strict=True):
            own = [draw(one, j, TARGET) for j in range(len(one.ids))]
            p = beliefs(one)
            allowed = [
                memory[token, o] >= 2 and row[token] >= 0.2 * row[o]
                for token, o, row in zip(one.ids, own, p, strict=False)
            ]
            assert decision == expected(one, allowed)
            relaxed_at += [n] * len(decision[2])
            memory.update((t, o) for t, o in list(zip(one.ids, own, strict=True))[: decision[0] + 1] if t != o)
    assert relaxed_at and min(relaxed_at) >= 2, "nothing at first, something later"


@pytest.mark.parametrize("certain", [False, True])
def test_ears_is_sampling_with_a_kinder_coin(certain: bool) -> None:
    sampling, rule = Sampling(0.8), make("ears:tolerance=0.5")
    ones = [random_one(seed, 6, sampling, certain=certain) for seed in range(200)]
    decided, plain = rule.verify(build(*ones)), make("sampling").verify(build(*ones))
    kinder = 0
    for b, one in enumerate(ones):
        accepted, p = 0, beliefs(one)
        for j, token in enumerate(one.ids):
            q = 1.0 if one.draft is None else torch.tensor(one.draft[j]).softmax(-1)[token].item()
            keys = (one.sampling.seed, one.position + j, stream(ACCEPT, one.round))
            u = uniform(*map(torch.tensor, keys)).item()
            if not u - 0.5 * (1 - max(p[j])) < p[j][token] / q and not u * q < p[j][token]:
                break
            accepted += 1
        assert decided.accepted[b] == accepted >= plain.accepted[b]
        kinder += accepted > int(plain.accepted[b])
    assert kinder > 20
    same = make("ears:tolerance=0").verify(build(*ones))
    assert torch.equal(same.accepted, plain.accepted) and torch.equal(same.next, plain.next)


def test_mars_and_margin_differ_by_the_size_of_logits() -> None:
    """The same two probabilities, 0.62 and 0.38: `margin` sees no difference, `mars` does."""
    small, large = [[1.0, 0.5, -9.0], [9.0, 0.0, 0.0]], [[20.0, 19.5, 10.0], [9.0, 0.0, 0.0]]
    ones = [One(small, [1]), One(large, [1]), One([[-0.5, -0.51, -9.0], [9.0, 0.0, 0.0]], [1])]
    assert make("margin").verify(build(*ones)).accepted.tolist() == [1, 1, 1]
    assert make("mars").verify(build(*ones)).accepted.tolist() == [0, 1, 0], "a ratio of negative logits says nothing"
    assert math.isclose(0.9 * 20, 18) and make("mars:ratio=0.98").verify(build(ones[1])).accepted.tolist() == [0]


def test_a_rule_that_rewrites_keeps_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget is one answer's, also where `regret` speeds up what a step rule leaves to the target."""
    seen = list[bool]()
    verify = Regret.verify
    monkeypatch.setattr(
        Regret, "verify", lambda self, drafts: seen.append(drafts.state is None) or verify(self, drafts)
    )
    pair = semspec.load("pocket", device="cpu", slots=1, context=512)
    rule = "random-step:rate=0,rewrite=regret"
    pair.generate("Mia has 4 bags with 6 pens each. How many pens does Mia have?", verifier=rule, max_new_tokens=60)
    assert len(seen) > 3 and seen[0] and not any(seen[1:])
