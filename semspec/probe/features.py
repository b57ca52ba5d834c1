"""What a probe sees of a step: the hidden states that predicted its tokens, pooled. Fitting and run time share this.

Row k of a step's states is the one that its token k was drawn from, so a step of C tokens has C rows: the state at the
last token of the context, and those at all of its own tokens but the last. States come ragged, the rows of many steps
one after the other [R, d]; other rows (a bonus row, say) may lie between.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from semspec.errors import BadRequest
from semspec.probe.evidence import known_groups, select

FIXED = ("mean", "last", "second-last", "last-prompt")
POOLINGS = (*FIXED, "attention")
LOW, TINY = -1e30, 1e-30


@dataclass(frozen=True, slots=True)
class Features:
    """Which states, and how they become one vector: those of several layers are concatenated."""

    layers: tuple[int, ...]  # 0 is the embedding, the model's depth what comes after the final norm
    pooling: str = "mean"  # see `pool`
    evidence: tuple[str, ...] = ()  # also what logits say about the step's tokens: which groups of `evidence`

    def __post_init__(self) -> None:
        if not (self.layers or self.evidence) or len(set(self.layers)) < len(self.layers):
            raise BadRequest(f"a probe's layers are {list(self.layers)}; give at least one, each once")
        if self.pooling not in POOLINGS:
            raise BadRequest(f"there is no pooling {self.pooling!r}; give one of: {', '.join(POOLINGS)}")
        object.__setattr__(self, "evidence", known_groups(self.evidence))

    @property
    def attends(self) -> bool:
        """Whether pooling has something to learn."""
        return self.pooling == "attention" and bool(self.layers)

    def __call__(
        self,
        states: dict[int, Tensor],
        first_row: Tensor,
        counts: Tensor,
        evidence: Tensor | None = None,
        queries: Tensor | None = None,
    ) -> Tensor:
        """layer -> [R, d], [B], [B], [B, all evidence], [layers, d] -> [B, features] float32.

        Steps lie in order; step b has counts[b] rows. Queries are for attention, one a layer."""
        each = [None] * len(self.layers) if queries is None else list(queries)
        parts = [
            pool(states[layer], first_row, counts, self.pooling, query)
            for layer, query in zip(self.layers, each, strict=True)
        ]
        if self.evidence:
            assert evidence is not None, "this probe wants to see what the logits say"
            parts.append(select(evidence, self.evidence))
        return torch.cat(parts, dim=-1)


def pool(states: Tensor, first_row: Tensor, counts: Tensor, pooling: str, query: Tensor | None = None) -> Tensor:
    """[R, d] -> [B, d] float32, without a host synchronisation and the same for a step whatever lies beside it.

    mean       over the step's tokens
    last       the state that predicted its last token
    second-last, last-prompt  those that predicted the token before it (the only one, if there is one), and the first
    attention  a weighted mean: softmax over the step's tokens of their states' products with a query [d]
    """
    if pooling in FIXED[1:]:
        back = {"last": 1, "second-last": 2}.get(pooling)
        return states[first_row if back is None else first_row + (counts - back).clamp_min(0)].float()
    # Segments of rows: step 0, what follows it, step 1, ... The even ones are the steps.
    bounds = torch.stack([first_row, first_row + counts], dim=1).flatten()  # [2 B]
    states = states.float()
    if pooling == "mean":
        return _sums(states, bounds) / counts.clamp_min(1)[:, None]
    assert query is not None, "attention needs a query"
    # Not a matrix product: its last bits would depend on how many rows there are.
    scores = (states * query).sum(-1)  # [R]
    segment = torch.searchsorted(bounds, torch.arange(len(states), device=states.device), right=True) - 1
    inside = segment % 2 == 0  # -1 before the first step
    step = torch.where(inside, segment // 2, 0)  # [R]
    highest = torch.segment_reduce(scores.detach()[:, None], "max", offsets=bounds, initial=LOW, unsafe=True)[::2, 0]
    weights = torch.where(inside, scores - highest[step], LOW).exp()[:, None]  # [R, 1]
    return _sums(weights * states, bounds) / _sums(weights, bounds).clamp_min(TINY)


def _sums(values: Tensor, bounds: Tensor) -> Tensor:
    """[R, x] -> [B, x] over the rows of each step"""
    return torch.segment_reduce(values, "sum", offsets=bounds, initial=0.0, unsafe=True)[::2]


def resolve_layers(layers: Iterable[int], depth: int) -> tuple[int, ...]:
    """Layers counted from 0, where negative ones count from the end: -1 is the state after the final norm."""
    resolved = tuple(layer + depth + 1 if layer < 0 else layer for layer in layers)
    for layer in resolved:
        if not 0 <= layer <= depth:
            raise BadRequest(f"there is no layer {layer}; this model's states are 0 to {depth}, or -1 for the last")
    return resolved
