"""Sample what models say next: after each prefix, steps from both models, with how each model sees every one of them.

Small generators ask for passes, as the decoding loop does, and the Executor batches them over prefixes: one that writes
all samples behind a prefix, each truncated away when it is done, and then one that has both models look at them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semspec import tasks
from semspec.errors import BadRequest
from semspec.execute import Executor
from semspec.fit.data import EVIDENCE, MODELS, TOKENS, Folder, Prefix, Sample, Trace
from semspec.fit.look import MEAN, Look
from semspec.fit.traces import cut, read_traces, write_traces
from semspec.noise import DRAFT, TARGET
from semspec.options import Options
from semspec.pair import Pair
from semspec.probe.evidence import number_tokens
from semspec.probe.features import resolve_layers
from semspec.probe.identity import fingerprint
from semspec.stats import Stats
from semspec.steps import MAX_STEP_TOKENS, Step, StepEnd, Steps
from semspec.types import Acquire, Decoding, Draft, Judge, Request, Roll, Rolled, Rows, Runner, Sampling, Score, Verdict
from semspec.verify import REGISTRY, make
from semspec.verify.step import StepRule

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]  # prefixes done, prefixes in all
STREAM = {"target": TARGET, "draft": DRAFT}
BUDGET = 2048  # tokens of a pass: nobody waits for a first word here
LOGITS = 1 << 27  # of a pass: looking at them takes several times their memory


@dataclass(frozen=True)
class Config:
    """What to collect; a folder goes on only with the config it was begun with."""

    task: str = "pocket"
    n: int | None = 64  # problems
    data: str | None = None
    traces: str = "target"  # who writes the answers that prefixes are cut from: target, draft, both, a rule, or a file
    max_new_tokens: int | None = None  # of an answer; None: as many as the task has
    per_problem: int | None = 8  # prefixes of a problem; None: all
    first_steps: bool = True  # also after the prompt alone, see traces.cut
    samples: int = 20  # from each model, after each prefix; from the target alone where a rule met the draft's step
    temperature: float = 0.6
    top_p: float = 0.95
    max_step_tokens: int = MAX_STEP_TOKENS
    target_layers: tuple[int, ...] = (-1,)
    draft_layers: tuple[int, ...] = (-1,)
    token_states: bool = False  # keep the states of every token, which pooling by attention learns from
    seed: int = 0
    shard: int = 32  # prefixes collected between two writings to the disk

    def __post_init__(self) -> None:
        for name in ("samples", "shard", "per_problem", "max_new_tokens"):
            value, least = getattr(self, name), 0 if name == "samples" and self.rule else 1
            if value is not None and value < least:
                raise BadRequest(f"{name} is {value}; give {least} or more")
        Sampling(self.temperature, top_p=self.top_p)
        if self.rule and self.rule.max_step_tokens != self.max_step_tokens:
            raise BadRequest(
                f"{self.rule.name}'s steps have up to {self.rule.max_step_tokens} tokens, those of the collection "
                f"{self.max_step_tokens}; give the rule max_step_tokens={self.max_step_tokens} as well"
            )

    @property
    def by(self) -> tuple[str, ...]:
        """Who writes traces; nobody, if they are in a file."""
        return MODELS if self.traces == "both" else (self.traces,) if self.traces in MODELS or self.rule else ()

    @property
    def rule(self) -> StepRule | None:
        """By which traces are written, so that what is collected is what it meets."""
        if self.traces.partition(":")[0] not in REGISTRY:
            return None
        rule = make(self.traces)
        if not isinstance(rule, StepRule):
            raise BadRequest(f"traces is {rule.name}, which judges tokens; give a rule that judges steps, as semantic+")
        return rule


Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """A step that a model wrote, and nobody has looked at yet."""

    model: str
    number: int
    tokens: Tokens
    end: StepEnd


@dataclass(slots=True)
class Seen:
    """What models make of a step: numbers of each model, on its device, and the states of tokens, if they are kept."""

    numbers: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, Tensor] = field(default_factory=dict)


class Sampler:
    """Samples steps after prefixes and looks at them with both models."""

    def __init__(self, pair: Pair, config: Config, steps: Steps) -> None:
        if pair.draft is None:
            raise BadRequest("probes are fitted for a pair; give a draft model as well")
        self.config, self.steps, self.tokenizer = config, steps, pair.tokenizer
        self.runners: dict[str, Runner] = {"target": pair.target, "draft": pair.draft}
        wanted = {"target": config.target_layers, "draft": config.draft_layers}
        self.sampling = Sampling(config.temperature, top_p=config.top_p)
        self.met = None if config.rule is None else policy(config.rule, pair)
        drawn = self.met is None or self.met["drawn"]
        self.drafting = self.sampling if drawn else Sampling(0.0)  # how the draft came by its tokens
        self.layers = {m: resolve_layers(wanted[m], runner.depth) for m, runner in self.runners.items()}
        numbers = number_tokens(pair.tokenizer, pair.target.vocab)
        self.looks = {m: Look(m, self.layers[m], numbers.to(runner.device)) for m, runner in self.runners.items()}

    def run(self, prefixes: Sequence[tuple[int, Prefix]]) -> tuple[list[Sample], dict[str, Tensor]]:
        """All samples of numbered prefixes, with their states in the same order.

        Everything is written before anything is looked at: while nobody scores, all write in fused rolls, and the
        looks of all prefixes fall into the same passes. Steps of the same tokens are looked at once."""
        written: list[list[Written]] = [self.given(prefix) for _, prefix in prefixes]
        seen: list[dict[Tokens, Seen]] = [{} for _ in prefixes]
        if self.config.samples:
            numbered = zip(prefixes, written, strict=True)
            self.answer([self.write(number, prefix, out) for (number, prefix), out in numbered])
        for steps, found in zip(written, seen, strict=True):
            found |= {step.tokens: Seen() for step in steps}
        self.answer([self.look(prefix, found) for (_, prefix), found in zip(prefixes, seen, strict=True)])
        looks = [look for found in seen for look in found.values()]
        rows = [(p, step, seen[n][step.tokens]) for n, (_, p) in enumerate(prefixes) for step in written[n]]
        numbers = {m: torch.stack([look.numbers[m] for look in looks]).cpu() for m in MODELS}
        at = {id(look): place for place, look in enumerate(looks)}
        places = torch.tensor([at[id(look)] for _, _, look in rows])
        named = {k: v[places] for m in MODELS for k, v in self.looks[m].named(numbers[m]).items()}
        named |= {k: torch.cat([look.tokens[k] for _, _, look in rows]) for k in looks[0].tokens}
        means = {m: named[f"{m}.{EVIDENCE}"][:, MEAN].tolist() for m in MODELS}
        whole = [[*p.begun, *tokens] for (_, p), found in zip(prefixes, seen, strict=True) for tokens in found]
        texts = self.tokenizer.batch_decode(whole, skip_special_tokens=True)
        samples = [
            Sample(
                p.id, p.problem, p.step, step.model, step.number, list(step.tokens), texts[at[id(look)]], step.end,
                {m: means[m][row] for m in MODELS},
            )
            for row, (p, step, look) in enumerate(rows)
        ]  # fmt: skip
        return samples, named

    def answer(self, decodings: Sequence[Decoding]) -> None:
        """Run sequences to their ends, as one batch; the first failure is everybody's."""
        vocab = max(runner.vocab for runner in self.runners.values())
        executor = Executor(budget=max(1, min(BUDGET, LOGITS // vocab)))
        work = [executor.submit(decoding, Stats()) for decoding in decodings]
        try:
            executor.run()
        finally:
            for task in work:
                executor.cancel(task)
        for task in work:
            if task.error is not None:
                raise task.error

    def given(self, prefix: Prefix) -> list[Written]:
        """The draft's step, where a rule was asked about one."""
        if not prefix.drafted:
            return []
        step = self.step_after(prefix)
        step.feed(prefix.drafted)
        return [Written("draft", 0, prefix.drafted, step.end or "length")]

    def step_after(self, prefix: Prefix) -> Step:
        step = Step(self.steps)
        step.feed(prefix.begun)
        return step

    def write(self, number: int, prefix: Prefix, out: list[Written]) -> Decoding:
        """All steps after one prefix, by one model after the other."""
        slots = dict(zip(MODELS, (yield Acquire([self.runners[m] for m in MODELS])), strict=True))
        try:
            for model in MODELS[:1] if prefix.drafted else MODELS:
                for i in range(self.config.samples):
                    tokens, end = yield from self.write_one(number, i, prefix, model, slots)
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
            rolled: Rolled = yield Roll(runner, slot, pending, step.room, sampling, STREAM[model], self.steps.stops)
            step.feed(rolled.tokens)
            tokens += rolled.tokens
        self._rewind(prefix, slots)
        return tokens, step.end

    def look(self, prefix: Prefix, found: dict[Tokens, Seen]) -> Decoding:
        """What both models make of each of a prefix's steps."""
        slots = dict(zip(MODELS, (yield Acquire([self.runners[m] for m in MODELS])), strict=True))
        try:
            for tokens, seen in found.items():
                fed = [*prefix.tokens, *tokens[:-1]]
                rows: tuple[Rows, ...] = yield tuple(
                    Score(runner, slots[m], fed[runner.length(slots[m]) :], keep=len(tokens), layers=self.layers[m])
                    for m, runner in self.runners.items()
                )
                self._rewind(prefix, slots)
                for m, own in zip(MODELS, rows, strict=True):
                    if self.config.token_states:
                        seen.tokens |= {f"{m}.{layer}.{TOKENS}": own.hidden[layer].cpu() for layer in self.layers[m]}
                verdicts: tuple[Verdict, ...] = yield tuple(
                    Judge(self.looks[m], Draft(list(tokens)), own, self.drafting, len(prefix.tokens), 0)
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


def collect(config: Config, out: Path, pair: Pair, progress: Progress = lambda done, total: None) -> Folder:
    """Traces, prefixes, samples; what the folder already has is not made again."""
    if not config.by and not Path(config.traces).is_file():
        raise BadRequest(
            f"traces is {config.traces!r}; give target, draft, both, a rule of steps such as semantic+, or a .jsonl "
            "file of answers"
        )
    if not config.by and Path(config.traces).resolve() == Folder(out).traces.resolve():
        raise BadRequest(f"{config.traces} is where this collection keeps its own traces; give another --out")
    steps = Steps.of(pair.tokenizer, pair.eos, config.max_step_tokens)
    sampler = Sampler(pair, config, steps)
    folder = Folder(out)
    models = {m: fingerprint(runner) for m, runner in sampler.runners.items()}
    layers = {m: list(sampler.layers[m]) for m in MODELS}
    depth = {m: runner.depth for m, runner in sampler.runners.items()}
    met = {} if sampler.met is None else {"met": sampler.met}
    folder.open({"config": _plain(config), "models": models, "depth": depth, "layers": layers} | met)
    traces = _traces(config, pair, folder, progress)
    room = config.max_step_tokens if config.samples else 0  # for what is sampled; a draft that was met has fitted
    longest = min(runner.capacity for runner in sampler.runners.values()) - room
    if longest < 2:
        raise BadRequest(
            f"steps of {config.max_step_tokens} tokens leave no room for a prefix; load the models with a larger "
            "context, or give a smaller max_step_tokens"
        )
    found = cut(traces, steps, pair.tokenizer, config.per_problem, config.seed, longest, config.first_steps)
    prefixes = list(enumerate(found))
    folder.write_histories(prefix for _, prefix in prefixes)
    log.info("%d prefixes from %d traces", len(prefixes), len(traces))
    for shard, begin in enumerate(range(0, len(prefixes), config.shard)):
        progress(begin, len(prefixes))
        if not folder.has_shard(shard):
            folder.write_shard(shard, *sampler.run(prefixes[begin : begin + config.shard]))
    progress(len(prefixes), len(prefixes))
    return folder


def policy(rule: StepRule, pair: Pair) -> dict[str, Any]:
    """Of a rule as this pair has it."""
    bound = rule.bound(pair)
    assert isinstance(bound, StepRule)
    return bound.policy


def _traces(config: Config, pair: Pair, folder: Folder, progress: Progress) -> list[Trace]:
    traces = folder.read_traces()
    if not config.by:
        if not traces:
            traces = read_traces(Path(config.traces), pair.tokenizer)
            folder.write_traces(traces)
        return traces
    task = tasks.make(config.task, Path(config.data) if config.data else None).for_fitting()
    jobs = list(enumerate(task.problems(config.n, config.seed)))
    how = Options(
        temperature=config.temperature, top_p=config.top_p, stop=task.stop,
        max_new_tokens=config.max_new_tokens or task.max_new_tokens,
    )  # fmt: skip
    while len(traces) < len(jobs):
        progress(len(traces), len(jobs))
        group = jobs[len(traces) :][: config.shard]
        written: dict[int, Trace] = {}
        for i, by in enumerate(config.by):  # where both write, every other problem is one's
            own = [(n, problem) for n, problem in group if n % len(config.by) == i]
            seeds = [config.seed * 1_000_003 + n for n, _ in own]
            made = write_traces(pair, by, task, [p for _, p in own], how, seeds)
            written |= dict(zip([n for n, _ in own], made, strict=True))
        traces += [written[n] for n, _ in group]
        folder.write_traces(traces)
    return traces


def _plain(config: Config) -> dict[str, Any]:
    """As JSON has it."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(config).items()}
