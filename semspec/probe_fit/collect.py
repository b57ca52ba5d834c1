"""A collection from start to end: answers, prefixes cut from them, steps after these with their states and evidence.

Every part is on the disk before the next is started, so that a collection that was stopped goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from semspec import tasks
from semspec.errors import BadRequest
from semspec.options import Options
from semspec.pair import Pair
from semspec.pair.loading import MORE_TOKENS
from semspec.pair.remote import RemotePair
from semspec.probe.identity import fingerprint
from semspec.probe_fit import served
from semspec.probe_fit.config import Config
from semspec.probe_fit.data import MODELS, Folder, Trace
from semspec.probe_fit.sampler import Sampler
from semspec.probe_fit.traces import cut, read_traces, write_traces
from semspec.text.steps import StepDelimiters

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]  # prefixes done, prefixes in all


def collect(config: Config, out: Path, pair: Pair, progress: Progress = lambda done, total: None) -> Folder:
    """Traces, prefixes, samples; what the folder already has is not made again."""
    if isinstance(pair, RemotePair):
        return served.collect(config, out, pair, progress)
    if not config.by and not Path(config.traces).is_file():
        raise BadRequest(
            f"traces is {config.traces!r}; give target, draft, both, a rule of steps such as semantic+, or a .jsonl "
            "file of answers"
        )
    if not config.by and Path(config.traces).resolve() == Folder(out).traces.resolve():
        raise BadRequest(f"{config.traces} is where this collection keeps its own traces; give another --out")
    steps = StepDelimiters.of(pair.tokenizer, pair.eos, config.max_step_tokens).by(config.delimiters)
    sampler = Sampler(pair, config, steps)
    folder = Folder(out)
    models = {m: fingerprint(runner) for m, runner in sampler.runners.items()}
    layers = {m: list(sampler.layers[m]) for m in MODELS}
    depth = {m: runner.num_layers for m, runner in sampler.runners.items()}
    policy = {} if sampler.policy is None else {"collected_by": sampler.policy}
    folder.open({"config": _plain(config), "models": models, "depth": depth, "layers": layers} | policy)
    traces = _traces(config, pair, folder, progress)
    reserved = config.max_step_tokens if config.samples else 0  # for what is sampled; a verified draft did fit
    more = 1.0 if pair.exchange is None else MORE_TOKENS  # that a draft model with another tokenizer may need
    longest = int(min(pair.target.max_seq_len, sampler.runners["draft"].max_seq_len / more)) - reserved
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


def _traces(config: Config, pair: Pair, folder: Folder, progress: Progress) -> list[Trace]:
    traces = folder.read_traces()
    if not config.by:
        if not traces:
            traces = read_traces(Path(config.traces), pair.tokenizer, pair.exchange)
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
