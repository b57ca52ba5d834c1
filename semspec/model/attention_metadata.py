"""Positions and masks of one pass, made once for all layers that need the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from semspec import tree
from semspec.model.config import AttentionSpec, Rotary


@dataclass(slots=True)
class SequenceChunk:
    """One sequence's part of a pass: `count` tokens, the first at position `start` of its slot."""

    slot: int
    start: int
    count: int
    parents: tuple[int, ...] = ()  # of the tree that its slot ends with, if it does: some of it may be there already

    @property
    def base(self) -> int:
        """Where its tree begins."""
        return self.start + self.count - len(self.parents)

    def positions(self) -> list[int]:
        """Of all tokens from `base` or `start` on in their own text, which is not where they lie in the slot."""
        base = self.base
        return [*range(self.start, base), *(base + depth for depth in tree.depths(self.parents))]


def cos_sin(rotary: Rotary, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, half of the rotated dimensions] of every position, float32."""
    inv_freq = torch.tensor(rotary.inv_freq, device=device)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * inv_freq
    return angles.cos() * rotary.gain, angles.sin() * rotary.gain


class RotaryTables:
    """Tables [length, 1, rotated dimensions] of cosines and sines; they grow as sequences do."""

    def __init__(self, rotary: Rotary | None, device: torch.device, dtype: torch.dtype) -> None:
        self._rotary, self._device, self._dtype = rotary, device, dtype
        self._cos = self._sin = torch.empty(0)

    def at(self, chunks: list[SequenceChunk]) -> tuple[Tensor, Tensor] | None:
        """cos and sin [N, 1, rotated dimensions] at every token's position; sin carries the signs of the two halves."""
        if self._rotary is None:
            return None
        end = max(c.start + c.count for c in chunks)
        if end > len(self._cos):
            cos, sin = cos_sin(self._rotary, max(end, 2 * len(self._cos)), self._device)
            self._cos = torch.cat([cos, cos], -1)[:, None].to(self._dtype)
            self._sin = torch.cat([-sin, sin], -1)[:, None].to(self._dtype)
        at = [c.positions()[-c.count :] if c.parents else slice(c.start, c.start + c.count) for c in chunks]
        if len(at) == 1:
            return self._cos[at[0]], self._sin[at[0]]
        return torch.cat([self._cos[a] for a in at]), torch.cat([self._sin[a] for a in at])


class AttentionMetadata:
    """One pass's positions and masks for each kind of layer; a kind that no layer has is not made."""

    def __init__(
        self,
        chunks: list[SequenceChunk],
        device: torch.device,
        tables: dict[Rotary | None, RotaryTables],
        flash: bool = False,
    ) -> None:
        self.chunks, self._device, self._flash = chunks, device, flash
        self._rotations = {rotary: table.at(chunks) for rotary, table in tables.items()}
        self._masks: dict[int | None, list[tuple[int, Tensor | None]]] = {}

    def rotate(self, x: Tensor, spec: AttentionSpec) -> Tensor:
        """Rotate the halves (a, b) of every head x [N, heads, d]: (a cos - b sin, b cos + a sin)."""
        rotation = self._rotations[spec.rotary]
        if rotation is None:
            return x
        cos, sin = rotation
        size = cos.shape[-1]
        if size == x.shape[-1]:
            return torch.addcmul(x * cos, x.roll(size // 2, dims=-1), sin)
        rotated, rest = x[..., :size], x[..., size:]
        return torch.cat([torch.addcmul(rotated * cos, rotated.roll(size // 2, dims=-1), sin), rest], dim=-1)

    def masks(self, spec: AttentionSpec) -> list[tuple[int, Tensor | None]]:
        """For each sequence: the first position that any of its tokens attends to, and the mask from there on."""
        if spec.window not in self._masks:
            self._masks[spec.window] = [self._mask(chunk, spec.window) for chunk in self.chunks]
        return self._masks[spec.window]

    def _mask(self, chunk: SequenceChunk, window: int | None) -> tuple[int, Tensor | None]:
        """A mask is [count, start + count - begin]; a single token attends to all it is shown and needs none."""
        begin = 0 if window is None else max(0, min(chunk.start, chunk.base) - window + 1)
        if chunk.count == 1 and not chunk.parents:
            return begin, None
        if self._flash and window is None and not chunk.parents:
            return begin, causal_lower_right(chunk.count, chunk.start + chunk.count)  # flash attention needs no mask
        positions = torch.arange(begin, chunk.start + chunk.count, device=self._device)
        mask = positions <= positions[chunk.start - begin :, None]
        if chunk.parents:  # of a tree, each sees its own line
            lines = own_lines(chunk.parents, self._device)[-chunk.count :]
            mask[-len(lines) :, -lines.shape[1] :] = lines
            positions[-len(chunk.parents) :] = torch.tensor(chunk.positions()[-len(chunk.parents) :])
        own = positions[chunk.start - begin :, None]
        return begin, mask if window is None else mask & (positions > own - window)


def own_lines(parents: Sequence[int], device: torch.device) -> Tensor:
    """[n, n] for each token of a tree: itself and its ancestors."""
    bits = torch.tensor(tree.lineages(parents), device=device)[:, None]
    return (bits >> torch.arange(len(parents), device=device)) & 1 != 0
