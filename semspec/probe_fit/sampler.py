"""Sample what models write next: after each prefix, steps from both models, with states and evidence of each model.

Small generators ask for passes, as the decoding loop does, and the Executor batches them over prefixes: one that writes
all samples after a prefix, each truncated away when it is done, and then one that has both models score them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from semspec.draft import ModelDrafter, TranslatingDrafter
from semspec.errors import BadRequest
from semspec.loop.executor import Executor
from semspec.loop.passes import ROUNDS
from semspec.model.prefix_index import common_prefix
from semspec.pair import Pair
from semspec.probe.evidence import number_tokens
from semspec.probe.features import resolve_layers
from semspec.probe_fit.config import Config
from semspec.probe_fit.data import EVIDENCE, MODELS, TOKENS, Prefix, Sample
from semspec.probe_fit.observe import MEAN, Observe
from semspec.sampling.noise import DRAFT, TARGET
from semspec.text.reader import Reader
from semspec.text.steps import StepDelimiters, StepEnd, StepTracker
from semspec.types import (
    Acquire,
    Decode,
    DecodeOutput,
    Draft,
    DraftRequest,
    Request,
    Runner,
    Sampling,
    Score,
    ScoreOutput,
    SequenceGenerator,
    Verdict,
    VerifyRequest,
)
from semspec.verify.step_rule import StepRule

STREAM = {"target": TARGET, "draft": DRAFT}
BUDGET = 2048  # tokens of a pass: there is no latency to keep low here
LOGITS = 1 << 27  # of a pass: looking at them takes several times their memory
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """A step that a model wrote, not observed yet."""

    model: str
    number: int
    tokens: Tokens
    end: StepEnd


@dataclass(slots=True)
class Seen:
    """What models compute of a step: numbers of each model, on its device, and states of tokens, if they are stored."""

    numbers: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, Tensor] = field(default_factory=dict)


class View(NamedTuple):
    """A prefix and a step after it, in one model's own tokens."""

    tokens: list[int]
    length: int  # of the step
    firm: int  # of the prefix; these are the same for every step

    @property
    def step(self) -> Draft:
        return Draft(self.tokens[-self.length :])


class Sampler:
    """Samples steps after prefixes and observes them with both models."""

    def __init__(self, pair: Pair, config: Config, steps: StepDelimiters) -> None:
        if pair.draft is None:
            raise BadRequest("probes are fitted for a pair; give a draft model as well")
        if pair.exchange is not None and config.token_states:
            raise BadRequest(
                "states of single tokens cannot be kept of models with different tokenizers; leave --token-states out"
            )
        self.config, self.steps, self.tokenizer, self.exchange = config, steps, pair.tokenizer, pair.exchange
        self.runners: dict[str, Runner] = {"target": pair.target, "draft": pair.draft}
        layers = {"target": config.target_layers, "draft": config.draft_layers}
        self.sampling = Sampling(config.temperature, top_p=config.top_p)
        self.policy = None if config.rule is None else policy(config.rule, pair)
        drawn = self.policy is None or self.policy["samples_drafts"]
        self.drafting = self.sampling if drawn else Sampling(0.0)  # how the draft came by its tokens
        self.layers = {m: resolve_layers(layers[m], runner.num_layers) for m, runner in self.runners.items()}
        tokenizers = [pair.tokenizer, pair.exchange.draft.tokenizer if pair.exchange else pair.tokenizer]
        self.observers = {
            m: Observe(
                m, self.layers[m], number_tokens(tokenizer, runner.vocab_size).to(runner.device), config.poolings
            )
            for (m, runner), tokenizer in zip(self.runners.items(), tokenizers, strict=True)
        }

    def run(self, prefixes: Sequence[tuple[int, Prefix]]) -> tuple[list[Sample], dict[str, Tensor]]:
        """All samples of numbered prefixes, with their states in the same order.

        Everything is written before anything is observed: while nothing is scored, all write in fused decodes, and the
        observations of all prefixes fall into the same passes. Steps of the same tokens are observed once."""
        written: list[list[Written]] = [self.given(prefix) for _, prefix in prefixes]
        seen: list[dict[Tokens, Seen]] = [{} for _ in prefixes]
        if self.config.samples:
            numbered = zip(prefixes, written, strict=True)
            self.answer([self.write(number, prefix, out) for (number, prefix), out in numbered])
        for steps, found in zip(written, seen, strict=True):
            found |= {step.tokens: Seen() for step in steps}
        self.answer([self.observe(prefix, found) for (_, prefix), found in zip(prefixes, seen, strict=True)])
        views = [view for found in seen for view in found.values()]
        rows = [(p, step, seen[n][step.tokens]) for n, (_, p) in enumerate(prefixes) for step in written[n]]
        numbers = {m: torch.stack([view.numbers[m] for view in views]).cpu() for m in MODELS}
        at = {id(view): i for i, view in enumerate(views)}
        indices = torch.tensor([at[id(view)] for _, _, view in rows])
        named = {k: v[indices] for m in MODELS for k, v in self.observers[m].named(numbers[m]).items()}
        named |= {k: torch.cat([view.tokens[k] for _, _, view in rows]) for k in views[0].tokens}
        means = {m: named[f"{m}.{EVIDENCE}"][:, MEAN].tolist() for m in MODELS}
        whole = [[*p.step_prefix, *tokens] for (_, p), found in zip(prefixes, seen, strict=True) for tokens in found]
        texts = self.tokenizer.batch_decode(whole, skip_special_tokens=True)
        samples = [
            Sample(
                p.id, p.problem, p.step, step.model, step.number, list(step.tokens), texts[at[id(view)]], step.end,
                {m: means[m][row] for m in MODELS},
            )
            for row, (p, step, view) in enumerate(rows)
        ]  # fmt: skip
        return samples, named

    def answer(self, decodings: Sequence[SequenceGenerator]) -> None:
        """Run sequences to their ends, as one batch; the first failure is everybody's."""
        vocab = max(runner.vocab_size for runner in self.runners.values())
        Executor(budget=max(1, min(BUDGET, LOGITS // (ROUNDS * vocab)))).run_all(decodings)

    def given(self, prefix: Prefix) -> list[Written]:
        """The draft's step, where a rule verified one."""
        if not prefix.drafted:
            return []
        step = self.step_after(prefix)
        step.feed(prefix.drafted)
        return [Written("draft", 0, prefix.drafted, step.end or "length")]

    def step_after(self, prefix: Prefix) -> StepTracker:
        step = StepTracker(self.steps)
        step.feed(prefix.step_prefix)
        return step

    def write(self, number: int, prefix: Prefix, out: list[Written]) -> SequenceGenerator:
        """All steps after one prefix, by one model after the other."""
        slots = dict(zip(MODELS, (yield Acquire([self.runners[m] for m in MODELS])), strict=True))
        try:
            for model in MODELS[:1] if prefix.drafted else MODELS:
                drafter = self._drafter(prefix, slots[model]) if model == "draft" else None
                for i in range(self.config.samples):
                    if drafter is None:
                        tokens, end = yield from self.write_one(number, i, prefix, model, slots)
                    else:
                        tokens, end = yield from self.write_translated(number, i, prefix, drafter)
                    out.append(Written(model, i, tuple(tokens), end))
        finally:
            self._release(slots)

    def write_one(
        self, number: int, i: int, prefix: Prefix, model: str, slots: dict[str, int]
    ) -> Generator[Request, Any, tuple[list[int], StepEnd]]:
        """One step by one model."""
        runner, slot = self.runners[model], slots[model]
        sampling = replace(self.sampling, seed=self._seed(number, i))
        step, tokens = self.step_after(prefix), list[int]()
        while step.end is None:
            pending = (prefix.tokens + tokens)[runner.length(slot) :]
            out: DecodeOutput = yield Decode(
                runner, slot, pending, step.tokens_left, sampling, STREAM[model], self.steps.stops
            )
            step.feed(out.tokens)
            tokens += out.tokens
        self._rewind(prefix, slots)
        return tokens, step.end

    def _drafter(self, prefix: Prefix, slot: int) -> TranslatingDrafter | None:
        """For a draft model with other tokens."""
        if self.exchange is None:
            return None
        inner = ModelDrafter(self.runners["draft"])
        drafter = TranslatingDrafter(inner, self.exchange, prefix.draft_prompt or [], prefix.prompt)
        drafter.begin([slot])
        return drafter

    def write_translated(
        self, number: int, i: int, prefix: Prefix, drafter: TranslatingDrafter
    ) -> Generator[Request, Any, tuple[list[int], StepEnd]]:
        """One step by a draft model with other tokens."""
        sampling = replace(self.sampling, seed=self._seed(number, i))
        step, tokens = self.step_after(prefix), list[int]()
        while step.end is None:
            wanted = DraftRequest(step.tokens_left, sampling, STREAM["draft"], stop=self.steps.stops)
            part: Draft = yield from drafter.propose(prefix.tokens + tokens, wanted)
            tokens += part.tokens[: step.feed(part.tokens)]
            if not part.tokens:  # what it writes cannot be spelled
                break
        drafter.accept(len(prefix.tokens))
        return tokens, step.end or "length"

    def view(self, model: str, prefix: Prefix, tokens: Tokens) -> View:
        if model == "target" or self.exchange is None:
            return View([*prefix.tokens, *tokens], len(tokens), len(prefix.tokens))
        reader = Reader(self.exchange, prefix.draft_prompt or [], prefix.prompt)
        reader.extend(prefix.tokens[prefix.prompt :])
        before, firm = list(reader.ids), reader.firm
        reader.extend(tokens)
        return View(reader.ids, max(1, len(reader.ids) - common_prefix(before, reader.ids)), max(1, firm))

    def observe(self, prefix: Prefix, found: dict[Tokens, Seen]) -> SequenceGenerator:
        """Observe each of a prefix's steps with both models."""
        slots = dict(zip(MODELS, (yield Acquire([self.runners[m] for m in MODELS])), strict=True))
        try:
            for tokens, seen in found.items():
                views = {m: self.view(m, prefix, tokens) for m in MODELS}
                rows: tuple[ScoreOutput, ...] = yield tuple(
                    Score(
                        runner, slots[m], views[m].tokens[runner.length(slots[m]) : -1], views[m].length, self.layers[m]
                    )
                    for m, runner in self.runners.items()
                )
                for m, runner in self.runners.items():
                    runner.truncate(slots[m], min(runner.length(slots[m]), views[m].firm - 1))
                for m, own in zip(MODELS, rows, strict=True):
                    if self.config.token_states:
                        seen.tokens |= {f"{m}.{layer}.{TOKENS}": own.hidden[layer].cpu() for layer in self.layers[m]}
                verdicts: tuple[Verdict, ...] = yield tuple(
                    VerifyRequest(self.observers[m], views[m].step, own, self.drafting, len(prefix.tokens), 0)
                    for m, own in zip(MODELS, rows, strict=True)
                )
                for m, verdict in zip(MODELS, verdicts, strict=True):
                    assert verdict.state is not None
                    seen.numbers[m] = verdict.state
        finally:
            self._release(slots)

    def _release(self, slots: dict[str, int]) -> None:
        for model, slot in slots.items():
            self.runners[model].release(slot)

    def _rewind(self, prefix: Prefix, slots: dict[str, int]) -> None:
        """Both models have read the prefix but its last token, or less."""
        for m, runner in self.runners.items():
            runner.truncate(slots[m], min(runner.length(slots[m]), len(prefix.tokens) - 1))

    def _seed(self, number: int, i: int) -> int:
        """Another for every sample of every prefix, so that nothing depends on what is sampled beside it."""
        return (self.config.seed * 1_000_003 + number) * 1_000_003 + i


def policy(rule: StepRule, pair: Pair) -> dict[str, Any]:
    """Of a rule as this pair has it."""
    bound = rule.bind(pair.resources)
    assert isinstance(bound, StepRule)
    return bound.policy
