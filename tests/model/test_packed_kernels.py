"""The attention kernel over the tiles of a packed pass, against float64 over each whole sequence by itself, which knows
nothing of rows and tiles; without a GPU in Triton's interpreter."""

from __future__ import annotations

import random as plain_random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

from semspec import tree
from semspec.model.attention_metadata import SequenceChunk
from semspec.model.fused_forward import AttentionTiles, BatchMetadata
from semspec.model.kernels import SelectedBlocks, TreeMask, attention, elementwise, reference
from semspec.model.kernels import tiles as cuts
from semspec.model.packed_rows import PackedRows, lines_of
from tests.model.test_kernels import DEVICE, close, multiplied, noise, random, whole
from tests.model.test_kv_fp8 import stored
from tests.model.test_paged_kernels import paged

few = settings(max_examples=10, phases=[Phase.generate])  # interpreted kernels are slow
CAPACITY = 96


@st.composite
def passes(draw: st.DrawFn) -> dict[str, Any]:
    """Sequences with some tokens each, tiles of a few of them, and more rows and tiles than needed."""
    slots = draw(st.permutations(range(4)))[: draw(st.integers(1, 4))]
    trees, chunks = draw(st.booleans()), []
    rng = plain_random.Random(draw(st.integers(0, 99)))
    for slot in slots:
        count, start = draw(st.integers(1, 13)), draw(st.integers(0, 70))
        grown = draw(st.integers(1, min(20, count + start))) if trees and draw(st.booleans()) else 0
        chunks.append(SequenceChunk(slot, start, count, tuple(rng.randrange(-1, i) for i in range(grown))))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 2), (2, 5), (1, 7)]))
    total, queries = sum(c.count for c in chunks), draw(st.sampled_from([1, 2, 3, 6, 12]))
    packing = PackedRows(total + draw(st.integers(0, 7)), 0, queries, any(c.parents for c in chunks), 0)
    tiles = len(packing.pieces(chunks)) + draw(st.integers(0, 2))
    return {
        "chunks": chunks, "packing": replace(packing, tiles=tiles), "kv_heads": kv_heads, "heads": kv_heads * group,
        "size": draw(st.sampled_from([8, 16, 24])), "seed": draw(st.integers(0, 99)), "total": total,
    }  # fmt: skip


def on_device(case: dict[str, Any]) -> tuple[BatchMetadata, AttentionTiles]:
    numbers = case["packing"].numbers([1] * case["total"], case["chunks"], [])
    _, metadata, _ = case["packing"].of_buffer(whole(numbers))
    assert metadata.tiles is not None
    return metadata, metadata.tiles


def by_sequence(case: dict[str, Any], q: Tensor, cache: list[Tensor], window: int | None) -> Tensor:
    """In float64, one sequence at a time; rows that belong to nobody are zero."""
    out, row = torch.zeros_like(q, dtype=torch.float64), 0
    for c in case["chunks"]:
        mask = None
        if c.parents:
            base, lines, depths = lines_of(c)
            mask = TreeMask(whole([base]), whole([lines]), whole([depths]))
        own = slice(row, row := row + c.count)
        places = (whole([c.slot]), whole([c.start]), whole([c.count]))
        rows = q[own].double().transpose(0, 1)
        out[own] = reference.attend(rows, *(h.double() for h in cache), *places, 0.3, window, mask).transpose(0, 1)
    return out


def packed(case: dict[str, Any], q: Tensor, cache: list[Tensor], window: int | None, **options: Any) -> Tensor:
    _, tiles = on_device(case)
    kernels = options.pop("kernels", attention)
    return kernels.attend(
        q, *cache, tiles.slots, tiles.starts, tiles.counts, 0.3, window, tiles.tree, rows=tiles.rows, **options
    )


def inputs(case: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    generator = random(case["seed"])
    q = noise((case["packing"].rows, 1, case["heads"], case["size"]), generator, dtype)
    return q, [noise((4, case["kv_heads"], CAPACITY, case["size"]), generator, dtype) for _ in range(2)]


def windowed(case: dict[str, Any], window: int | None) -> int | None:
    """No window is shorter than a tree."""
    return None if case["packing"].trees and window and window < 33 else window


@given(passes(), multiplied, st.sampled_from([None, 1, 5, 33]), st.sampled_from([1, 2, 8]), st.sampled_from([16, 32]))
@few
def test_attention(case: dict, dtype: torch.dtype, window: int | None, splits: int, keys: int) -> None:
    (q, cache), window = inputs(case, dtype), windowed(case, window)
    exact = by_sequence(case, q, cache, window)
    ours = packed(case, q, cache, window, tiles=cuts.Tiles(16, keys, splits, warps=4, stages=2))
    close(ours, exact, dtype)
    assert not ours[case["total"] :].any(), "rows that belong to nobody are zero"
    wide = packed(case, q.double(), [h.double() for h in cache], window, kernels=reference)
    torch.testing.assert_close(wide, exact)


@given(passes(), multiplied, st.sampled_from([16, 32, 48]), st.sampled_from([None, 33]), st.sampled_from([1, 4]))
@few
def test_attention_over_pages(case: dict, dtype: torch.dtype, page: int, window: int | None, splits: int) -> None:
    q, cache = inputs(case, dtype)
    pools, tables = paged(cache, page, case["seed"])
    tiles = cuts.Tiles(32, 16, splits, warps=4, stages=2)
    ours = packed(case, q, pools, window, tiles=tiles, tables=tables)
    close(ours, by_sequence(case, q, cache, window), dtype)


@given(passes(), multiplied, st.sampled_from([16, 48]), st.sampled_from([1, 4]))
@settings(max_examples=6, phases=[Phase.generate])
def test_attention_over_fp8(case: dict, dtype: torch.dtype, page: int, splits: int) -> None:
    q, cache = inputs(case, dtype)
    pools, tables, scales, exact = stored([h.float() for h in cache], page, case["seed"])
    tiles = cuts.Tiles(16, 16, splits, warps=4, stages=2)
    ours = packed(case, q, pools, None, tiles=tiles, tables=tables, scales=scales)
    close(ours, by_sequence(case, q, exact, None), dtype)


@given(passes(), multiplied, st.sampled_from([None, 16]))
@few
def test_rotation_and_cache_write_by_row(case: dict, dtype: torch.dtype, page: int | None) -> None:
    """As for each sequence by itself; what is padding writes nothing."""
    generator, size = random(case["seed"]), case["size"]
    qkv = noise((case["packing"].rows, 1, case["heads"] + 2 * case["kv_heads"], size), generator, dtype)
    _, cache = inputs(case, dtype)
    angles = torch.rand(CAPACITY, size // 2, generator=generator).to(DEVICE) * 6
    turns, wide = (angles.cos(), angles.sin()), (angles.double().cos(), angles.double().sin())
    metadata, _ = on_device(case)
    exact, row = [h.double() for h in cache], 0
    pools, tables = (cache, None) if page is None else paged(cache, page, case["seed"])
    where = (metadata.slots, metadata.starts, metadata.counts)
    ours = elementwise.rope_and_cache(
        qkv, *pools, *where, turns, case["heads"], None, 1e-5, metadata.tree, tables=tables
    )
    for c in case["chunks"]:
        own, mask = slice(row, row := row + c.count), None
        if c.parents:
            base, lines, depths = lines_of(c)
            mask = TreeMask(whole([base]), whole([lines]), whole([depths]))
        places = (whole([c.slot]), whole([c.start]), whole([c.count]))
        rows = qkv[own].double().transpose(0, 1)
        theirs = reference.rope_and_cache(rows, *exact, *places, wide, case["heads"], None, 1e-5, mask)
        close(ours[own], theirs.transpose(0, 1), dtype)
    for mine, theirs in zip(pools, exact, strict=True):
        whole_cache = mine if tables is None else mine[tables.long()].transpose(1, 2).flatten(2, 3)[:, :, :CAPACITY]
        close(whole_cache, theirs, dtype)


def example() -> tuple[dict[str, Any], Tensor, list[Tensor], Tensor]:
    """Three sequences in tiles of three, two rows of padding."""
    chunks = [SequenceChunk(2, 40, 7), SequenceChunk(0, 11, 1), SequenceChunk(1, 60, 5)]
    packing = PackedRows(15, 8, 3, False, 0)
    case = {"chunks": chunks, "packing": packing, "kv_heads": 2, "heads": 4, "size": 16, "seed": 1, "total": 13}
    q, cache = inputs(case, torch.float32)
    return case, q, cache, by_sequence(case, q, cache, None)


FAULTS = {
    "a tile's rows begin one late": lambda tiles: tiles.rows.offsets[1:].add_(1),
    "a later tile begins where its sequence does": lambda tiles: tiles.starts[1].fill_(40),
    "a tile is of another sequence": lambda tiles: tiles.slots[3].fill_(2),
    "a tile has one query less": lambda tiles: tiles.counts[0].sub_(1),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("splits", [1, 4])
def test_planted_faults_are_found(fault: str, splits: int) -> None:
    case, q, cache, exact = example()
    cut = cuts.Tiles(16, 16, splits, warps=4, stages=2)
    close(packed(case, q, cache, None, tiles=cut), exact, torch.float32)
    _, tiles = on_device(case)
    FAULTS[fault](tiles)
    where = (tiles.slots, tiles.starts, tiles.counts)
    q = torch.cat([q, q[:1]])  # so that what is one late stays in memory that is ours
    wrong = attention.attend(q, *cache, *where, 0.3, tiles=cut, rows=tiles.rows)[: len(exact)].nan_to_num()
    with pytest.raises(AssertionError):
        close(wrong, exact, torch.float32)


def test_what_lay_in_memory_before_is_no_part_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in rows that are padding nor where splits had nothing to look at."""
    case, q, cache, exact = example()
    for make in ("new_empty", "empty_like"):
        owner = torch.Tensor if make == "new_empty" else torch
        empty = getattr(owner, make)

        def dirty(*size: Any, empty: Any = empty, **options: Any) -> Tensor:
            made = empty(*size, **options)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        monkeypatch.setattr(owner, make, dirty)
    for splits in (1, 8):
        ours = packed(case, q, cache, None, tiles=cuts.Tiles(16, 16, splits, warps=4, stages=2))
        close(ours, exact, torch.float32)


def test_a_chain_longer_than_a_line_has_bits() -> None:
    """Beside a tree: 90 tokens in tiles of 12."""
    chunks = [SequenceChunk(0, 2, 90), SequenceChunk(1, 30, 4, (-1, 0, 0, 1))]
    packing = PackedRows.of(chunks, 5, 94)
    assert packing.trees and packing.queries < 64
    case = {"chunks": chunks, "packing": packing, "kv_heads": 1, "heads": 5, "size": 16, "seed": 1, "total": 94}
    q, cache = inputs(case, torch.float32)
    assert tree.depths(chunks[1].parents) == [0, 1, 1, 2]
    close(packed(case, q, cache, None), by_sequence(case, q, cache, None), torch.float32)


def test_blocks_are_not_selected_for_tiles() -> None:
    case, q, cache, _ = example()
    none = torch.zeros(8, 2, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(AssertionError, match="a tile is a part of one"):
        packed(case, q, cache, None, chosen=SelectedBlocks(none, none[..., 0], 16))
