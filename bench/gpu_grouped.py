"""What checks cost when experts or channels are left out, against dense ones: `bench/gpu.py --only experts,ffn`.

Weights are noise: only times mean anything here. Arms are measured in turns. How a kernel is cut is tried first, and
what is fastest is used. The limit counts what is really read: experts that somebody chose, channels somebody needs.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.gpu_tune import graphed
from semspec.model import ModelRunner
from semspec.model.config import Shape
from semspec.model.experts import Experts, FeedForward, ratios, route, skip
from semspec.model.fused_forward import FusedForward
from semspec.model.graph_runner import GraphRunner
from semspec.model.graphs import NoGraphs
from semspec.model.kernels import Kernels, reference_kernels
from semspec.model.layer_ops import SparsityInputs
from semspec.model.transformer import Transformer
from semspec.sparse import ExpertsPlan, SparsePlan, apply

if TYPE_CHECKING:
    from bench.gpu import Bench

TOKENS, SKIPPED = 16, 3
ROUNDS = 5
SIZES = (2, 4, 9, 33, 64)  # of other checks
RATIOS = {  # of the dense time, that must be reached
    "30B-A3B check of 16 tokens, 3 of 8 skipped": 0.83,
    "32B feed-forward of 16 tokens, 64 % of the union inactive": 0.75,
}


def in_turns(bench: Bench, arms: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median milliseconds of each, one round after the other; the first round, which makes graphs, is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for round in range(ROUNDS + 1):
        for name, work in arms.items():
            ms = bench.ms(work, repeats=3, warm=1)
            if round:
                taken[name].append(ms)
    return {name: statistics.median(times) for name, times in taken.items()}


def tell(bench: Bench, what: str, ms: float, dense: float, read: float, all_read: float, **more: Any) -> None:
    """A sparse arm: its time, and both ratios to the dense one."""
    bar, time, byte = RATIOS.get(what), ms / dense, read / all_read
    bench.add(what, ms, read, ratio=time, byte_ratio=byte, bar_ratio=bar, **more)
    verdict = "" if bar is None else f", must be {bar}: {'reached' if time <= bar else 'MISSED'}"
    print(f"    {time:.3f} of the dense time, {byte:.3f} of its bytes{verdict}", flush=True)


def best_cuts(bench: Bench, what: str, module: Any, launch: Callable[[Any], None], options: Sequence[Any]) -> Any:
    """The fastest pair of cuts, the first of two kernels changed before the second; `launch(cuts)` launches both."""
    best = list(module.CUTS)
    times = {}
    for which in (0, 1):
        for cut in (best[which], *(c for c in options[which] if c != best[which])):
            pair = (cut, best[1]) if which == 0 else (best[0], cut)
            if pair not in times:
                times[pair] = graphed(bench, partial(launch, pair), cut)
        fastest = min(times, key=lambda pair: times[pair])
        best[which] = fastest[which]
    bench.add(f"{what}, as it is cut", times[module.CUTS], cuts=str(module.CUTS))
    bench.add(f"{what}, as cut best", times[tuple(best)], cuts=str(tuple(best)))
    for pair, ms in times.items():
        print(f"    {ms:9.3f}  {pair}", flush=True)
    return tuple(best)


# -- experts


@dataclass
class Seen:
    """What the routers of one pass did."""

    distinct: list[int]  # experts that were read, by layer
    ratios: list[Tensor]  # [tokens, chosen - 1], by layer


def watched(runner: ModelRunner, score: Callable[[], Any]) -> Seen:
    """One pass without a graph, looking at every mixture."""
    fast, seen = runner.graph_runner, Seen([], [])
    assert fast is not None
    kernels, launcher = fast.fused.kernels, fast.launcher

    def fused_moe(
            x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, activation: str, chosen: int, renormalise: bool,
            counts: Tensor, skipping: tuple[Tensor, int, Tensor] | None = None) -> Tensor:  # fmt: skip
        weights, index = route((logits.sum(0) if logits.dim() == 3 else logits).float(), chosen, renormalise)
        inside = (torch.arange(len(x) // len(counts), device=x.device) < counts[:, None]).flatten()
        seen.ratios.append(ratios(weights[inside]))
        if skipping is not None:
            weights, index = skip(weights, index, skipping[0], skipping[1], inside, renormalise)
        used = index[inside].unique()
        seen.distinct.append(int((used >= 0).sum()))
        return kernels.fused_moe(x, logits, gate_up, down, activation, chosen, renormalise, counts, skipping)

    fast.fused.kernels, fast.launcher = replace(kernels, fused_moe=fused_moe), NoGraphs()
    try:
        score()
    finally:
        fast.fused.kernels, fast.launcher = kernels, launcher
    return seen


def experts(bench: Bench) -> None:
    runner = bench.runner("mixture", 1, bench.asked.context + 128)
    if runner.graph_runner is None:
        runner.use(GraphRunner(runner.transformer, runner.cache, reference_kernels(), NoGraphs()))
    shape, context = runner.shape, bench.asked.context
    assert shape.mixture is not None and runner.graph_runner is not None
    chosen = shape.mixture.chosen
    skipped = min(SKIPPED, chosen - 1)
    expert = 3 * shape.width * shape.mixture.ffn * bench.dtype.itemsize
    layers = [layer for layer in runner.transformer.layers if isinstance(layer.ffn, Experts)]
    rest = bench.weights("mixture") - len(layers) * shape.mixture.experts * expert + bench.kv("mixture", context)
    if bench.device.type == "cuda":
        tune_experts(bench, runner)

    def score(sparsity: Any, tokens: int = TOKENS) -> None:
        runner.sparsity = sparsity
        runner.cache.pretend(0, context - tokens)
        bench.score_once(runner, tokens)

    def made(betas: Tensor, most: int) -> Any:
        apply(SparsePlan(experts=ExpertsPlan(betas, most)), runner)
        return runner.sparsity

    depth, name = shape.num_layers, f"30B-A3B check of {TOKENS} tokens"
    natural = watched(runner, lambda: score(None))
    medians = torch.zeros(depth, chosen - 1)
    mixtures = [i for i, layer in enumerate(runner.transformer.layers) if isinstance(layer.ffn, Experts)]
    medians[mixtures] = torch.stack([r.float().median(0).values.cpu() for r in natural.ratios])
    arms = {
        "dense": None,
        f"{skipped} of {chosen} skipped": made(torch.full((depth, chosen - 1), 1e9), skipped),
        "calibrated rule": made(medians, skipped),
    }
    times = in_turns(bench, {arm: partial(score, sparsity) for arm, sparsity in arms.items()})
    read = {arm: rest + sum(watched(runner, partial(score, s)).distinct) * expert for arm, s in arms.items()}
    bench.add(f"{name}, dense", times["dense"], read["dense"], distinct=statistics.mean(natural.distinct))
    for arm in list(arms)[1:]:
        distinct = (read[arm] - rest) / expert / len(layers)
        tell(bench, f"{name}, {arm}", times[arm], times["dense"], read[arm], read["dense"], distinct=distinct)
    off = times["calibrated rule"] / times["dense"] / (read["calibrated rule"] / read["dense"])
    print(f"    the calibrated rule takes {off:.3f} of what its bytes say (at most 1.05 is wanted)", flush=True)
    for tokens in SIZES:
        some = {arm: partial(score, s, tokens) for arm, s in list(arms.items())[:2]}
        found = in_turns(bench, some)
        dense, few = (rest + sum(watched(runner, work).distinct) * expert for work in some.values())
        bench.add(f"30B-A3B check of {tokens} tokens, dense", found["dense"], dense)
        arm = list(arms)[1]
        tell(bench, f"30B-A3B check of {tokens} tokens, {arm}", found[arm], found["dense"], few, dense)
    runner.sparsity, runner.graph_runner = None, None
    bench.add(f"{name}, dense, one operation at a time", bench.ms(partial(score, None), repeats=2, warm=1))


def tune_experts(bench: Bench, runner: ModelRunner) -> None:
    from semspec.model.kernels import moe as module

    fast, shape = runner.graph_runner, runner.shape
    assert fast is not None and shape.mixture is not None
    x = torch.randn(TOKENS, shape.width, device=bench.device, dtype=bench.dtype)
    counts = torch.tensor([TOKENS], device=bench.device)
    mixtures = [layer.ffn for layer in runner.transformer.layers if isinstance(layer.ffn, Experts)]
    scores = torch.randn(len(mixtures), TOKENS, shape.mixture.experts, device=bench.device)
    kernels = fast.fused.kernels

    def launch(cuts: Any) -> None:
        for mixture, logits in zip(mixtures, scores, strict=True):
            rest = (shape.activation, mixture.chosen, mixture.renormalise, counts)
            kernels.fused_moe(x, logits, mixture.gate_up, mixture.down, *rest, cuts=cuts)

    cut = module.Cut
    options = (
        [cut(32, 64, 4), cut(32, 128, 4), cut(16, 128, 5), cut(64, 64, 4)],
        [cut(64, 64, 4), cut(64, 128, 3), cut(32, 128, 4), cut(128, 64, 4)],
    )
    best = best_cuts(bench, "all experts' layers", module, launch, options)
    fast.fused.kernels = replace(kernels, fused_moe=partial(kernels.fused_moe, cuts=best))


# -- channels

GROUPS = (0.20, 0.36, 0.50, 0.64, 0.84, 1.0)  # channels that matter at each of the thresholds
STEP = 1e-3  # by how much each group's gates are smaller than those of the group before


class Networks:
    """Feed-forward networks of a shape, as a pass runs them: with the norm in front, which adds up what came before.

    Every layer's gates are planted in groups, so that a threshold says exactly how many channels are needed."""

    def __init__(self, bench: Bench, layers: int) -> None:
        from semspec.bench.shapes import RandomWeights

        config = copy.deepcopy(bench.config("target"))
        config.num_hidden_layers, config.layer_types = layers, None
        self.bench, self.shape = bench, Shape.of(config)
        device, dtype = bench.device, bench.dtype
        self.transformer = Transformer(self.shape, RandomWeights(), device, dtype)
        self.runner = ModelRunner(self.transformer, 1, 64)
        kernels: Kernels = self.runner.graph_runner.kernels if self.runner.graph_runner else reference_kernels()
        self.fused = FusedForward(self.transformer, self.runner.cache, kernels, bench.asked.choices)
        order = torch.randperm(self.shape.ffn, device=device)
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(self.shape.ffn, device=device))
        edges = torch.tensor(GROUPS[:-1], device=device) * self.shape.ffn
        self.scale = STEP ** torch.bucketize(rank.float(), edges, right=True).float()  # [channels]
        self.columns: list[Tensor | None] = []
        for layer in self.transformer.layers:
            assert isinstance(layer.ffn, FeedForward)
            gates, _ = layer.ffn.gate_up.halves  # type: ignore[union-attr]
            gates.weight.mul_(self.scale[:, None].to(dtype))
            self.columns.append(layer.ffn.transposed_down())
        self.x = torch.randn(TOKENS, self.shape.width, device=device, dtype=dtype)
        self.counts, self.marks = (torch.tensor([n], device=device) for n in (TOKENS, 1))

    def run(self, threshold: float) -> Tensor:
        """All layers, one after the other; a threshold of 0 reads everything."""
        fewer = None
        if threshold:
            fewer = SparsityInputs(self.marks, thresholds=[threshold] * self.shape.num_layers, columns=self.columns)
        x, added = self.x.clone(), self.x.clone()
        for i, layer in enumerate(self.transformer.layers):
            added = self.fused._feed(i, layer, x, added, self.counts, fewer)
        return self.fused.kernels.add_norm(x, added, self.transformer.final_norm, self.shape.norm_eps)

    def gates(self, layer: int) -> Tensor:
        """|activations| [tokens, channels] of one layer for the first input."""
        ffn = self.transformer.layers[layer].ffn
        assert isinstance(ffn, FeedForward)
        normed = torch.nn.functional.rms_norm(self.x, (self.shape.width,))
        return ffn.activate(ffn.gate_up.halves[0](normed)).float().abs()  # type: ignore[union-attr]


def ffn(bench: Bench) -> None:
    bench.drop("target", "draft", "mixture")
    networks = Networks(bench, layers=8 if bench.device.type == "cuda" else 2)
    shape, depth = networks.shape, networks.shape.num_layers
    matrix = shape.width * shape.ffn * bench.dtype.itemsize
    if bench.device.type == "cuda":
        tune_channels(bench, networks)
    name = f"32B feed-forward of {TOKENS} tokens"
    # At most a third of a group's smallest activation in 16 tokens, and many times the next group's largest.
    thresholds = {1 - share: 0.02 * STEP**i for i, share in enumerate(GROUPS)}
    arms: dict[str, Callable[[], Any]] = {"dense": captured(bench, partial(networks.run, 0.0))}
    for inactive, threshold in thresholds.items():
        arms[f"{inactive:.0%} of the union inactive".replace("%", " %")] = captured(
            bench, partial(networks.run, threshold)
        )
    times = in_turns(bench, arms)
    bench.add(f"{name}, dense", times["dense"] / depth, 3 * matrix)
    gates = networks.gates(0)
    for (arm, ms), threshold in zip(list(times.items())[1:], thresholds.values(), strict=True):
        union = float((gates >= threshold).any(0).float().mean())
        read = matrix * (1 + 2 * union)
        tell(bench, f"{name}, {arm}", ms / depth, times["dense"] / depth, read, 3 * matrix, union=union)
    plain = gates / networks.scale  # about what gates that nobody planted would have given
    for share in (0.5, 0.64, 0.8, 0.9, 0.95):
        threshold = float(plain.flatten().quantile(share))
        left = 1 - float((plain >= threshold).any(0).float().mean())
        what = f"noise, {share:.0%} of a token's channels: its union of {TOKENS} leaves out"
        bench.rows.append({"what": what, "ms": 0.0, "limit_ms": 0.0, "bar_ms": None, "left_out": left})
        print(f"    {what} {left:.1%}", flush=True)


def captured(bench: Bench, work: Callable[[], Any]) -> Callable[[], Any]:
    if bench.device.type != "cuda":
        return work
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def tune_channels(bench: Bench, networks: Networks) -> None:
    from semspec.model.kernels import sparse_mlp as module

    kernels = networks.fused.kernels

    def launch(cuts: Any) -> None:
        networks.fused.kernels = replace(kernels, sparse_mlp=partial(kernels.sparse_mlp, cuts=cuts))
        networks.run(0.02 * STEP)

    cut = module.Cut
    options = (
        [cut(32, 128, 6), cut(16, 256, 4), cut(64, 64, 6), cut(32, 256, 4)],
        [cut(64, 64, 6), cut(64, 128, 4), cut(128, 32, 6), cut(128, 64, 4)],
    )
    launch(best_cuts(bench, "eight thin networks", module, launch, options))
