"""Passes as one row of tokens, whatever they are for: drafts that are checked, single tokens, prompts, trees.

To everything but attention a row of N tokens is a batch of N sequences of one token each. Attention sees it as tiles:
each is a few rows of one sequence, and reads that sequence's keys and values once. Rows and tiles are rounded up to a
few sizes, so that few graphs serve everything; rows that fill up have tiles without queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from semspec import tree
from semspec.model.attention_metadata import SequenceChunk
from semspec.model.buckets import BATCHES, MAX_QUERIES, MAX_ROWS, QUERIES, bucket
from semspec.model.fused_forward import AttentionTiles, BatchMetadata
from semspec.model.kernels import RowTiles, TreeMask

# Of all tokens together. Multiples of 9 are checks of a draft of 8; products of many rows are made 64 or 128 at a time.
ROWS = (
    1, 2, 4, 6, 9, 12, 16, 18, 24, 32, 36, 48, 64, 72, 96, 128, 144, 192, 256, 288, 320, 384, 448, 512, 576, 640, 768,
    896, 1024,
)  # fmt: skip
TILES = tuple(1 << i for i in range(MAX_ROWS.bit_length()))
HEIGHTS = (16, 32, 64, 128)  # of a tile in the attention kernel: queries times the heads that share a key head
LOOK = 64  # rows of a tile whose arithmetic takes as long as reading its keys and values; estimated, not measured
SAVED = 128  # rows that the head must be spared to be worth a graph of their own: a quarter of a millisecond at 32B
NUMBERS = 9 * MAX_ROWS + 5 * TILES[-1] + 2  # of the largest pass, with the rows whose states are wanted


def packed_passes(lengths: Sequence[int]) -> list[list[int]]:
    """The sequences that share a pass, by their places in `lengths`: as many as there are rows for."""
    found, rows = [list[int]()], 0
    for i, n in enumerate(lengths):
        if found[-1] and rows + n > MAX_ROWS:
            found.append([])
            rows = 0
        found[-1].append(i)
        rows += n
    return found


def fits_rectangle(lengths: Sequence[int]) -> bool:
    """Whether sequences of one pass take no more rows side by side, each as long as the longest: then their numbers are
    fewer, and attention has whole sequences in place of tiles. One alone has hardly any padding either way."""
    longest = max(lengths)
    if longest > MAX_QUERIES or len(lengths) > BATCHES[-1]:
        return False
    return len(lengths) == 1 or bucket(len(lengths), BATCHES) * bucket(longest, QUERIES) <= bucket(sum(lengths), ROWS)


def tile_queries(lengths: Sequence[int], group: int) -> int:
    """Tokens of a tile: of the heights there are, the one whose tiles take least. Smaller tiles read keys and values
    more often, larger ones have more empty rows."""

    def cost(queries: int) -> int:
        height = next((h for h in HEIGHTS if h >= queries * group), queries * group)
        return (LOOK + height) * sum(-(-n // queries) for n in lengths)

    choices = {max(1, min(height // group, MAX_QUERIES)) for height in HEIGHTS}  # a tree's line has 64 bits
    return min(sorted(choices), key=cost)


def lines_of(chunk: SequenceChunk) -> tuple[int, list[int], list[int]]:
    """Where a sequence's tree begins, which is with its pass or before, and for each of its new tokens the bits of its
    line, signed, and its depth. A sequence without one is a chain."""
    line = tree.after_chain(max(chunk.count - len(chunk.parents), 0), chunk.parents)
    lineages = [bits - (bits >> 63 << 64) for bits in tree.lineages(line)[-chunk.count :]]
    return chunk.start + chunk.count - len(line), lineages, tree.depths(line)[-chunk.count :]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The sizes of a packed pass, which a graph is captured for, and the order of its numbers in a buffer."""

    rows: int
    tiles: int  # 0: all are single tokens, which need none
    queries: int  # of a tile, at most
    trees: bool
    wanted: int  # rows that the head sees, those that want logits; 0: all, since that spares few

    @staticmethod
    def of(chunks: Sequence[SequenceChunk], group: int, wanted: int) -> PackedRows:
        """`group`: heads that share a key head; `wanted`: how many rows want logits."""
        lengths, trees = [c.count for c in chunks], any(c.parents for c in chunks)
        total = sum(lengths)
        rows, head = bucket(total, ROWS), bucket(max(wanted, 1), ROWS)
        head = head if rows - head >= SAVED else 0
        if total == len(chunks) and not trees:
            return PackedRows(rows, 0, 1, False, head)
        queries = tile_queries(lengths, group)
        tiles = sum(-(-n // queries) for n in [*lengths, rows - total])
        return PackedRows(rows, bucket(tiles, TILES), queries, trees, head)

    def pieces(self, chunks: Sequence[SequenceChunk]) -> list[tuple[SequenceChunk, int]]:
        """Every tile's part of its sequence, as a chunk that begins with it, and how many rows it has: those of its
        tokens, or of padding."""
        found = list[tuple[SequenceChunk, int]]()
        for chunk in chunks:
            for at in range(0, chunk.count, self.queries):
                count = min(self.queries, chunk.count - at)
                found.append((SequenceChunk(chunk.slot, chunk.start + at, count), count))
        for at in range(sum(c.count for c in chunks), self.rows, self.queries):
            found.append((SequenceChunk(0, 0, 0), min(self.queries, self.rows - at)))
        return found

    def sizes(self) -> list[int]:
        """Of the columns that a pass reads from its buffer."""
        n, t = self.rows, self.tiles
        tiles, lines = [t, t, t, t + 1] if t else [], [n, n, n, t] if self.trees else []
        return [n, n, n, n, *tiles, *lines, *([self.wanted] if self.wanted else [])]

    def numbers(self, tokens: Sequence[int], chunks: Sequence[SequenceChunk], wanted: Sequence[int]) -> list[int]:
        """The columns one after the other, in the order in which `of_buffer` cuts them."""
        columns: list[list[int]] = [list(tokens), [], [], [1] * len(tokens)]
        for chunk in chunks:
            columns[1] += [chunk.slot] * chunk.count
            columns[2] += range(chunk.start, chunk.start + chunk.count)
        if self.tiles:
            pieces, offsets = self.pieces(chunks), [0]
            for _, rows in pieces:
                offsets.append(offsets[-1] + rows)
            offsets += [self.rows] * (self.tiles - len(pieces))
            columns += [p.slot for p, _ in pieces], [p.start for p, _ in pieces], [p.count for p, _ in pieces], offsets
        if self.trees:
            columns += self._lines(chunks)
        if self.wanted:
            columns.append(list(wanted))
        flat: list[int] = []
        for column, size in zip(columns, self.sizes(), strict=True):
            flat += column
            flat += [0] * (_aligned(size) - len(column))
        return flat

    def _lines(self, chunks: Sequence[SequenceChunk]) -> tuple[list[int], ...]:
        """Bases, lines and depths of rows, then the bases of tiles, which are those of their trees. A chain may be
        longer than a line has bits, so each of its tiles is a chain of its own."""
        bases, lineages, depths, tile_bases = list[int](), list[int](), list[int](), list[int]()
        for chunk in chunks:
            tiles = [piece for piece, _ in replace(self, rows=0).pieces([chunk])]
            for part in [chunk] if chunk.parents else tiles:
                base, own_lines, own_depths = lines_of(part)
                bases += [base] * part.count
                lineages += own_lines
                depths += own_depths
            tile_bases += [bases[-1]] * len(tiles) if chunk.parents else [tile.start for tile in tiles]
        return bases, lineages, depths, tile_bases

    def of_buffer(self, buffer: Tensor) -> tuple[Tensor, BatchMetadata, Tensor | None]:
        """Tokens [rows, 1], where they belong, and which of them the head has to see; None: all."""
        parts, at = list[Tensor](), 0
        for size in self.sizes():
            parts.append(buffer[at : at + size])
            at += _aligned(size)
        tokens, slots, positions, counts, *rest = parts
        metadata = BatchMetadata(slots, positions, counts)
        if self.tiles:
            slots, starts, counts, offsets, *rest = rest
            metadata.tiles = AttentionTiles(slots, starts, counts, RowTiles(offsets, self.queries))
            if self.trees:
                bases, lineages, depths, tile_bases, *rest = rest
                metadata.tree = TreeMask(bases, lineages[:, None], depths[:, None])
                metadata.tiles.tree = metadata.tree._replace(bases=tile_bases)
        return tokens[:, None], metadata, rest[0] if rest else None


def _aligned(size: int) -> int:
    """Columns begin at multiples of 16 bytes: Triton compiles a kernel once more for pointers that do not."""
    return size + size % 2
