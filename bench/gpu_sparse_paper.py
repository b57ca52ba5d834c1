"""The paper's sparse verification (arXiv 2512.21911, `sparse calibrate --preset paper`) at 32B/1.5B shapes.

Part of bench/gpu.py (`--only paper`). A round is a roll of the draft and a check of its tokens by the target, at two
lengths of context; beside times are operations and bytes by sparse_fit/cost.py, over the dense ones. Weights are noise:
of their activations few are below a threshold for all tokens of a draft, so channels save nothing here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from semspec.model import ModelRunner
from semspec.sparse import AttentionPlan, FfnPlan, SparsePlan, apply
from semspec.sparse_fit.cost import cost
from semspec.sparse_fit.observe import Observer
from semspec.sparse_fit.presets import config
from semspec.types import Score

if TYPE_CHECKING:
    from bench.gpu import Bench

TOKENS = 16  # of a check: a draft of 15, and the token before it
SLOW = 5  # repeats of what runs one operation at a time


def plans(runner: ModelRunner, below: int) -> dict[str, SparsePlan | None]:
    """The strict preset in parts and whole, L0 in the paper's series, and our default beside it."""
    strict, ours = config("paper", dense_below=below), config("default", dense_below=below // 4)
    assert strict.attention is not None and ours.attention is not None
    depth, attention = runner.num_layers, strict.attention
    few = tuple(sorted({*range(min(strict.shallow, depth)), *range(strict.shallow, depth, 4)}))
    network = FfnPlan(torch.full((depth,), strict.ffn_threshold), "union", absolute=strict.ffn_threshold)
    seen = channels(runner, network)
    network = replace(network, sparsity=max(float(seen["token_share"].mean()), 1e-9))
    found: dict[str, SparsePlan | None] = {"dense": None}
    for part in (1, 2, 4):
        one = replace(attention, dense_below=below // part)
        found[f"paper, attention, L0 {one.dense_below}"] = SparsePlan(attention=one)
    found["paper, attention*"] = SparsePlan(attention=replace(attention, anchors=few))
    found["paper, channels by union"] = SparsePlan(ffn=network, seen=seen)
    found["paper, attention* and channels by union"] = SparsePlan(
        attention=replace(attention, anchors=few), ffn=network, seen=seen
    )
    found["paper, strict (channels by token)"] = SparsePlan(
        attention=replace(attention, anchors=few), ffn=replace(network, by="token"), seen=seen
    )
    found["ours, default"] = SparsePlan(attention=replace(ours.attention, anchors=few))
    return found


def channels(runner: ModelRunner, network: FfnPlan) -> dict[str, torch.Tensor]:
    """Shares of channels below the threshold, of a token and of all tokens of a pass; one dense pass is watched."""
    observer = Observer(runner, AttentionPlan(block=64, dense_below=1 << 30))
    runner.sparsity = observer
    runner.cache.pretend(0, 64)
    runner.score([Score(runner, 0, list(range(1, TOKENS + 1)), TOKENS)])
    runner.sparsity = None
    seen = observer.observations
    return {
        "token_share": seen.token_share(network.thresholds),
        "union_share": seen.union_share(network.thresholds).nan_to_num(0.0),
    }


def paper(bench: Bench) -> None:
    longest = bench.asked.long
    draft = bench.runner("draft", 1, longest + 64)
    rolls = {context: bench.roll_at(draft, context, TOKENS - 1) for context in (longest, longest // 4)}
    bench.drop("draft")
    runner = bench.runner("target", 1, longest + 64)
    for context, roll in rolls.items():
        bench.add(f"1.5B draft of {TOKENS - 1} at {context}", roll, context=context)
        start = context - TOKENS
        dense = cost(runner.shape, None, start, TOKENS, bench.dtype.itemsize)
        for name, plan in plans(runner, min(4096, longest // 16)).items():
            apply(plan, runner)
            slow = plan is not None and plan.ffn is not None and plan.ffn.by == "token"
            ms = bench.score_at(runner, context, TOKENS, repeats=SLOW if slow else None)
            spent = cost(runner.shape, plan, start, TOKENS, bench.dtype.itemsize)
            ratios = spent.over(dense)
            more = {"context": context, "plan": name, "flops": sum(spent.flops.values()), "ratios": ratios}
            bench.add(f"32B check at {context}, {name}", ms, sum(spent.bytes.values()), **more, round_ms=roll + ms)
            print(f"    FLOPs {ratios['flops']:.3f}, bytes {ratios['bytes']:.3f} of dense; a round {roll + ms:.2f} ms")
            apply(None, runner)
