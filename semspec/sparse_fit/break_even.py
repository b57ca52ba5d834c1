"""Where sparse verification is faster on this device: `semspec sparse calibrate --auto`.

Selection takes time too. Each part of a plan is timed by itself against dense verification: cache blocks at several
context lengths, channels and experts on a text, since what they skip depends on it. Parts that are not faster are
turned off. All of it for one sequence; a batch needs more of the experts and channels, so less is saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from semspec.errors import BadRequest
from semspec.model import ModelRunner
from semspec.model.wrapper import unwrap
from semspec.pair import Pair
from semspec.sparse.applied import apply
from semspec.sparse.plan import SparsePlan
from semspec.sparse_fit.calibrate import PREFILL_CHUNK
from semspec.tasks import Task
from semspec.text.tokenizer import encode
from semspec.types import Score

MAX_RATIO = 0.97  # sparse time over dense time; a smaller gain may be noise
SECONDS = 1.0  # per comparison

Compare = Callable[[ModelRunner, int, int, Sequence[int], SparsePlan], float]
"""(runner, slot, context length, draft, plan) -> time of a sparse verification over that of a dense one"""


def keep_what_pays(pair: Pair, task: Task, plan: SparsePlan, seed: int = 0, k: int = 8) -> SparsePlan:
    """The plan without the parts that are not faster here; `made["pays"]` has the measured ratios."""
    runner = unwrap(pair.target)
    assert isinstance(runner, ModelRunner)
    problems = task.for_model(task.for_fitting().problems(4, seed), pair.tokenizer, runner.max_seq_len)
    prompt = max((encode(pair.tokenizer, p.prompt) for p in problems), key=len)
    text = prompt[-runner.max_seq_len :]
    if len(text) < k + 2:
        raise BadRequest(f"no problem of {task.name} is longer than a draft of {k} tokens; --auto needs a longer text")
    return keep_faster_parts(runner, plan, text, k + 1)


def keep_faster_parts(
    runner: ModelRunner, plan: SparsePlan, text: list[int], draft: int, compare: Compare | None = None
) -> SparsePlan:
    compare, previous, slot = compare or time_ratio, runner.sparsity, runner.acquire()
    ratios: dict[str, Any] = {}
    try:
        runner.sparsity = None
        runner.score([Score(runner, slot, text[:-draft], 0)])
        start, tokens = runner.length(slot), text[-draft:]
        for part in ("ffn", "experts"):
            own = getattr(plan, part)
            if own is not None:
                ratios[part] = compare(runner, slot, start, tokens, SparsePlan(**{part: own}))
                off: dict[str, Any] = {part: None}
                plan = plan if ratios[part] <= MAX_RATIO else replace(plan, **off)
        if plan.attention is not None:
            attention, heads = plan.attention, runner.shape.kv_heads
            by_length = {
                length: compare(runner, slot, length, tokens, SparsePlan(attention=attention))
                for length in lengths(runner.max_seq_len - draft)
                if attention.sparse_at(length, heads)
            }
            ratios["attention"] = {str(length): ratio for length, ratio in by_length.items()}
            plan = replace(plan, attention=replace(attention, pays_from=pays_from(by_length, runner.max_seq_len)))
    finally:
        runner.sparsity = previous
        runner.release(slot)
    return replace(plan, made=plan.made | {"pays": ratios})


def lengths(longest: int) -> list[int]:
    """Powers of two from 256, and the longest possible."""
    return [*(256 << i for i in range(20) if 256 << i < longest), longest]


def pays_from(ratios: dict[int, float], capacity: int) -> int:
    """The shortest measured length from which on all were faster; `capacity`, which is never reached, if none was."""
    shortest = capacity
    for length in sorted(ratios, reverse=True):
        if ratios[length] > MAX_RATIO:
            break
        shortest = length
    return shortest


def time_ratio(runner: ModelRunner, slot: int, start: int, draft: Sequence[int], plan: SparsePlan) -> float:
    """Alternating, so that other load affects both alike; lower quartiles, since disturbances only add time."""
    apply(plan, runner)
    sparse = runner.sparsity
    times: dict[bool, list[float]] = {False: [], True: []}
    start_time = time.perf_counter()
    while len(times[True]) < 4 or (time.perf_counter() - start_time < SECONDS and len(times[True]) < 50):
        for is_sparse in times:
            runner.sparsity = sparse if is_sparse else None
            runner.cache.pretend(slot, start)
            _wait(runner)
            started = time.perf_counter()
            runner.score([Score(runner, slot, list(draft), len(draft))])
            _wait(runner)
            times[is_sparse].append(time.perf_counter() - started)
    dense_time, sparse_time = (sorted(t[1:])[len(t) // 4] for t in times.values())  # the first captures graphs
    return sparse_time / dense_time


def timer(runner: ModelRunner, longest: int, draft: int) -> Callable[[SparsePlan, int], float]:
    """(plan, context length) -> the same ratio, after a text of random tokens."""
    slot = runner.acquire()
    random = torch.Generator().manual_seed(0)
    text = torch.randint(runner.vocab_size, [longest + draft], generator=random).tolist()
    for at in range(0, longest, PREFILL_CHUNK):
        runner.score([Score(runner, slot, text[at : min(at + PREFILL_CHUNK, longest)], 0)])
    return lambda plan, length: time_ratio(runner, slot, length, text[-draft:], plan)


def _wait(runner: ModelRunner) -> None:
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
