"""What passes cost on this device, the limit set by its memory bandwidth, and the speedup drafts can give.

The limit of a pass is the time to read its weights, keys and values at the bandwidth of a large copy. No pass can be
faster, so the distance of a runner to it is what is left to gain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from semspec.loop.draft_length import MAX_DRAFT_TOKENS, rates
from semspec.model.memory_plan import MemoryPlan
from semspec.types import Decode, Runner, Sampling, Score

CONTEXT = 128  # tokens in the cache before a pass
MEASURE_SECONDS = 1.0  # spent on each measurement
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
COPY_BYTES = {"cpu": 2**27, "cuda": 2**31}  # many times the size of a cache


def seconds_of(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """The lower quartile of repeated runs, since noise only adds. The first run is warm-up."""
    work()
    times: list[float] = []
    while sum(times) < MEASURE_SECONDS and len(times) < 50:
        start = clock()
        work()
        times.append(clock() - start)
    return sorted(times)[len(times) // 4]


def bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a large copy."""
    size = COPY_BYTES.get(device.type, COPY_BYTES["cpu"])
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        _wait(device)

    return 2 * size / seconds_of(copy)


def pass_cost(
    runner: Runner, rows: int, clock: Callable[[], float] = time.perf_counter, context: int = CONTEXT
) -> float:
    """Milliseconds of a pass over this many tokens of one sequence, after `context` others."""
    rows = min(rows, runner.max_seq_len // 2)
    before = max(1, min(context, runner.max_seq_len - rows))
    slot = runner.acquire()
    runner.score([Score(runner, slot, [1] * before, 1)])

    def work() -> None:
        runner.score([Score(runner, slot, [1] * rows, rows)])
        _wait(runner.device)
        runner.truncate(slot, before)

    seconds = seconds_of(work, clock)
    runner.release(slot)
    return seconds * 1000


def token_cost(runner: Runner, clock: Callable[[], float] = time.perf_counter, context: int = CONTEXT) -> float:
    """Milliseconds per token of autoregressive decoding, without the cost of a call."""
    few, many = 4, 20
    before = max(1, min(context, runner.max_seq_len - many))
    slot = runner.acquire()
    runner.score([Score(runner, slot, [1] * before, 1)])

    def work(n: int) -> None:
        runner.decode([Decode(runner, slot, [1], min(n, runner.max_seq_len - before), Sampling(), 0)])
        runner.truncate(slot, before)

    short, long = seconds_of(lambda: work(few), clock), seconds_of(lambda: work(many), clock)
    runner.release(slot)
    return max(long - short, 0.0) * 1000 / (many - few)


def best_drafts(target: dict[int, float], token: float) -> list[dict[str, float]]:
    """For each acceptance rate: the best draft length (0: drafting does not pay), its tokens per round, and its speedup
    over the target without drafts.

    `target`: milliseconds of passes by tokens; `token`: those of a draft token.
    """
    target_only = target[min(target)]
    found = []
    for acceptance in ACCEPTANCES:
        speeds = rates(
            [acceptance] * MAX_DRAFT_TOKENS,
            lambda n: n * token,
            lambda n: interpolate(target, n + 1) if n else target_only,
        )
        n = speeds.index(max(speeds))
        tokens = sum(acceptance**i for i in range(n + 1))
        found.append({"acceptance": acceptance, "draft_tokens": n, "tau": tokens, "speedup": speeds[n] * target_only})
    return found


def interpolate(costs: dict[int, float], tokens: int) -> float:
    """Linear between measured sizes, constant outside."""
    below = max((n for n in costs if n <= tokens), default=min(costs))
    above = min((n for n in costs if n >= tokens), default=max(costs))
    if below == above:
        return costs[below]
    return costs[below] + (costs[above] - costs[below]) * (tokens - below) / (above - below)


def profile(
    runners: Sequence[Runner], plans: Sequence[MemoryPlan], passes: Sequence[dict[str, float]]
) -> dict[str, Any]:  # fmt: skip
    """Of a target and its draft model, if any; `passes`: measured milliseconds by tokens, for each."""
    speeds = {device: bandwidth(device) for device in {plan.device for plan in plans}}
    limits = [
        None if plan.read is None else (plan.read + CONTEXT * plan.per_token) / speeds[plan.device] * 1000
        for plan in plans
    ]
    found: dict[str, Any] = {
        "device": device_name(plans[0].device),
        "bandwidth_GBps": speeds[plans[0].device] / 1e9,
        "context": CONTEXT,
        "limits_ms": limits,
    }
    if len(runners) == 2:
        token = token_cost(runners[1])
        found["draft_token_ms"] = token
        found["best_drafts"] = best_drafts({int(n): ms for n, ms in passes[0].items()}, token)
    return found


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
