"""Drafts of many sequences, decided in parts: each within a graph, or within the memory that was planned."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from torch import Tensor

from semspec.loop import rule_graphs
from semspec.loop.rule_graphs import PATIENCE, RuleGraphs
from semspec.model.graph_memory import RULE_ROWS, TREE_ROWS
from semspec.types import DraftSteps, Sampling, Verdict, VerifyRequest
from semspec.verify import REGISTRY, Rule, make
from semspec.verify.decide import decide
from semspec.verify.exact import Exact
from tests.loop.test_rule_graphs import FILTERED, FREE, plain, played, request, same
from tests.verify.binding import RuleResources


def test_every_batch_is_decided_in_graphs_as_one_call_decides_it() -> None:
    """With 18 sequences and more the rows of 8 draft tokens are more than a graph has."""
    for count in (17, 18, 32, 63, 64, 100):
        rules, launcher = played()
        for turn in range(PATIENCE + 2):
            requests = [request(Exact(), 100 * turn + i, 8, FREE) for i in range(count)]
            same(rules.verify(Exact(), requests), plain(Exact(), requests))
        parts = -(-9 * count // (17 * 9))  # of 17 sequences at most
        verified = (PATIENCE + 2) * parts
        left_out = PATIENCE * len(rules._shapes)  # plainly, before a shape is captured
        assert launcher.replays == verified - left_out
        assert len(launcher.graphs) == len(rules._shapes) <= 2, "one shape, and a last part of fewer sequences"


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_rule_decides_for_64_sequences_as_in_one_call(name: str) -> None:
    """Of several lengths, with what the rule kept of each; step rules with several steps in one draft."""
    rule = make(name).bind(RuleResources())
    rules, launcher = played()
    states: list[Tensor | None] = [None] * 64
    for turn in range(2 * PATIENCE + 4):
        requests = [request(rule, 64 * turn + i, 3 + i % 6, FILTERED, states[i]) for i in range(64)]
        for i, one in enumerate(requests):
            if rule.unit == "step":
                one.draft.steps = DraftSteps((2, len(one.draft.tokens)) if i % 3 else (2,))
        found = rules.verify(rule, requests)
        same(found, plain(rule, requests))
        if turn > PATIENCE:
            states = [verdict.state for verdict in found]
    assert launcher.replays >= 4 and not any(shape.plain for shape in rules._shapes.values())
    heights = {len(shape.tensors["target"]) for shape in rules._shapes.values() if shape.tensors}
    assert heights and max(heights) <= RULE_ROWS, "so memory is what was planned"
    buffers = {key: len(buffer) for key, buffer in rules._buffers.items()}
    assert all(rows <= RULE_ROWS for rows in buffers.values())


def test_parts_keep_a_request_whole_and_are_few_and_even() -> None:
    def parts(*lengths: int, steps: int = 1) -> list[list[int]]:
        made = [request(Exact(), i, k, FREE) for i, k in enumerate(lengths)]
        for one, k in zip(made, lengths, strict=True):
            one.draft.steps = DraftSteps((*range(1, steps), k))
        found = rule_graphs.in_parts(made, RULE_ROWS, rule_graphs.SEQUENCES)
        assert [one for part in found for one in part] == made
        return [[len(one.draft.tokens) for one in part] for part in found]

    assert parts(*[8] * 17) == [[8] * 17]
    assert parts(*[8] * 64) == [[8] * 16] * 4
    assert parts(*[8] * 18) == [[8] * 9] * 2
    assert parts(150, 8, 8, 60, 60, 8) == [[150, 8], [8, 60, 60, 8]]
    assert parts(8, 8, 150, 8) == [[8, 8], [150, 8]]
    assert parts(*[1] * 40) == [[1] * 20] * 2, "of sequences there are no more than a graph has"
    assert parts(*[9] * 16, steps=3) == [[9] * 8] * 2, "and steps count each"
    assert parts(300, 300) == [[300], [300]]


@pytest.mark.parametrize("name", ["exact", "fly", "sampling"])
def test_many_trees_are_verified_in_parts_that_fit_into_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, rng, sizes = make(name), Random(4), list[int]()
    sampling = Sampling(0.8, seed=5)

    def tree(seed: int) -> VerifyRequest:
        made, n = request(rule, seed, 40, sampling), 40
        return replace(made, draft=replace(made.draft, parents=tuple(rng.randrange(-1, i) for i in range(n))))

    requests = [tree(seed) for seed in range(7)]
    whole = decide(rule, requests)
    inner = rule_graphs.decide

    def counted(rule: Rule, some: list[VerifyRequest]) -> list[Verdict]:
        sizes.append(sum(len(r.rows.logits) for r in some))
        return inner(rule, some)

    monkeypatch.setattr(rule_graphs, "decide", counted)
    same(RuleGraphs().verify(rule, requests), whole)
    assert sizes == [3 * 41, 3 * 41, 41] and max(sizes) <= TREE_ROWS
    assert [len(part) for part in rule_graphs.in_parts(requests[:2], 1, 1)] == [1, 1], "one is always verified"
