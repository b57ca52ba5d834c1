"""How the native runner scores and rolls on a GPU: buffers at fixed places, filled by one copy, and graphs over them.

Batches and token counts are rounded up to few sizes (buckets), so that few graphs serve everything; a graph is made
when its bucket is first met. What is padded away costs little: a pass reads all weights for one token as for many.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from semspec.model.cache import Cache
from semspec.model.fused_forward import BatchMetadata, FusedForward, covers
from semspec.model.graphs import GraphCache, GraphLauncher
from semspec.model.kernels import DEFAULT_FLAGS, KernelFlags, Kernels, triton_kernels
from semspec.model.layer_ops import Sparsity
from semspec.model.transformer import Transformer
from semspec.types import Score, ScoreOutput

log = logging.getLogger(__name__)

# Tokens of one sequence; often a draft of 8 or 16 and one before.
QUERIES = (1, 2, 4, 6, 9, 12, 16, 17, 24, 33, 48, 64)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
MOST_ROWS = 512  # of a padded pass
LONGEST = QUERIES[-1]


def bucket(n: int, sizes: tuple[int, ...]) -> int:
    return next(size for size in sizes if size >= n)


class GraphRunner:
    def __init__(
        self,
        transformer: Transformer,
        cache: Cache,
        kernels: Kernels,
        runs: GraphLauncher,
        choices: KernelFlags = DEFAULT_FLAGS,
    ) -> None:
        self.fused = FusedForward(transformer, cache, kernels, choices)
        self.cache, self.kernels, self.runs = cache, kernels, runs
        self.device, self.shape = transformer.device, transformer.shape
        self.logits = torch.zeros(MOST_ROWS, self.shape.vocab, device=self.device, dtype=transformer.dtype)
        self._buffers: dict[Any, Tensor] = {}

    @staticmethod
    def of(transformer: Transformer, cache: Cache, choices: KernelFlags = DEFAULT_FLAGS) -> GraphRunner | None:
        """Where there is a GPU and the family has no part that needs the host; others go one operation at a time."""
        if transformer.device.type != "cuda" or not covers(transformer.shape):
            return None
        try:
            return GraphRunner(transformer, cache, triton_kernels(), GraphCache(transformer.device), choices)
        except ImportError:
            log.warning("Triton is not installed, so passes are made one operation at a time, which is much slower")
            return None

    def score(
        self, requests: Sequence[Score], starts: Sequence[int], vocab: int, sparsity: Sparsity | None = None
    ) -> list[ScoreOutput]:
        """ScoreOutput for short feeds whose slots have been extended already."""
        queries = bucket(max(len(r.tokens) for r in requests), QUERIES)
        most = max(size for size in BATCHES if size * queries <= MOST_ROWS)
        if len(requests) > most:
            parts = (slice(most), slice(most, None))
            return [row for p in parts for row in self.score(requests[p], starts[p], vocab, sparsity)]
        batch = bucket(len(requests), BATCHES)
        layers = tuple(sorted({layer for r in requests for layer in r.layers}))
        marks = sparsity.sparse_flags(requests, starts) if sparsity else None
        pairs = sparsity.pair_budgets(requests, starts) if sparsity else None
        buffer = self.buffer(("score", batch, queries), (batch * (queries + 5),), torch.long)
        tokens, places = buffer[: batch * queries].view(batch, queries), buffer[batch * queries :].view(5, batch)
        none = [0] * (batch - len(requests))
        flat = pad([r.tokens for r in requests], batch, queries)
        flat += [*(r.slot for r in requests), *none, *starts, *none, *(len(r.tokens) for r in requests), *none]
        if marks is not None:
            flat += [*marks, *none, *(pairs or [0] * len(requests)), *none]
        self.fill(buffer, flat)

        def work() -> tuple[Tensor, dict[int, Tensor]]:
            fewer = None
            if sparsity and marks is not None:
                fewer = sparsity.inputs(places[3], None if pairs is None else places[4], self.kernels)
            normed, hidden = self.fused.forward(tokens, BatchMetadata(*places[:3]), layers, fewer=fewer)
            return self.fused.head(normed, self.logits), hidden

        key = ("score", batch, queries, layers, None if marks is None else (sparsity, pairs is None))
        logits, hidden = self.runs.run(key, work, buffer)
        # Copies: the buffers belong to whoever comes next. One for all sequences, of the rows that somebody wants.
        first = min(len(r.tokens) - r.keep for r in requests)
        rows = (slice(len(requests)), slice(first, max(len(r.tokens) for r in requests)))
        logits, hidden = logits[..., :vocab][rows].clone(), {layer: h[rows].clone() for layer, h in hidden.items()}
        answers = []
        for b, r in enumerate(requests):
            own = slice(len(r.tokens) - r.keep - first, len(r.tokens) - first)
            answers.append(ScoreOutput(logits[b, own], {layer: hidden[layer][b, own] for layer in r.layers}))
        return answers

    def buffer(self, key: Any, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory that stays where it is, for graphs to read and write."""
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(size, device=self.device, dtype=dtype)
        return self._buffers[key]

    def fill(self, buffer: Tensor, numbers: Sequence[float]) -> None:
        """One copy from the host, which does not wait for it."""
        host = torch.tensor(numbers, dtype=buffer.dtype)
        if self.device.type == "cuda":
            host = host.pin_memory()  # torch keeps it until the copy is made
        buffer[: len(numbers)].copy_(host, non_blocking=True)


def pad(rows: Sequence[Sequence[int]], height: int, width: int) -> list[int]:
    """All rows one after the other, each filled up with zeros, and as many rows of zeros behind."""
    flat: list[int] = []
    for row in rows:
        flat += [*row, *[0] * (width - len(row))]
    return flat + [0] * (width * (height - len(rows)))
