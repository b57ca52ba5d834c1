"""Rules over tree drafts: lossless ones keep the target's distribution, lossy ones do as on chains."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from semspec import tree
from semspec.errors import SemspecError
from semspec.sampling import noise
from semspec.sampling.draw import SamplingRows
from semspec.types import GREEDY, Draft, Sampling, ScoreOutput, Verdict, VerifyRequest
from semspec.verify import REGISTRY, Decisions, DraftBatch, Rule, make
from semspec.verify.block import Block
from semspec.verify.decide import decide
from semspec.verify.exact import Exact
from semspec.verify.sampling import SpeculativeSampling
from semspec.verify.traversal import Traversal
from semspec.verify.trees import DraftTrees
from tests.verify.build import CPU, Crowd, Language

PLAIN = Sampling(1.0)
PARENTS = (-1, 0, 1, 0, -1, 4, 4, -1)  # paths of three, two, two, two and one
RULES = [SpeculativeSampling(), Traversal()]


@dataclass
class Trees(Crowd):
    """A crowd whose drafts are trees of one shape; siblings are drawn without replacement, or are the best ones."""

    parents: tuple[int, ...] = PARENTS
    replaced: bool = False  # siblings are drawn with replacement: a fault
    shared: bool = False  # tokens of a level are drawn with the same noise: another

    def drafts(self, k: int, round: int) -> DraftBatch:
        n, count = len(self.tokens), len(self.parents)
        processed = self.draft.processed(self.sampling)
        stream = torch.tensor(noise.stream(noise.DRAFT, round))
        states, ids, rows = [self.state] + [self.state] * count, [self.state] * count, [self.state] * count
        for parent in range(-1, count):
            children = [i for i, p in enumerate(self.parents) if p == parent]
            if not children:
                continue
            own = processed[states[parent + 1]]
            place = tree.depths(self.parents)[parent] + 1 if self.shared and parent >= 0 else parent + 1
            race = own.clone()
            if not self.certain:
                race -= noise.exponential(noise.key(self.seeds, self.lengths + place, stream), own.shape[-1]).log()
            ranked = race.topk(len(children), dim=-1).indices
            for rank, child in enumerate(children):
                ids[child], rows[child] = ranked[:, rank], own
                if self.replaced and rank:
                    key = noise.key(self.seeds, self.lengths + 1000 + child, stream)
                    ids[child] = (own - noise.exponential(key, own.shape[-1]).log()).argmax(-1)
                states[child + 1] = self.target.after(states[parent + 1], ids[child])
        one = DraftTrees.of([self.parents], count, CPU)
        step = torch.arange(n)
        trees = DraftTrees(
            [self.parents] * n,
            one.before.repeat(n, 1),
            step.repeat_interleave(len(one.counts)),
            one.counts.repeat(n),
            one.places.repeat(n, 1),
        )
        return DraftBatch(
            ids=torch.stack(ids, 1),
            counts=torch.full([n], count),
            target_logits=self.target.table[torch.stack(states, 1).flatten()],
            first_row=step * (count + 1),
            draft_logits=None if self.certain else torch.stack(rows, 1).flatten(0, 1),
            first_draft=step * count,
            target_sampling=SamplingRows.of([self.sampling], [n * (count + 1)], CPU),
            seed=self.seeds,
            position=self.lengths,
            round=torch.full([n], round),
            trees=trees,
        )

    def commit(self, drafts: DraftBatch, decisions: Decisions) -> None:
        assert decisions.last is not None
        paths = [tree.path(self.parents, i) for i in range(-1, len(self.parents))]
        assert torch.equal(torch.tensor([len(p) for p in paths])[decisions.last + 1], decisions.accepted)
        deepest = max(map(len, paths))
        table = torch.tensor([list(p) + [0] * (deepest - len(p)) for p in paths])[decisions.last + 1]
        drafted = drafts.ids.gather(1, table)
        for i in range(deepest + 1):
            token = torch.where(decisions.accepted == i, decisions.next, drafted[:, min(i, deepest - 1)])
            self._write(token, i <= decisions.accepted)


def languages(seed: int, distance: float = 1.0, vocab: int = 4) -> tuple[Language, Language]:
    target = Language(vocab, memory=3, seed=seed)
    return target, target.near(distance, seed + 100)


def fit(rule: Rule, seed: int, sampling: Sampling = PLAIN, rounds: int = 1, n: int = 100_000, **how: object) -> float:
    zeros = torch.zeros(n, dtype=torch.long)
    certain = bool(how.pop("certain", False))
    crowd = Trees(*languages(seed), sampling, certain, torch.full([n, 4], -1), zeros, zeros, **how)  # type: ignore[arg-type]
    for round in range(rounds):
        drafts = crowd.drafts(0, round)
        crowd.commit(drafts, rule.verify_tree(drafts))
    crowd.complete()
    return crowd.p_value()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_four_tokens_have_the_targets_joint_distribution(rule: Rule, certain: bool) -> None:
    assert fit(rule, seed=1, certain=certain) > 1e-4
    assert fit(rule, seed=2, sampling=Sampling(0.7, top_k=3, top_p=0.95), certain=certain) > 1e-4


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_second_round_changes_nothing(rule: Rule) -> None:
    assert fit(rule, seed=3, rounds=2, parents=(-1, 0, -1, 2)) > 1e-4


@dataclass(frozen=True)
class Forgetful(SpeculativeSampling):
    """Does not take rejected siblings from the draft's distribution."""

    def verify_tree(self, drafts: DraftBatch) -> Decisions:
        from semspec.verify import sampling

        own = sampling.without
        sampling.without = lambda q, lost: q
        try:
            return super().verify_tree(drafts)
        finally:
            sampling.without = own


@pytest.mark.parametrize(
    ("rule", "how"),
    [
        (SpeculativeSampling(), {"replaced": True}),
        (Traversal(), {"replaced": True}),
        (Traversal(), {"shared": True, "parents": (-1, 0, 0, 0, -1, 4, 4, 4), "seed": 2}),
        (Forgetful(), {}),
    ],
    ids=["siblings with replacement", "the same, from the leaves", "levels with one noise", "siblings not removed"],
)
def test_faults_are_found(rule: Rule, how: dict[str, object]) -> None:
    assert fit(rule, **{"seed": 1} | how) < 1e-6  # type: ignore[arg-type]


def accepted(rule: Rule, seed: int, certain: bool, n: int = 20_000) -> Tensor:
    zeros = torch.zeros(n, dtype=torch.long)
    crowd = Trees(*languages(seed, vocab=6), PLAIN, certain, torch.full([n, 4], -1), zeros, zeros)
    return rule.verify_tree(crowd.drafts(0, 0)).accepted.double()


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_from_the_leaves_no_fewer_tokens_are_accepted(certain: bool) -> None:
    """In expectation, which is what is proved; with the same noise, so that small differences show."""
    gains = []
    for seed in range(4):
        gain = accepted(Traversal(), seed, certain) - accepted(SpeculativeSampling(), seed, certain)
        assert gain.mean() > -4 * gain.std() / len(gain) ** 0.5
        gains.append(float(gain.mean()))
    assert certain or max(gains) > 0.01  # of tokens that are certain, both accept as many


def request(rule: Rule, seed: int, parents: tuple[int, ...], sampling: Sampling, vocab: int = 8) -> VerifyRequest:
    """A random tree with random rows; siblings differ. The target chose some of its tokens."""
    rng, source = random.Random(seed), torch.Generator().manual_seed(seed)
    rows = torch.randn(len(parents) + 1, vocab, generator=source) * 3
    tokens: list[int] = []
    for i, parent in enumerate(parents):
        taken = [tokens[j] for j in range(i) if parents[j] == parent]
        own = int(rows[parent + 1].argmax())
        free = [t for t in range(vocab) if t not in taken]
        tokens.append(own if own in free and rng.random() < 0.6 else rng.choice(free))
    draft = Draft(tokens, parents=() if tree.is_chain(parents) else parents)
    return VerifyRequest(rule, draft, ScoreOutput(rows), replace(sampling, seed=seed), seed % 30, seed % 5)


def path_request(whole: VerifyRequest, path: tuple[int, ...]) -> VerifyRequest:
    rows = whole.rows.logits[[0, *(i + 1 for i in path)]]
    return replace(whole, draft=Draft([whole.draft.tokens[i] for i in path]), rows=ScoreOutput(rows))


LOOSE = [
    "exact", "fly:window=1,theta=0.1", "fly:window=1,carry=1", "topk:top=3", "typical", "margin", "mars", "regret",
    "threshold:single=0.2", "csd:count=0", "accept-all",
]  # fmt: skip
WHOLE = ["exact", "fly:window=1", "sampling", "traversal"]
numbers = st.lists(st.integers(0, 10**6), min_size=1, max_size=14)
trees = numbers.map(lambda some: tuple(n % (i + 1) - 1 for i, n in enumerate(some)))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(LOOSE), st.integers(0, 10**6), trees, st.sampled_from([GREEDY, Sampling(0.8)]))
def test_the_longest_path_that_the_rule_accepts_wins(
    name: str, seed: int, parents: tuple[int, ...], sampling: Sampling
) -> None:
    """Path by path as a chain, in plain Python: the longest, then the one with most of the target's own choices."""
    rule = make(name)
    whole = request(rule, seed, parents, sampling)
    (found,) = decide(rule, [whole])
    each = [(path, decide(rule, [path_request(whole, path)])[0]) for path in tree.paths(parents)]
    path, best = max(each, key=lambda one: (one[1].accepted, one[1].accepted - len(one[1].relaxed)))
    assert (found.accepted, found.next, found.relaxed) == (best.accepted, best.next, best.relaxed)
    assert list(found.taken) == list(path[: best.accepted])
    assert found.target_tokens == best.target_tokens and found.evidence == best.evidence


def test_protected_tokens_are_relaxed_on_no_branch() -> None:
    rule = make("accept-all")
    whole = request(rule, 3, (-1, 0, -1, 2, 3), GREEDY)
    whole.rows.logits[:] = 0.0
    whole.rows.logits[:, 7] = 5.0  # the target's own choice, everywhere
    whole.draft.tokens = [1, 2, 3, 4, 5]
    (free,) = decide(rule, [whole])
    assert free.path == (2, 3, 4)
    whole.protected = torch.tensor([i == 4 for i in range(8)])
    assert decide(rule, [whole])[0].path == (0, 1)
    whole.protected[7] = True
    assert decide(rule, [whole])[0].path == ()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.lists(trees, min_size=2, max_size=4), st.sampled_from(WHOLE))
def test_in_a_batch_as_alone(seed: int, shapes: list[tuple[int, ...]], name: str) -> None:
    rule = make(name)
    branching = [shape for shape in shapes if not tree.is_chain(shape)]
    requests = [request(rule, seed + i, shape, Sampling(0.8)) for i, shape in enumerate(branching)]
    if requests:
        together = [(v.path, v.next) for v in decide(rule, requests)]
        assert together == [(v.path, v.next) for r in requests for v in decide(rule, [r])]


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_on_a_chain_traversal_is_block(certain: bool) -> None:
    zeros = torch.zeros(2000, dtype=torch.long)
    crowd = Trees(*languages(5), PLAIN, certain, torch.full([2000, 4], -1), zeros, zeros, parents=(-1, 0, 1))
    drafts = crowd.drafts(0, 0)
    ours, block = Traversal().verify_tree(drafts), Block().verify(replace(drafts, trees=None))
    assert torch.equal(ours.accepted, block.accepted) and torch.equal(ours.next, block.next)
    recursive = SpeculativeSampling().verify_tree(drafts)
    chain = SpeculativeSampling().verify(replace(drafts, trees=None))
    assert torch.equal(recursive.accepted, chain.accepted) and torch.equal(recursive.next, chain.next)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), trees, st.sampled_from(["sampling", "traversal"]))
def test_greedy_lossless_rules_are_exact(seed: int, parents: tuple[int, ...], name: str) -> None:
    whole = request(make(name), seed, parents, GREEDY)

    def outcome(rule: str) -> tuple[object, ...]:
        verdict: Verdict = decide(make(rule), [whole])[0]
        return tuple(verdict.taken), verdict.next

    assert outcome(name) == outcome("exact")


def test_rules_say_whether_they_take_trees() -> None:
    rules = {name: REGISTRY[name] for name in REGISTRY if REGISTRY[name].unit == "token"}
    can = {name for name, rule in rules.items() if rule().supports_trees}
    assert {"exact", "sampling", "traversal", "fly", "topk", "typical", "margin", "threshold"} <= can
    assert not can & {"block", "reflective", "ears", "ensemble"}


def test_no_rule_is_given_a_tree_without_what_it_asks_for() -> None:
    class Sure(Exact):
        keeps_draft_logits = True

    class Deep(Exact):
        draft_layers = (1,)

    assert Exact().supports_trees and not Sure().supports_trees and not Deep().supports_trees


@pytest.mark.parametrize("last", [None, 0, 7])
def test_an_accepted_path_is_one(last: int | None) -> None:
    """A rule that names no last token, another than the path's, or none of the draft's."""

    class Careless(Exact):
        name = "careless"

        def verify_tree(self, drafts: DraftBatch) -> Decisions:
            return Decisions(torch.tensor([2]), torch.tensor([3]), last=None if last is None else torch.tensor([last]))

    with pytest.raises(SemspecError, match="'careless' gave an impossible verdict: accepted 2 tokens of a tree"):
        decide(Careless(), [request(Exact(), 0, (-1, 0, -1, 2), GREEDY)])


def test_siblings_toss_coins_of_their_own() -> None:
    """Of four siblings some passes a coin of 0.3 in 76 % of all rounds, if no two share one; what two paths have in
    common has one coin, so that both have the same to say about it."""
    rule, rejecting = make("random:rate=0.3"), torch.full((5, 16), -5.0)
    rejecting[:, 15] = 5.0

    def accepted(parents: tuple[int, ...]) -> list[tuple[int, ...]]:
        draft = Draft(list(range(1, 1 + len(parents))), parents=parents)
        rows = ScoreOutput(rejecting[: len(parents) + 1])
        asked = [VerifyRequest(rule, draft, rows, Sampling(seed=s), s % 50, s % 7) for s in range(4000)]
        return [tuple(verdict.taken) for verdict in decide(rule, asked)]

    siblings = accepted((-1, -1, -1, -1))
    assert sum(map(bool, siblings)) / 4000 == pytest.approx(1 - 0.7**4, abs=0.03)
    assert len(set(siblings)) == 5, "each of them passes alone at times"
    twins = accepted((-1, 0, 0))
    assert sum(map(bool, twins)) / 4000 == pytest.approx(0.3, abs=0.03)
