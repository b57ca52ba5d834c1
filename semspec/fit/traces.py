"""Answers to a task's problems, and the prefixes of them after which steps are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

from transformers import PreTrainedTokenizerBase

from semspec.errors import BadRequest
from semspec.fit.data import Prefix, Trace
from semspec.options import Options
from semspec.pair import Pair
from semspec.steps import Step, Steps
from semspec.tasks import Problem, Task
from semspec.tasks.base import field, read_rows
from semspec.text import encode


def write_traces(
    pair: Pair, by: str, task: Task, problems: Sequence[Problem], temperature: float, top_p: float, seeds: Sequence[int]
) -> list[Trace]:
    """One sampled answer to each problem, decoded as one batch, by one of the models alone."""
    if not problems:
        return []
    writer = pair if by == "target" else Pair(pair.draft or pair.target, pair.tokenizer, eos=pair.eos)
    prompts = [encode(pair.tokenizer, p.prompt) for p in problems]
    options = [
        Options(
            verifier="none", temperature=temperature, top_p=top_p, seed=seed, stop=task.stop,
            max_new_tokens=max(1, min(task.max_new_tokens, writer.target.capacity - len(prompt))),
        )
        for seed, prompt in zip(seeds, prompts, strict=True)
    ]  # fmt: skip
    results = writer.generate([p.prompt for p in problems], options)
    return [Trace(p.id, q, r.tokens) for p, q, r in zip(problems, prompts, results, strict=True)]


def read_traces(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Trace]:
    """Traces from a file: rows with a `prompt` (text or chat messages), the answer's `text`, perhaps a `problem`."""
    traces = []
    for i, row in enumerate(read_rows(path)):
        prompt, text = field(row, "prompt", path, i), field(row, "text", path, i)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        traces.append(Trace(str(row.get("problem", f"{path.stem}/{i}")), encode(tokenizer, prompt), tokens))
    return traces


def cut(
    traces: Sequence[Trace],
    steps: Steps,
    tokenizer: PreTrainedTokenizerBase,
    per_problem: int | None = None,
    seed: int = 0,
    longest: int | None = None,
    first_steps: bool = True,
) -> list[Prefix]:
    """A prefix for every step of every trace that thinking goes on after, or for `per_problem` of them at random.

    The prompt alone, which first steps come after, is one of them and is drawn as any other, so that first steps have
    the share that they have where a rule judges every step; a rule whose `lead` is 1 judges none of them. Prefixes of
    more than `longest` tokens are left out."""
    prefixes = []
    for place, trace in enumerate(traces):
        ends = _ends(trace.tokens, steps)
        begin = [0] if first_steps and ends and trace.prompt else []
        found = [
            Prefix(
                f"{place}/{number}", trace.problem, number, [*trace.prompt, *trace.tokens[:end]],
                tokenizer.decode(trace.tokens[:end], skip_special_tokens=True),
            )
            for number, end in enumerate([*begin, *ends], 0 if begin else 1)
            if longest is None or len(trace.prompt) + end <= longest
        ]  # fmt: skip
        if per_problem is not None and len(found) > per_problem:
            rng = Random(f"{seed}/{trace.problem}")
            found = sorted(sorted(found, key=lambda _: rng.random())[:per_problem], key=lambda p: p.step)
        prefixes += found
    if not prefixes:
        raise BadRequest(
            "no trace has a step that another follows. Steps end in blank lines: are these a reasoning model's "
            "answers, and is the context long enough for them?"
        )
    return prefixes


def _ends(tokens: Sequence[int], steps: Steps) -> list[int]:
    """The places behind which whole steps end, as long as thinking goes on."""
    step, ends = Step(steps), list[int]()
    for i, token in enumerate(tokens):
        if step.feed([token]) is None:
            continue
        if step.end in ("end of thinking", "end of text"):
            break
        ends.append(i + 1)
        step = Step(steps)
    return ends
