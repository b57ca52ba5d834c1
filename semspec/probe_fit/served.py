"""Steps and their evidence from a pair of servers, for a judge probe of evidence alone: as the rule will meet them.

A rule of steps answers problems, and every step of the draft that the target's server scored becomes a row: what was
seen of it is what the rule saw. With samples, the target's server also writes steps after the same text, whose own
log-probabilities are their evidence. The folder is that of any collection, so labels and training are, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from semspec import tasks
from semspec.errors import BadRequest
from semspec.options import Options
from semspec.pair.remote import RemotePair
from semspec.pair.result import Result
from semspec.probe.evidence import NAMES, WIDTH
from semspec.probe_fit.config import Config
from semspec.probe_fit.data import CONFIDENCE, EVIDENCE, MODELS, Folder, Prefix, Sample
from semspec.probe_fit.sampler import policy
from semspec.remote.model import BACKGROUND, BLANK
from semspec.remote.pieces import TextPrompt
from semspec.remote.verification import evidence_of
from semspec.tasks import Problem, Task
from semspec.text.tokenizer import encode
from semspec.types import Sampling

MEAN = NAMES.index("mean")
Rows = list[tuple[Sample, Tensor]]  # with all evidence [WIDTH, and the draft's confidence if it is known]


def collect(config: Config, out: Path, pair: RemotePair, progress: Callable[[int, int], None]) -> Folder:
    """All problems, a shard's number of them at a time; a shard that the folder has is not made again."""
    if config.rule is None:
        raise BadRequest(
            "of servers only steps that a rule verifies can be collected; give --traces a rule of steps that needs no "
            "judge probe, such as likely-step, or one with the judge probe you have"
        )
    pair.check(Options(verifier=config.traces, referee=lambda so_far, step: True))
    folder = Folder(out)
    assert pair.servers.draft is not None, "a rule of steps has been bound to it"
    names = {"target": pair.servers.target.abilities.name, "draft": pair.servers.draft.abilities.name}
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(config).items()}
    nothing: dict[str, Any] = {"depth": dict.fromkeys(MODELS, 0), "layers": {model: [] for model in MODELS}}
    folder.open({"config": plain, "models": names, "collected_by": policy(config.rule, pair)} | nothing)
    task = tasks.make(config.task, Path(config.data) if config.data else None).for_fitting()
    problems = list(enumerate(task.problems(config.n, config.seed)))
    histories = list[Prefix]()
    for shard, begin in enumerate(range(0, len(problems), config.shard)):
        progress(begin, len(problems))
        if folder.has_shard(shard):
            kept = folder.read_histories()
            seen = {sample.prefix: sample.problem for sample in folder.read_samples(shard)}
            histories += [Prefix(i, problem, 0, [], kept[i]) for i, problem in seen.items()]
            continue
        rows, found = _shard(config, pair, task, problems[begin : begin + config.shard])
        histories += found
        folder.write_histories(histories)  # before the shard whose labels need them
        folder.write_shard(shard, [sample for sample, _ in rows], _tensors(rows))
    progress(len(problems), len(problems))
    return folder


def _shard(config: Config, pair: RemotePair, task: Task, group: list[tuple[int, Problem]]) -> tuple[Rows, list[Prefix]]:
    how = Options(
        verifier=config.traces, temperature=config.temperature, top_p=config.top_p, stop=task.stop,
        max_new_tokens=config.max_new_tokens or task.max_new_tokens,
    )  # fmt: skip
    options = [replace(how, seed=config.seed * 1_000_003 + n, referee=task.referee(p)) for n, p in group]
    rows: Rows = []
    prefixes = list[Prefix]()
    results: list[Result] = pair.generate([p.prompt for _, p in group], options)
    for (number, problem), result in zip(group, results, strict=True):
        for prefix, at, sample, seen in _drafted(pair, number, problem, result):
            prefixes.append(prefix)
            rows.append((sample, seen))
            rows += _sampled(config, pair, problem, prefix, at)
    if not rows:
        raise BadRequest("no step of the draft was scored; do these models write steps with blank lines between them?")
    return rows, prefixes


def _drafted(
    pair: RemotePair, number: int, problem: Problem, result: Result
) -> Iterator[tuple[Prefix, str, Sample, Tensor]]:
    """The draft's steps in an answer: what was before each in whole steps, and all that was."""
    so_far, count = 0, 0
    for event in result.events:
        for step in event.drafted_steps:
            if step.outcome != "handed over" and step.evidence is not None:
                at = max(so_far, step.start)
                before = pair.tokenizer.decode(result.tokens[: step.start])
                name, mean = f"{number}/{count}", float(step.evidence[MEAN])
                prefix = Prefix(name, problem.id, count, [], before)
                own, text = step.tokens[at - step.start :], pair.tokenizer.decode(step.tokens)
                sample = Sample(
                    name, problem.id, count, "draft", 0, own, text, "blank line", dict.fromkeys(MODELS, mean)
                )
                yield prefix, pair.tokenizer.decode(result.tokens[:at]), sample, step.evidence
                count += 1
        so_far += len(event.tokens)


def _sampled(config: Config, pair: RemotePair, problem: Problem, prefix: Prefix, so_far: str) -> Rows:
    """What the target writes after the same text."""
    prompt = encode(pair.tokenizer, problem.prompt)
    assert isinstance(prompt, TextPrompt)
    target, rows = pair.servers.target, Rows()
    for i in range(config.samples):
        how = Sampling(config.temperature, top_p=config.top_p, seed=crc32(f"{config.seed}/{prefix.id}/{i}".encode()))
        write = target.write(prompt.target + so_far, config.max_step_tokens, how, [BLANK], target.abilities.top)
        answer = BACKGROUND.wait(write)
        text, ending = target.ending(answer)
        if ending != "blank line" or not answer.pieces:
            continue
        seen = evidence_of(answer.pieces, pair.servers.vocabulary())
        tokens = [pair.servers.pieces.number(piece.text) for piece in answer.pieces]
        whole = so_far[len(prefix.history) :] + text
        mean = dict.fromkeys(MODELS, float(seen[MEAN]))
        sample = Sample(prefix.id, problem.id, prefix.step, "target", i, tokens, whole, "blank line", mean)
        rows.append((sample, seen))
    return rows


def _tensors(rows: Rows) -> dict[str, Tensor]:
    """The draft's confidence is known of its own steps alone, so a judge probe can use it where there are no others."""
    found = {f"target.{EVIDENCE}": torch.stack([seen[:WIDTH] for _, seen in rows])}
    if all(len(seen) > WIDTH for _, seen in rows):
        found[f"draft.{CONFIDENCE}"] = torch.stack([seen[WIDTH:] for _, seen in rows])
    return found
