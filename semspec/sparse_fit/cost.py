"""What verifying a draft costs, dense and by a plan: floating-point operations, and bytes that must be read.

For one sequence with `length` tokens in the cache and a pass of `tokens`. A product of [n, a] and [a, b] is 2 n a b
operations; norms, rotations and softmaxes are not counted. What a plan skips of blocks follows from its budget, of
channels and experts from what calibration saw. How many different experts a pass reads is what calibration saw in
passes of this size, else what even routing gives: E (1 - (1 - k / E)^n) of E with k a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch

from semspec.errors import BadRequest
from semspec.model.config import Mixture, Shape
from semspec.sparse.attention import AttentionPlan
from semspec.sparse.plan import SparsePlan

PARTS = ("projections", "attention", "selection", "ffn", "head")


@dataclass(frozen=True)
class Cost:
    """Of one pass, by part; `selection` scores blocks, `ffn` has experts and their routers too."""

    flops: dict[str, float]
    bytes: dict[str, float]

    def over(self, dense: Cost) -> dict[str, float]:
        return {name: sum(getattr(self, name).values()) / sum(getattr(dense, name).values()) for name in vars(self)}


def cost(shape: Shape, plan: SparsePlan | None, length: int, tokens: int, itemsize: int = 2) -> Cost:
    """`itemsize`: bytes of a weight, and of an entry of the cache."""
    plan = plan or SparsePlan()
    flops, read = (dict.fromkeys(PARTS, 0.0) for _ in range(2))
    full = [i for i, spec in enumerate(shape.attention_specs) if spec.window is None]
    queries, entries = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer, spec in enumerate(shape.attention_specs):
        weights = shape.width * (2 * queries + 2 * entries)
        flops["projections"] += 2 * tokens * weights
        read["projections"] += weights
        seen = float(length if spec.window is None else min(length, spec.window))
        if plan.attention is not None and layer in full and plan.attention.sparse_at(length, shape.kv_heads):
            seen, scored, stored = _blocks(plan.attention, shape, length, tokens)
            if plan.attention.anchors is None or layer in plan.attention.anchors or layer == full[0]:
                flops["selection"] += scored
                read["selection"] += stored
        flops["attention"] += 4 * tokens * queries * (seen + (tokens + 1) / 2)  # of the draft, what is before a token
        read["attention"] += 2 * entries * seen
        flops["ffn"] += _ffn_flops(shape, plan, layer, tokens)
        read["ffn"] += _ffn_weights(shape, plan, layer, tokens)
    flops["head"], read["head"] = 2.0 * tokens * shape.width * shape.vocab_size, float(shape.width * shape.vocab_size)
    return Cost(flops, {name: count * itemsize for name, count in read.items()})


def _blocks(plan: AttentionPlan, shape: Shape, length: int, tokens: int) -> tuple[float, float, float]:
    """Of a layer: keys that a query sees, operations of the selection, and numbers read for it."""
    whole = length // plan.block
    selected = plan.pairs(length, shape.kv_heads) / shape.kv_heads  # blocks of a head, on average
    seen = selected * plan.block + length % plan.block + (whole - selected if plan.rest == "mean" else 0)
    queries = 1 if plan.score == "first" else tokens * shape.heads / shape.kv_heads  # a head's, for each block
    vectors = 2 if plan.score == "reach" else 1  # means, and variances
    entries = shape.kv_heads * shape.head_dim * whole * vectors
    return seen, 2 * queries * entries, entries


def _ffn_flops(shape: Shape, plan: SparsePlan, layer: int, tokens: int) -> float:
    kept, mixture = 1.0, _mixture(shape, layer)
    if plan.ffn is not None:
        name = "token_share" if plan.ffn.by == "token" or mixture else "union_share"
        kept -= _seen(plan, name, layer)
    if mixture is None:
        return 2 * tokens * shape.width * shape.ffn * (1 + 2 * kept)  # the gate decides, so it is whole
    experts = _token_experts(mixture, plan, layer) * mixture.ffn * (1 + 2 * kept)
    return 2 * tokens * shape.width * (experts + mixture.experts)


def _ffn_weights(shape: Shape, plan: SparsePlan, layer: int, tokens: int) -> float:
    """Weights that some token needs. Channels by token, and those of experts, are read in any case."""
    mixture = _mixture(shape, layer)
    if mixture is None:
        union = plan.ffn is not None and plan.ffn.by == "union"
        return shape.width * shape.ffn * (1 + 2 * (1 - (_seen(plan, "union_share", layer) if union else 0.0)))
    different = mixture.experts * (1 - (1 - _token_experts(mixture, plan, layer) / mixture.experts) ** tokens)
    if plan.experts is not None and "pass_experts" in plan.seen and plan.made.get("k") == tokens - 1:
        different = float(plan.seen["pass_experts"][layer, plan.experts.most])
    return shape.width * (3 * different * mixture.ffn + mixture.experts)


def _mixture(shape: Shape, layer: int) -> Mixture | None:
    return None if shape.mixture is None or layer in shape.mixture.dense_layers else shape.mixture


def _token_experts(mixture: Mixture, plan: SparsePlan, layer: int) -> float:
    if plan.experts is None or not plan.experts.most:
        return mixture.chosen
    if bool(torch.isinf(plan.experts.betas).all()):  # of every token
        return mixture.chosen - plan.experts.most
    if "token_experts" not in plan.seen:
        raise BadRequest("the plan does not say how many experts it skips; calibrate it again with this version")
    return float(plan.seen["token_experts"][layer, plan.experts.most])


def _seen(plan: SparsePlan, name: str, layer: int) -> float:
    assert plan.ffn is not None
    if name not in plan.seen or (plan.ffn.absolute and not plan.ffn.sparsity):
        raise BadRequest("the plan does not say how many channels it skips; calibrate it for these thresholds")
    share = float(plan.seen[name][layer])
    return share if isfinite(share) else 0.0
