"""Every relaxed token comes with the target's own choice and a true reason."""

from __future__ import annotations

import re

import pytest
import torch

from semspec import verify
from semspec.draft import ModelDrafter
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.types import Event, Sampling
from semspec.verify import REGISTRY, Decisions, make
from semspec.verify.collate import verdicts
from tests.fakes import FakeRunner, chain
from tests.verify.build import One, build, hot

VOCAB = 11
LOOSE = {name: name for name, rule in REGISTRY.items() if not rule.lossless and rule.unit == "token"}
LOOSE |= {
    "fly": "fly:window=1",
    "threshold": "threshold:single=0.05",
    "adaptive": "adaptive:start=0.9",
    "reflective": "reflective:alpha=0.9",
    "regret": "regret:budget=9,slope=9",
    "mars": "mars:ratio=0.3",
    "csd": "csd:count=1",
}
UNDECIDED = [0.0, 2.0, 2.4, 0.0, 0.0, 0.0]  # probabilities 0.33 of token 1, 0.49 of token 2, 0.04 of each other


def decode(spec: str, sampling: Sampling) -> tuple[list[int], list[Event]]:
    stats, executor = Stats(), Executor()
    target, draft = FakeRunner(chain(VOCAB, seed=1), VOCAB), FakeRunner(chain(VOCAB, seed=1, sharpness=1.0), VOCAB)
    draft.logits = lambda context: [
        a + b for a, b in zip(chain(VOCAB, 1)(context), chain(VOCAB, 9)(context), strict=True)
    ]
    decoder = Decoder(Job([1, 2], make(spec), 5, 80, sampling), target, ModelDrafter(draft), stats)
    task = executor.submit(decoder.decode(), stats)
    executor.run()
    assert task.error is None
    return [t for e in task.events for t in e.tokens], list(task.events)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", sorted(LOOSE))
def test_relaxed_tokens_and_no_others_have_a_reason(name: str, sampling: Sampling):
    tokens, events = decode(LOOSE[name], sampling)
    language, at, relaxed = chain(VOCAB, seed=1), 0, 0
    for event in events:
        assert sorted(event.relaxed) == [i for i, o in enumerate(event.origins) if o == "relaxed"]
        for i, why in event.relaxed.items():
            assert why.reason and why.target_token is not None
            if sampling.greedy:
                row = language([1, 2, *tokens[: at + i]])
                assert why.target_token == row.index(max(row)) != event.tokens[i]
        at, relaxed = at + len(event.tokens), relaxed + len(event.relaxed)
    assert relaxed > 0 or (name == "ears" and sampling.greedy), "it is speculative sampling then"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("margin", "p 0.33, at least 0.5 of the best's 0.49"),
        ("topk:top=2", "among the 2 best, p 0.33 within 0.6 of 0.49"),
        ("typical", r"p 0\.330 > 0\.0\d\d"),
        ("fly:window=1,theta=0.3", r"entropy 0\.8\d >= 0.3, 1 matches follow"),
        ("threshold", "p 0.33 >= 0.3"),
        ("ensemble:weight=0.5", "p 0.33 and the draft's 1.00 make 0.66"),
        ("cascade-rule", "the draft is sure to 1.00, the target to 0.49"),
        ("cascade-rule:defer=token,alpha=0.5", "p 0.33, at least 0.5 of the best's 0.49"),
        ("adaptive:start=1", r"distance 0\.\d\d <= 1.00"),
        ("regret", "regret 0.40; 0.40 of 2 spent"),
        ("mars:ratio=0.8", "second best, logit 2.00, at least 0.8 of 2.40"),
        ("csd:count=0", "met 0 times, p 0.330 at least 0.01 of 0.492"),
        ("accept-all", "every draft token is accepted"),
        ("random:rate=1", r"random number 0\.\d\d < 1"),
    ],
)
def test_the_numbers_are_those_of_the_rows(spec: str, reason: str):
    one = One([UNDECIDED, hot(3), hot(4)], [1, 3], None)
    rule = make(spec)
    (verdict,) = verdicts(rule.verify(build(one)))
    assert verdict.relaxed == (0,) and verdict.target_tokens == (2,)
    found = rule.reason(verdict.evidence[0] if verdict.evidence else ())
    assert re.fullmatch(reason if "\\" in reason else re.escape(reason), found), found


def test_evidence_crosses_in_the_one_copy_bit_for_bit():
    numbers = torch.tensor([[[0.1, -3e38], [float("inf"), 1e-40], [7.0, 0.0]]] * 2)
    marks = torch.tensor([[True, False, True], [False, True, True]])
    decisions = Decisions(torch.tensor([3, 2]), torch.tensor([5, 6]), marks, evidence=numbers)
    first, second = verdicts(decisions)
    assert first.relaxed == (0, 2) and second.relaxed == (1,), "what is not accepted is not relaxed"
    assert first.evidence == (tuple(numbers[0, 0].tolist()), tuple(numbers[0, 2].tolist()))
    assert second.evidence == (tuple(numbers[1, 1].tolist()),) and first.target_tokens == ()


def test_a_rule_of_ones_own_needs_no_reasons():
    decisions = verify.make("exact").verify(build(One([hot(1), hot(2)], [1])))
    decisions.relaxed = torch.tensor([[True]])
    (verdict,) = verdicts(decisions)
    assert verdict.relaxed == (0,) and verdict.evidence == () and verify.make("exact").reason(()) == ""
