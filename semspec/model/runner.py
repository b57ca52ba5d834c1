"""A checkpoint made into a Runner: weights, KV slots, and the two things it does, `score` and `roll`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from semspec.model.cache import Cache
from semspec.model.choose import choose_context, choose_device, choose_dtype
from semspec.model.config import Shape
from semspec.model.roll import roll_by_score
from semspec.model.sight import Span
from semspec.model.transformer import Transformer
from semspec.model.weights import locate, open_checkpoint
from semspec.types import Roll, Rolled, Rows, Score


class ModelRunner:
    """See types.Runner for the contract."""

    def __init__(self, transformer: Transformer, slots: int, capacity: int) -> None:
        self.transformer, self.shape = transformer, transformer.shape
        self.depth = self.shape.depth
        self.vocab = self.shape.vocab  # cut to what both models of a pair share, see pair.py
        self.cache = Cache(self.shape, slots, capacity, transformer.device, transformer.attention_dtype)
        self.capacity = capacity

    @staticmethod
    def load(
        model: str | Path,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        slots: int = 8,
        context: int | None = None,
    ) -> ModelRunner:
        path = locate(model)
        shape = Shape.read(path)
        place = choose_device(device)
        kind = choose_dtype(dtype, shape.dtype, place)
        int8 = kind == torch.int8
        with open_checkpoint(path) as checkpoint:
            transformer = Transformer(shape, checkpoint, place, torch.float32 if int8 else kind, int8)
        return ModelRunner(transformer, slots, choose_context(context, shape.context))

    @property
    def device(self) -> torch.device:
        return self.transformer.device

    @property
    def free(self) -> int:
        return self.cache.free

    def acquire(self) -> int:
        return self.cache.acquire()

    def release(self, slot: int) -> None:
        self.cache.release(slot)

    def length(self, slot: int) -> int:
        return self.cache.lengths[slot]

    def truncate(self, slot: int, length: int) -> None:
        self.cache.truncate(slot, length)

    @torch.inference_mode()
    def score(self, requests: Sequence[Score]) -> list[Rows]:
        starts = self.cache.extend([(r.slot, len(r.tokens)) for r in requests])
        spans: list[Span] = []
        wanted: list[int] = []
        row = 0
        for r, start in zip(requests, starts, strict=True):
            spans.append(Span(r.slot, start, len(r.tokens)))
            row += len(r.tokens)
            wanted += range(row - r.keep, row)
        tokens = torch.tensor([t for r in requests for t in r.tokens], device=self.device)
        layers = {layer for r in requests for layer in r.layers}
        at = torch.tensor(wanted, dtype=torch.long, device=self.device)
        logits, hidden = self.transformer.forward(tokens, spans, self.cache, at, layers)
        logits = logits[:, : self.vocab]
        results, row = [], 0
        for r in requests:
            rows = slice(row, row := row + r.keep)
            results.append(Rows(logits[rows], {layer: hidden[layer][rows] for layer in r.layers}))
        return results

    @torch.inference_mode()
    def roll(self, requests: Sequence[Roll]) -> list[Rolled]:
        return roll_by_score(self, requests)
