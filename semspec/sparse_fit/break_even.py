"""Where leaving things out is worth it on the device at hand: `semspec sparse calibrate --auto`.

Choosing takes time too. Each part of a plan is timed by itself against dense checks: blocks of the cache at several
lengths of context, channels and experts on a text, since what they leave out depends on it. What is no faster is turned
off. All of it for one sequence; in a batch more experts and channels are needed by somebody, so less is saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from semspec.errors import BadRequest
from semspec.model import ModelRunner
from semspec.pair import Pair
from semspec.sparse.applied import apply
from semspec.sparse.plan import SparsePlan
from semspec.tasks import Task
from semspec.text.tokenizer import encode
from semspec.types import Score

FASTER = 0.97  # of the dense time, at most; less of a gain may be noise
SECONDS = 1.0  # for each comparison

Compare = Callable[[ModelRunner, int, int, Sequence[int], SparsePlan], float]
"""(runner, slot, tokens before, draft, plan) -> seconds of a check by the plan, over those of a dense one"""


def where_it_pays(pair: Pair, task: Task, plan: SparsePlan, seed: int = 0, k: int = 8) -> SparsePlan:
    """The plan with what does not pay turned off; `made["pays"]` says what was seen."""
    runner = pair.target
    assert isinstance(runner, ModelRunner)
    prompt = max((encode(pair.tokenizer, p.prompt) for p in task.for_fitting().problems(4, seed)), key=len)
    text = prompt[-runner.capacity :]
    if len(text) < k + 2:
        raise BadRequest(f"no problem of {task.name} is longer than a draft of {k} tokens; --auto needs a longer text")
    return measured(runner, plan, text, k + 1)


def measured(
    runner: ModelRunner, plan: SparsePlan, text: list[int], draft: int, compare: Compare | None = None
) -> SparsePlan:
    compare, before, slot = compare or compared, runner.sparsity, runner.acquire()
    seen: dict[str, Any] = {}
    try:
        runner.sparsity = None
        runner.score([Score(runner, slot, text[:-draft], 0)])
        start, tokens = runner.length(slot), text[-draft:]
        for part in ("ffn", "experts"):
            own = getattr(plan, part)
            if own is not None:
                seen[part] = compare(runner, slot, start, tokens, SparsePlan(**{part: own}))
                off: dict[str, Any] = {part: None}
                plan = plan if seen[part] <= FASTER else replace(plan, **off)
        if plan.attention is not None:
            attention, heads = plan.attention, runner.shape.kv_heads
            found = {
                length: compare(runner, slot, length, tokens, SparsePlan(attention=attention))
                for length in lengths(runner.capacity - draft)
                if attention.sparse_at(length, heads)
            }
            seen["attention"] = {str(length): ratio for length, ratio in found.items()}
            plan = replace(plan, attention=replace(attention, pays_from=pays_from(found, runner.capacity)))
    finally:
        runner.sparsity = before
        runner.release(slot)
    return replace(plan, made=plan.made | {"pays": seen})


def lengths(most: int) -> list[int]:
    """Doubling, and the longest that there can be."""
    found = [256 << i for i in range(20) if 256 << i < most]
    return [*found, most]


def pays_from(ratios: dict[int, float], capacity: int) -> int:
    """The least of the measured lengths from which on all were faster; one that cannot be reached if there is none."""
    least = capacity
    for length in sorted(ratios, reverse=True):
        if ratios[length] > FASTER:
            break
        least = length
    return least


def compared(runner: ModelRunner, slot: int, start: int, draft: Sequence[int], plan: SparsePlan) -> float:
    """By turns, so that what the machine does beside meets both alike; quartiles, since what disturbs only adds."""
    apply(plan, runner)
    sparse = runner.sparsity
    times: dict[bool, list[float]] = {False: [], True: []}
    began = time.perf_counter()
    while len(times[True]) < 4 or (time.perf_counter() - began < SECONDS and len(times[True]) < 50):
        for thin in times:
            runner.sparsity = sparse if thin else None
            runner.cache.lengths[slot] = start  # what lies there does not matter, only how much
            _wait(runner)
            started = time.perf_counter()
            runner.score([Score(runner, slot, list(draft), len(draft))])
            _wait(runner)
            times[thin].append(time.perf_counter() - started)
    dense, less = (sorted(t[1:])[len(t) // 4] for t in times.values())  # the first makes graphs
    return less / dense


def _wait(runner: ModelRunner) -> None:
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
