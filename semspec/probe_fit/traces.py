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
from semspec.text.exchange import Exchange
from semspec.text.prompts import draft_prompt
from semspec.text.steps import StepDelimiters, StepTracker
from semspec.text.tokenizer import Prompt, encode


def write_traces(
    pair: Pair, by: str, task: Task, problems: Sequence[Problem], how: Options, seeds: Sequence[int]
) -> list[Trace]:
    """One sampled answer to each problem, decoded as one batch, by one of the models alone, or by both and a rule."""
    if not problems:
        return []
    assert how.max_new_tokens is not None
    writer = pair.draft_alone() if by == "draft" and pair.draft else pair
    prompts = [encode(pair.tokenizer, p.prompt) for p in problems]
    own = [_draft_prompt(pair.exchange, p.prompt, prompt) for p, prompt in zip(problems, prompts, strict=True)]
    options = [
        replace(
            how, verifier="none" if by in MODELS else by, seed=seed, referee=task.referee(problem),
            max_new_tokens=max(
                1, min(how.max_new_tokens, writer.target.max_seq_len - max(len(prompt), len(other or ())))
            ),
        )
        for seed, problem, prompt, other in zip(seeds, problems, prompts, own, strict=True)
    ]  # fmt: skip
    results = writer.generate([p.prompt for p in problems], options)
    answers = [result.tokens for result in results]
    if by == "draft" and pair.exchange is not None:
        answers = [pair.exchange.translate(tokens)[0] for tokens in answers]
    return [
        Trace(p.id, prompt, answer, None if by in MODELS else drafts_of(result), other)
        for p, prompt, answer, result, other in zip(problems, prompts, answers, results, own, strict=True)
    ]


def _draft_prompt(exchange: Exchange | None, prompt: Prompt, target: list[int]) -> list[int] | None:
    return None if exchange is None else draft_prompt(exchange, prompt, target)


def drafts_of(result: Result) -> list[Drafted]:
    """The whole steps that a rule verified, each with what was before it then."""
    drafts, so_far = list[Drafted](), 0
    for event in result.events:
        for step in event.drafted_steps:
            at = max(so_far, step.start)
            own = step.tokens[at - step.start :]
            if step.outcome != "handed over" and own:
                drafts.append(Drafted(step.start, at, own))
        so_far += len(event.tokens)
    return drafts


def read_traces(path: Path, tokenizer: PreTrainedTokenizerBase, exchange: Exchange | None = None) -> list[Trace]:
    """Traces from a file: rows with a `prompt` (text or chat messages), the answer's `text`, perhaps a `problem`."""
    traces = []
    for row in read_rows(path):
        prompt, text = row["prompt"], row["text"]
        tokens = tokenizer.encode(text, add_special_tokens=False)
        problem, read = str(row.get("problem", f"{path.stem}/{row.index}")), encode(tokenizer, prompt)
        traces.append(Trace(problem, read, tokens, draft_prompt=_draft_prompt(exchange, prompt, read)))
    return traces


def cut(
    traces: Sequence[Trace],
    steps: StepDelimiters,
    tokenizer: PreTrainedTokenizerBase,
    per_problem: int | None = None,
    seed: int = 0,
    longest: int | None = None,
    first_steps: bool = True,
) -> list[Prefix]:
    """A prefix for every step of every trace that thinking goes on after, or for `per_problem` of them at random; where
    a rule wrote the trace, one for every step that it verified.

    The prompt alone, which first steps come after, is one of them and is drawn as any other, so that first steps have
    the share that they have where a rule judges every step; a rule whose `lead` is 1 judges none of them. Prefixes of
    more than `longest` tokens are left out."""
    prefixes = []
    for t, trace in enumerate(traces):
        ends = [0, *_ends(trace.tokens, steps)]
        after = [Drafted(end, end, []) for end in ends] if len(ends) > 1 else []
        found_at = after if trace.drafts is None else trace.drafts
        found = [
            Prefix(
                f"{t}/{number}", trace.problem, sum(end < draft.step_start for end in ends),
                [*trace.prompt, *trace.tokens[: draft.at]],
                tokenizer.decode(trace.tokens[: draft.step_start], skip_special_tokens=True),
                tuple(trace.tokens[draft.step_start : draft.at]), tuple(draft.tokens),
                len(trace.prompt), trace.draft_prompt,
            )
            for number, draft in enumerate(found_at)
            if (draft.step_start or (first_steps and trace.prompt))
            and (longest is None or len(trace.prompt) + draft.step_start <= longest)
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


def _ends(tokens: Sequence[int], steps: StepDelimiters) -> list[int]:
    """The tokens after which whole steps end, as long as thinking goes on."""
    step, ends = StepTracker(steps), list[int]()
    for i, token in enumerate(tokens):
        if step.feed([token]) is None:
            continue
        if step.end in ("end of thinking", "end of text"):
            break
        ends.append(i + 1)
        step = StepTracker(steps)
    return ends
