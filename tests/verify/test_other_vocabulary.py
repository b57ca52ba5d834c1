"""`sampling` and `block` over different vocabularies: 100,000 joint draws have the target's distribution."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from semspec import verify
from semspec.model.restricted import RestrictedRunner
from semspec.sampling import noise
from semspec.sampling.draw import SamplingRows, choose, process
from semspec.text.exchange import Exchange
from semspec.types import Sampling
from semspec.verify import DraftBatch
from tests.draft.test_translating import side, toy
from tests.fakes import FakeRunner
from tests.verify.build import CPU, Crowd, Language

# Ten tokens and eight, of which seven are in both, at other ids; drafts must not use "bc", targets may use "ab".
EXCHANGE = Exchange(side(toy("ab", "abc", "ca")), side(toy("ca", "bc")))
V, D = EXCHANGE.target.vocab_size, EXCHANGE.draft.vocab_size
WARM, FILTERED = Sampling(1.0), Sampling(0.8, top_k=4, top_p=0.95)
K, N = 2, 100_000


@dataclass
class TwoVocabularies(Crowd):
    """A crowd whose draft has a table [states, D] over tokens of its own."""

    mask: bool = True

    def own_table(self) -> Tensor:
        """[states, D] what the draft draws from, as its runner gives it"""
        runner = RestrictedRunner(FakeRunner(lambda context: [0.0] * D, D), EXCHANGE.shared[1])
        table = self.draft.table
        masked = table.masked_fill(runner._forbidden, -torch.inf) if self.mask else table
        return process(masked, SamplingRows.of([self.sampling], [len(table)], CPU))

    def drafts(self, k: int, round: int) -> DraftBatch:
        n, processed = len(self.tokens), self.own_table()
        stream = torch.tensor(noise.stream(noise.DRAFT, round))
        to_target = torch.tensor([EXCHANGE.shared_target.get(d, 0) for d in range(D)])
        state, states, ids = self.state, [self.state], []
        for i in range(k):
            own = choose(processed[state], noise.key(self.seeds, self.lengths + i, stream))
            ids.append(to_target[own])
            state = self.target.after(state, ids[-1])
            states.append(state)
        rows = torch.stack(states, 1)
        return DraftBatch(
            ids=torch.stack(ids, 1),
            counts=torch.full([n], k),
            target_logits=self.target.table[rows.flatten()],
            first_row=torch.arange(n) * (k + 1),
            draft_logits=EXCHANGE.rows_for_target(processed[rows[:, :-1].flatten()]),
            first_draft=torch.arange(n) * k,
            target_sampling=SamplingRows.of([self.sampling], [n * (k + 1)], CPU),
            seed=self.seeds,
            position=self.lengths,
            round=torch.full([n], round),
        )


def p_value(rule: str, sampling: Sampling, mask: bool = True) -> float:
    target, draft = Language(V, 1, seed=1), Language(V, 1, seed=2)
    draft.table = torch.randn(draft.states, D, generator=torch.Generator().manual_seed(3)) * 1.2
    zeros = torch.zeros(N, dtype=torch.long)
    crowd = TwoVocabularies(target, draft, sampling, False, torch.full([N, K + 1], -1), zeros, zeros, mask)
    for round in range(2):
        drafts = crowd.drafts(K, round)
        crowd.commit(drafts, verify.make(rule).verify(drafts))
    crowd.complete()
    return crowd.p_value()


@pytest.mark.parametrize("sampling", [WARM, FILTERED])
@pytest.mark.parametrize("rule", ["sampling", "block"])
def test_the_joint_distribution_is_the_targets(rule: str, sampling: Sampling) -> None:
    assert len(EXCHANGE.shared[0]) == 7
    assert p_value(rule, sampling) > 1e-4


@pytest.mark.parametrize("rule", ["sampling", "block"])
def test_drawing_from_tokens_that_the_target_lacks_is_caught(rule: str) -> None:
    """Planted: the draft is not restricted, and what the target lacks becomes some token of the target's."""
    assert p_value(rule, WARM, mask=False) < 1e-6
