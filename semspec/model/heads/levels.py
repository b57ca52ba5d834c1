"""Greedy trees of a head whose tokens are chosen on the device: one captured pass a level, and the host waits for the
last.

A level is `width` tokens a sequence. Of their successors, the `top` likeliest of each, those with the best joint
probability are the next level. The host gets the successors of all levels in one copy and chooses from them again, by
the same order, which is how it learns what was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from semspec import tree
from semspec.model.buckets import BATCHES, MAX_QUERIES, bucket
from semspec.model.graph_decode import StopTable
from semspec.model.graph_runner import fill, pad
from semspec.model.heads.graphs import HeadGraphs
from semspec.model.kernels import TreeMask
from semspec.types import Beam


class Start(NamedTuple):
    """Where a sequence's levels begin: a row of the pool, the position of the first token, its state before that."""

    row: int
    position: int
    state: Tensor  # [width of the head]
    tokens: Sequence[int]
    beam: Beam


class Numbers(NamedTuple):
    """What changes from level to level, as parts of one tensor."""

    tokens: Tensor  # [B, W]
    slots: Tensor  # [B]
    starts: Tensor
    counts: Tensor
    bases: Tensor
    limits: Tensor  # levels of each sequence
    stops: Tensor  # rows of the stop table
    lineages: Tensor  # [B, W]
    depths: Tensor
    step: Tensor  # [1]

    @staticmethod
    def of(flat: Tensor, batch: int, width: int) -> Numbers:
        sizes = [batch * width, *[batch] * 6, batch * width, batch * width, 1]
        parts = list(flat[: sum(sizes)].split(sizes))
        for wide in (0, 7, 8):
            parts[wide] = parts[wide].view(batch, width)
        return Numbers(*parts)


class Buffers(NamedTuple):
    numbers: Tensor
    least: Tensor  # [B] a joint log-probability below this is no token
    chances: Tensor  # [levels + 1, B, W]
    states: Tensor  # [levels + 1, B, W, width of the head] with which each level's tokens are read
    best: Tensor


class Levels:
    def __init__(self, graphs: HeadGraphs, vocab: int) -> None:
        self.graphs, self.vocab_size = graphs, vocab
        self.stops = StopTable(vocab, graphs.head.device)
        self._buffers: dict[tuple[int, int, int], Buffers] = {}

    def supports(self, beams: Sequence[Beam]) -> bool:
        first = beams[0]
        alike = all((b.width, b.top) == (first.width, first.top) for b in beams)
        longest = max(b.levels for b in beams) * first.width
        fits = 0 < longest <= tree.MAX_TREE and len(beams) * first.width <= BATCHES[-1] * MAX_QUERIES // 8
        return alike and fits and len(beams) <= BATCHES[-1] and first.top <= self.vocab_size

    def buffers(self, batch: int, width: int, top: int) -> Buffers:
        if (batch, width, top) not in self._buffers:
            device, levels = self.graphs.head.device, tree.MAX_TREE // width
            numbers = torch.zeros(3 * batch * width + 6 * batch + 1, dtype=torch.long, device=device)
            chances = torch.zeros(levels + 1, batch, width, dtype=torch.double, device=device)
            made = torch.zeros(
                levels + 1, batch, width, self.graphs.head.shape.width, dtype=self.graphs.head.dtype, device=device
            )
            best = torch.zeros(levels, 2, batch, width, top, dtype=torch.double, device=device)
            self._buffers[batch, width, top] = Buffers(numbers, torch.zeros_like(chances[0, :, 0]), chances, made, best)
        return self._buffers[batch, width, top]

    def run(self, starts: Sequence[Start]) -> Tensor:
        """Of all levels, of which the host knows nothing yet, [levels, 2, B, W, top]: log-probabilities of the
        successors of each token, and their ids. The pool has room for all that is read."""
        first, levels = starts[0].beam, max(s.beam.levels for s in starts)
        batch, width, top = bucket(len(starts), BATCHES), first.width, first.top
        b = self.buffers(batch, width, top)
        padding = [0] * (batch - len(starts))
        flat = pad([s.tokens for s in starts], batch, width)
        columns = [(s.row, s.position, width * (s.beam.levels > 0), s.position, s.beam.levels) for s in starts]
        for column in (*zip(*columns, strict=True), self.stops.rows([s.beam.stop for s in starts])):
            flat += [*column, *padding]
        lines = [1 << i for i in range(width)]  # no token of the first level sees another
        fill(b.numbers, [*flat, *lines * batch, *[0] * (batch * width), 0])
        some = [[*s.beam.chances, *[-torch.inf] * (width - len(s.tokens))] for s in starts]
        fill(b.chances[0].view(-1), [chance for own in some for chance in own])
        fill(b.least, [s.beam.least for s in starts])
        b.states[0, : len(starts)] = torch.cat([s.state for s in starts])[:, None]
        for _ in range(levels):
            self.graphs.run(("level", batch, width, top), lambda: self._level(b, batch, width, top), b.numbers)
        return b.best[:levels, :, : len(starts)]

    def _level(self, b: Buffers, batch: int, width: int, top: int) -> None:
        """Nothing but numbers is read that this writes, so that it can be done again."""
        n = Numbers.of(b.numbers, batch, width)
        states = b.states.index_select(0, n.step).view(batch * width, -1)
        mask = TreeMask(n.bases, n.lineages, n.depths)
        logits, own = self.graphs.rows(n.tokens, states, (n.slots, n.starts, n.counts), mask)
        values, ids = successors(logits[..., : self.vocab_size], top)
        b.best.index_copy_(0, n.step, torch.stack([values, ids.double()])[None])

        joint = (b.chances.index_select(0, n.step)[0][..., None] + values).flatten(1)  # [B, W * top]
        ids = ids.flatten(1)
        stopped = self.stops.table[n.stops[:, None], ids]
        allowed = (joint >= b.least[:, None]) & ~stopped
        order = torch.where(allowed, joint, -torch.inf).sort(stable=True, dim=-1, descending=True)
        chosen, after = order.indices[:, :width], n.step + 1
        parents = chosen // top
        b.chances.index_copy_(0, after, order.values[:, :width][None])
        b.states.index_copy_(0, after, own.gather(1, parents[..., None].expand(own.shape))[None])

        n.counts.mul_(n.limits > after)  # a sequence that has all its levels reads no more
        n.starts.add_(n.counts)
        places = n.starts - n.bases
        places = (places[:, None] + torch.arange(width, device=ids.device)).clamp_max(tree.MAX_TREE)
        bits = torch.ones_like(parents) << places
        n.lineages.copy_(n.lineages.gather(1, parents) | bits)
        n.depths.add_(1)
        n.tokens.copy_(ids.gather(1, chosen))
        n.step.copy_(after)


def successors(logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """As `sampling.draw.add_likeliest` has them: log-probabilities, in double, and ids."""
    best = logits.topk(top, dim=-1)
    return (best.values.float() - logits.float().logsumexp(-1, keepdim=True)).double(), best.indices


def on_host(best: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return best.cpu().numpy()
