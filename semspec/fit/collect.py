"""Sample what models say next: after each prefix, steps from both models, with how each model sees every one of them.

One small generator a prefix asks for passes, as the decoding loop does, and the Executor batches them over prefixes.
Both models read a prefix once; a sample is written behind it, looked at by both in one scoring pass each, and
truncated away.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semspec import tasks
from semspec.errors import BadRequest
from semspec.execute import Executor
from semspec.fit.data import CONFIDENCE, EVIDENCE, MODELS, TOKENS, Folder, Prefix, Sample, Trace
from semspec.fit.traces import cut, read_traces, write_traces
from semspec.noise import DRAFT, TARGET
from semspec.pair import Pair
from semspec.probe.evidence import NAMES, at_one, confidence, evidence, number_tokens
from semspec.probe.features import FIXED, pool, resolve_layers
from semspec.probe.identity import fingerprint
from semspec.sampling import SamplingRows, process
from semspec.stats import Stats
from semspec.steps import MAX_STEP_TOKENS, Step, StepEnd, Steps
from semspec.types import Acquire, Decoding, Request, Roll, Rolled, Rows, Runner, Sampling, Score

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]  # prefixes done, prefixes in all
STREAM = {"target": TARGET, "draft": DRAFT}
BUDGET = 2048  # tokens of a pass: nobody waits for a first word here


@dataclass(frozen=True)
class Config:
    """What to collect; a folder goes on only with the config it was begun with."""

    task: str = "pocket"
    n: int | None = 64  # problems
    data: str | None = None
    traces: str = "target"  # who writes the answers that prefixes are cut from: target, draft, both, or a file
    per_problem: int | None = 8  # prefixes of a problem; None: all
    samples: int = 20  # from each model, after each prefix
    temperature: float = 0.6
    top_p: float = 0.95
    max_step_tokens: int = MAX_STEP_TOKENS
    target_layers: tuple[int, ...] = (-1,)
    draft_layers: tuple[int, ...] = (-1,)
    token_states: bool = False  # keep the states of every token, which pooling by attention learns from
    seed: int = 0
    shard: int = 32  # prefixes collected between two writings to the disk

    def __post_init__(self) -> None:
        for name in ("samples", "shard", "per_problem"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadRequest(f"{name} is {value}; give 1 or more")
        Sampling(self.temperature, top_p=self.top_p)

    @property
    def by(self) -> tuple[str, ...]:
        """Who writes traces; nobody, if they are in a file."""
        return MODELS if self.traces == "both" else (self.traces,) if self.traces in MODELS else ()


class Sampler:
    """Samples steps after prefixes and looks at them with both models."""

    def __init__(self, pair: Pair, config: Config, steps: Steps) -> None:
        if pair.draft is None:
            raise BadRequest("probes are fitted for a pair; give a draft model as well")
        self.config, self.steps, self.tokenizer = config, steps, pair.tokenizer
        self.runners: dict[str, Runner] = {"target": pair.target, "draft": pair.draft}
        wanted = {"target": config.target_layers, "draft": config.draft_layers}
        numbers = number_tokens(pair.tokenizer, pair.target.vocab)
        self.numbers = {m: numbers.to(runner.device) for m, runner in self.runners.items()}
        self.layers = {m: resolve_layers(wanted[m], runner.depth) for m, runner in self.runners.items()}

    def run(self, prefixes: Sequence[tuple[int, Prefix]]) -> tuple[list[Sample], dict[str, Tensor]]:
        """All samples of numbered prefixes, with their states in the same order."""
        executor = Executor(budget=BUDGET)
        found: list[list[tuple[Sample, dict[str, Tensor]]]] = [[] for _ in prefixes]
        work = [
            executor.submit(self.decode(number, prefix, out), Stats())
            for (number, prefix), out in zip(prefixes, found, strict=True)
        ]
        try:
            executor.run()
        finally:
            for task in work:
                executor.cancel(task)
        for task in work:
            if task.error is not None:
                raise task.error
        rows = [row for out in found for row in out]
        names = rows[0][1]
        return [sample for sample, _ in rows], {name: torch.cat([states[name] for _, states in rows]) for name in names}

    def decode(self, number: int, prefix: Prefix, out: list[tuple[Sample, dict[str, Tensor]]]) -> Decoding:
        slots = dict(zip(MODELS, (yield Acquire([self.runners[m] for m in MODELS])), strict=True))
        try:
            for model in MODELS:
                for i in range(self.config.samples):
                    tokens, end = yield from self.write(number, i, prefix, model, slots)
                    logprob, states = yield from self.look(prefix, tokens, slots)
                    text = self.tokenizer.decode(tokens, skip_special_tokens=True)
                    assert isinstance(text, str)
                    sample = Sample(prefix.id, prefix.problem, prefix.step, model, i, tokens, text, end, logprob)
                    out.append((sample, states))
        finally:
            for model, slot in slots.items():
                self.runners[model].release(slot)

    def write(
        self, number: int, i: int, prefix: Prefix, model: str, slots: dict[str, int]
    ) -> Generator[Request, Any, tuple[list[int], StepEnd]]:
        """One step by one model."""
        runner, slot = self.runners[model], slots[model]
        sampling = Sampling(self.config.temperature, top_p=self.config.top_p, seed=self._seed(number, i))
        step, tokens = Step(self.steps), list[int]()
        while step.end is None:
            pending = (prefix.tokens + tokens)[runner.length(slot) :]
            rolled: Rolled = yield Roll(runner, slot, pending, step.room, sampling, STREAM[model], self.steps.stops)
            step.feed(rolled.tokens)
            tokens += rolled.tokens
        self._rewind(prefix, slots)
        return tokens, step.end

    def look(
        self, prefix: Prefix, tokens: list[int], slots: dict[str, int]
    ) -> Generator[tuple[Request, ...], Any, tuple[dict[str, float], dict[str, Tensor]]]:
        """What both models make of a step: the mean log-probability of its tokens, its states, pooled, and evidence."""
        fed = prefix.tokens + tokens[:-1]
        seen: tuple[Rows, ...] = yield tuple(
            Score(runner, slots[m], fed[runner.length(slots[m]) :], keep=len(tokens), layers=self.layers[m])
            for m, runner in self.runners.items()
        )
        self._rewind(prefix, slots)
        logprob: dict[str, float] = {}
        states: dict[str, Tensor] = {}
        for m, rows in zip(MODELS, seen, strict=True):
            device = rows.logits.device
            first, count = torch.zeros(1, dtype=torch.long, device=device), torch.tensor([len(tokens)], device=device)
            for layer in self.layers[m]:
                for pooling in FIXED:
                    states[f"{m}.{layer}.{pooling}"] = pool(rows.hidden[layer], first, count, pooling).cpu()
                if self.config.token_states:
                    states[f"{m}.{layer}.{TOKENS}"] = rows.hidden[layer].cpu()
            ids, steps = torch.tensor([tokens], device=device), torch.arange(len(tokens), device=device)[None]
            exist = torch.ones_like(ids, dtype=torch.bool)
            seen_by = evidence(rows.logits, steps, ids, exist, self.numbers[m])
            states[f"{m}.{EVIDENCE}"] = seen_by.cpu()
            if m == "draft":
                states[f"{m}.{CONFIDENCE}"] = confidence(self.drawn_from(rows.logits, ids), steps, ids, exist).cpu()
            logprob[m] = float(seen_by[0, NAMES.index("mean")])
        return logprob, states

    def drawn_from(self, logits: Tensor, ids: Tensor) -> Tensor:
        """[K, V] what the draft draws from, as it is known at run time: filters applied, temperature undone.

        A token that is not the draft's own counts as let through, since of those that it writes all are."""
        rows = SamplingRows.of([Sampling(self.config.temperature, top_p=self.config.top_p)], [len(logits)], ids.device)
        if rows.all_greedy:
            return logits
        kept = at_one(process(logits, rows), rows.temperature)
        own = logits.float() - logits.float().amax(-1, keepdim=True)
        return kept.scatter(-1, ids.T, own.gather(-1, ids.T))

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
        raise BadRequest(f"traces is {config.traces!r}; give target, draft, both, or a .jsonl file of answers")
    steps = Steps.of(pair.tokenizer, pair.eos, config.max_step_tokens)
    sampler = Sampler(pair, config, steps)
    folder = Folder(out)
    models = {m: fingerprint(runner) for m, runner in sampler.runners.items()}
    layers = {m: list(sampler.layers[m]) for m in MODELS}
    depth = {m: runner.depth for m, runner in sampler.runners.items()}
    folder.open({"config": _plain(config), "models": models, "depth": depth, "layers": layers})
    traces = _traces(config, pair, folder, progress)
    longest = min(runner.capacity for runner in sampler.runners.values()) - config.max_step_tokens
    if longest < 2:
        raise BadRequest(
            f"steps of {config.max_step_tokens} tokens leave no room for a prefix; load the models with a larger "
            "context, or give a smaller max_step_tokens"
        )
    prefixes = list(enumerate(cut(traces, steps, pair.tokenizer, config.per_problem, config.seed, longest)))
    folder.write_histories(prefix for _, prefix in prefixes)
    log.info("%d prefixes from %d traces", len(prefixes), len(traces))
    for shard, begin in enumerate(range(0, len(prefixes), config.shard)):
        progress(begin, len(prefixes))
        if not folder.has_shard(shard):
            folder.write_shard(shard, *sampler.run(prefixes[begin : begin + config.shard]))
    progress(len(prefixes), len(prefixes))
    return folder


def _traces(config: Config, pair: Pair, folder: Folder, progress: Progress) -> list[Trace]:
    traces = folder.read_traces()
    if not config.by:
        if not traces:
            traces = read_traces(Path(config.traces), pair.tokenizer)
            folder.write_traces(traces)
        return traces
    task = tasks.make(config.task, Path(config.data) if config.data else None).for_fitting()
    jobs = list(enumerate(task.problems(config.n, config.seed)))
    while len(traces) < len(jobs):
        progress(len(traces), len(jobs))
        group = jobs[len(traces) :][: config.shard]
        written: dict[int, Trace] = {}
        for i, by in enumerate(config.by):  # where both write, every other problem is one's
            own = [(n, problem) for n, problem in group if n % len(config.by) == i]
            seeds = [config.seed * 1_000_003 + n for n, _ in own]
            made = write_traces(pair, by, task, [p for _, p in own], config.temperature, config.top_p, seeds)
            written |= dict(zip([n for n, _ in own], made, strict=True))
        traces += [written[n] for n, _ in group]
        folder.write_traces(traces)
    return traces


def _plain(config: Config) -> dict[str, Any]:
    """As JSON has it."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(config).items()}
