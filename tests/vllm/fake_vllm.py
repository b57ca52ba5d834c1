"""vLLM's loop in plain Python: one step for all requests, K greedy drafts each, and a sampler that only sees logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

from semspec.loop.repetition import RepetitionGuard
from semspec.pair.resources import Resources
from semspec.types import Sampling
from semspec.verify import Rule
from semspec.vllm.request import Choice
from semspec.vllm.rounds import EngineStep, Rounds
from tests.checkpoints import make_tokenizer
from tests.fakes import Logits, greedy


def resources(vocab: int, protected: set[int], thinking: tuple[int, int] | None = None) -> Resources:
    found = Resources(
        make_tokenizer(), SimpleNamespace(vocab_size=vocab, device=torch.device("cpu")), None, frozenset(), None
    )
    found.__dict__ |= {"protected": torch.tensor([v in protected for v in range(vocab)]), "thinking": thinking}
    return found


@dataclass
class Request:
    prompt: list[int]
    choice: Choice | None
    sampling: Sampling = field(default_factory=Sampling)
    length: int = 40
    tokens: list[int] = field(default_factory=list)
    accepted: int = 0


class FakeVllm:
    def __init__(self, target: Logits, draft: Logits, vocab: int, k: int, resources: Resources, gap: int = 0) -> None:
        """`gap`: tokens after each step that the target writes alone, without asking anybody, as V1 does."""
        self.gap = gap
        self.target, self.draft, self.vocab_size, self.k = target, draft, vocab, k
        self.texts: dict[int, Tensor] = {}  # by slot; staged ones are written when all requests of a step have entered
        self.staged: dict[int, Tensor] = {}
        self.rounds = Rounds(resources, 16, k, reports=False, text_in=lambda slot: self.texts[slot])
        self.untouched = True  # rows of strict requests have stayed as they were

    def run(self, requests: list[Request]) -> None:
        slots = {id(r): 3 * i % 16 for i, r in enumerate(requests)}
        for r in requests:
            self.begin(r, slots[id(r)])
        live = list(requests)
        while live:
            self.step(live, [slots[id(r)] for r in live])
            live = [r for r in live if len(r.tokens) < len(r.prompt) + r.length]

    def begin(self, r: Request, slot: int, resumed: bool = False) -> None:
        r.tokens = r.tokens if resumed else [*r.prompt, *greedy(self.target, r.prompt, 1)]
        self.staged[slot] = torch.tensor(r.tokens + [-1] * 500)
        self.rounds.begin(slot, r.choice, lambda _: r.sampling, len(r.prompt), len(r.tokens) if resumed else 0)

    def step(self, live: list[Request], slots: list[int]) -> None:
        drafts = [greedy(self.draft, r.tokens, self.k - i % 2) for i, r in enumerate(live)]  # lengths differ
        rows, first = list[list[float]](), list[int]()
        for r, draft in zip(live, drafts, strict=True):
            first.append(len(rows))
            rows += [self.target(r.tokens + draft[:i]) for i in range(len(draft) + 1)]
        logits, longest = torch.tensor(rows), max(len(r.tokens) for r in live)
        before = logits.clone()
        history = torch.tensor([r.tokens + [0] * (longest - len(r.tokens)) for r in live])
        padded = [draft + [0] * (self.k - len(draft)) for draft in drafts]
        self.texts |= self.staged
        self.staged = {}
        self.rounds.decide(
            EngineStep(
                slots,
                logits,
                torch.tensor(first),
                torch.tensor([len(d) for d in drafts]),
                torch.tensor(padded),
                torch.tensor([len(r.tokens) for r in live]),
                lambda at, index: history[at[:, None], index],
                gaps=self.gap > 0,
                lengths=[len(r.tokens) + self.k + 1 for r in live],
            )
        )
        for r, draft, start in zip(live, drafts, first, strict=True):
            own = slice(start, start + len(draft) + 1)
            self.untouched &= r.choice is not None or torch.equal(logits[own], before[own])
            r.accepted += self.sample(r, draft, logits[own])
            r.tokens += greedy(self.target, r.tokens, self.gap) if self.gap else []
        for r, slot in zip(live, slots, strict=True):
            self.texts[slot][: len(r.tokens)] = torch.tensor(r.tokens)

    def sample(self, request: Request, draft: list[int], rows: Tensor) -> int:
        """vLLM's sampler: a draft token is accepted with the probability it has; only certainties in these tests."""
        probs = (rows / (request.sampling.temperature or 1e-4)).softmax(-1)
        for i, token in enumerate([*draft, None]):
            best = int(probs[i].argmax())
            assert float(probs[i, best]) > 0.999 or request.choice is None, "the rule left something to chance"
            request.tokens.append(best)
            if best != token:
                return i
        raise AssertionError


def choice_of(rule: Rule, thinking_only: bool = False, repeats: int = 0, period: int = 16) -> Choice:
    return Choice(rule, thinking_only, RepetitionGuard(repeats, period))
