"""A checkpoint made into a Runner: weights, KV slots, and the two things it does, `score` and `roll`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from semspec.errors import BadRequest
from semspec.model.cache import Cache
from semspec.model.config import Shape
from semspec.model.roll import roll_by_score
from semspec.model.sight import Span
from semspec.model.transformer import Transformer
from semspec.model.weights import locate, open_checkpoint
from semspec.types import Roll, Rolled, Rows, Score

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelRunner:
    """See types.Runner for the contract."""

    def __init__(self, transformer: Transformer, slots: int, capacity: int) -> None:
        self.transformer, self.shape = transformer, transformer.shape
        self.depth = self.shape.depth
        self.vocab = self.shape.vocab  # cut to what both models of a pair share, see pair.py
        self.cache = Cache(self.shape, slots, capacity, transformer.device, transformer.dtype)
        self.capacity = capacity

    @staticmethod
    def load(
        model: str | Path,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        slots: int = 8,
        context: int | None = None,
    ) -> ModelRunner:
        folder = locate(model)
        shape = Shape.read(folder)
        place = choose_device(device)
        kind = choose_dtype(dtype, shape, place)
        with open_checkpoint(folder) as checkpoint:
            transformer = Transformer(shape, checkpoint, place, kind)
        return ModelRunner(transformer, slots, choose_context(context, shape))

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


def choose_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise BadRequest(f"device {device!r} is not known to torch; give auto, cpu, cuda or cuda:N") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise BadRequest(f"device {device!r} was asked for, but torch finds no CUDA device here; give cpu or auto")
    return chosen


def choose_dtype(dtype: str | torch.dtype, shape: Shape, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's own type on a GPU; on a CPU float32, which is exact and usually no slower."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return shape.dtype if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise BadRequest(f"dtype {dtype!r} is not known; give auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def choose_context(context: int | None, shape: Shape) -> int:
    """The tokens a slot can hold. By default at most 4096, since every slot's memory is taken at once."""
    if context is None:
        return min(shape.context, 4096)
    if not 1 < context <= shape.context:
        raise BadRequest(f"context is {context}; this checkpoint takes 2 to {shape.context} tokens")
    return context
