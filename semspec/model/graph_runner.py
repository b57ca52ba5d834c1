"""How the native runner scores and decodes on a GPU: graphs over buffers at fixed addresses, filled by one copy.

Batches and token counts are rounded up to a few sizes (buckets.py), so that few graphs serve everything; a graph is
captured when its bucket is first needed. With the flag `packed`, tokens lie in one row (packed_rows.py) in place of a
rectangle; passes that leave something out stay rectangles, because what to leave out is found for whole sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semspec.model.attention_metadata import SequenceChunk
from semspec.model.buckets import BATCHES, MAX_ROWS, QUERIES, bucket, feed_bucket, passes
from semspec.model.cache import Cache
from semspec.model.fused_forward import BatchMetadata, FusedForward, covers
from semspec.model.graphs import GraphCache, GraphLauncher
from semspec.model.kernels import DEFAULT_FLAGS, KernelFlags, Kernels, TreeMask, triton_kernels
from semspec.model.layer_ops import Sparsity
from semspec.model.packed_rows import NUMBERS, PackedRows, fits_rectangle, lines_of, packed_passes
from semspec.model.rows import chunks_of, copied_rows, last_rows, outputs_of, split_rows
from semspec.model.transformer import Transformer
from semspec.types import Score, ScoreOutput

log = logging.getLogger(__name__)


class GraphRunner:
    def __init__(
        self,
        transformer: Transformer,
        cache: Cache,
        kernels: Kernels,
        launcher: GraphLauncher,
        flags: KernelFlags = DEFAULT_FLAGS,
    ) -> None:
        self.fused = FusedForward(transformer, cache, kernels, flags)
        self.cache, self.kernels, self.launcher, self.flags = cache, kernels, launcher, flags
        self.device, self.shape = transformer.device, transformer.shape
        self.logits = torch.zeros(MAX_ROWS, self.shape.vocab_size, device=self.device, dtype=transformer.dtype)
        self._buffers: dict[Any, Tensor] = {}

    @staticmethod
    def of(transformer: Transformer, cache: Cache, flags: KernelFlags = DEFAULT_FLAGS) -> GraphRunner | None:
        """None without a GPU, or for a family that the kernels do not cover: it runs one operation at a time."""
        if transformer.device.type != "cuda" or not covers(transformer.shape):
            return None
        try:
            return GraphRunner(transformer, cache, triton_kernels(), GraphCache(transformer.device), flags)
        except ImportError:
            log.warning("Triton is not installed, so passes are made one operation at a time, which is much slower")
            return None

    def score(
        self, requests: Sequence[Score], starts: Sequence[int], vocab: int, sparsity: Sparsity | None = None
    ) -> list[ScoreOutput]:
        """ScoreOutput for short feeds whose slots have been extended already."""
        found: list[ScoreOutput | None] = [None] * len(requests)
        lengths = [len(r.tokens) for r in requests]
        dense = sparsity is None or sparsity.sparse_flags(requests, starts) is None
        packed = self.flags.packed and dense
        for places in packed_passes(lengths) if packed else passes(lengths):
            part, at = [requests[i] for i in places], [starts[i] for i in places]
            if packed and not fits_rectangle([lengths[i] for i in places]):
                some = self._packed_pass(part, at, vocab)
            else:
                some = self._pass(part, at, vocab, sparsity)
            for i, output in zip(places, some, strict=True):
                found[i] = output
        return found  # type: ignore[return-value]  # every place is in one pass

    def begin(
        self, requests: Sequence[Score], starts: Sequence[int], vocab: int, drafts: Tensor
    ) -> list[ScoreOutput] | None:
        """As `score`, but the last tokens of each request are these [n, B], as the device has them. None: that would
        be several passes, or wait for a capture."""
        lengths, layers = [len(r.tokens) for r in requests], requests[0].layers
        if len(packed_passes(lengths) if self.flags.packed else passes(lengths)) > 1:
            return None
        if self.flags.packed and not fits_rectangle(lengths):
            known = self.launcher.knows(("packed", self._packing(requests, starts), layers))
            return self._packed_pass(requests, starts, vocab, drafts) if known else None
        sizes = rectangle(requests)
        known = self.launcher.knows(("score", *sizes, layers, None))
        return self._pass(requests, starts, vocab, None, drafts) if known else None

    def _pass(
        self,
        requests: Sequence[Score],
        starts: Sequence[int],
        vocab: int,
        sparsity: Sparsity | None,
        drafts: Tensor | None = None,
    ) -> list[ScoreOutput]:
        batch, queries = rectangle(requests)
        layers = tuple(sorted({layer for r in requests for layer in r.layers}))
        marks = sparsity.sparse_flags(requests, starts) if sparsity else None
        pairs = sparsity.pair_budgets(requests, starts) if sparsity else None
        trees = any(r.parents for r in requests)
        size = batch * queries
        buffer = self.buffer(("score", batch, queries), (3 * size + 6 * batch,), torch.long)
        tokens, rows = buffer[:size].view(batch, queries), buffer[size : size + 6 * batch].view(6, batch)
        padding = [0] * (batch - len(requests))
        flat = pad([r.tokens for r in requests], batch, queries)
        flat += [*(r.slot for r in requests), *padding, *starts, *padding, *(len(r.tokens) for r in requests), *padding]
        if marks is not None or trees:
            none = [0] * len(requests)
            flat += [*(marks or none), *padding, *(pairs or none), *padding]
        if trees:
            flat += tree_numbers(chunks_of(requests, starts), batch, queries)
        fill(buffer, flat)
        if drafts is not None:
            put_drafts(drafts, tokens[: len(requests), : len(requests[0].tokens)])

        def work() -> tuple[Tensor, dict[int, Tensor]]:
            inputs = None
            if sparsity and marks is not None:
                inputs = sparsity.inputs(rows[3], None if pairs is None else rows[4], self.kernels)
            mask = TreeMask(rows[5], *buffer[-2 * size :].view(2, batch, queries)) if trees else None
            metadata = BatchMetadata(rows[0], rows[1], rows[2], mask)
            normed, hidden = self.fused.forward(tokens, metadata, layers, sparsity=inputs)
            return self.fused.head(normed, self.logits), hidden

        skipping = None if marks is None else (sparsity, pairs is None)
        key = ("tree" if trees else "score", batch, queries, layers, skipping)
        logits, hidden = self.launcher.run(key, work, buffer)
        rows_wanted = [(len(r.tokens) - r.logits_to_keep, len(r.tokens)) for r in requests]
        seen = [(len(r.tokens) - r.kept_states, len(r.tokens)) for r in requests] if hidden else []
        states = {layer: copied_rows(h, seen) for layer, h in hidden.items()}
        return outputs_of(requests, copied_rows(logits[..., :vocab], rows_wanted), states)

    def _packing(self, requests: Sequence[Score], starts: Sequence[int]) -> PackedRows:
        wanted = sum(r.logits_to_keep for r in requests)
        return PackedRows.of(chunks_of(requests, starts), self.shape.heads // self.shape.kv_heads, wanted)

    def _packed_pass(
        self, requests: Sequence[Score], starts: Sequence[int], vocab: int, drafts: Tensor | None = None
    ) -> list[ScoreOutput]:
        chunks, (wanted, observed) = chunks_of(requests, starts), last_rows(requests)
        tokens = [token for r in requests for token in r.tokens]
        layers = tuple(sorted({layer for r in requests for layer in r.layers}))
        packing = self._packing(requests, starts)
        numbers = packing.numbers(tokens, chunks, wanted)
        buffer, at = self.buffer("packed", (NUMBERS,), torch.long), len(numbers)
        picked = [] if packing.wanted or len(wanted) == len(tokens) else wanted
        fill(buffer, [*numbers, *picked, *(observed if layers else ())])
        if drafts is not None:
            put_drafts(drafts, buffer[: len(tokens)].view(len(requests), -1))

        def work() -> tuple[Tensor, dict[int, Tensor]]:
            ids, metadata, index = packing.of_buffer(buffer)
            normed, hidden = self.fused.forward(ids, metadata, layers)
            return self.fused.head(normed if index is None else normed.index_select(0, index), self.logits), hidden

        logits, hidden = self.launcher.run(("packed", packing, layers), work, buffer)
        # Copies, since the next pass reuses the buffers.
        some, seen = buffer[at : at + len(picked)], buffer[at + len(picked) : at + len(picked) + len(observed)]
        logits = logits[:, 0, :vocab].index_select(0, some) if picked else logits[: len(wanted), 0, :vocab].clone()
        hidden = {layer: h[:, 0].index_select(0, seen) for layer, h in hidden.items()}
        return split_rows(requests, logits, hidden)

    def buffer(self, key: Any, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory at a fixed address, for graphs to read and write."""
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(size, device=self.device, dtype=dtype)
        return self._buffers[key]


def fill(buffer: Tensor, numbers: Sequence[float]) -> None:
    """One copy from the host, which does not wait for it."""
    kind = {torch.long: np.int64, torch.double: np.float64}.get(buffer.dtype, np.float32)
    host = torch.from_numpy(np.array(numbers, dtype=kind))  # of 2,600 numbers in 27 us; torch.tensor takes 200
    if buffer.is_cuda:
        host = host.pin_memory()  # torch keeps it until the copy is made
    buffer[: len(numbers)].copy_(host, non_blocking=True)


def rectangle(requests: Sequence[Score]) -> tuple[int, int]:
    """Sequences and tokens of each that a pass is padded to."""
    batch, longest = bucket(len(requests), BATCHES), max(len(r.tokens) for r in requests)
    caught_up = all(r.drafting and not r.parents and r.logits_to_keep <= 1 for r in requests)
    return batch, feed_bucket(longest, batch) if caught_up else bucket(longest, QUERIES)


def put_drafts(drafts: Tensor, feeds: Tensor) -> None:
    """Drafts [n, B] end feeds [B, m]. -1 is no token: what follows the end of a draft is never asked for."""
    torch.clamp_min(drafts.t(), 0, out=feeds[:, -len(drafts) :])


def tree_numbers(chunks: Sequence[SequenceChunk], batch: int, queries: int) -> list[int]:
    """The numbers of a TreeMask, one tensor after the other. A sequence's tree begins with its pass, or before that."""
    bases, lineages, depths = zip(*(lines_of(chunk) for chunk in chunks), strict=True)
    return pad([bases], 1, batch) + pad(lineages, batch, queries) + pad(depths, batch, queries)


def pad(rows: Sequence[Sequence[int]], height: int, width: int) -> list[int]:
    """All rows one after the other, each padded with zeros, followed by rows of zeros up to the height."""
    flat: list[int] = []
    for row in rows:
        flat += [*row, *[0] * (width - len(row))]
    return flat + [0] * (width * (height - len(rows)))
