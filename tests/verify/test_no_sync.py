"""Every rule works without looking at values on the host: what makes it fit for CUDA graphs and for vLLM."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from semspec.probe.evidence import GROUPS
from semspec.probe.features import Features
from semspec.sampling import draw
from semspec.types import Draft, Sampling, ScoreOutput, VerifyRequest
from semspec.verify import REGISTRY, Decisions, DraftBatch, Rule, make
from semspec.verify.collate import collate
from semspec.verify.exact import Exact
from tests.verify.binding import WIDTH, RuleResources


def without_values(drafts: DraftBatch, mode: FakeTensorMode) -> DraftBatch:
    """The same tensors with shapes but no values: reading one is an error."""

    def strip(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return mode.from_tensor(value)
        if isinstance(value, dict):
            return {key: strip(part) for key, part in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.replace(
                value, **{f.name: strip(getattr(value, f.name)) for f in dataclasses.fields(value)}
            )
        return value

    return strip(drafts)  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "on_host", lambda values: False)


def verify_blind(rule: Rule, sampling: Sampling) -> Decisions:
    def one(k: int) -> VerifyRequest:
        logits = torch.zeros(k, 50) if rule.keeps_draft_logits else None
        protected = torch.zeros(50, dtype=torch.bool)
        height = 1 + len(rule.layout([1] * k))
        rows = ScoreOutput(torch.zeros(height, 50), {layer: torch.zeros(height, WIDTH) for layer in rule.layers})
        hidden = {layer: torch.zeros(k, WIDTH) for layer in rule.draft_layers}
        return VerifyRequest(rule, Draft([1] * k, logits, hidden), rows, sampling, 5, 0, protected=protected)

    drafts = collate([one(3), one(1), one(2)])
    drafts.protected = torch.zeros(50, dtype=torch.bool)
    with (mode := FakeTensorMode(allow_non_fake_inputs=True)):  # weights, those of a probe, are real
        decisions = rule.verify(without_values(drafts, mode))
        if decisions.state is not None:  # a rule with state, in its second round
            state = torch.zeros(decisions.state.shape, dtype=decisions.state.dtype)
            decisions = rule.verify(without_values(dataclasses.replace(drafts, state=state), mode))
        return decisions


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.8, top_k=5, top_p=0.9, min_p=0.01)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_rule_never_reads_a_value(name: str, sampling: Sampling):
    decisions = verify_blind(make(name).bind(RuleResources()), sampling)
    assert decisions.accepted.shape == decisions.next.shape == (3,)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_p=0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("several", ["steps", "candidates"])
def test_nor_does_an_attention_judge_with_the_drafts_confidence(sampling: Sampling, several: str):
    features = Features((2,), "attention", tuple(GROUPS))
    rule = make(f"semantic+:{several}=3,part=true").bind(RuleResources(judge=features))
    assert rule.keeps_draft_logits and verify_blind(rule, sampling).accepted.shape == (3,)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_p=0.9)], ids=["greedy", "sampled"])
def test_nor_does_semantic_if_its_probe_sees_evidence(sampling: Sampling):
    rule = make("semantic").bind(RuleResources(target=Features((2,), evidence=tuple(GROUPS))))
    assert rule.keeps_draft_logits and verify_blind(rule, sampling).accepted.shape == (3,)


@dataclasses.dataclass(frozen=True)
class Peeking(Exact):
    name = "peeking"

    def verify(self, drafts: DraftBatch) -> Decisions:
        decisions = super().verify(drafts)
        assert decisions.accepted.max().item() >= 0
        return decisions


def test_a_rule_that_does_is_caught():
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        verify_blind(Peeking(), Sampling())
