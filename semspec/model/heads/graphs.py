"""Short passes of an EAGLE-3 head on a GPU: the same weights in fewer launches, captured by size.

Keys and values of all slots lie in one buffer, which grows as slots and texts do; what was captured is then captured
again. A tree is drafted by one such pass per level.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from semspec.model.attention_metadata import SequenceChunk, cos_sin
from semspec.model.buckets import BATCHES, MAX_QUERIES, QUERIES, bucket
from semspec.model.experts import FeedForward
from semspec.model.fused_forward import covers
from semspec.model.graph_runner import fill, pad, tree_numbers
from semspec.model.graphs import GraphCache, GraphLauncher
from semspec.model.heads.eagle import EagleHead
from semspec.model.kernels import Kernels, TreeMask, triton_kernels

FIRST_ROWS, FIRST_LENGTH = 2, 2048
T = TypeVar("T")


class Pool:
    """Keys and values [layers, rows, kv heads, capacity, head_dim]; each slot has a row."""

    def __init__(self, head: EagleHead) -> None:
        s = head.shape
        size = (s.num_layers, FIRST_ROWS, s.kv_heads, FIRST_LENGTH, s.head_dim)
        self.keys = torch.zeros(size, device=head.device, dtype=head.dtype)
        self.values = torch.zeros_like(self.keys)
        self._free = list(range(FIRST_ROWS))

    def take(self) -> int:
        if not self._free:
            rows = self.keys.shape[1]
            self._free = list(range(rows, 2 * rows))
            self.keys, self.values = (F.pad(half, (0, 0, 0, 0, 0, 0, 0, rows)) for half in (self.keys, self.values))
        return self._free.pop(0)

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def reserve(self, length: int) -> None:
        more = self.keys.shape[3]
        while length > self.keys.shape[3]:
            self.keys, self.values = (F.pad(half, (0, 0, 0, more)) for half in (self.keys, self.values))


class States(NamedTuple):
    """What a sequence's tokens are read with."""

    states: Tensor
    rows: tuple[int, ...] = ()  # of them, one for each token; none: all, in order

    def picked(self) -> Tensor:
        return self.states[list(self.rows)] if self.rows else self.states


class HeadGraphs:
    def __init__(self, head: EagleHead, capacity: int, kernels: Kernels, launcher: Callable[[], GraphLauncher]) -> None:
        self.head, self.kernels, self._launcher = head, kernels, launcher
        self.pool = Pool(head)
        self._keys, self.launcher = self.pool.keys, launcher()
        self._buffers: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        rotaries = {spec.rotary for spec in head.shape.attention_specs}
        self._rotary = {r: None if r is None else cos_sin(r, capacity, head.device) for r in rotaries}

    @staticmethod
    def of(head: EagleHead, capacity: int) -> HeadGraphs | None:
        """None without a GPU and Triton, or for a head that the kernels do not cover."""
        plain = all(isinstance(layer.ffn, FeedForward) for layer in head.layers)
        if head.device.type != "cuda" or not covers(head.shape) or not plain:
            return None
        try:
            return HeadGraphs(head, capacity, triton_kernels(), lambda: GraphCache(head.device))
        except ImportError:
            return None

    @staticmethod
    def fits(chunks: Sequence[SequenceChunk]) -> bool:
        longest = max(max(c.count, len(c.parents)) for c in chunks)
        return longest <= MAX_QUERIES and len(chunks) <= BATCHES[-1] // max(1, longest // 8)

    def forward(
        self, tokens: list[list[int]], states: list[States], chunks: list[SequenceChunk]
    ) -> tuple[Tensor, Tensor]:
        """As `EagleHead.forward`, for chunks whose slots are rows of the pool: [B, Q, V] and [B, Q, width], padded,
        where the next pass writes, too."""
        batch, queries = bucket(len(chunks), BATCHES), bucket(max(c.count for c in chunks), QUERIES)
        size = batch * queries
        if (batch, queries) not in self._buffers:
            device, width = self.head.device, self.head.shape.width
            numbers = torch.zeros(4 * size + 4 * batch, dtype=torch.long, device=device)
            inputs = torch.zeros(size, width, device=device, dtype=self.head.dtype)
            self._buffers[batch, queries] = numbers, inputs
        numbers, inputs = self._buffers[batch, queries]
        padding = [0] * (batch - len(chunks))
        flat = pad(tokens, batch, queries)
        for column in ([c.slot for c in chunks], [c.start for c in chunks], [c.count for c in chunks]):
            flat += column + padding
        if trees := any(c.parents for c in chunks):
            flat += tree_numbers(chunks, batch, queries)
        picked = len(flat)  # where the rows are that states are picked from
        fill(numbers, [*flat, *(row for own in states for row in own.rows)])
        for i, own in enumerate(states):
            place = inputs[i * queries : i * queries + chunks[i].count]
            if own.rows:
                torch.index_select(own.states, 0, numbers[picked : (picked := picked + len(own.rows))], out=place)
            else:
                place.copy_(own.states)

        def work() -> tuple[Tensor, Tensor]:
            ids, where = numbers[:size].view(batch, queries), numbers[size : size + 4 * batch].view(4, batch)
            lines = numbers[size + 4 * batch : 3 * size + 4 * batch]
            mask = TreeMask(where[3], *lines.view(2, batch, queries)) if trees else None
            return self.rows(ids, inputs, (where[0], where[1], where[2]), mask)

        return self.run((batch, queries, trees), work, numbers)

    def run(self, key: Hashable, work: Callable[[], T], state: Tensor) -> T:
        if self._keys is not self.pool.keys:  # it has grown
            self._keys, self.launcher = self.pool.keys, self._launcher()
        return self.launcher.run(key, work, state)

    def rows(
        self, tokens: Tensor, states: Tensor, where: tuple[Tensor, Tensor, Tensor], tree: TreeMask | None
    ) -> tuple[Tensor, Tensor]:
        """Tokens [B, Q] and their states [B * Q, width] -> [B, Q, V] and [B, Q, width]."""
        head, k, s = self.head, self.kernels, self.head.shape
        batch, queries = tokens.shape
        embedded = F.embedding(tokens.flatten(), head.embedding).to(head.dtype)
        normed = k.add_norm(states, None, head.hidden_norm, s.norm_eps)
        x = (normed if head.config.norm_before_residual else states).clone()  # is added to in place
        first = k.add_norm(embedded, None, head.layers[0].attention_norm, s.norm_eps)
        inputs = torch.cat([first, normed], -1)
        added: Tensor | None = None
        for i, layer in enumerate(head.layers):
            inputs = inputs if i == 0 else k.add_norm(x, added, layer.attention_norm, s.norm_eps)
            qkv = layer.qkv(inputs).view(batch, queries, -1, s.head_dim)
            keys, values, spec = self.pool.keys[i], self.pool.values[i], layer.attention_spec
            norms = None
            if layer.query_norm is not None and layer.key_norm is not None:
                norms = (layer.query_norm, layer.key_norm)
            rotary = self._rotary[spec.rotary]
            q = k.rope_and_cache(qkv, keys, values, *where, rotary, s.heads, norms, s.norm_eps, tree=tree)
            attended = k.attend(q, keys, values, *where, s.attention_scale, spec.window, tree)
            added = layer.out(attended.view(batch * queries, -1))
            assert isinstance(layer.ffn, FeedForward)
            gate_up = layer.ffn.gate_up(k.add_norm(x, added, layer.ffn_norm, s.norm_eps))
            added = layer.ffn.down(k.act_and_mul(gate_up, s.activation))
        normed = k.add_norm(x, added, head.final_norm, s.norm_eps)
        own = normed if head.config.norm_output else x
        return head.head(normed).view(batch, queries, -1), own.view(batch, queries, -1)
