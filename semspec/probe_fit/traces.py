"""Answers to a task's problems, and the prefixes of them after which steps are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from transformers import PreTrainedTokenizerBase

from semspec.errors import BadRequest
from semspec.options import Options
from semspec.pair import Pair
from semspec.pair.result import Result
from semspec.probe_fit.data import MODELS, Drafted, Prefix, Trace
from semspec.tasks import Problem, Task
from semspec.tasks.base import read_rows
from semspec.text.steps import Step, Steps
from semspec.text.tokenizer import encode


def write_traces(
    pair: Pair, by: str, task: Task, problems: Sequence[Problem], how: Options, seeds: Sequence[int]
) -> list[Trace]:
    """One sampled answer to each problem, decoded as one batch, by one of the models alone, or by both and a rule."""
    if not problems:
        return []
    assert how.max_new_tokens is not None
    writer = Pair(pair.draft or pair.target, pair.tokenizer, eos=pair.eos) if by == "draft" else pair
    prompts = [encode(pair.tokenizer, p.prompt) for p in problems]
    options = [
        replace(
            how, verifier="none" if by in MODELS else by, seed=seed, referee=task.referee(problem),
            max_new_tokens=max(1, min(how.max_new_tokens, writer.target.capacity - len(prompt))),
        )
        for seed, problem, prompt in zip(seeds, problems, prompts, strict=True)
    ]  # fmt: skip
    results = writer.generate([p.prompt for p in problems], options)
    return [
        Trace(p.id, prompt, result.tokens, None if by in MODELS else drafts_of(result))
        for p, prompt, result in zip(problems, prompts, results, strict=True)
    ]


def drafts_of(result: Result) -> list[Drafted]:
    """The whole steps that a rule was asked about, each with what stood in front of it then."""
    drafts, so_far = list[Drafted](), 0
    for event in result.events:
        for step in event.drafted_steps:
            at = max(so_far, step.start)
            own = step.tokens[at - step.start :]
            if step.outcome != "handed over" and own:
                drafts.append(Drafted(step.start, at, own))
        so_far += len(event.tokens)
    return drafts


def read_traces(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Trace]:
    """Traces from a file: rows with a `prompt` (text or chat messages), the answer's `text`, perhaps a `problem`."""
    traces = []
    for row in read_rows(path):
        prompt, text = row["prompt"], row["text"]
        tokens = tokenizer.encode(text, add_special_tokens=False)
        traces.append(Trace(str(row.get("problem", f"{path.stem}/{row.index}")), encode(tokenizer, prompt), tokens))
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
    """A prefix for every step of every trace that thinking goes on after, or for `per_problem` of them at random; where
    a rule wrote the trace, one for every step that it was asked about.

    The prompt alone, which first steps come after, is one of them and is drawn as any other, so that first steps have
    the share that they have where a rule judges every step; a rule whose `lead` is 1 judges none of them. Prefixes of
    more than `longest` tokens are left out."""
    prefixes = []
    for place, trace in enumerate(traces):
        ends = [0, *_ends(trace.tokens, steps)]
        behind = [Drafted(end, end, []) for end in ends] if len(ends) > 1 else []
        asked = behind if trace.drafts is None else trace.drafts
        found = [
            Prefix(
                f"{place}/{number}", trace.problem, sum(end < draft.begun for end in ends),
                [*trace.prompt, *trace.tokens[: draft.at]],
                tokenizer.decode(trace.tokens[: draft.begun], skip_special_tokens=True),
                tuple(trace.tokens[draft.begun : draft.at]), tuple(draft.tokens),
            )
            for number, draft in enumerate(asked)
            if (draft.begun or (first_steps and trace.prompt))
            and (longest is None or len(trace.prompt) + draft.begun <= longest)
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
