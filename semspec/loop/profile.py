"""What passes cost on this very device, against what its memory allows, and what drafts can bring at such costs.

The limit of a pass is the time in which the device could copy the bytes that the pass must read: weights, keys and
values. Nothing that decodes token by token can be faster; how near a runner comes says what is left to gain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from semspec.loop.draft_length import rates
from semspec.model.memory_plan import MemoryPlan
from semspec.types import Decode, Runner, Sampling, Score

CONTEXT = 128  # tokens that lie before a pass
SECONDS = 1.0  # for each figure
LONGEST = 16  # drafts that are thought about
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
COPIED = {"cpu": 2**27, "cuda": 2**31}  # bytes; many times what a cache holds


def usual(work: Callable[[], Any]) -> float:
    """Seconds that it takes; the quartile, since what disturbs only adds. The first time is not counted."""
    work()
    times: list[float] = []
    while sum(times) < SECONDS and len(times) < 50:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 4]


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy moves, read and written."""
    size = COPIED.get(device.type, COPIED["cpu"])
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        _wait(device)

    return 2 * size / usual(copy)


def pass_cost(runner: Runner, rows: int) -> float:
    """Milliseconds of a pass over so many tokens of one sequence."""
    rows = min(rows, runner.capacity // 2)
    before = min(CONTEXT, runner.capacity - rows)
    slot = runner.acquire()
    runner.score([Score(runner, slot, [1] * before, 1)])

    def work() -> None:
        runner.score([Score(runner, slot, [1] * rows, rows)])
        _wait(runner.device)
        runner.truncate(slot, before)

    seconds = usual(work)
    runner.release(slot)
    return seconds * 1000


def token_cost(runner: Runner) -> float:
    """Milliseconds of each further token that a model writes by itself."""
    few, many = 4, 20
    before = max(1, min(CONTEXT, runner.capacity - many))
    slot = runner.acquire()
    runner.score([Score(runner, slot, [1] * before, 1)])

    def work(n: int) -> None:
        runner.decode([Decode(runner, slot, [1], min(n, runner.capacity - before), Sampling(), 0)])
        runner.truncate(slot, before)

    short, long = usual(lambda: work(few)), usual(lambda: work(many))
    runner.release(slot)
    return max(long - short, 0.0) * 1000 / (many - few)


def best_drafts(target: dict[int, float], token: float) -> list[dict[str, float]]:
    """For each chance that a draft token is accepted: the draft length that pays most, the tokens that a step with it
    gives, and how many times as fast as the target alone that is. Length 0: drafting does not pay.

    `target` are milliseconds of passes by tokens, `token` those of a draft token.
    """
    alone = target[min(target)]
    found = []
    for acceptance in ACCEPTANCES:
        speeds = rates(
            [acceptance] * LONGEST, lambda n: n * token, lambda n: between(target, n + 1) if n else alone
        )  # fmt: skip
        n = speeds.index(max(speeds))
        tokens = sum(acceptance**i for i in range(n + 1))
        found.append({"acceptance": acceptance, "draft_tokens": n, "tau": tokens, "speedup": speeds[n] * alone})
    return found


def between(costs: dict[int, float], tokens: int) -> float:
    """On straight lines from one measured size to the next."""
    below = max((n for n in costs if n <= tokens), default=min(costs))
    above = min((n for n in costs if n >= tokens), default=max(costs))
    if below == above:
        return costs[below]
    return costs[below] + (costs[above] - costs[below]) * (tokens - below) / (above - below)


def profile(
    runners: Sequence[Runner], plans: Sequence[MemoryPlan], passes: Sequence[dict[str, float]]
) -> dict[str, Any]:  # fmt: skip
    """Of a target and, where there is one, its draft; `passes`: milliseconds by tokens, as measured for each."""
    speeds = {device: bandwidth(device) for device in {plan.device for plan in plans}}
    limits = [
        None if plan.read is None else (plan.read + CONTEXT * plan.per_token) / speeds[plan.device] * 1000
        for plan in plans
    ]
    found: dict[str, Any] = {
        "device": _name(plans[0].device),
        "bandwidth_GBps": speeds[plans[0].device] / 1e9,
        "context": CONTEXT,
        "limits_ms": limits,
    }
    if len(runners) == 2:
        token = token_cost(runners[1])
        found["draft_token_ms"] = token
        found["best_drafts"] = best_drafts({int(n): ms for n, ms in passes[0].items()}, token)
    return found


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
