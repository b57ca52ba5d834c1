"""Section `one_token` of bench/gpu.py: a token in one launch beside a launch for each operation, in turns, and how its
work should be shared out. Write what wins into `OneTokenConfig.of`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.gpu_quantised import SMALL_VOCAB
from semspec.model import ModelRunner
from semspec.model.graph_runner import GraphRunner
from semspec.model.graphs import GraphCache
from semspec.model.kernels import DEFAULT_FLAGS, triton_kernels
from semspec.model.one_token import OneToken

if TYPE_CHECKING:
    from bench.gpu_sections import Bench

CUTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "10 tiles on their way": {"stages": 10},
    "tiles of 32 kB": {"depth": 1024},
}
MODELS: dict[str, tuple[str, str, bool]] = {  # shapes, how weights are stored, whether the head is small
    "1.5B bf16": ("32B/1.5B", "plain", False),
    "1.5B fp8, head of 32k": ("32B/1.5B", "fp8", True),
    "8B fp8": ("70B/8B", "fp8", False),
}


def one_token(bench: Bench) -> None:
    bench.drop("target", "draft")
    shape = bench.asked.shape
    for name, (bench.asked.shape, weights, small) in MODELS.items():
        bench.precisions["draft"] = weights  # type: ignore[assignment]
        bench.vocab.update({"draft": SMALL_VOCAB} if small else {})
        turns(bench, name, 3 if name.startswith("8B") else 0)
        bench.drop("draft")
        bench.vocab.clear()
        bench.precisions.clear()
    bench.asked.shape = shape


def turns(bench: Bench, name: str, cuts: int) -> None:
    context = bench.asked.context
    runner = bench.runner("draft", 1, context + 128)
    read = bench.weights("draft") + bench.kv("draft", context)
    arms: dict[str, GraphRunner] = {"a launch for each operation": made(runner, None)}
    assert runner.graph_runner is not None
    for told, change in list(CUTS.items())[: cuts or None]:
        arms[told] = made(runner, change)
    times: dict[str, list[float]] = {}
    for _ in range(3):
        for told, graph_runner in arms.items():
            if graph_runner is None:
                continue
            runner.use(graph_runner)
            try:
                short, long = (bench.roll_at(runner, context, n) for n in (8, 72))
            except Exception as failure:  # a cut that does not fit: the others are worth knowing
                print(f"    {told}: {type(failure).__name__}: {str(failure)[:200]}", flush=True)
                arms[told] = None  # type: ignore[assignment]
                continue
            times.setdefault(told, []).append((long - short) / 64)
    for told, taken in times.items():
        bench.add(f"{name} token, {told}", sorted(taken)[len(taken) // 2], read)


def made(runner: ModelRunner, change: dict[str, Any] | None) -> GraphRunner:
    flags = replace(DEFAULT_FLAGS, one_token=change is not None)
    graph_runner = GraphRunner(
        runner.transformer, runner.cache, triton_kernels(), GraphCache(runner.transformer.device), flags
    )
    if change is not None:  # also for models that would be left to other kernels
        whole = OneToken(runner.transformer, runner.cache, graph_runner.kernels)
        graph_runner.fused.one_token = OneToken(
            runner.transformer, runner.cache, graph_runner.kernels, replace(whole.cut, **change)
        )
    return graph_runner
