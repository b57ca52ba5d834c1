"""The Triton kernels against their references in float64, over random shapes; without a GPU in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

from semspec.model.kernels import (  # noqa: E402  # noqa: E402
    COUNT,
    FIELDS,
    LEFT,
    START,
    STEP,
    STOPS,
    SelectedBlocks,
    TreeMask,
    attention,
    elementwise,
    gemm,
    reference,
)
from semspec.model.kernels import tiles as cuts  # noqa: E402
from semspec.model.page_pool import page_of  # noqa: E402
from tests.interpreter import allow_new_numpy  # noqa: E402

allow_new_numpy()

TYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
types = st.sampled_from(sorted(TYPES, key=str))
# The interpreter multiplies matrices of bfloat16 as if their bits were whole numbers; on a GPU all types are tested.
multiplied = types if DEVICE.type == "cuda" else st.sampled_from([torch.float16, torch.float32])
few = settings(max_examples=12, phases=[Phase.generate])  # interpreted kernels are slow, and shrinking runs hundreds


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(size: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=generator).to(DEVICE, dtype)


def close(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == dtype and not ours.isnan().any()
    size = exact.norm().clamp_min(1e-6)
    assert (ours.double() - exact).norm() / size < TYPES[dtype]


def whole(tensors: list[int]) -> Tensor:
    return torch.tensor(tensors, device=DEVICE)


@st.composite
def passes(draw: st.DrawFn, longest: int = 70) -> dict[str, object]:
    """Sequences in slots of a cache, each with some new tokens at its end; some have none."""
    batch, queries = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    counts = draw(st.lists(st.integers(0, queries), min_size=batch, max_size=batch))
    starts = draw(st.lists(st.integers(0, longest), min_size=batch, max_size=batch))
    slots = draw(st.permutations(range(4)))[:batch]
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 2), (2, 5), (1, 7)]))
    return {
        "queries": queries, "kv_heads": kv_heads, "heads": kv_heads * group, "size": draw(st.sampled_from([8, 16, 24])),
        "counts": counts, "starts": starts, "slots": slots, "capacity": longest + queries,
        "seed": draw(st.integers(0, 99)),
    }  # fmt: skip


def any_tree(case: dict, generator: torch.Generator, before: int = 3) -> TreeMask:
    """Each query sees itself and any of the tokens before it, of which some come from earlier passes."""
    batch, queries = len(case["slots"]), case["queries"]
    bases = [max(0, start - before) for start in case["starts"]]
    lines = torch.zeros(batch, queries, dtype=torch.long)
    for b, (base, start) in enumerate(zip(bases, case["starts"], strict=True)):
        for i in range(queries):
            marks = torch.rand(start - base + i, generator=generator).round().long().tolist()
            lines[b, i] = sum(mark << at for at, mark in enumerate([*marks, 1]))
    depths = torch.randint(0, queries + before, (batch, queries), generator=generator)
    return TreeMask(whole(bases), lines.to(DEVICE), depths.to(DEVICE))


@given(
    passes(), multiplied, st.sampled_from([None, 1, 5, 33]), st.booleans(), st.sampled_from([1, 2, 8, 32]),
    st.sampled_from([16, 32, 64]), st.sampled_from([16, 32, 128]),
)  # fmt: skip
@few
def test_attention(
    case: dict, dtype: torch.dtype, window: int | None, tree: bool, splits: int, rows: int, keys: int
) -> None:
    generator, batch, queries = random(case["seed"]), len(case["slots"]), case["queries"]
    q = noise((batch, queries, case["heads"], case["size"]), generator, dtype)
    cache = [noise((4, case["kv_heads"], case["capacity"], case["size"]), generator, dtype) for _ in range(2)]
    places = [whole(case[name]) for name in ("slots", "starts", "counts")]
    mask = any_tree(case, generator) if tree else None
    tiles = cuts.Tiles(rows, keys, splits, warps=4, stages=2)
    exact = reference.attend(q.double(), *(c.double() for c in cache), *places, 0.3, window, mask)
    ours = attention.attend(q, *cache, *places, 0.3, window, mask, tiles)
    close(ours, exact, dtype)
    for b, count in enumerate(case["counts"]):
        assert not ours[b, count:].any(), "rows behind a sequence's queries are zero"


def test_what_lay_in_memory_before_is_no_part_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits that had nothing to look at store no answer, and memory is not cleared for them: the joining reads it and
    must not count it. Of eight splits two have nothing in the first sequence, five in the second."""
    q, keys, values = (noise(size, random(1), torch.float32) for size in [(2, 6, 3, 24), *[(3, 1, 96, 24)] * 2])
    places, tiles = [whole([2, 0]), whole([85, 40]), whole([6, 4])], cuts.Tiles(16, 16, 8, warps=4, stages=2)
    clean = attention.attend(q, keys, values, *places, 0.3, tiles=tiles)
    close(clean, reference.attend(q.double(), keys.double(), values.double(), *places, 0.3), torch.float32)
    empty = torch.Tensor.new_empty

    def dirty(*size: Any, **options: Any) -> Tensor:
        made = empty(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", dirty)
    assert torch.equal(attention.attend(q, keys, values, *places, 0.3, tiles=tiles), clean)


@given(
    passes(), multiplied, st.sampled_from([1, 4, 16, 24, 64]), st.floats(0, 1), st.booleans(),
    st.sampled_from([1, 2, 8]), st.sampled_from([16, 32]),
)  # fmt: skip
@few
def test_attention_to_chosen_blocks(
    case: dict, dtype: torch.dtype, span: int, share: float, tree: bool, splits: int, keys: int
) -> None:
    """Blocks smaller and larger than a tile; each key head has another choice, also of nothing. What is not chosen is
    not read: it holds no numbers."""
    generator, batch, queries = random(case["seed"]), len(case["slots"]), case["queries"]
    q = noise((batch, queries, case["heads"], case["size"]), generator, dtype)
    cache = [noise((4, case["kv_heads"], case["capacity"], case["size"]), generator, dtype) for _ in range(2)]
    places = [whole(case[name]) for name in ("slots", "starts", "counts")]
    mask = any_tree(case, generator, before=0) if tree else None
    width = case["capacity"] // span + 1
    lists = torch.full((batch, case["kv_heads"], width), 10**6, dtype=torch.int32)
    counts = torch.zeros(batch, case["kv_heads"], dtype=torch.int32)
    for b, (slot, start) in enumerate(zip(case["slots"], case["starts"], strict=True)):
        for h in range(case["kv_heads"]):
            keep = torch.rand(start // span, generator=generator) < share
            blocks = keep.nonzero()[:, 0]
            lists[b, h, : len(blocks)], counts[b, h] = blocks.int(), len(blocks)
            for block in (~keep).nonzero()[:, 0].tolist():
                for buffer in cache:
                    buffer[slot, h, block * span : (block + 1) * span] = float("nan")
    chosen = SelectedBlocks(lists.to(DEVICE), counts.to(DEVICE), span)
    tiles = attention.Tiles(16, keys, splits, warps=4, stages=2)
    zeroed = [c.double().nan_to_num() for c in cache]
    exact = reference.attend(q.double(), *zeroed, *places, 0.3, None, mask, chosen=chosen)
    close(attention.attend(q, *cache, *places, 0.3, None, mask, tiles, chosen), exact, dtype)


def test_all_blocks_chosen_are_all_of_the_cache() -> None:
    q, keys, values = (noise(size, random(1), torch.float32) for size in [(2, 3, 4, 16), *[(2, 2, 90, 16)] * 2])
    places = [whole([1, 0]), whole([70, 9]), whole([3, 2])]
    lists = torch.arange(5, dtype=torch.int32, device=DEVICE).repeat(2, 2, 1)
    counts = torch.tensor([[4, 4], [0, 0]], dtype=torch.int32, device=DEVICE)
    for kernels in (attention, reference):
        dense = kernels.attend(q, keys, values, *places, 0.3)
        torch.testing.assert_close(
            kernels.attend(q, keys, values, *places, 0.3, chosen=SelectedBlocks(lists, counts, 16)), dense
        )


def test_attention_reads_nothing_after_the_new_tokens() -> None:
    q, keys, values = (noise(size, random(1), torch.float32) for size in [(1, 2, 4, 16), *[(2, 2, 90, 16)] * 2])
    places = [whole([1]), whole([50]), whole([2])]
    before = attention.attend(q, keys, values, *places, 0.3)
    for cache in (keys, values):
        cache[0] = float("nan")
        cache[1, :, 52:] = float("nan")
    assert torch.equal(attention.attend(q, keys, values, *places, 0.3), before)


@given(
    passes(), multiplied, st.sampled_from([None, 1, 5, 33]), st.sampled_from([1, 2, 8]),
    st.sampled_from([0.0, 0.5, 1.0]), st.booleans(),
)  # fmt: skip
@few
def test_rotation_cache_write_and_attention_of_single_tokens(
    case: dict, dtype: torch.dtype, window: int | None, splits: int, rotated: float, normed: bool
) -> None:
    generator, batch, size = random(case["seed"]), len(case["slots"]), case["size"]
    qkv = noise((batch, 1, case["heads"] + 2 * case["kv_heads"], size), generator, dtype)
    cache = [noise((4, case["kv_heads"], case["capacity"], size), generator, dtype) for _ in range(2)]
    counts = [min(count, 1) for count in case["counts"]]
    places = [whole(case["slots"]), whole(case["starts"]), whole(counts)]
    half = int(size * rotated) // 2
    angles = torch.rand(case["capacity"], half, generator=generator).to(DEVICE) * 6
    cos_sin = (angles.cos(), angles.sin()) if half else None
    norms = (noise((size,), generator, dtype), noise((size,), generator, dtype)) if normed else None
    for slot, start in zip(case["slots"], case["starts"], strict=True):
        for half_cache in cache:  # what the place held before must not be seen, nor what lies behind it
            half_cache[slot, :, start:] = float("nan")
    exact_cache = [c.double() for c in cache]
    exact = reference.rope_cache_attend(
        qkv.double(), *exact_cache, *places, tuple(t.double() for t in cos_sin) if cos_sin else None, case["heads"],
        tuple(n.double() for n in norms) if norms else None, 1e-5, 0.3, window,
    )  # fmt: skip
    tiles = cuts.Tiles(16, 16, splits, warps=4, stages=2)
    ours = attention.rope_cache_attend(qkv, *cache, *places, cos_sin, case["heads"], norms, 1e-5, 0.3, window, tiles)
    close(ours, exact, dtype)
    for mine, theirs in zip(cache, exact_cache, strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan()), "written beside its place"
        close(mine.nan_to_num(), theirs.nan_to_num(), dtype)


@given(
    st.integers(1, 64), st.integers(1, 8), st.integers(1, 8), st.integers(1, 64), st.sampled_from([64, 96, 128, 256]),
    st.sampled_from([64, 99, 163, 227]), st.sampled_from([0, 2048, 131_072, 10**6]),
)  # fmt: skip
def test_tiles_fill_a_gpu_and_fit_into_it(
    queries: int, group: int, kv_heads: int, batch: int, size: int, kilobytes: int, reach: int
) -> None:
    card = cuts.Card(132, kilobytes * 1024)
    narrow = cuts.Tiles.of(queries, group, kv_heads, batch, size, 2, card, reach, narrow=True)
    shared = narrow.rows * size * 2 + narrow.keys * size * 2 + narrow.stages * 2 * narrow.keys * size
    assert shared <= card.shared // (1 + (narrow.rows <= 64)) or narrow.rows * size * 2 > 24 * 1024
    tiles = cuts.Tiles.of(queries, group, kv_heads, batch, size, 2, card, reach)
    programs = -(-queries * group // tiles.rows) * kv_heads * batch * tiles.splits
    assert tiles.splits == 64 or programs > 132 // 2
    assert tiles.splits == 1 or programs <= 2 * 132
    assert (tiles.rows + tiles.stages * 2 * tiles.keys) * size * 2 <= card.shared or tiles.rows * size * 2 > 48 * 1024


def test_long_caches_have_the_tiles_that_were_measured_for_them_and_nothing_else_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h200, a100 = cuts.Card(132, 227 * 1024), cuts.Card(108, 163 * 1024)
    eight = (16, 4, 8, 1, 128, 2)  # 16 queries of an 8B model: queries, group, key heads, batch, size, bytes
    short = cuts.Tiles(64, 64, 16, warps=4, stages=3)
    assert cuts.Tiles.of(*eight, h200, cuts.LONG) == cuts.Tiles(64, 128, 16, warps=4, stages=3)
    assert cuts.Tiles.of(*eight, h200, cuts.LONG - 1) == cuts.Tiles.of(*eight, h200) == short
    for other in (
        (8, 4, 8, 1, 128, 2),  # 32 rows
        (16, 5, 8, 1, 128, 2),  # 128 rows
        (16, 4, 8, 1, 64, 2),  # narrower heads
        (16, 4, 8, 1, 256, 2),  # wider ones
        (16, 4, 8, 1, 128, 4),  # float32
    ):
        assert cuts.Tiles.of(*other, h200, cuts.LONG) == cuts.Tiles.of(*other, h200), other
    assert cuts.Tiles.of(*eight, a100, cuts.LONG) == cuts.Tiles.of(*eight, a100), "three stages of 128 do not fit"

    assert page_of(cuts.WIDE) == 128, "a tile lies in one page"
    for queries, rows, splits in ((1, 16, 32), (4, 64, 32), (9, 64, 32), (16, 64, 16), (60, 128, 4)):
        for reach, keys, stages in ((cuts.WIDE - 1, 64, 3), (cuts.WIDE, 64, 3) if rows > 64 else (cuts.WIDE, 128, 2)):
            narrow = cuts.Tiles.of(queries, 5, 8, 1, 128, 2, h200, reach, narrow=True)
            assert narrow == cuts.Tiles(rows, keys, splits, warps=8 if queries == 60 else 4, stages=stages)

    asked: list[int] = []

    def of(*shape: Any) -> cuts.Tiles:
        asked.append(shape[7])
        return cuts.Tiles(16, 16, 1, warps=4, stages=2)

    monkeypatch.setattr(attention.Tiles, "of", of)
    q, keys = (noise(size, random(1), torch.float32) for size in [(1, 2, 1, 16), (1, 1, 40, 16)])
    places = [whole([0]), whole([20]), whole([2])]
    none = [torch.zeros(size, dtype=torch.int32, device=DEVICE) for size in [(1, 1, 1), (1, 1)]]
    for options in ({}, {"window": 9}, {"chosen": SelectedBlocks(*none, 16)}):
        attention.attend(q, keys, keys, *places, 0.3, **options)
    assert asked == [40, 0, 0], "windows and chosen blocks are not long, and blocks of 64 need tiles of 64 or less"


@given(
    st.integers(1, 4), st.sampled_from([8, 24, 64, 100]), types, st.booleans(), st.booleans(), st.integers(0, 99)
)  # fmt: skip
@few
def test_residual_and_norm(rows: int, size: int, dtype: torch.dtype, adds: bool, inner: bool, seed: int) -> None:
    generator = random(seed)
    x, added = noise((rows, size), generator, dtype), noise((rows, size), generator, dtype)
    weight, other = noise((size,), generator, dtype), noise((size,), generator, dtype)
    exact_x = x.double()
    options = (other,) if inner else ()
    exact = reference.add_norm(
        exact_x, added.double() if adds else None, weight.double(), 1e-5, *(o.double() for o in options)
    )
    ours = elementwise.add_norm(x, added if adds else None, weight, 1e-5, *options)
    close(ours, exact, dtype)
    close(x, exact_x, dtype)


@given(
    st.integers(1, 16),
    st.sampled_from([(5, 24), (40, 70), (33, 128)]),
    multiplied,
    st.booleans(),
    st.sampled_from([1, 2, 4]),
)
@few
def test_products_of_few_rows(rows: int, size: tuple[int, int], dtype: torch.dtype, biased: bool, splits: int) -> None:
    generator = random(rows)
    x, weight = noise((rows, size[1]), generator, dtype), noise(size, generator, dtype)
    bias = noise((size[0],), generator, dtype) if biased else None
    ours = gemm.product(x, weight, bias, cut=gemm.SkinnyGemmConfig(16, 16, splits))
    whole = reference.product(x.double(), weight.double(), None if bias is None else bias.double())
    if splits > 1:
        assert ours.shape == (splits, rows, size[0]) and ours.dtype == torch.float32
        before = noise((rows, size[0]), generator, dtype)
        stream = before.clone()
        elementwise.add_norm(stream, ours, torch.ones(size[0], device=DEVICE, dtype=dtype), 1e-5)
        close(stream, before.double() + whole, dtype)
        ours = ours.sum(0).to(dtype)
    close(ours, whole, dtype)


@given(
    st.integers(1, 16), st.sampled_from([(5, 24), (40, 70), (33, 128)]), multiplied, st.booleans(),
    st.sampled_from(["silu", "gelu_pytorch_tanh"]),
)  # fmt: skip
@few
def test_products_with_an_activation(
    rows: int, size: tuple[int, int], dtype: torch.dtype, biased: bool, activation: str
) -> None:
    generator = random(rows)
    x, weight = noise((rows, size[1]), generator, dtype), noise((2 * size[0], size[1]), generator, dtype)
    bias = noise((2 * size[0],), generator, dtype) if biased else None
    ours = gemm.product(x, weight, bias, activation=activation, cut=gemm.SkinnyGemmConfig(16, 16, 1))
    whole = reference.product(x.double(), weight.double(), None if bias is None else bias.double())
    close(ours, reference.act_and_mul(whole, activation), dtype)


@given(
    st.sampled_from([(2048, 1536), (1536, 8960), (17920, 1536), (64, 32)]), st.booleans(), st.booleans(),
    st.sampled_from([2, 4]), st.sampled_from([48, 64, 99, 163, 227]),
)  # fmt: skip
def test_products_fit_into_any_card(
    size: tuple[int, int], parts: bool, gated: bool, itemsize: int, kilobytes: int
) -> None:
    cut = gemm.SkinnyGemmConfig.of(size, cuts.Card(80, kilobytes * 1024), parts and not gated, gated, itemsize)
    weights = cut.columns * (2 if gated else 1)
    assert cut.stages * cut.depth * (weights + gemm.SKINNY_ROWS) * itemsize <= kilobytes * 1024
    assert cut.columns >= 16 and cut.depth >= 16 and (not gated or cut.splits == 1)


def test_products_are_cut_as_was_measured_to_be_fastest() -> None:
    h200 = cuts.Card(132, 227 * 1024)
    for size, parts, cut in (
        ((2048, 1536), False, gemm.SkinnyGemmConfig(16, 256, 1, stages=6)),
        ((1536, 1536), True, gemm.SkinnyGemmConfig(16, 128, 4, stages=6)),
        ((17920, 1536), False, gemm.SkinnyGemmConfig(64, 64, 1, stages=6)),
        ((1536, 8960), True, gemm.SkinnyGemmConfig(32, 256, 4, stages=4)),
    ):
        assert gemm.SkinnyGemmConfig.of(size, h200, parts) == cut


@given(passes(), types, st.sampled_from([0.0, 0.5, 1.0]), st.booleans(), st.booleans())
@few
def test_rotation_and_cache_write(case: dict, dtype: torch.dtype, rotated: float, normed: bool, tree: bool) -> None:
    generator, batch, size = random(case["seed"]), len(case["slots"]), case["size"]
    qkv = noise((batch, case["queries"], case["heads"] + 2 * case["kv_heads"], size), generator, dtype)
    cache = [noise((4, case["kv_heads"], case["capacity"], size), generator, dtype) for _ in range(2)]
    places = [whole(case[name]) for name in ("slots", "starts", "counts")]
    half = int(size * rotated) // 2
    angles = torch.rand(case["capacity"], half, generator=generator).to(DEVICE) * 6
    cos_sin = (angles.cos(), angles.sin()) if half else None
    norms = (noise((size,), generator, dtype), noise((size,), generator, dtype)) if normed else None
    exact_cache = [c.double() for c in cache]
    mask = None
    if tree:
        mask = any_tree(case, generator)
        mask = mask._replace(depths=mask.depths.clamp_max(case["queries"] - 1))  # within the tables
    exact = reference.rope_and_cache(
        qkv.double(), *exact_cache, *places, tuple(t.double() for t in cos_sin) if cos_sin else None, case["heads"],
        tuple(n.double() for n in norms) if norms else None, 1e-5, mask,
    )  # fmt: skip
    untouched = [c.clone() for c in cache]
    ours = elementwise.rope_and_cache(qkv, *cache, *places, cos_sin, case["heads"], norms, 1e-5, mask)
    for b, count in enumerate(case["counts"]):
        close(ours[b, :count], exact[b, :count], dtype)
    for mine, theirs, before in zip(cache, exact_cache, untouched, strict=True):
        close(mine, theirs, dtype)
        written = torch.zeros_like(mine, dtype=torch.bool)
        for slot, start, count in zip(case["slots"], case["starts"], case["counts"], strict=True):
            written[slot, :, start : start + count] = True
        assert torch.equal(mine[~written], before[~written]), "a pass wrote beside its places"


@given(st.integers(1, 3), st.sampled_from([1, 40, 1100]), types, st.sampled_from(["silu", "gelu_pytorch_tanh"]))
@few
def test_gated_activation(rows: int, size: int, dtype: torch.dtype, activation: str) -> None:
    gate_up = 3 * noise((rows, 2 * size), random(size), dtype)
    close(elementwise.act_and_mul(gate_up, activation), reference.act_and_mul(gate_up.double(), activation), dtype)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 7)), min_size=1, max_size=5))
@few
def test_what_is_written_is_noted(lanes: list[tuple[int, int, int]]) -> None:
    stops = torch.zeros(2, 8, dtype=torch.bool, device=DEVICE)
    stops[1, ::2] = True
    ours = torch.zeros(FIELDS, len(lanes), dtype=torch.long, device=DEVICE)
    ours[COUNT], ours[LEFT] = (whole(column) for column in list(zip(*lanes, strict=True))[:2])
    ours[STOPS], ours[START], ours[STEP] = torch.arange(len(lanes), device=DEVICE) % 2, 10, 1
    theirs = ours.clone()
    tokens, out = whole([token for _, _, token in lanes]), torch.full((3, len(lanes)), -7, device=DEVICE)
    expected = out.clone()
    for _ in range(2):  # the second step starts from what the first noted
        elementwise.advance(ours, tokens, stops, out)
        reference.advance(theirs, tokens, stops, expected)
    assert torch.equal(ours, theirs) and torch.equal(out, expected)
