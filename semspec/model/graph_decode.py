"""Writing on a GPU without asking the host: draws, stop flags and positions live on the device.

A roll goes in chunks of at most eight tokens. Within a chunk nothing waits: graphs of one or several tokens follow each
other, and a sequence that has ended does nothing in the rest. The host looks at a chunk's tokens only when the next
chunk is on its way, so the device never waits for it; what was launched in vain wrote nothing, but took its time. So
chunks are no longer than the host needs to keep ahead: short in a deep model, whose tokens take long.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semspec.model.fused_forward import BatchMetadata
from semspec.model.graph_runner import BATCHES, LONGEST, QUERIES, GraphRunner, bucket, pad
from semspec.model.kernels import COUNT, FIELDS, SEED, SLOT, START, STEP, STREAM, TOKEN
from semspec.sampling.draw import SamplingRows, best_rows, draw_rows
from semspec.types import Decode, DecodeOutput

CHUNK = 8
STOP_SETS = 128  # kept at a time
UNROLL = 256  # layers in one graph: a small model writes several tokens in one
LOOK = 48  # layers between two looks at a roll that may end anywhere; the host needs less than a millisecond for one


@dataclass(frozen=True, slots=True)
class Mode:
    """What differs between captured steps besides their size."""

    greedy: bool
    filtered: bool
    floored: bool
    keep: bool
    layers: tuple[int, ...]
    vocab: int

    @staticmethod
    def of(requests: Sequence[Decode], vocab: int) -> Mode:
        sampled = [r.sampling for r in requests if not r.sampling.greedy]
        return Mode(
            greedy=not sampled,
            filtered=any(s.filtered for s in sampled),
            floored=any(s.min_p > 0.0 for s in sampled),
            keep=any(r.keep_logits for r in requests),
            layers=tuple(sorted({layer for r in requests for layer in r.layers})),
            vocab=vocab,
        )


class GraphDecode:
    def __init__(self, fast: GraphRunner) -> None:
        self.fast = fast
        self.stops = Stops(fast.shape.vocab, fast.device)
        self.unroll = max(1, min(CHUNK, UNROLL // fast.shape.depth))
        self.look = max(1, min(CHUNK, LOOK // fast.shape.depth))

    def chunk(self, n: int) -> int:
        """Tokens between two looks at a roll of n. A short one is a draft of tokens, all of which are wanted; a long
        one ends where a step or an answer does."""
        return n if n <= CHUNK else self.look

    def computed(self, wrote: int, n: int) -> int:
        """Tokens that are computed for a roll of n which stops after so many: it goes on until a stop is seen."""
        size = self.chunk(n)
        return min(n, (-(-wrote // size) + 1) * size)

    def decode(self, requests: Sequence[Decode], vocab: int) -> list[DecodeOutput]:
        """Feeds must be short; see types.Runner for the rest of the contract."""
        if len(requests) > BATCHES[-1]:
            most = BATCHES[-1]
            return self.decode(requests[:most], vocab) + self.decode(requests[most:], vocab)
        cache = self.fast.cache
        starts = cache.extend([(r.slot, len(r.tokens)) for r in requests])
        # The last token written is not fed, so one more fits than there are places.
        left = [min(r.n, cache.capacity - cache.lengths[r.slot] + 1) for r in requests]
        chunks = self._launch(requests, starts, left, Mode.of(requests, vocab))
        answers = []
        for b, r in enumerate(requests):
            rolled = DecodeOutput.join([part for chunk in chunks if (part := chunk.of(b, r))])
            written = len(rolled.tokens)
            cache.lengths[r.slot] += written - 1
            if written < r.n and rolled.tokens[-1] not in r.stop:
                cache.extend([(r.slot, 1)])  # says that the slot is full
            answers.append(rolled)
        return answers

    def _launch(self, requests: Sequence[Decode], starts: list[int], left: list[int], mode: Mode) -> list[Chunk]:
        fast, most = self.fast, max(left)
        batch = bucket(len(requests), BATCHES)
        queries = bucket(max(len(r.tokens) for r in requests), QUERIES)
        stops = self.stops.rows([r.stop for r in requests])
        columns = [
            [r.tokens[0], r.slot, start, len(r.tokens), n, r.sampling.seed, r.stream, row, 0]
            for r, start, n, row in zip(requests, starts, left, stops, strict=True)
        ]
        columns += [[0] * FIELDS] * (batch - len(requests))
        table = [number for field in zip(*columns, strict=True) for number in field]
        fast.fill(self._ints(batch), table + (pad([r.tokens for r in requests], batch, queries) if queries > 1 else []))
        if not mode.greedy:
            options = [(o.temperature, o.top_k, o.top_p, o.min_p) for o in (r.sampling for r in requests)]
            options += [(0.0, 0, 1.0, 0.0)] * (batch - len(requests))
            fast.fill(self._options(batch), [number for column in zip(*options, strict=True) for number in column])

        chunks: list[Chunk] = []
        longest = self.chunk(most)
        while (done := sum(chunk.size for chunk in chunks)) < most:
            if chunks:
                self._state(batch)[STEP].zero_()
            size = min(longest, most - done)
            chunks.append(self._chunk(batch, queries if not chunks else 1, size, mode, len(requests)))
            if len(chunks) > 1 and chunks[-2].ended(requests):
                break
        return chunks

    def _chunk(self, batch: int, queries: int, size: int, mode: Mode, used: int) -> Chunk:
        """Write so many tokens, the first after feeding `queries` each."""
        fast = self.fast
        state, out = self._state(batch), fast.buffer(("written", batch), (CHUNK, batch), torch.long)
        left = size
        hidden: dict[int, Tensor] = {}
        kept: Tensor | None = None
        while left:
            steps = 1 if queries > 1 else min(self.unroll, 1 << (left.bit_length() - 1))

            def work(queries: int = queries, steps: int = steps) -> tuple[Tensor | None, dict[int, Tensor]]:
                for _ in range(steps):
                    results = self._step(batch, queries, state, out, mode)
                return results

            kept, hidden = fast.runs.run(("roll", batch, queries, steps, mode), work, state)
            left -= steps
            queries = 1
        return Chunk(
            size,
            Fetch(out[:size, :used]),
            None if kept is None else kept[:size, :used].clone(),
            {layer: states[:size, :used].clone() for layer, states in hidden.items()},
        )

    def _ints(self, batch: int) -> Tensor:
        """The state of so many sequences, and behind it the tokens they are fed first."""
        return self.fast.buffer(("roll", batch), (batch * (FIELDS + LONGEST),), torch.long)

    def _state(self, batch: int) -> Tensor:
        return self._ints(batch)[: FIELDS * batch].view(FIELDS, batch)

    def _options(self, batch: int) -> Tensor:
        return self.fast.buffer(("options", batch), (4 * batch,), torch.float32)

    def _step(
        self, batch: int, queries: int, state: Tensor, out: Tensor, mode: Mode
    ) -> tuple[Tensor | None, dict[int, Tensor]]:
        """Feed, draw, note."""
        fast, width = self.fast, self.fast.shape.width
        feed = self._ints(batch)[FIELDS * batch :]
        tokens = state[TOKEN][:, None] if queries == 1 else feed[: batch * queries].view(batch, queries)
        places = BatchMetadata(state[SLOT], state[START], state[COUNT])
        normed, hidden = fast.fused.forward(tokens, places, mode.layers, last=True)
        logits = fast.fused.head(normed, fast.logits)[:, 0, : mode.vocab]  # [B, V]
        kept = None
        if mode.keep:
            kept = fast.buffer(("kept", batch, mode.vocab), (CHUNK, batch, mode.vocab), torch.float32)
        drawn = self._draw(logits, batch, state, mode, kept)
        step = state[STEP, :1]
        states = {}
        for layer, one in hidden.items():
            states[layer] = fast.buffer(("hidden", batch, layer), (CHUNK, batch, width), one.dtype)
            states[layer].index_copy_(0, step, one[:, 0][None])
        fast.kernels.advance(state, drawn, self.stops.table, out)
        return kept, states

    def _draw(self, logits: Tensor, batch: int, state: Tensor, mode: Mode, kept: Tensor | None) -> Tensor:
        """A token for each sequence; what it was drawn from goes to the row of this step."""
        if mode.greedy:  # nothing below is looked at, and each line of it would be a launch
            drawn, processed = best_rows(logits, mode.keep)
        else:
            options = self._options(batch).view(4, batch)
            if self.fast.kernels.sample is not None and not mode.filtered:
                return self.fast.kernels.sample(logits, options, state, kept)
            temperature, top_k, top_p, min_p = options
            rows = SamplingRows(temperature, top_k.long(), top_p, min_p, mode.greedy, mode.filtered, mode.floored)
            drawn, processed = draw_rows(
                logits, rows, (state[SEED], state[START] + state[COUNT], state[STREAM]), mode.keep
            )
        if kept is not None and processed is not None:
            kept.index_copy_(0, state[STEP, :1], processed[None])
        return drawn


class Stops:
    """Sets of stop tokens as rows of a table [sets, V] on the device; row 0 is the empty set."""

    def __init__(self, vocab: int, device: torch.device, most: int = STOP_SETS) -> None:
        self.table = torch.zeros(most, vocab, dtype=torch.bool, device=device)
        self._known: OrderedDict[frozenset[int], int] = OrderedDict()
        self._free = list(range(1, most))[::-1]

    def rows(self, sets: Sequence[frozenset[int]]) -> list[int]:
        """At most `most - 1` different sets at once."""
        for tokens in sets:
            if tokens in self._known:
                self._known.move_to_end(tokens)  # the oldest, which may have to go, is none of these
        return [self._row(tokens) if tokens else 0 for tokens in sets]

    def _row(self, tokens: frozenset[int]) -> int:
        if tokens not in self._known:
            row = self._free.pop() if self._free else self._known.popitem(last=False)[1]
            inside = [t for t in tokens if 0 <= t < self.table.shape[1]]
            self.table[row].zero_()
            self.table[row, torch.tensor(inside, dtype=torch.long, device=self.table.device)] = True
            self._known[tokens] = row
        return self._known[tokens]


class Fetch:
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
        """Made once, since every sequence of a batch asks for it."""
        if self._rows is None:
            if self._event is not None:
                self._event.synchronize()
            self._rows = self._host.tolist()
        return self._rows


@dataclass(slots=True)
class Chunk:
    """What was written in one go; tokens [size, B] of which -1 are none."""

    size: int
    tokens: Fetch
    logits: Tensor | None  # [size, B, V]
    hidden: dict[int, Tensor]  # layer -> [size, B, width]

    def ended(self, requests: Sequence[Decode]) -> bool:
        """Whether no sequence went on after this."""
        last = self.tokens.result()[-1]
        return all(token == -1 or token in r.stop for token, r in zip(last, requests, strict=True))

    def of(self, b: int, r: Decode) -> DecodeOutput | None:
        tokens = [row[b] for row in self.tokens.result() if row[b] != -1]
        if not tokens:
            return None
        rows = slice(len(tokens))
        logits = self.logits[rows, b] if r.keep_logits and self.logits is not None else None
        return DecodeOutput(tokens, logits, {layer: self.hidden[layer][rows, b] for layer in r.layers})
