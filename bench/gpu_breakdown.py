"""Where the time of a pass goes: kernels by name, and the gaps between them. `bench/gpu.py --only breakdown`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from semspec.types import Decode, Sampling, Score

if TYPE_CHECKING:
    from bench.gpu import Bench

SHOWN = 14


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    begin: float  # microseconds
    end: float


def table(kernels: Sequence[Kernel], times: int = 1) -> dict[str, Any]:
    """By name: how often, microseconds in all and each, and the gaps in front; for one of so many repetitions.

    A gap is the time since the last of all kernels before had ended. One that began earlier than that has no
    gap, and only what it took beyond the others counts as its time.
    """
    rows: dict[str, dict[str, float]] = {}
    reached = min((k.begin for k in kernels), default=0.0)
    first = reached
    for kernel in sorted(kernels, key=lambda k: (k.begin, k.end)):
        row = rows.setdefault(short(kernel.name), {"count": 0.0, "us": 0.0, "gap_us": 0.0})
        row["count"] += 1 / times
        row["gap_us"] += max(kernel.begin - reached, 0.0) / times
        row["us"] += max(kernel.end - max(kernel.begin, reached), 0.0) / times
        reached = max(reached, kernel.end)
    ordered = dict(sorted(rows.items(), key=lambda item: -item[1]["us"] - item[1]["gap_us"]))
    busy, gaps = (sum(row[part] for row in rows.values()) for part in ("us", "gap_us"))
    return {"kernels": ordered, "busy_us": busy, "gap_us": gaps, "whole_us": (reached - first) / times}


def short(name: str) -> str:
    """Without template arguments and hashes, which tell nothing and differ from one version to the next."""
    name = re.sub(r"^void ", "", name)
    while "<" in name and (inner := re.sub(r"<[^<>]*>", "", name)) != name:
        name = inner
    return name.split("(")[0][:60]


def trace(work: Callable[[], Any], times: int) -> list[Kernel]:
    """What the device did while `work` was done so many times."""
    from torch.profiler import ProfilerActivity

    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(times):
            work()
        torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    device = [e for e in events if str(e.device_type()).endswith("CUDA") and e.duration_ns() > 0]
    return [Kernel(e.name(), e.start_ns() / 1000, (e.start_ns() + e.duration_ns()) / 1000) for e in device]


def break_down(bench: Bench) -> None:
    """A draft roll of eight, a target pass of nine, and a step of eight sequences."""
    context = bench.asked.context
    draft, target = (bench.runner(which, 8, context + 128) for which in ("draft", "target"))

    def roll(slots: int = 1) -> None:
        for slot in range(slots):
            draft.cache.pretend(slot, context)
        draft.decode([Decode(draft, slot, [3], 8, Sampling(), 0) for slot in range(slots)])

    def score(slots: int = 1) -> None:
        for slot in range(slots):
            target.cache.pretend(slot, context)
        target.score([Score(target, slot, list(range(1, 10)), 9) for slot in range(slots)])

    def both() -> None:
        roll(8)
        score(8)

    for name, work in (("draft roll of 8", roll), ("target pass of 9", score), ("batch 8: roll and pass", both)):
        plain = bench.ms(work)  # unobserved; a profiler makes gaps longer
        found = table(trace(work, times=3), times=3)
        bench.add(f"breakdown, {name}", plain, breakdown=found)
        print(f"    profiled {found['whole_us']:.0f} us: kernels {found['busy_us']:.0f}, gaps {found['gap_us']:.0f}")
        for kernel, row in list(found["kernels"].items())[:SHOWN]:
            each = row["us"] / row["count"]
            print(f"    {row['count']:6.0f} x {each:8.2f} = {row['us']:8.0f} us, gaps {row['gap_us']:6.0f}  {kernel}")
