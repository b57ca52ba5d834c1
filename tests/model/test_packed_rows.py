"""Passes as one row of tokens: how rows become tiles, and what is where. Models: test_packed_passes.py; the kernels:
test_packed_kernels.py."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from semspec import tree
from semspec.model.attention_metadata import SequenceChunk
from semspec.model.buckets import MAX_QUERIES, MAX_ROWS, bucket
from semspec.model.fused_forward import BatchMetadata
from semspec.model.packed_rows import HEIGHTS, LOOK, NUMBERS, ROWS, TILES, PackedRows, packed_passes, tile_queries


@st.composite
def chunks(draw: st.DrawFn) -> list[SequenceChunk]:
    """Sequences of a pass; some end with trees, of which the first tokens may have come before."""
    found = []
    for slot in range(draw(st.integers(1, 12))):
        count, start, parents = draw(st.integers(1, 80)), draw(st.integers(0, 500)), ()
        if draw(st.booleans()):
            size = draw(st.integers(1, min(63, count + start)))
            rng = random.Random(draw(st.integers(0, 99)))
            parents, count = tuple(rng.randrange(-1, i) for i in range(size)), min(count, MAX_QUERIES)
        found.append(SequenceChunk(slot, start, count, parents))
    return found


def cut(
    chunks: Sequence[SequenceChunk], group: int
) -> tuple[PackedRows, tuple[Tensor, BatchMetadata, Tensor | None], int]:
    """What a pass over these reads on the device."""
    total = sum(c.count for c in chunks)
    packing = PackedRows.of(chunks, group, total)
    numbers = packing.numbers(list(range(100, 100 + total)), chunks, list(range(total)))
    assert len(numbers) <= NUMBERS
    buffer = torch.full((NUMBERS,), 10**9)
    buffer[: len(numbers)] = torch.tensor(numbers)
    tokens, where, wanted = packing.of_buffer(buffer)
    tiles = [] if where.tiles is None else [where.tiles.slots, where.tiles.starts, where.tiles.rows.offsets]
    for column in (where.slots, where.starts, where.counts, *tiles, *(where.tree or ())):
        assert (column.data_ptr() - buffer.data_ptr()) % 16 == 0, "kernels would be compiled once more"
    return packing, (tokens, where, wanted), total


@given(chunks(), st.sampled_from([1, 2, 5, 7, 8, 40]))
@settings(max_examples=150)
def test_every_row_is_in_one_tile_of_its_own_sequence(sequences: list[SequenceChunk], group: int) -> None:
    packing, (tokens, where, wanted), total = cut(sequences, group)
    assert packing.rows in ROWS and wanted is None and tokens[:, 0].tolist()[:total] == list(range(100, 100 + total))
    owners = [(c, i) for c in sequences for i in range(c.count)]
    assert where.slots.tolist()[:total] == [c.slot for c, _ in owners]
    assert where.starts.tolist()[:total] == [c.start + i for c, i in owners]
    assert where.counts.tolist() == [1] * total + [0] * (packing.rows - total)
    if where.tiles is None:
        assert total == len(sequences) and not packing.trees and packing.queries == 1
        return
    tiles, seen = where.tiles, 0
    offsets = tiles.rows.offsets.tolist()
    assert packing.tiles in TILES and offsets[0] == 0 and offsets[-1] == packing.rows, "all rows have a tile"
    assert packing.queries * group <= max(HEIGHTS[-1], group)
    for t in range(packing.tiles):
        begin, end, count = offsets[t], offsets[t + 1], int(tiles.counts[t])
        assert 0 <= end - begin <= packing.queries and count in (0, end - begin)
        seen += count
        for row in range(begin, begin + count):
            c, i = owners[row]
            assert (int(tiles.slots[t]), int(tiles.starts[t]) + row - begin) == (c.slot, c.start + i)
    assert seen == total, "padding asks nothing"


@given(chunks(), st.sampled_from([1, 5, 8]))
@settings(max_examples=100)
def test_each_token_of_a_tree_sees_its_own_line_and_each_of_a_chain_all_before(
    sequences: list[SequenceChunk], group: int
) -> None:
    _, (_, where, _), _ = cut(sequences, group)
    if where.tree is None:
        assert not any(c.parents for c in sequences)
        return
    assert where.tiles is not None and where.tiles.tree is not None
    tiles, mask, offsets = where.tiles, where.tiles.tree, where.tiles.rows.offsets.tolist()
    owners = [(c, i) for c in sequences for i in range(c.count)]
    for t, (begin, end) in enumerate(pairwise(offsets)):
        for row in range(begin, end if tiles.counts[t] else begin):
            c, i = owners[row]
            own, base = c.start + i, int(mask.bases[t])
            node = own - c.base
            if c.parents and node >= 0:
                line = {c.base + n for n in tree.path(c.parents, node)} | set(range(c.base))
                turned = c.base + tree.depths(c.parents)[node]
            else:
                line, turned = set(range(own + 1)), own
            bits = int(mask.lineages[row])
            assert base <= own and {base + n for n in range(64) if bits >> n & 1} | set(range(base)) == line
            assert base + int(mask.depths[row]) == turned
            assert int(where.tree.bases[row]) + int(where.tree.depths[row]) == turned, "rotated where it belongs"


def test_a_tile_that_begins_elsewhere_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the tiles of a chain all begin where it does."""
    check = test_every_row_is_in_one_tile_of_its_own_sequence.hypothesis.inner_test
    check([SequenceChunk(0, 5, 70)], 5)
    right = PackedRows.pieces

    def wrong(self: PackedRows, chunks: Sequence[SequenceChunk]) -> list[tuple[SequenceChunk, int]]:
        return [(replace(piece, start=chunks[0].start), rows) for piece, rows in right(self, chunks)]

    monkeypatch.setattr(PackedRows, "pieces", wrong)
    with pytest.raises(AssertionError):
        check([SequenceChunk(0, 5, 70)], 5)


@pytest.mark.parametrize(
    ("lengths", "group", "queries"),
    [([9] * 8, 5, 12), ([1] * 7 + [60], 5, 12), ([1] * 9, 5, 3), ([2] * 9, 6, 2), ([300], 5, 25), ([64] * 3, 1, 64)],
)
def test_how_tall_tiles_are(lengths: list[int], group: int, queries: int) -> None:
    """A check of 9 is one tile of 64 rows at five heads a key head; single tokens have the smallest there are."""
    assert tile_queries(lengths, group) == queries


@given(st.lists(st.integers(1, 200), min_size=1, max_size=20), st.integers(1, 40))
def test_no_height_takes_less(lengths: list[int], group: int) -> None:
    def cost(height: int) -> int:
        queries = max(1, min(height // group, MAX_QUERIES))
        taken = next((h for h in HEIGHTS if h >= queries * group), group * queries)
        return (LOOK + taken) * sum(-(-n // queries) for n in lengths)

    chosen = tile_queries(lengths, group)
    assert cost(chosen * group) == min(cost(height) for height in HEIGHTS)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=200))
def test_no_second_pass_as_long_as_rows_allow(lengths: list[int]) -> None:
    groups = packed_passes(lengths)
    assert [i for group in groups for i in group] == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in group) for group in groups]
    assert max(sums) <= MAX_ROWS and (len(groups) == 1) == (sum(lengths) <= MAX_ROWS)
    assert all(a + lengths[group[0]] > MAX_ROWS for a, group in zip(sums, groups[1:], strict=False))


@given(st.integers(1, MAX_ROWS))
def test_padding_is_a_few_rows(rows: int) -> None:
    assert rows <= bucket(rows, ROWS) <= max(rows + 2, 1.5 * rows) and (rows < 256 or bucket(rows, ROWS) <= 1.2 * rows)
