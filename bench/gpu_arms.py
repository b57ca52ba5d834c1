"""Which of several ways is fastest here: `bench/gpu.py --only arms,long_arms`.

An arm is a `KernelFlags`, and perhaps a cut of attention other than `Tiles.of` makes. Arms are interleaved, so that
whatever else the machine does affects all alike; the sections that come after use the winners.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from semspec.model import ModelRunner
from semspec.model.fused_forward import covers
from semspec.model.graph_decode import GraphDecode
from semspec.model.graph_runner import GraphRunner
from semspec.model.graphs import GraphCache
from semspec.model.kernels import DEFAULT_FLAGS, KernelFlags, Kernels, triton_kernels
from semspec.types import Decode, Sampling, Score

if TYPE_CHECKING:
    from bench.gpu import Bench


@dataclass(frozen=True, slots=True)
class Arm:
    choices: KernelFlags = DEFAULT_FLAGS
    tiles: tuple[int, int, int, int, int] | None = None  # rows, keys, splits, warps, stages
    queries: int = 1  # of one sequence; other passes are cut as ever


DRAFT = [
    Arm(),
    Arm(replace(DEFAULT_FLAGS, skinny_gemm_bytes=0)),
    Arm(replace(DEFAULT_FLAGS, fused_activation=False)),
    Arm(replace(DEFAULT_FLAGS, fused_rope=False)),
    Arm(DEFAULT_FLAGS, (16, 64, 32, 4, 3)),  # half as many splits, which are half as much to join
]
TARGET = [  # 45 rows of one key head, in a tile of 64
    Arm(),
    Arm(DEFAULT_FLAGS, (64, 64, 32, 4, 3), 9),
    Arm(DEFAULT_FLAGS, (64, 128, 16, 4, 3), 9),  # what long caches have
]
LONG = [  # 64 rows of one key head
    Arm(),
    Arm(DEFAULT_FLAGS, (64, 64, 16, 4, 3), 16),  # what short caches have
    Arm(DEFAULT_FLAGS, (64, 64, 32, 4, 3), 16),  # two programs a processor: one reads while the other reckons
    Arm(DEFAULT_FLAGS, (64, 64, 16, 4, 5), 16),  # more on its way
]
ROUNDS = 4


def parse(text: str) -> KernelFlags:
    """From "fused_rope=0,skinny_gemm_bytes=0", say; nothing means the defaults."""
    chosen, kinds = DEFAULT_FLAGS, {f.name: type(getattr(DEFAULT_FLAGS, f.name)) for f in fields(KernelFlags)}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in kinds or not value.isdecimal():
            raise ValueError(f"{part!r} is no choice; there are {', '.join(f'{name}=NUMBER' for name in kinds)}")
        chosen = replace(chosen, **{name: kinds[name](int(value))})
    return chosen


def told(choices: KernelFlags) -> str:
    on = [f.name for f in fields(KernelFlags) if getattr(choices, f.name) is True]
    products = {0: "cuBLAS", DEFAULT_FLAGS.skinny_gemm_bytes: "ours if small"}.get(choices.skinny_gemm_bytes, "ours")
    return "+".join([products, *on])


def told_arm(arm: Arm) -> str:
    if arm.tiles is None:
        return told(arm.choices)
    _, keys, splits, warps, stages = arm.tiles
    return f"{told(arm.choices)}, {splits} splits, {stages} x {keys} keys, {warps} warps"


def kernels(arm: Arm) -> Kernels:
    made = triton_kernels()
    if arm.tiles is None:
        return made
    from semspec.model.kernels.tiles import Tiles

    tiles = Tiles(*arm.tiles)

    def cut(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def launch(q: Tensor, *rest: Any, **options: Any) -> Tensor:
            return kernel(q, *rest, **options, **({"tiles": tiles} if q.shape[:2] == (1, arm.queries) else {}))

        return launch

    return replace(made, attend=cut(made.attend), rope_cache_attend=cut(made.rope_cache_attend))


def fast(runner: ModelRunner, arm: Arm) -> GraphRunner | None:
    """As `GraphRunner.of` would make it, but for the tiles."""
    transformer = runner.transformer
    if transformer.device.type != "cuda" or not covers(transformer.shape):
        return None
    return GraphRunner(transformer, runner.cache, kernels(arm), GraphCache(transformer.device), arm.choices)


def in_turns(arms: dict[Arm, Callable[[], float]]) -> dict[Arm, float]:
    """Medians of what each measures, one round after the other. An arm that fails is told and left out."""
    taken: dict[Arm, list[float]] = {arm: [] for arm in arms}
    for round in range(ROUNDS + 1):  # the first makes graphs
        for arm, measure in arms.items():
            if arm not in taken:
                continue
            try:
                ms = measure()
            except Exception as failure:
                print(f"    {told_arm(arm)}: {type(failure).__name__}: {str(failure)[:200]}", flush=True)
                del taken[arm]
                continue
            if round:
                taken[arm].append(ms)
    return {arm: statistics.median(times) for arm, times in taken.items()}


def compare(bench: Bench, which: str, what: str, arms: list[Arm], measure: Callable[[Arm], float]) -> None:
    """`measure(arm)` gives milliseconds."""
    times = in_turns({arm: (lambda arm=arm: measure(arm)) for arm in arms})  # type: ignore[misc]
    for arm, ms in times.items():
        bench.add(f"{what}: {told_arm(arm)}", ms)
    if times:
        bench.arms[which] = best = min(times, key=lambda arm: times[arm])
        print(f"    from here on {which}: {told_arm(best)}", flush=True)


class GemmPaths:
    """One model and one cache, with the graphs of every way."""

    def __init__(self, bench: Bench, which: str, slots: int, capacity: int) -> None:
        self.runner = bench.runner(which, slots, capacity)
        self.made: dict[Arm, tuple[GraphRunner | None, GraphDecode | None]] = {}

    def by(self, arm: Arm) -> ModelRunner:
        runner = self.runner
        if arm not in self.made:
            runner.use(fast(runner, arm))
            self.made[arm] = runner.graph_runner, runner.graph_decode
        runner.graph_runner, runner.graph_decode = self.made[arm]  # both: graphs know the addresses of either's buffers
        return runner


def draft_arms(bench: Bench) -> None:
    context = bench.asked.context
    ways = GemmPaths(bench, "draft", 1, context + 128)
    exact: list[torch.Tensor] = []

    def token(arm: Arm) -> float:
        runner = ways.by(arm)

        def roll(n: int) -> None:
            runner.cache.pretend(0, context)
            runner.decode([Decode(runner, 0, [3], n, Sampling(), 0)])

        if bench.device.type == "cuda":
            same(runner)
        short, long = (bench.ms(lambda n=n: roll(n), repeats=3, warm=1) for n in (8, 72))  # type: ignore[misc]
        return (long - short) / 64

    def same(runner: ModelRunner) -> None:
        """A way that gives other logits is not faster but wrong."""
        runner.cache.pretend(0, context)
        rolled = runner.decode([Decode(runner, 0, [3], 1, Sampling(), 0, keep_logits=True)])[0].logits
        assert rolled is not None
        exact.append(rolled[0].float())
        off = float((exact[-1] - exact[0]).norm() / exact[0].norm())
        assert off < 0.7, f"logits are off by {off:.2f} of their size"  # unrelated ones by 1.4; rounding by some 0.05
        del exact[1:]

    compare(bench, "draft", "draft token", DRAFT, token)


def pass_arms(bench: Bench, which: str, context: int, tokens: int, what: str, arms: list[Arm]) -> None:
    ways = GemmPaths(bench, which, 1, context + 32)

    def measure(arm: Arm) -> float:
        runner = ways.by(arm)

        def score() -> None:
            runner.cache.pretend(0, context - tokens)
            runner.score([Score(runner, 0, list(range(1, tokens + 1)), tokens)])

        return bench.ms(score, repeats=5, warm=1)

    compare(bench, which, what, arms, measure)


def all_arms(bench: Bench) -> None:
    draft_arms(bench)
    pass_arms(bench, "target", bench.asked.context, 9, "target pass of 9 tokens", TARGET)


def long_arms(bench: Bench) -> None:
    bench.drop("target", "draft")
    pass_arms(bench, "8B", bench.asked.longest, 16, "8B pass of 16 tokens, longest context", LONG)
