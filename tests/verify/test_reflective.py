"""Reflective verification: two readings of a draft, fused by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from semspec.draft import ModelDrafter
from semspec.errors import BadRequest
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.sampling.noise import TARGET
from semspec.types import Sampling
from semspec.verify import Rule, make
from semspec.verify.exact import Exact
from tests.fakes import FakeRunner, chain, greedy
from tests.race import key, race
from tests.verify.binding import RuleResources
from tests.verify.build import One, build, hot, random_one

WARM = Sampling(temperature=0.9)
REMARK = [4, 5, 4]


def bound(spec: str) -> Rule:
    return make(spec).bind(RuleResources(REMARK))


def laid_out(seed: int, k: int, sampling: Sampling) -> One:
    """A draft with rows for [draft, remark, draft]."""
    one = random_one(seed, k, sampling)
    rows = 1 + (2 * k + len(REMARK) if k else 0)
    target = torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed + 5000)) * 2
    return replace(one, target=target.tolist())


def written(one: One, logits: list[float], j: int) -> int:
    p = (torch.tensor(logits) / (one.sampling.temperature or 1.0)).softmax(-1).tolist()
    if one.sampling.greedy:
        return p.index(max(p))
    return race(p, key(one.sampling.seed, one.position + j, TARGET))


def expected(one: One, alpha: float) -> tuple[int, int, list[int]]:
    k, relaxed = len(one.ids), []
    for j, token in enumerate(one.ids):
        own = written(one, one.target[j], j)
        if token != own:
            again = one.target[k + len(REMARK) + j]
            fused = [(1 - alpha) * a + alpha * b for a, b in zip(one.target[j], again, strict=True)]
            if token != written(one, fused, j):
                return j, own, relaxed
            relaxed.append(j)
    return k, written(one, one.target[k], k), relaxed


def decide(rule: Rule, ones: list[One]) -> list[tuple[int, int, list[int]]]:
    d = rule.verify(build(*ones))
    assert d.relaxed is not None
    marks = [[i for i, r in enumerate(row) if r] for row in d.relaxed.tolist()]
    return list(zip(d.accepted.tolist(), d.next.tolist(), marks, strict=True))


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("alpha", [0.3, 0.7, 1.0])
def test_a_token_is_accepted_if_it_is_the_choice_of_the_fused_logits(alpha: float, sampling: Sampling):
    ones = [laid_out(seed, seed % 6, sampling) for seed in range(300)]
    wanted = [expected(one, alpha) for one in ones]
    assert decide(bound(f"reflective:alpha={alpha}"), ones) == wanted
    assert sum(len(marks) for *_, marks in wanted) > 0


def test_without_weight_the_second_reading_changes_nothing():
    ones = [laid_out(seed, seed % 6, [Sampling(), WARM][seed % 2]) for seed in range(200)]
    found, exact = bound("reflective:alpha=0").verify(build(*ones)), Exact().verify(build(*ones))
    assert torch.equal(found.accepted, exact.accepted) and torch.equal(found.next, exact.next)


def test_protected_tokens_are_not_relaxed():
    one = One([[0.0, 2.0, 2.4, 0.0, 0.0, 0.0], hot(3), hot(0), hot(0), hot(1), hot(0)], [1])
    rule = bound("reflective:alpha=0.5")
    assert decide(rule, [one]) == [(1, 3, [0])], "in the second reading it is the target's choice"
    for token in (1, 2):
        drafts = build(one)
        drafts.protected = torch.tensor([v == token for v in range(6)])
        assert rule.verify(drafts).accepted.tolist() == [0]


def test_the_prompt_is_in_the_models_tokens():
    rule = make("reflective:prompt=A B").bind(RuleResources())
    assert rule.layout([1, 2]) == [1, 2, *(ord(letter) % 50 for letter in "A B"), 1, 2] and rule.layout([]) == []
    assert rule != make("reflective:prompt=A B"), "rules for different models are not verified together"
    with pytest.raises(BadRequest, match="has no option 'tokens'; its options are: alpha, prompt"):
        make("reflective:tokens=3")


def test_through_the_loop_the_second_copy_is_scored_and_dropped():
    vocab, prompt, seen = 11, [3, 1, 4], 0
    language, other = chain(vocab, seed=1), chain(vocab, seed=2)
    target = FakeRunner(language, vocab)
    for alpha in (0.0, 1.0):
        rule = make(f"reflective:alpha={alpha}").bind(RuleResources([9, 9]))
        stats, executor = Stats(), Executor()
        decoder = Decoder(Job(prompt, rule, 4, 60), target, ModelDrafter(FakeRunner(other, vocab)), stats)
        task = executor.submit(decoder.decode(), stats)
        executor.run()
        tokens = [t for e in task.events for t in e.tokens]
        assert task.error is None and len(tokens) == 60
        assert (tokens == greedy(language, prompt, 60)) is (alpha == 0.0)
        assert (stats.relaxed > 0) is (alpha == 1.0)
        seen = max(rows for entry in target.diary for rows in entry.rows.values())
    assert seen == len(prompt) + 4 + 2 + 4
