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

POOLINGS = ("mean", "last")


@dataclass(frozen=True, slots=True)
class Features:
    """Which states, and how they become one vector: those of several layers stand side by side."""

    layers: tuple[int, ...]  # 0 is the embedding, the model's depth what comes after the final norm
    pooling: str = "mean"  # over the step's tokens, or the state that predicted its last token
    evidence: bool = False  # also what the model's logits say about the step's tokens, see `evidence`

    def __post_init__(self) -> None:
        if not (self.layers or self.evidence) or len(set(self.layers)) < len(self.layers):
            raise BadRequest(f"a probe's layers are {list(self.layers)}; give at least one, each once")
        if self.pooling not in POOLINGS:
            raise BadRequest(f"there is no pooling {self.pooling!r}; give one of: {', '.join(POOLINGS)}")

    def __call__(
        self, states: dict[int, Tensor], first_row: Tensor, counts: Tensor, evidence: Tensor | None = None
    ) -> Tensor:
        """layer -> [R, d], [B], [B], [B, E] -> [B, features] float32. Steps lie in order; step b has counts[b] rows."""
        parts = [pool(states[layer], first_row, counts, self.pooling) for layer in self.layers]
        if self.evidence:
            assert evidence is not None, "this probe wants to see what the logits say"
            parts.append(evidence)
        return torch.cat(parts, dim=-1)


def pool(states: Tensor, first_row: Tensor, counts: Tensor, pooling: str) -> Tensor:
    """[R, d] -> [B, d] float32, without a host synchronisation and the same for a step whatever lies beside it."""
    if pooling == "last":
        return states[first_row + (counts - 1).clamp_min(0)].float()
    # Segments of rows: step 0, what lies behind it, step 1, ... The even ones are the steps.
    bounds = torch.stack([first_row, first_row + counts], dim=1).flatten()  # [2 B]
    sums = torch.segment_reduce(states.float(), "sum", offsets=bounds, initial=0.0, unsafe=True)  # [2 B - 1, d]
    return sums[::2] / counts.clamp_min(1)[:, None]


def resolve_layers(layers: Iterable[int], depth: int) -> tuple[int, ...]:
    """Layers counted from 0, where negative ones count from the end: -1 is the state after the final norm."""
    resolved = tuple(layer + depth + 1 if layer < 0 else layer for layer in layers)
    for layer in resolved:
        if not 0 <= layer <= depth:
            raise BadRequest(f"there is no layer {layer}; this model's states are 0 to {depth}, or -1 for the last")
    return resolved
