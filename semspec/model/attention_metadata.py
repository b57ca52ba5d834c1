"""What each token of a pass sees and where it stands: masks and rotations, made once for all layers alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from semspec.model.config import AttentionSpec, Rotary


@dataclass(slots=True)
class SequenceChunk:
    """One sequence's part of a pass: `count` tokens, the first at position `start` of its slot."""

    slot: int
    start: int
    count: int


class RotaryTables:
    """Tables [length, 1, turned dimensions] of cosines and sines; they grow as sequences do."""

    def __init__(self, rotary: Rotary | None, device: torch.device, dtype: torch.dtype) -> None:
        self._rotary, self._device, self._dtype = rotary, device, dtype
        self._cos = self._sin = torch.empty(0)

    def at(self, spans: list[SequenceChunk]) -> tuple[Tensor, Tensor] | None:
        """cos and sin [N, 1, turned dimensions] at every token's position; sin carries the signs of the two halves."""
        if self._rotary is None:
            return None
        end = max(s.start + s.count for s in spans)
        if end > len(self._cos):
            self._grow(self._rotary, max(end, 2 * len(self._cos)))
        at = [slice(s.start, s.start + s.count) for s in spans]
        if len(at) == 1:
            return self._cos[at[0]], self._sin[at[0]]
        return torch.cat([self._cos[a] for a in at]), torch.cat([self._sin[a] for a in at])

    def _grow(self, rotary: Rotary, length: int) -> None:
        inv_freq = torch.tensor(rotary.inv_freq, device=self._device)
        angles = torch.arange(length, device=self._device, dtype=torch.float32)[:, None] * inv_freq
        cos, sin = angles.cos() * rotary.gain, angles.sin() * rotary.gain
        self._cos = torch.cat([cos, cos], -1)[:, None].to(self._dtype)
        self._sin = torch.cat([-sin, sin], -1)[:, None].to(self._dtype)


class AttentionMetadata:
    """One pass's positions and masks for each kind of layer; what no layer asks for is not made."""

    def __init__(
        self,
        spans: list[SequenceChunk],
        device: torch.device,
        rotations: dict[Rotary | None, RotaryTables],
        flash: bool = False,
    ) -> None:
        self.spans, self._device, self._flash = spans, device, flash
        self._turns = {rotary: table.at(spans) for rotary, table in rotations.items()}
        self._seen: dict[int | None, list[tuple[int, Tensor | None]]] = {}

    def turn(self, x: Tensor, sight: AttentionSpec) -> Tensor:
        """Rotate the halves (a, b) of every head x [N, heads, d]: (a cos - b sin, b cos + a sin)."""
        turn = self._turns[sight.rotary]
        if turn is None:
            return x
        cos, sin = turn
        size = cos.shape[-1]
        if size == x.shape[-1]:
            return torch.addcmul(x * cos, x.roll(size // 2, dims=-1), sin)
        turned, rest = x[..., :size], x[..., size:]
        return torch.cat([torch.addcmul(turned * cos, turned.roll(size // 2, dims=-1), sin), rest], dim=-1)

    def seen(self, sight: AttentionSpec) -> list[tuple[int, Tensor | None]]:
        """For each span: the first position that any of its tokens sees, and who sees what from there on."""
        if sight.window not in self._seen:
            self._seen[sight.window] = [self._mask(span, sight.window) for span in self.spans]
        return self._seen[sight.window]

    def _mask(self, span: SequenceChunk, window: int | None) -> tuple[int, Tensor | None]:
        """A mask is [count, start + count - begin]; a single token needs none, it sees everything it is shown."""
        begin = 0 if window is None else max(0, span.start - window + 1)
        if span.count == 1:
            return begin, None
        if self._flash and window is None:
            return begin, causal_lower_right(span.count, span.start + span.count)  # flash attention needs no mask
        positions = torch.arange(begin, span.start + span.count, device=self._device)
        own = positions[span.start - begin :, None]
        mask = positions <= own
        return begin, mask if window is None else mask & (positions > own - window)
