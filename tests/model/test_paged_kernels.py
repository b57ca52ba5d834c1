"""Kernels over a paged cache give what they give over a contiguous one, and write where its tables say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

from semspec.model.kernels import SelectedBlocks, TreeMask, attention, elementwise, reference
from semspec.model.kernels import tiles as cuts
from tests.model.test_kernels import DEVICE, close, multiplied, noise, passes, random, whole

pages = st.sampled_from([16, 32, 48])
few = settings(max_examples=8, phases=[Phase.generate])  # interpreted kernels are slow


def paged(cache: list[Tensor], page: int, seed: int) -> tuple[list[Tensor], Tensor]:
    """The same contents in pages that lie anywhere, and their tables; a page that nobody has holds no numbers."""
    slots, heads, capacity, size = cache[0].shape
    width = -(-capacity // page)
    order = torch.randperm(slots * width + 3, generator=random(seed))[: slots * width].view(slots, width)
    pools = []
    for half in cache:
        pool = half.new_full((slots * width + 3, heads, page, size), float("nan"))
        whole_pages = half.new_zeros(slots, heads, width * page, size)
        whole_pages[:, :, :capacity] = half
        pool[order.flatten()] = whole_pages.unflatten(2, (width, page)).transpose(1, 2).flatten(0, 1)
        pools.append(pool)
    return pools, order.to(DEVICE, torch.int32)


def unpaged(pool: Tensor, tables: Tensor, capacity: int) -> Tensor:
    return pool[tables.long()].transpose(1, 2).flatten(2, 3)[:, :, :capacity]


def contiguous(case: dict, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    return [noise((4, case["kv_heads"], case["capacity"], case["size"]), generator, dtype) for _ in range(2)]


@given(
    passes(), multiplied, pages, st.sampled_from([None, 5, 33]), st.booleans(), st.sampled_from([1, 4]),
    st.sampled_from([16, 32]),
)  # fmt: skip
@few
def test_attention(
    case: dict, dtype: torch.dtype, page: int, window: int | None, tree: bool, splits: int, keys: int
) -> None:
    generator, batch, queries = random(case["seed"]), len(case["slots"]), case["queries"]
    q = noise((batch, queries, case["heads"], case["size"]), generator, dtype)
    cache, places = contiguous(case, dtype, generator), [whole(case[name]) for name in ("slots", "starts", "counts")]
    pools, tables = paged(cache, page, case["seed"])
    mask = None
    if tree:  # each query sees itself and the first of the new tokens
        lines = 1 | (1 << torch.arange(queries, device=DEVICE).repeat(batch, 1))
        mask = TreeMask(places[1], lines, torch.arange(queries, device=DEVICE).clamp_max(1).repeat(batch, 1))
    exact = reference.attend(q.double(), *(c.double() for c in cache), *places, 0.3, window, mask)
    tiles = cuts.Tiles(16, keys, splits, warps=4, stages=2)
    close(attention.attend(q, *pools, *places, 0.3, window, mask, tiles, tables=tables), exact, dtype)
    ours = reference.attend(q.double(), *(p.double() for p in pools), *places, 0.3, window, mask, tables=tables)
    torch.testing.assert_close(ours, exact)


@given(passes(), multiplied, pages, st.sampled_from([4, 16, 32]), st.floats(0, 1), st.sampled_from([16, 32]))
@few
def test_attention_to_chosen_blocks(
    case: dict, dtype: torch.dtype, page: int, span: int, share: float, keys: int
) -> None:
    """Blocks of a sparse plan, smaller and larger than a tile and than a page."""
    generator, batch, queries = random(case["seed"]), len(case["slots"]), case["queries"]
    q = noise((batch, queries, case["heads"], case["size"]), generator, dtype)
    cache, places = contiguous(case, dtype, generator), [whole(case[name]) for name in ("slots", "starts", "counts")]
    lists = torch.zeros(batch, case["kv_heads"], case["capacity"] // span + 1, dtype=torch.int32)
    counts = torch.zeros(batch, case["kv_heads"], dtype=torch.int32)
    for b, start in enumerate(case["starts"]):
        for h in range(case["kv_heads"]):
            blocks = (torch.rand(start // span, generator=generator) < share).nonzero()[:, 0]
            lists[b, h, : len(blocks)], counts[b, h] = blocks.int(), len(blocks)
    chosen = SelectedBlocks(lists.to(DEVICE), counts.to(DEVICE), span)
    pools, tables = paged(cache, page, case["seed"])
    exact = reference.attend(q.double(), *(c.double() for c in cache), *places, 0.3, chosen=chosen)
    tiles = cuts.Tiles(16, keys, 2, warps=4, stages=2)
    close(attention.attend(q, *pools, *places, 0.3, tiles=tiles, chosen=chosen, tables=tables), exact, dtype)


@given(passes(), multiplied, pages, st.booleans(), st.sampled_from([None, 33]), st.sampled_from([1, 4]))
@few
def test_new_tokens_are_written_to_their_pages(
    case: dict, dtype: torch.dtype, page: int, single: bool, window: int | None, splits: int
) -> None:
    """By the kernel of several tokens, and by that of single ones, which attends too."""
    generator, batch, size = random(case["seed"]), len(case["slots"]), case["size"]
    queries = 1 if single else case["queries"]
    qkv = noise((batch, queries, case["heads"] + 2 * case["kv_heads"], size), generator, dtype)
    cache = contiguous(case, dtype, generator)
    counts = [min(count, queries) for count in case["counts"]]
    places = [whole(case["slots"]), whole(case["starts"]), whole(counts)]
    angles = torch.rand(case["capacity"], size // 2, generator=generator).to(DEVICE) * 6
    pools, tables = paged(cache, page, case["seed"])
    before = [pool.clone() for pool in pools]
    exact_cache, turns = [c.double() for c in cache], (angles.double().cos(), angles.double().sin())
    rope, exact_rope = ((angles.cos(), angles.sin()), case["heads"], None), (turns, case["heads"], None)
    if single:
        tiles = cuts.Tiles(16, 16, splits, warps=4, stages=2)
        ours = attention.rope_cache_attend(qkv, *pools, *places, *rope, 0.0, 0.3, window, tiles, tables)
        exact = reference.rope_cache_attend(qkv.double(), *exact_cache, *places, *exact_rope, 0.0, 0.3, window)
    else:
        ours = elementwise.rope_and_cache(qkv, *pools, *places, *rope, tables=tables)
        exact = reference.rope_and_cache(qkv.double(), *exact_cache, *places, *exact_rope)
    for b, count in enumerate(counts):
        close(ours[b, :count], exact[b, :count], dtype)
    for pool, old, theirs in zip(pools, before, exact_cache, strict=True):
        close(unpaged(pool, tables, case["capacity"]), theirs, dtype)
        changed = (pool.nan_to_num() != old.nan_to_num()).flatten(1).any(1).sum()
        assert changed <= sum(-(-count // page) + 1 for count in counts if count), "written beside its place"


@pytest.mark.parametrize("single", [True, False])
def test_pages_behind_the_window_are_not_read(single: bool) -> None:
    """They have been given back: tables name pages there that are others' now, or nobody's."""
    page, window, queries, generator = 32, 9, 1 if single else 3, random(1)
    cache = [noise((2, 1, 128, 16), generator, torch.float32) for _ in range(2)]
    starts, slots, counts = [72, 41], whole([0, 1]), whole([queries, queries])
    pools, tables = paged(cache, page, 3)
    free = next(i for i in range(len(pools[0])) if pools[0][i].isnan().all())
    for b, start in enumerate(starts):
        tables[b, : (start - window + 1) // page] = free
    places, tiles = [slots, whole(starts), counts], cuts.Tiles(16, 32, 2, warps=4, stages=2)
    if single:
        qkv = noise((2, 1, 4, 16), generator, torch.float32)
        ours = attention.rope_cache_attend(qkv, *pools, *places, None, 2, None, 0.0, 0.3, window, tiles, tables)
        exact = reference.rope_cache_attend(qkv, *cache, *places, None, 2, None, 0.0, 0.3, window)
    else:
        q = noise((2, queries, 2, 16), generator, torch.float32)
        ours = attention.attend(q, *pools, *places, 0.3, window, None, tiles, tables=tables)
        exact = reference.attend(q, *cache, *places, 0.3, window)
    close(ours, exact, torch.float32)
