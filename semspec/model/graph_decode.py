"""Decoding on a GPU without asking the host: sampling, stop flags and positions live on the device.

A decode runs in chunks of at most eight tokens. Within a chunk nothing waits: graphs of one or several tokens follow
each other, and a sequence that has ended does nothing in the rest. The host checks a chunk for stop tokens when the
next one is already running, so the device never waits for it; tokens computed after a stop are discarded, but take
time. So chunks that may stop are short in a deep model, and in a very deep one the host checks each token before it
launches the next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from semspec.model.buckets import BATCHES, MAX_QUERIES, bucket, feed_bucket
from semspec.model.fused_forward import BatchMetadata
from semspec.model.graph_runner import GraphRunner, fill, pad
from semspec.model.kernels import COUNT, FIELDS, SEED, SLOT, START, STEP, STREAM, TOKEN
from semspec.sampling.draw import SamplingRows, SamplingUse, draw_rows
from semspec.types import Decode, DecodeOutput

CHUNK = 8
STOP_SETS = 128  # in the table at a time
UNROLL = 256  # layers in one graph: a small model writes several tokens in one
LOOK = 48  # layers between two checks for stop tokens: they take longer than the host needs for a check


@dataclass(frozen=True, slots=True)
class Mode:
    """What distinguishes captured decode steps besides their size."""

    use: SamplingUse
    keep: bool
    layers: tuple[int, ...]
    vocab_size: int

    @staticmethod
    def of(requests: Sequence[Decode], vocab: int) -> Mode:
        return Mode(
            SamplingUse.of([r.sampling for r in requests])._replace(some_greedy=True),  # as sequences that pad are
            keep=any(r.keep_logits for r in requests),
            layers=tuple(sorted({layer for r in requests for layer in r.layers})),
            vocab_size=vocab,
        )


class GraphDecode:
    def __init__(self, runner: GraphRunner) -> None:
        self.runner = runner
        self.stops = StopTable(runner.shape.vocab_size, runner.device)
        self.unroll = max(1, min(CHUNK, UNROLL // runner.shape.num_layers))
        self.look = max(1, min(CHUNK, LOOK // runner.shape.num_layers))  # tokens between two checks for stop tokens
        # One token of such a model takes longer than the device would wait for the host between two.
        self.waits = runner.shape.num_layers >= LOOK

    def computed(self, wrote: int, n: int) -> int:
        """Tokens computed for a decode of n that stopped after `wrote`: more, where the next ones were running already
        when the stop was seen."""
        if wrote >= n:
            return n
        return min(n, (-(-wrote // self.look) + (not self.waits)) * self.look)

    def decode(self, requests: Sequence[Decode], vocab: int) -> list[DecodeOutput]:
        """Feeds must be short; see types.Runner for the rest of the contract."""
        if len(requests) > BATCHES[-1]:
            most, parts = BATCHES[-1], [replace(r, handover=None) for r in requests]
            return self.decode(parts[:most], vocab) + self.decode(parts[most:], vocab)
        cache = self.runner.cache
        starts = cache.extend([(r.slot, len(r.tokens)) for r in requests])
        # The last token written is not fed, so one more fits than the slot has positions left.
        left = [min(r.n, cache.capacity - cache.lengths[r.slot] + 1) for r in requests]
        cache.reserve([(r.slot, n - 1) for r, n in zip(requests, left, strict=True)])
        chunks = self._launch(requests, starts, left, Mode.of(requests, vocab))
        hand_over(requests, chunks)
        answers = []
        for b, r in enumerate(requests):
            output = DecodeOutput.join([part for chunk in chunks if (part := chunk.of(b, r))])
            written = len(output.tokens)
            cache.lengths[r.slot] += written - 1
            if written < r.n and output.tokens[-1] not in r.stop:
                cache.extend([(r.slot, 1)])  # raises: the slot is full
            if chunks[-1].nan(b):  # in the cache, it makes all later logits NaN: to check the last ones is enough
                output.tokens[-1] = -1
            if r.handover is not None:
                r.handover.draft = output.tokens
            answers.append(output)
        return answers

    def _launch(self, requests: Sequence[Decode], starts: list[int], left: list[int], mode: Mode) -> list[Chunk]:
        most = max(left)
        batch = bucket(len(requests), BATCHES)
        queries = feed_bucket(max(len(r.tokens) for r in requests), batch)
        stops = self.stops.rows([r.stop for r in requests])
        columns = [
            [r.tokens[0], r.slot, start, len(r.tokens), n, r.sampling.seed, r.stream, row, 0]
            for r, start, n, row in zip(requests, starts, left, stops, strict=True)
        ]
        columns += [[0] * FIELDS] * (batch - len(requests))
        table = [number for field in zip(*columns, strict=True) for number in field]
        feed = pad([r.tokens for r in requests], batch, queries) if queries > 1 else []
        fill(self._ints(batch), table + feed)
        if not mode.use.all_greedy:
            options = [(o.temperature, o.top_k, o.top_p, o.min_p) for o in (r.sampling for r in requests)]
            options += [(0.0, 0, 1.0, 0.0)] * (batch - len(requests))
            fill(self._options(batch), [number for row in options for number in row])

        chunks: list[Chunk] = []
        may_stop = any(r.stop for r in requests)
        longest = self.look if may_stop or most > CHUNK else CHUNK  # a short draft that cannot stop is wanted whole
        while (done := sum(chunk.size for chunk in chunks)) < most:
            if chunks:
                if self.waits and chunks[-1].ended(requests):
                    break
                self._state(batch)[STEP].zero_()
            size = min(longest, most - done)
            chunks.append(self._chunk(batch, queries if not chunks else 1, size, mode, len(requests)))
            if len(chunks) > 1 and chunks[-2].ended(requests):
                break
        return chunks

    def _chunk(self, batch: int, queries: int, size: int, mode: Mode, used: int) -> Chunk:
        """Write so many tokens, the first after feeding `queries` each."""
        runner = self.runner
        state, out = self._state(batch), runner.buffer(("written", batch), (CHUNK, batch), torch.long)
        left = size
        hidden: dict[int, Tensor] = {}
        logits: Tensor | None = None
        while left:
            steps = 1 if queries > 1 else min(self.unroll, 1 << (left.bit_length() - 1))

            def work(queries: int = queries, steps: int = steps) -> tuple[Tensor | None, dict[int, Tensor]]:
                for _ in range(steps):
                    results = self._step(batch, queries, state, out, mode)
                return results

            logits, hidden = runner.launcher.run(("decode", batch, queries, steps, mode), work, state)
            left -= steps
            queries = 1
        nan = runner.logits[:used, : mode.vocab_size].isnan().any(-1)
        rows = torch.cat([out[:size, :used], nan[None].long()])
        return Chunk(
            rows[:size],
            HostCopy(rows),
            None if logits is None else logits[:size, :used].clone(),
            {layer: states[:size, :used].clone() for layer, states in hidden.items()},
        )

    def _ints(self, batch: int) -> Tensor:
        """The state of so many sequences, followed by the tokens they are fed first."""
        return self.runner.buffer(("decode", batch), (batch * (FIELDS + MAX_QUERIES),), torch.long)

    def _state(self, batch: int) -> Tensor:
        return self._ints(batch)[: FIELDS * batch].view(FIELDS, batch)

    def _options(self, batch: int) -> Tensor:
        return self.runner.buffer(("options", batch), (4 * batch,), torch.float32)

    def _step(
        self, batch: int, queries: int, state: Tensor, out: Tensor, mode: Mode
    ) -> tuple[Tensor | None, dict[int, Tensor]]:
        """Feed, sample, advance."""
        runner, width = self.runner, self.runner.shape.width
        feed = self._ints(batch)[FIELDS * batch :]
        tokens = state[TOKEN][:, None] if queries == 1 else feed[: batch * queries].view(batch, queries)
        metadata = BatchMetadata(state[SLOT], state[START], state[COUNT])
        normed, hidden = runner.fused.forward(tokens, metadata, mode.layers, last=True)
        logits = runner.fused.head(normed, runner.logits)[:, 0, : mode.vocab_size]  # [B, V]
        kept = None
        if mode.keep:
            kept = runner.buffer(("logits", batch, mode.vocab_size), (CHUNK, batch, mode.vocab_size), torch.float32)
        sampled = self._sample(logits, batch, state, mode, kept)
        step = state[STEP, :1]
        states = {}
        for layer, one in hidden.items():
            states[layer] = runner.buffer(("hidden", batch, layer), (CHUNK, batch, width), one.dtype)
            states[layer].index_copy_(0, step, one[:, 0][None])
        runner.kernels.advance(state, sampled, self.stops.table, out)
        return kept, states

    def _sample(self, logits: Tensor, batch: int, state: Tensor, mode: Mode, kept: Tensor | None) -> Tensor:
        """A token for each sequence; the logits it was sampled from go to the row of this step."""
        if mode.use.all_greedy:  # nothing below applies, and each line of it would be a launch
            sampled, processed = logits.argmax(-1), logits.float() if mode.keep else None
        else:
            rows = SamplingRows(self._options(batch).view(batch, 4), mode.use)
            if self.runner.kernels.sample is not None:
                return self.runner.kernels.sample(logits, rows.columns, rows.use, state, kept)
            sampled, processed = draw_rows(
                logits, rows, (state[SEED], state[START] + state[COUNT], state[STREAM]), mode.keep
            )
            sampled = sampled.clamp_min(0)  # what is NaN is found out on the host; until then any token will do
        if kept is not None and processed is not None:
            kept.index_copy_(0, state[STEP, :1], processed[None])
        return sampled


class StopTable:
    """Sets of stop tokens as rows of a table [sets, V] on the device; row 0 is the empty set."""

    def __init__(self, vocab: int, device: torch.device, capacity: int = STOP_SETS) -> None:
        self.table = torch.zeros(capacity, vocab, dtype=torch.bool, device=device)
        self._known: OrderedDict[frozenset[int], int] = OrderedDict()
        self._free = list(range(1, capacity))[::-1]

    def rows(self, sets: Sequence[frozenset[int]]) -> list[int]:
        """At most `capacity - 1` different sets at once."""
        for tokens in sets:
            if tokens in self._known:
                self._known.move_to_end(tokens)  # so that none of these is the oldest, which may be evicted
        return [self._row(tokens) if tokens else 0 for tokens in sets]

    def _row(self, tokens: frozenset[int]) -> int:
        if tokens not in self._known:
            row = self._free.pop() if self._free else self._known.popitem(last=False)[1]
            inside = [t for t in tokens if 0 <= t < self.table.shape[1]]
            self.table[row].zero_()
            self.table[row, torch.tensor(inside, dtype=torch.long, device=self.table.device)] = True
            self._known[tokens] = row
        return self._known[tokens]


class HostCopy:
    """A copy to the host that is under way."""

    def __init__(self, tensor: Tensor) -> None:
        self._rows: list[list[int]] | None = None
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = tensor.clone()

    def result(self) -> list[list[int]]:
        """Made once, since every sequence of a batch reads it."""
        if self._rows is None:
            if self._event is not None:
                self._event.synchronize()
            self._rows = self._host.tolist()
        return self._rows


@dataclass(slots=True)
class Chunk:
    """The tokens of one launch; -1 where a sequence had ended before."""

    written: Tensor  # [size, B]
    _rows: HostCopy  # [size + 1, B]; the last row says whose latest logits are NaN
    logits: Tensor | None  # [size, B, V]
    hidden: dict[int, Tensor]  # layer -> [size, B, width]

    @property
    def size(self) -> int:
        return len(self.written)

    @property
    def tokens(self) -> list[list[int]]:  # [size, B]
        return self._rows.result()[: self.size]

    def nan(self, b: int) -> bool:
        return bool(self._rows.result()[self.size][b])

    def ended(self, requests: Sequence[Decode]) -> bool:
        """Whether no sequence continues after this."""
        last = self.tokens[-1]
        return all(token == -1 or token in r.stop for token, r in zip(last, requests, strict=True))

    def of(self, b: int, r: Decode) -> DecodeOutput | None:
        tokens = [row[b] for row in self.tokens if row[b] != -1]
        if not tokens:
            return None
        rows = slice(len(tokens))
        logits = self.logits[rows, b] if r.keep_logits and self.logits is not None else None
        return DecodeOutput(tokens, logits, {layer: self.hidden[layer][rows, b] for layer in r.layers})


def hand_over(requests: Sequence[Decode], chunks: Sequence[Chunk]) -> None:
    """Begin the passes that follow, before the host waits for the tokens; of one target, and for whole batches only."""
    handovers = [r.handover for r in requests if r.handover is not None]
    if len(handovers) < len(requests) or len({id(h.runner) for h in handovers}) > 1:
        return
    target, drafts = handovers[0].runner, torch.cat([chunk.written for chunk in chunks])
    if target.device == drafts.device:  # one on another device may be in the middle of a pass
        target.begin(handovers, drafts)
