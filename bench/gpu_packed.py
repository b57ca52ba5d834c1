"""Section `packed` of bench/gpu.py: the tokens of a tick in one row against rectangles, in turns, over one cache.

Equal checks must be no slower than rectangles, and mixed ticks faster; then `KernelFlags.packed` should be the default.
Whole rounds with it: `bench/gpu.py --only bars --flags packed=1`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bench.gpu_arms import Arm, GemmPaths, in_turns
from semspec.model import ModelRunner
from semspec.model.buckets import BATCHES, MAX_QUERIES, QUERIES, bucket, passes
from semspec.model.graph_runner import GraphRunner
from semspec.model.graphs import NoGraphs
from semspec.model.kernels import DEFAULT_FLAGS, reference_kernels
from semspec.model.packed_rows import ROWS, packed_passes
from semspec.types import Score

if TYPE_CHECKING:
    from bench.gpu_sections import Bench

ARMS = {"rectangles": Arm(replace(DEFAULT_FLAGS, packed=False)), "packed": Arm(replace(DEFAULT_FLAGS, packed=True))}
# Tokens of each sequence, and milliseconds that were predicted for an H200 at 32B and context 2,048, in both ways.
TICKS: dict[str, tuple[list[int], tuple[float, float] | None]] = {
    "1 check": ([9], (16.6, 16.6)),
    "8 checks": ([9] * 8, (19.5, 19.5)),
    "32 checks": ([9] * 32, (33.1, 33.1)),
    "64 checks": ([9] * 64, (63.2, 63.2)),
    "7 tokens and a tail of 60": ([1] * 7 + [60], (36.0, 20.0)),
    "33 checks": ([9] * 33, (50.0, 36.0)),
    "32 checks and a piece of 512": ([9] * 32 + [512], (106.0, 97.0)),
    "16 checks, 8 of 5, 40 tokens": ([9] * 16 + [5] * 8 + [1] * 40, None),
}
SLOWER = 1.01  # that equal checks may be: a repeated measurement differs by as much


def rows_of(lengths: list[int], packed: bool) -> tuple[int, int]:
    """Rows that a tick computes, padding included, and passes that read the weights for it."""
    if packed:
        groups = packed_passes(lengths)
        return sum(bucket(sum(lengths[i] for i in group), ROWS) for group in groups), len(groups)
    short = [n for n in lengths if n <= MAX_QUERIES]
    groups, long = passes(short), [n for n in lengths if n > MAX_QUERIES]
    rows = sum(bucket(len(g), BATCHES) * bucket(max(short[i] for i in g), QUERIES) for g in groups)
    return rows + sum(long), len(groups) + bool(long)


def prepared(ways: GemmPaths, arm: Arm) -> ModelRunner:
    runner = ways.by(arm)
    if runner.graph_runner is None:  # on a CPU, only to see it run
        runner.use(GraphRunner(runner.transformer, runner.cache, reference_kernels(), NoGraphs(), arm.choices))
        ways.made[arm] = runner.graph_runner, runner.graph_decode
    return runner


def packed(bench: Bench) -> None:
    bench.drop("draft")
    context, told = bench.asked.context, {arm: name for name, arm in ARMS.items()}
    most = max(len(lengths) for lengths, _ in TICKS.values())
    ways = GemmPaths(bench, "target", most, context + 16)
    for name, (wanted, predicted) in TICKS.items():
        lengths = [min(n, context // 2) for n in wanted]

        def tick(runner: ModelRunner, lengths: list[int] = lengths) -> list[Score]:
            for slot, n in enumerate(lengths):
                runner.cache.pretend(slot, context - n)
            # Of a prompt only the last token's logits are wanted.
            return [Score(runner, slot, list(range(1, n + 1)), 1 if n > 17 else n) for slot, n in enumerate(lengths)]

        def measure(arm: Arm) -> float:
            runner = prepared(ways, arm)
            return bench.ms(lambda: runner.score(tick(runner)), repeats=5, warm=1)

        first = [runner.score(tick(runner)) for runner in (prepared(ways, arm) for arm in ARMS.values())]
        off = max(
            float((ours.logits.float() - theirs.logits.float()).norm() / theirs.logits.float().norm())
            for theirs, ours in zip(*first, strict=True)
        )
        # Rounding is some 0.05 of noise weights' logits, unrelated ones are 1.4 apart.
        assert off < 0.7, f"{name}: packed logits are off by {off:.2f} of their size"
        times = in_turns({arm: (lambda arm=arm: measure(arm)) for arm in ARMS.values()})  # type: ignore[misc]
        read = bench.weights("target") + bench.kv("target", context) * len(lengths)
        for arm, ms in times.items():
            rows, reads = rows_of(lengths, arm.choices.packed)
            guess = None if predicted is None else predicted[arm.choices.packed]
            more = {"rows": rows, "passes": reads, "tokens": sum(lengths), "predicted_ms": guess}
            bench.add(f"packed: {name}, {told[arm]}", ms, read, **more, off=off)
        if len(times) == 2:
            flat, one = (times[arm] for arm in ARMS.values())
            bar = SLOWER if len(set(lengths)) == 1 and len(passes(lengths)) == 1 else 1.0
            verdict = "reached" if one <= bar * flat else "MISSED"
            bench.rows[-1] |= {"ratio_to_rectangles": one / flat, "verdict": verdict}
            print(f"    packed {one / flat:.3f} of rectangles, at most {bar:g}: {verdict}", flush=True)
