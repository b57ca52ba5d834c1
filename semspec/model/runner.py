"""A checkpoint made into a Runner: weights, KV slots, and the two things it does, `score` and `roll`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from semspec.model.attention_metadata import SequenceChunk
from semspec.model.cache import Cache
from semspec.model.config import Shape
from semspec.model.decode import decode_by_score
from semspec.model.graph_decode import GraphDecode
from semspec.model.graph_runner import LONGEST, GraphRunner
from semspec.model.layer_ops import DENSE, Sparsity, checks
from semspec.model.numpy_decoder import NumpyDecoder
from semspec.model.placement import choose_context, choose_device, choose_dtype
from semspec.model.transformer import Transformer
from semspec.model.weights import locate, open_checkpoint
from semspec.types import Decode, DecodeOutput, Score, ScoreOutput


class ModelRunner:
    """See types.Runner for the contract."""

    def __init__(self, transformer: Transformer, slots: int, capacity: int) -> None:
        self.transformer, self.shape = transformer, transformer.shape
        self.depth = self.shape.depth
        self.vocab = self.shape.vocab  # cut to what both models of a pair share, see pair.py
        self.cache = Cache(self.shape, slots, capacity, transformer.device, transformer.attention_dtype)
        self.capacity = capacity
        self.sparsity: Sparsity | None = None  # what passes that check drafts leave out
        self.single = NumpyDecoder.of(transformer, self.cache)
        self.use(GraphRunner.of(transformer, self.cache))

    def use(self, fast: GraphRunner | None) -> None:
        """How to go about short passes; without, every operation is launched by itself."""
        self.fast, self.rolls = fast, GraphDecode(fast) if fast else None

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

    def acquire(self, prompt: Sequence[int] = ()) -> int:
        return self.cache.acquire()

    def copy(self, source: int, target: int, length: int) -> None:
        self.cache.copy(source, target, length)
        if self.sparsity is not None:
            self.sparsity.copied(source, target)

    def release(self, slot: int) -> None:
        self.cache.release(slot)

    def length(self, slot: int) -> int:
        return self.cache.lengths[slot]

    def truncate(self, slot: int, length: int) -> None:
        self.cache.truncate(slot, length)

    @torch.inference_mode()
    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        if self.sparsity is None:
            return self._pass(requests)
        before, requests = self.sparsity.split_prefill(requests)
        if before:
            self._noted_pass(before, self.sparsity)
        return self._noted_pass(self.sparsity.prepare(requests), self.sparsity)

    def _noted_pass(self, requests: Sequence[Score], sparsity: Sparsity) -> list[ScoreOutput]:
        starts = [self.length(r.slot) for r in requests]
        rows = self._pass(requests)
        for r, start in zip(requests, starts, strict=True):
            sparsity.record(r.slot, start, r.tokens, checks(r))
        return rows

    def _pass(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        starts = self.cache.extend([(r.slot, len(r.tokens)) for r in requests])
        if self.fast is None:
            checked = self.sparsity is not None and any(checks(r) for r in requests)
            if self.single is not None and not checked and self.single.suits(requests):
                return [self.single.score(requests[0], starts[0], self.vocab)]
            return self._score(requests, starts)
        # Prompts are bound by arithmetic, and any pass of theirs has another size; they go by themselves.
        results: dict[int, ScoreOutput] = {}
        for short in (True, False):
            which = [i for i, r in enumerate(requests) if self._is_short(r) == short]
            if which:
                part, at = [requests[i] for i in which], [starts[i] for i in which]
                rows = self.fast.score(part, at, self.vocab, self.sparsity) if short else self._score(part, at)
                results |= dict(zip(which, rows, strict=True))
        return [results[i] for i in range(len(requests))]

    def _is_short(self, r: Score) -> bool:
        plain = self.sparsity is not None and not self.sparsity.fusible and checks(r)
        return len(r.tokens) <= LONGEST and not plain

    def _score(self, requests: Sequence[Score], starts: Sequence[int]) -> list[ScoreOutput]:
        spans: list[SequenceChunk] = []
        wanted: list[int] = []
        row = 0
        for r, start in zip(requests, starts, strict=True):
            spans.append(SequenceChunk(r.slot, start, len(r.tokens)))
            row += len(r.tokens)
            wanted += range(row - r.keep, row)
        tokens = torch.tensor([t for r in requests for t in r.tokens], device=self.device)
        layers = {layer for r in requests for layer in r.layers}
        at = torch.tensor(wanted, dtype=torch.long, device=self.device)
        way = DENSE if self.sparsity is None else self.sparsity.layer_ops(requests, spans)
        logits, hidden = self.transformer.forward(tokens, spans, self.cache, at, layers, way)
        logits = logits[:, : self.vocab]
        results, row = [], 0
        for r in requests:
            rows = slice(row, row := row + r.keep)
            results.append(ScoreOutput(logits[rows], {layer: hidden[layer][rows] for layer in r.layers}))
        return results

    @torch.inference_mode()
    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]:
        if self.rolls is None or any(r.logprobs is not None for r in requests):
            return decode_by_score(self, requests)
        fed = []
        for r in requests:
            if len(r.tokens) > LONGEST:
                self.score([Score(self, r.slot, r.tokens[:-1], 0)])
                r = replace(r, tokens=r.tokens[-1:])
            fed.append(r)
        starts = [self.length(r.slot) for r in fed]
        rolled = self.rolls.decode(fed, self.vocab)
        if self.sparsity is not None:
            for r, start, wrote in zip(fed, starts, rolled, strict=True):
                self.sparsity.record(r.slot, start, [*r.tokens, *wrote.tokens[:-1]])
        return rolled

    def computed(self, wrote: int, n: int) -> int:
        """Tokens that are computed for a roll of n which stops after so many."""
        return wrote if self.rolls is None else self.rolls.computed(wrote, n)
