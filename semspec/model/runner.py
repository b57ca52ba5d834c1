"""The runner of native models: weights, KV slots, and the two things it does, `score` and `decode`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from semspec.model.base_runner import BaseRunner
from semspec.model.buckets import MAX_QUERIES, MAX_ROWS
from semspec.model.cache import Cache
from semspec.model.config import read_config
from semspec.model.decode import decode_by_score
from semspec.model.graph_decode import GraphDecode
from semspec.model.graph_runner import GraphRunner
from semspec.model.layer_ops import DENSE, Sparsity, checks
from semspec.model.numpy_decoder import NumpyDecoder
from semspec.model.paged_cache import PagedCache
from semspec.model.placement import Precision, choose_context, choose_device, on_its_device
from semspec.model.rows import after_prefill, chunks_of, first, last_rows, rest, split_rows
from semspec.model.transformer import Transformer
from semspec.model.weights import default_weights, locate, open_checkpoint, shape_of
from semspec.types import Decode, DecodeOutput, Handover, Score, ScoreOutput


class ModelRunner(BaseRunner):
    """See types.Runner for the contract."""

    trees = True

    def __init__(
        self,
        transformer: Transformer,
        slots: int,
        capacity: int,
        vocab: int | None = None,
        tokens: int | None = None,
        page: int | None = None,
        fp8_cache: bool = False,
        graphs: bool = True,
    ) -> None:
        """`tokens`: that all slots hold together, at most; then the cache is paged, which it always is on a GPU;
        `page`: its pages' size, if another; `fp8_cache`: how a paged cache stores keys and values; `graphs`: whether
        short passes on a GPU are captured, which pays for a runner that stays."""
        self.transformer, self.shape = transformer, transformer.shape
        self.num_layers = self.shape.num_layers
        self.vocab_size = vocab or self.shape.vocab_size  # of a pair: ids that both models share
        where = (transformer.device, transformer.attention_dtype)
        paged = tokens is not None or page is not None or transformer.device.type == "cuda"
        make = partial(PagedCache, tokens=tokens, page=page, fp8=fp8_cache) if paged else Cache
        self.cache: Cache = make(self.shape, slots, capacity, *where)
        self.max_seq_len = capacity
        self.acquire, self.release, self.truncate = self.cache.acquire, self.cache.release, self.cache.truncate
        self.sparsity: Sparsity | None = None  # what passes that score drafts leave out
        # Since anything else was done, and where what was read of them lies.
        self._begun: dict[Handover, list[list[int]]] = {}
        self.numpy_decoder = NumpyDecoder.of(transformer, self.cache)
        self.use(GraphRunner.of(transformer, self.cache) if graphs else None)

    def use(self, graph_runner: GraphRunner | None) -> None:
        """How short passes are run; None: every operation is launched by itself."""
        self.graph_runner, self.graph_decode = graph_runner, GraphDecode(graph_runner) if graph_runner else None

    @staticmethod
    def load(
        model: str | Path,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        slots: int = 8,
        context: int | None = None,
        vocab: int | None = None,
        head_ids: Sequence[int] | None = None,
        tokens: int | None = None,
        kv_dtype: str = "auto",
    ) -> ModelRunner:
        """`vocab`: how many ids both models of a pair share; `head_ids`: the tokens that its head has, if not all;
        `tokens`: see above."""
        path = locate(model)
        shape = shape_of(path, read_config(path))
        where = choose_device(device)
        with open_checkpoint(path) as checkpoint:
            precision = Precision.choose(dtype, shape.dtype, where, default_weights(path, where))
            precision = precision.with_cache(kv_dtype, where)
            transformer = Transformer(shape, checkpoint, where, precision.dtype, precision.weights)
        transformer = transformer if head_ids is None else transformer.with_head(head_ids)
        capacity = choose_context(context, shape.context)
        return ModelRunner(transformer, slots, capacity, vocab, tokens, fp8_cache=precision.fp8_cache)

    @property
    def device(self) -> torch.device:
        return self.transformer.device

    @property
    def windowed(self) -> bool:
        return self.cache.longest is not None

    @property
    def hands_over(self) -> bool:
        plain = self.sparsity is None and not self.windowed  # whose slots can be truncated to what they held
        return self.graph_runner is not None and self.graph_runner.flags.hand_over and plain

    @property
    def free(self) -> int:
        return self.cache.free

    def lacks_room(self, tokens: Sequence[tuple[int | None, int]], without: Sequence[int] = ()) -> bool:
        return self.cache.lacks_room(tokens, without)

    @on_its_device
    def copy(self, source: int, target: int, length: int) -> None:
        self._begun = {}
        self.cache.copy(source, target, length)
        if self.sparsity is not None:
            self.sparsity.copied(source, target)

    def length(self, slot: int) -> int:
        return self.cache.lengths[slot]

    def min_length(self, slot: int) -> int:
        return self.cache.min_length(slot)

    def park(self, slot: int) -> int | None:
        self._begun = {}
        return self.cache.park(slot) if self.sparsity is None else None  # whose figures belong to slots

    @on_its_device
    @torch.inference_mode()
    def compact(self, slot: int, start: int, rows: Sequence[int]) -> None:
        self._begun = {}
        self.cache.compact(slot, start, rows)
        if self.sparsity is not None:
            self.sparsity.kept(slot, start, rows)

    @on_its_device
    @torch.inference_mode()
    def begin(self, handovers: Sequence[Handover], drafts: torch.Tensor) -> None:
        self._begun, lengths = {}, [len(h.tokens) + len(drafts) for h in handovers]
        starts = [self.length(h.slot) for h in handovers]
        fits = all(start and start + n <= self.max_seq_len for start, n in zip(starts, lengths, strict=True))
        alike = len(set(lengths)) == 1 and len({h.layers for h in handovers}) == 1 and max(lengths) <= MAX_QUERIES
        if not (self.hands_over and fits and alike):
            return
        assert self.graph_runner is not None
        none = [0] * len(drafts)
        scores = [Score(self, h.slot, [*h.tokens, *none], lengths[0], h.layers) for h in handovers]
        self.cache.extend([(h.slot, lengths[0]) for h in handovers])
        rows = self.graph_runner.begin(scores, starts, self.vocab_size, drafts)
        begun = {h: self.cache.places(h.slot) for h in handovers}
        for h, start in zip(handovers, starts, strict=True):
            self.truncate(h.slot, start)
        if rows is not None:
            for h, start, row in zip(handovers, starts, rows, strict=True):
                h.start, h.rows = start, row
            self._begun = begun

    def _known(self, requests: Sequence[Score]) -> list[ScoreOutput | None]:
        """The rows of those that were begun, if their keys and values are still where they were written: pages that a
        slot keeps beyond its length are given back where others ask for room."""
        begun, self._begun = self._begun, {}
        known = list[ScoreOutput | None]()
        for r in requests:
            h = r.handover
            there = h in begun and self.cache.places(h.slot) == begun[h]
            known.append(h.rows_of(r, self.length(r.slot)) if h and there else None)
        return known

    @on_its_device
    @torch.inference_mode()
    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        if self._begun and any(known := self._known(requests)):
            self.cache.extend([(r.slot, len(r.tokens)) for r, row in zip(requests, known, strict=True) if row])
            left = [r for r, row in zip(requests, known, strict=True) if not row]
            computed = iter(self.score(left) if left else [])
            return [row or next(computed) for row in known]
        if self.sparsity is None:
            return self._pass(requests)
        before, requests = self.sparsity.split_prefill(requests)
        read = self._recorded_pass(before, self.sparsity) if before else []
        rows = self._recorded_pass(self.sparsity.prepare(requests), self.sparsity)
        return after_prefill(before, read, requests, rows)

    def _recorded_pass(self, requests: Sequence[Score], sparsity: Sparsity) -> list[ScoreOutput]:
        starts = [self.length(r.slot) for r in requests]
        rows = self._pass(requests)
        for r, start in zip(requests, starts, strict=True):
            sparsity.record(r.slot, start, r.tokens, checks(r))
        return rows

    def _pass(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        """In several passes, where one is longer than layers with a window have room for."""
        longest = self.cache.longest
        if longest is None or sum(len(r.tokens) for r in requests) <= longest:
            return self._one_pass(requests)
        if len(requests) > 1:
            half = len(requests) // 2
            return self._pass(requests[:half]) + self._pass(requests[half:])
        (r,) = requests
        count = min(longest, len(r.tokens) - len(r.parents) - 1)
        parts = [*self._one_pass([first(r, count)]), *self._pass([rest(r, count)])]
        return [ScoreOutput.join(parts)]

    def _one_pass(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        starts = self.cache.extend([(r.slot, len(r.tokens)) for r in requests])
        if self.graph_runner is None:
            checked = self.sparsity is not None and any(checks(r) for r in requests)
            if self.numpy_decoder is None or checked or not self.numpy_decoder.supports(requests):
                return self._score(requests, starts)
            before, here = self.numpy_decoder.split(requests, starts)
            prompts = [r for r, _ in before]
            read = self._score(prompts, [start for _, start in before]) if before else []
            return after_prefill(prompts, read, requests, self.numpy_decoder.score(here, self.vocab_size))
        # Prompts are bound by arithmetic, and each has a size of its own: they run without graphs.
        # But a packed pass takes them along: the weights are read once.
        results: dict[int, ScoreOutput] = {}
        kinds = [self._is_short(r) for r in requests]
        if any(kinds) and self._packs(requests):
            kinds = [True] * len(requests)
        for short in (True, False):
            which = [i for i, kind in enumerate(kinds) if kind == short]
            if which:
                part, at = [requests[i] for i in which], [starts[i] for i in which]
                rows = (
                    self.graph_runner.score(part, at, self.vocab_size, self.sparsity)
                    if short
                    else self._score(part, at)
                )
                results |= dict(zip(which, rows, strict=True))
        return [results[i] for i in range(len(requests))]

    def _is_short(self, r: Score) -> bool:
        plain = self.sparsity is not None and not self.sparsity.fusible and checks(r)
        narrow = bool(r.parents) and any((s.window or MAX_QUERIES) < MAX_QUERIES for s in self.shape.attention_specs)
        return max(len(r.tokens), len(r.parents)) <= MAX_QUERIES and not plain and not narrow

    def _packs(self, requests: Sequence[Score]) -> bool:
        """Whether one packed pass can read all of these, however long each is."""
        assert self.graph_runner is not None
        if not self.graph_runner.flags.packed or self.sparsity is not None:
            return False
        whole = sum(len(r.tokens) for r in requests) <= MAX_ROWS
        return whole and all(self._is_short(r) for r in requests if r.parents)

    def _score(self, requests: Sequence[Score], starts: Sequence[int]) -> list[ScoreOutput]:
        chunks = chunks_of(requests, starts)
        wanted, observed = last_rows(requests)
        tokens = torch.tensor([t for r in requests for t in r.tokens], device=self.device)
        layers = {layer for r in requests for layer in r.layers}
        at = torch.tensor(wanted, dtype=torch.long, device=self.device)
        layer_ops = DENSE if self.sparsity is None else self.sparsity.layer_ops(requests, chunks)
        seen = None if observed == wanted else torch.tensor(observed, dtype=torch.long, device=self.device)
        logits, hidden = self.transformer.forward(tokens, chunks, self.cache, at, layers, layer_ops, seen)
        return split_rows(requests, logits[:, : self.vocab_size], hidden)

    @on_its_device
    @torch.inference_mode()
    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]:
        self._begun = {}
        # A fused decode never asks the host, which logprobs and processors need after every token.
        plain = [r.logprobs is None and r.history is None for r in requests]
        if self.graph_decode is None or not any(plain):
            return decode_by_score(self, requests)
        if not all(plain):
            parts = {fused: [r for r, p in zip(requests, plain, strict=True) if p == fused] for fused in (True, False)}
            written = {True: iter(self.decode(parts[True])), False: iter(decode_by_score(self, parts[False]))}
            return [next(written[p]) for p in plain]
        fed = []
        for r in requests:
            if len(r.tokens) > MAX_QUERIES:
                self.score([Score(self, r.slot, r.tokens[:-1], 0)])
                r = replace(r, tokens=r.tokens[-1:])
            fed.append(r)
        if self.cache.longest is not None:
            left = self.cache.longest - sum(len(r.tokens) for r in fed)
            if left < 0:
                half = len(fed) // 2
                return self.decode(fed[:half]) + self.decode(fed[half:])
            if any(r.n > 1 + left // len(fed) for r in fed):
                return self._decode_in_parts(fed, 1 + left // len(fed))
        starts = [self.length(r.slot) for r in fed]
        outputs = self.graph_decode.decode(fed, self.vocab_size)
        if self.sparsity is not None:
            for r, start, output in zip(fed, starts, outputs, strict=True):
                self.sparsity.record(r.slot, start, [*r.tokens, *output.tokens[:-1]])
        return outputs

    def _decode_in_parts(self, requests: Sequence[Decode], most: int) -> list[DecodeOutput]:
        """At most so many tokens at a time: between two parts, layers with a window give back what they have left."""
        parts = [[part] for part in self.decode([replace(r, n=min(r.n, most), handover=None) for r in requests])]
        going = [
            (i, replace(r, tokens=own[-1].tokens[-1:], n=r.n - most, handover=None))
            for i, (r, own) in enumerate(zip(requests, parts, strict=True))
            if r.n > most and own[-1].tokens[-1] not in r.stop and own[-1].tokens[-1] >= 0
        ]
        if going:
            for (i, _), part in zip(going, self.decode([r for _, r in going]), strict=True):
                parts[i].append(part)
        return [DecodeOutput.join(own) for own in parts]

    def computed(self, wrote: int, n: int) -> int:
        """Tokens computed for a decode of n that stopped after `wrote`; see GraphDecode.computed."""
        return wrote if self.graph_decode is None else self.graph_decode.computed(wrote, n)
