"""What checking a draft costs with blocks of the cache left out, against dense checks, over lengths of context.

Part of bench/gpu.py (`--only sparse`). Weights and cache are noise: only times mean anything here. The limit counts the
weights, the blocks that are read, the mean keys that they are chosen by, and the means of others where these are seen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from bench.gpu_tune import graphed
from semspec.sparse import AttentionPlan, SparsePlan, apply
from semspec.sparse.layer_ops import PlanSparsity

if TYPE_CHECKING:
    from bench.gpu import Bench

TOKENS = 16
L0, RHO, BLOCK = 4096, 0.1, 64


def plans(depth: int, longest: int) -> dict[str, AttentionPlan | None]:
    below = min(L0, longest // 32)
    few = tuple(sorted({*range(min(4, depth)), *range(4, depth, 4)}))
    return {
        "dense": None,
        "sparse, paper's score": AttentionPlan(BLOCK, below, RHO, score="first"),
        "sparse, share": AttentionPlan(BLOCK, below, RHO),
        "sparse, share, anchors": AttentionPlan(BLOCK, below, RHO, anchors=few),
        "sparse, share, equal heads": AttentionPlan(BLOCK, below, RHO, spread="heads"),
        "sparse, share, anchors, equal heads": AttentionPlan(BLOCK, below, RHO, spread="heads", anchors=few),
        "sparse, share, means": AttentionPlan(BLOCK, below, RHO, rest="mean"),
        "sparse, reach": AttentionPlan(BLOCK, below, RHO, score="reach"),
        "sparse, reach, anchors, equal heads, means": AttentionPlan(
            BLOCK, below, RHO, score="reach", spread="heads", anchors=few, rest="mean"
        ),
        "sparse, share, anchors, equal heads, means": AttentionPlan(
            BLOCK, below, RHO, spread="heads", anchors=few, rest="mean"
        ),
    }


def sparse(bench: Bench) -> None:
    """Dense and sparse at the longest context and at shorter ones: where does it begin to pay?"""
    longest = bench.asked.longest
    runner = bench.runner("8B", 1, longest + 32)
    heads = runner.shape.kv_heads
    for context in [longest] + [longest >> i for i in range(1, 6)]:
        for name, plan in plans(runner.num_layers, longest).items():
            apply(None if plan is None else SparsePlan(attention=plan), runner)
            ms = bench.score_at(runner, context, TOKENS)
            read = bench.weights("8B") + bench.kv("8B", context)
            if plan is not None:
                start = context - TOKENS
                share = plan.pairs(start, heads) / max(start // plan.block * heads, 1)
                chosen = len(plan.anchors or range(runner.num_layers)) / runner.num_layers
                summaries = 2 if plan.score == "reach" else 1
                means = summaries * chosen / (2 * plan.block) + (
                    1 / plan.block if plan.rest == "mean" and share < 1 else 0
                )
                read = bench.weights("8B") + bench.kv("8B", context) * (share + means)
            bench.add(f"8B check at {context}, {name}", ms, read, context=context)
    if bench.device.type == "cuda":
        choosing(bench, longest)
    apply(None, runner)


def choosing(bench: Bench, context: int) -> None:
    """The choice alone, of all layers in one graph: microseconds of one, by kernels and one operation at a time."""
    runner = bench.runner("8B", 1, context + 32)
    assert runner.graph_runner is not None
    shape, device = runner.shape, bench.device
    q = torch.randn(1, TOKENS, shape.heads, shape.head_dim, device=device, dtype=bench.dtype)
    where = [torch.tensor([n], device=device) for n in (0, context - TOKENS, TOKENS)]
    for name, plan in plans(runner.num_layers, context).items():
        if plan is None or plan.anchors:
            continue
        apply(SparsePlan(attention=plan), runner)
        sparsity = runner.sparsity
        assert isinstance(sparsity, PlanSparsity) and sparsity.statistics is not None
        sparsity.statistics.keys.normal_()
        pairs = torch.tensor([plan.pairs(context - TOKENS, shape.kv_heads)], device=device)
        for how, kernels in (
            ("", runner.graph_runner.kernels),
            (", plainly", replace(runner.graph_runner.kernels, choose_blocks=None)),
        ):

            def launch() -> None:
                select = sparsity.block_selector(pairs, kernels)  # noqa: B023
                for layer in range(runner.num_layers):
                    select(layer, q, *where)

            us = graphed(bench, launch, name) / runner.num_layers * 1000
            row = {"what": f"choosing at {context}, {name}{how}", "ms": us / 1000, "limit_ms": 0.0, "bar_ms": None}
            bench.rows.append(row)
            print(f"    choosing at {context}, {name}{how}: {us:.1f} us a layer", flush=True)
