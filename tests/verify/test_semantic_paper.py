"""`semantic:paper=true` against the acceptance of SemanticSpec's released code, in plain Python."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from semspec.errors import BadRequest
from semspec.sampling import noise
from semspec.types import Sampling
from semspec.verify import make
from semspec.verify.semantic import Semantic
from tests.verify.build import One, build
from tests.verify.test_step_rules import VOCAB, accepts, semantic, unlikely, with_probabilities


def released(p: float, q: float, u: float, ids: list[int], top2: list[set[int]]) -> bool:
    """The fast path, then u < min(1, p / q), and a ratio of 0 where q is 0."""
    if all(token in best for token, best in zip(ids, top2, strict=True)):
        return True
    ratio = p / q if q > 0 else 0
    return u < min(1.0, ratio)


def test_paper_is_the_released_acceptance() -> None:
    ones, ps, qs, wanted = [], list[float](), list[float](), list[bool]()
    for seed in range(2000):
        rng = Random(seed)
        ids = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 3))]
        rows = [[rng.gauss(0, 2) for _ in range(VOCAB)] for _ in range(len(ids) + 1)]
        p, q = (rng.choice([0.0, 1e-6, 0.01, 1.0, rng.random(), rng.random()]) for _ in range(2))
        sampling = Sampling(0.6, seed=seed)
        ones.append(One(rows, ids, None, sampling, position=seed % 9, round=seed % 3))
        top2 = [set(sorted(range(VOCAB), key=lambda v, row=row: -row[v])[:2]) for row in rows[:-1]]  # type: ignore[misc]
        stream = noise.stream(noise.ACCEPT, seed % 3)
        u = noise.uniform(*(torch.tensor(x) for x in (seed, seed % 9, stream))).item()
        # As float32, which the probes return.
        p, q = torch.tensor(p).item(), torch.tensor(q).item()
        ps, qs = [*ps, p], [*qs, q]
        wanted.append(released(p, q, u, ids, top2))
    drafts = with_probabilities(build(*ones), ps, qs)
    drafts = replace(drafts, protected=torch.tensor([v == 0 for v in range(VOCAB)]))
    found = semantic(paper=True).verify(drafts).accepted == drafts.counts
    assert found.tolist() == wanted
    assert 200 < sum(wanted) < 1800
    ours = semantic().verify(drafts).accepted == drafts.counts
    assert ours.tolist() != wanted, "our floor and our protected tokens make a difference"


def test_each_part_is_an_option_and_the_preset_sets_what_is_left_at_its_default() -> None:
    rule = make("semantic:paper=true")
    assert isinstance(rule, Semantic)
    assert {name: getattr(rule, name) for name in Semantic.published} == Semantic.published
    assert (rule.lead, rule.max_step_tokens, rule.hand_over, rule.sample, rule.bonus_temperature) == (
        1,
        500,
        True,
        True,
        0.1,
    )
    assert (rule.keep, rule.rewrite, rule.steps, rule.top, rule.tau, rule.floor) == (False, "", 1, 2, 0.0, 0.0)
    other = make("semantic:paper=true,end_tokens=100,top=0")
    assert isinstance(other, Semantic) and (other.end_tokens, other.top, other.min_prob) == (100, 0, 0.0)
    by_parts = make("semantic:min_prob=0,delimiters=released,protect=false,end_tokens=2000")
    assert replace(rule, paper=False) == by_parts
    assert {name: getattr(make("semantic"), name) for name in Semantic.published}.items().isdisjoint(
        Semantic.published.items()
    )


def test_a_probability_of_nothing_is_rejected_and_ours_counts_as_a_fiftieth() -> None:
    assert not accepts(semantic(paper=True, tau=0.5), p=0.5, q=0.0)
    assert accepts(semantic(tau=0.5), p=0.5, q=0.0)
    assert accepts(semantic(paper=True, tau=0.5), q=1e-4, p=1e-4)
    assert not accepts(semantic(tau=0.5), q=1e-4, p=1e-4), "the floor is what rejects it"


def test_a_protected_token_can_be_left_out_only_as_released() -> None:
    one = One(unlikely([1, 2]), [1, 2])
    drafts = with_probabilities(build(one), [0.9], [0.1])
    drafts.protected = torch.tensor([v == 2 for v in range(VOCAB)])  # the target's own choice at the first token
    assert semantic().verify(drafts).accepted.item() == 0
    assert semantic(protect=False).verify(drafts).accepted.item() == 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("semantic:delimiters=some", "give all or released"),
        ("semantic:end_tokens=-1", "end_tokens is -1"),
        ("semantic:min_prob=-1", "min_prob is -1.0"),
    ],
)
def test_options_out_of_range_are_refused(spec: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        make(spec)
