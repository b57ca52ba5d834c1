"""Keys and values in fp8: what is stored, what kernels read and write of it, and what a model makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

import semspec
from semspec.errors import BadRequest, ModelError
from semspec.model import ModelRunner, Source
from semspec.model.config import Shape
from semspec.model.graph_runner import GraphRunner
from semspec.model.kernels import (
    BlockMeans,
    KvScales,
    SelectedBlocks,
    attention,
    elementwise,
    reference,
    reference_kernels,
)
from semspec.model.kernels import tiles as cuts
from semspec.model.kv_fp8 import FP8, LARGEST, decode, encode
from semspec.model.memory_plan import MemoryPlan
from semspec.model.paged_cache import PagedCache
from semspec.model.placement import Precision
from semspec.sparse.attention import block_lists
from semspec.types import Decode, Sampling, Score
from tests.checkpoints import make_model, make_tokenizer, save
from tests.model.test_graph_runner import Rehearsed, close, text
from tests.model.test_kernels import DEVICE, any_tree, noise, passes, random, whole
from tests.model.test_kernels import close as near
from tests.model.test_paged_kernels import contiguous, multiplied, paged, pages

STEP = 2**-4  # e4m3 has three bits after the point: a number is off by this share of it, at most


def test_codes_are_near_and_the_largest_is_itself() -> None:
    x = torch.randn(50, 3, 64, generator=random(1)) * torch.tensor([1e-6, 1.0, 3e4])[:, None]
    codes, scales = encode(x)
    back = decode(codes, scales, torch.float32)
    assert codes.dtype == FP8 and scales.shape == (50, 3)
    assert ((back - x).abs() <= STEP * x.abs() + scales[..., None] * 2**-9).all()
    torch.testing.assert_close(back.abs().amax(-1), x.abs().amax(-1))
    assert not decode(*encode(torch.zeros(2, 8)), torch.float32).any()
    assert decode(*encode(torch.tensor([[1.0, float("nan")]])), torch.float32).isnan().any(), "it is not hidden"


def stored(cache: list[Tensor], page: int, seed: int) -> tuple[list[Tensor], Tensor, KvScales, list[Tensor]]:
    """A cache in pages of fp8, and what it stands for, contiguous."""
    coded = [encode(half) for half in cache]
    codes, tables = paged([c.view(torch.uint8).float() for c, _ in coded], page, seed)  # torch moves no fp8
    scales, _ = paged([s[..., None] for _, s in coded], page, seed)
    exact = [decode(c, s, torch.float64) for c, s in coded]
    made = [c.nan_to_num(0).to(torch.uint8).view(FP8) for c in codes]
    return made, tables, KvScales(*(s[..., 0].contiguous() for s in scales)), exact


@given(passes(), multiplied, pages, st.sampled_from([None, 33]), st.sampled_from([1, 4]), st.booleans())
@settings(max_examples=5, phases=[Phase.generate])  # interpreted kernels are slow
def test_attention_reads_them(
    case: dict, dtype: torch.dtype, page: int, window: int | None, splits: int, sparse: bool
) -> None:
    generator, batch = random(case["seed"]), len(case["slots"])
    q = noise((batch, case["queries"], case["heads"], case["size"]), generator, dtype)
    places = [whole(case[name]) for name in ("slots", "starts", "counts")]
    cache = [half * torch.rand(*half.shape[:3], 1) * 5 for half in contiguous(case, torch.float32, generator)]
    cache[1] *= 0.002  # weights times scales would be lost in half precision
    pools, tables, scales, exact_cache = stored(cache, page, case["seed"])
    chosen = None
    if sparse and window is None:
        lists = torch.zeros(batch, case["kv_heads"], 1, dtype=torch.int32, device=DEVICE)
        chosen = SelectedBlocks(lists, (places[1] >= 8)[:, None].expand(-1, case["kv_heads"]).int().contiguous(), 8)
    exact = reference.attend(q.double(), *exact_cache, *places, 0.3, window, chosen=chosen)
    tiles = cuts.Tiles(16, 16, splits, warps=4, stages=2)
    more = {"chosen": chosen, "tables": tables, "scales": scales}
    near(attention.attend(q, *pools, *places, 0.3, window, tiles=tiles, **more), exact, dtype)
    torch.testing.assert_close(reference.attend(q.double(), *pools, *places, 0.3, window, **more), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["all", "window", "tree", "blocks", "blocks and means"])
def test_tiles_that_all_queries_see_and_tiles_that_some_do_not(kind: str, dtype: torch.dtype) -> None:
    """Tiles of neighbours: their scales are read together, and most need no mask."""
    case = {"slots": [2, 0, 1], "starts": [131, 0, 96], "counts": [5, 3, 4], "queries": 5}
    generator, size, span = random(8), 16, 32
    q = noise((3, 5, 6, size), generator, dtype)
    pools, tables, scales, exact_cache = stored(
        [noise((3, 2, 160, size), generator, torch.float32) for _ in range(2)], 32, 2
    )
    places = [whole(case[name]) for name in ("slots", "starts", "counts")]
    more, exactly = {}, {}
    if kind == "window":
        more = {"window": 50}
    if kind == "tree":
        more = {"tree": any_tree(case, generator)}
    if "blocks" in kind:
        marks = torch.rand(3, 2, 5, generator=generator).to(DEVICE) < 0.6
        marks &= torch.arange(5, device=DEVICE) < (places[1] // span)[:, None, None]
        means = [half.unflatten(2, (5, span)).mean(3) for half in exact_cache]
        for told, dtype_of_means in ((more, dtype), (exactly, torch.float64)):
            rest = BlockMeans(marks.to(torch.int8), *(half.to(dtype_of_means) for half in means))
            told["chosen"] = SelectedBlocks(*block_lists(marks), span, rest if "means" in kind else None)
    exact = reference.attend(q.double(), *exact_cache, *places, 0.3, **(more | exactly))
    for keys, splits in ((16, 1), (32, 2)):
        tiles = cuts.Tiles(16, keys, splits, warps=4, stages=2)
        near(attention.attend(q, *pools, *places, 0.3, tiles=tiles, tables=tables, scales=scales, **more), exact, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("of_queries", "of_values"), [(1e7, 1e8), (1e-7, 1e-9), (1.0, 1e30)])
def test_no_size_of_numbers_is_lost_in_half_precision(dtype: torch.dtype, of_queries: float, of_values: float) -> None:
    """Queries, and weights times the scales of values, are in float16 for a while: they may be larger than its largest
    number, or smaller than its smallest."""
    generator, (batch, queries, size, end) = random(5), (2, 3, 16, 70)
    q = (noise((batch, queries, 4, size), generator, torch.float32) * of_queries).to(dtype)
    cache = [noise((batch, 2, end, size), generator, torch.float32) for _ in range(2)]
    cache[0] /= of_queries
    cache[1] *= of_values * 10 ** (torch.rand(batch, 2, end, 1, generator=generator).to(DEVICE) * 4 - 4)
    cache[1][:, :, 3] *= 1e3  # one among others that are small, which a query may or may not look at
    pools, tables, scales, exact_cache = stored(cache, 32, seed=1)
    places = [torch.arange(batch, device=DEVICE), whole([end - queries] * batch), whole([queries] * batch)]
    exact = reference.attend(q.double(), *exact_cache, *places, 0.3)
    for splits, keys in ((1, 16), (2, 32)):
        tiles = cuts.Tiles(16, keys, splits, warps=4, stages=2)
        ours = attention.attend(q, *pools, *places, 0.3, tiles=tiles, tables=tables, scales=scales)
        near(ours / of_values, exact / of_values, dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("keys", [16, 32])
def test_what_is_no_number_stays_where_it_is(keys: int) -> None:
    """Of what a slot has not written, nothing is read; of queries, keys and values only those that meet them tell."""
    generator, (batch, queries, size, end) = random(6), (2, 5, 16, 45)
    q = noise((batch, queries, 2, size), generator, torch.float16)
    cache = [noise((batch, 1, 64, size), generator, torch.float32) for _ in range(2)]
    pools, tables, scales, exact_cache = stored(cache, 32, seed=1)
    places = [torch.arange(batch, device=DEVICE), whole([end - queries] * batch), whole([queries] * batch)]
    for pool, scale in zip(pools, scales, strict=True):
        for page in tables[:, 1].tolist():
            pool.view(torch.uint8)[page, :, end - 32 :] = 0x7F
            scale[page, :, end - 32 :] = float("nan")
    exact, told = reference.attend(q.double(), *exact_cache, *places, 0.3), torch.ones(batch, queries, 2).bool()
    q[0, 2, 1, 3], q[1, 4, 0, 0] = float("inf"), float("nan")
    told[0, 2, 1] = told[1, 4, 0] = False
    more = {"tiles": cuts.Tiles(16, keys, 1, warps=4, stages=2), "tables": tables, "scales": scales}
    ours = attention.attend(q, *pools, *places, 0.3, **more)
    near(ours[told], exact[told], torch.float16)
    assert ours[~told].isnan().all()
    scales.keys[tables[0, 0], 0, 7] = float("nan")
    ours = attention.attend(q, *pools, *places, 0.3, **more)
    assert ours[0].isnan().all(), "it is not hidden"
    near(ours[1][told[1]], exact[1][told[1]], torch.float16)


@given(passes(), multiplied, pages, st.booleans(), st.sampled_from([1, 4]))
@settings(max_examples=5, phases=[Phase.generate])  # interpreted kernels are slow
def test_new_tokens_are_written_so(case: dict, dtype: torch.dtype, page: int, single: bool, splits: int) -> None:
    generator, batch, size = random(case["seed"]), len(case["slots"]), case["size"]
    queries = 1 if single else case["queries"]
    qkv = noise((batch, queries, case["heads"] + 2 * case["kv_heads"], size), generator, dtype)
    counts = [min(count, queries) for count in case["counts"]]
    places = [whole(case["slots"]), whole(case["starts"]), whole(counts)]
    angles = torch.rand(case["capacity"], size // 2, generator=generator).to(DEVICE) * 6
    cache = contiguous(case, torch.float32, generator)
    pools, tables, scales, exact_cache = stored(cache, page, case["seed"])
    turns = (angles.double().cos(), angles.double().sin())
    rope, exact_rope = ((angles.cos(), angles.sin()), case["heads"], None), (turns, case["heads"], None)
    wide = [half.clone() for half in exact_cache]
    reference.rope_and_cache(qkv.double(), *wide, *places, *exact_rope)
    if single:
        tiles = cuts.Tiles(16, 16, splits, warps=4, stages=2)
        more = {"tiles": tiles, "tables": tables, "scales": scales}
        ours = attention.rope_cache_attend(qkv, *pools, *places, *rope, 0.0, 0.3, None, **more)
    else:
        elementwise.rope_and_cache(qkv, *pools, *places, *rope, tables=tables, scales=scales)
    found = []
    for pool, scale, exact in zip(pools, scales, wide, strict=True):
        codes = pool.view(torch.uint8)[tables.long()].transpose(1, 2).flatten(2, 3)[:, :, : case["capacity"]].view(FP8)
        level = scale[tables.long()].transpose(1, 2).flatten(2, 3)[:, :, : case["capacity"]]
        found.append(decode(codes, level, torch.float64))
        loose = 2.0 if dtype == torch.float16 else 1.0  # a rounding may end in the next code
        allowed = loose * (STEP * exact.abs() + level[..., None] * 2**-9)
        assert ((found[-1] - exact).abs() <= allowed + 1e-6).all()
        assert (level * LARGEST - exact.abs().amax(-1)).abs().max() < 2e-2
    if single:
        q = reference.rope_and_cache(qkv.double(), *[half.clone() for half in wide], *places, *exact_rope)
        near(ours, reference.attend(q, *found, *places, 0.3), dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(make_model("gemma3"), tmp_path_factory.mktemp("gemma3"))
    make_tokenizer().save_pretrained(folder)
    return folder


def runner_of(plain: ModelRunner, graphs: bool, fp8: bool = True) -> ModelRunner:
    made = ModelRunner(plain.transformer, 4, plain.max_seq_len, page=8, fp8_cache=fp8)
    if graphs:
        made.use(GraphRunner(plain.transformer, made.cache, reference_kernels(), Rehearsed()))
    return made


def test_passes_agree_whichever_way_they_are_made(folder: Path) -> None:
    """Prompts by plain passes and drafts by fused ones share a cache; cut, kept and copied as any other."""
    plain = ModelRunner.load(folder, device="cpu", slots=4, context=96)
    one, other, wide = runner_of(plain, True), runner_of(plain, False), runner_of(plain, False, fp8=False)
    last = []
    for runner in (one, other, wide):
        a, b = runner.acquire(), runner.acquire()
        runner.score([Score(runner, a, text(1, 70), 1)])
        rows = [runner.score([Score(runner, a, text(2, 5), 5)])[0].logits]
        runner.truncate(a, 72)
        tree = Score(runner, a, text(3, 4), 4, parents=(-1, 0, 0, 2))
        rows.append(runner.score([tree])[0].logits)
        runner.compact(a, 72, [0, 2, 3])
        runner.copy(a, b, 74)
        rows.append(runner.score([Score(runner, b, text(4, 3), 3)])[0].logits)
        last.append(torch.cat(rows))
    close(last[0], last[1])
    away = (last[0] - last[2]).norm() / last[2].norm()
    assert 1e-4 < away < 0.1, "fp8 it is, and not far from what it stands for"
    assert isinstance(one.cache, PagedCache) and isinstance(wide.cache, PagedCache)
    size = plain.shape.head_dim
    assert one.cache.nbytes * 4 * size == wide.cache.nbytes * (size + 4)


def test_drafts_change_nothing(folder: Path) -> None:
    plain = semspec.load(folder, folder, device="cpu", slots=4, context=96)
    assert isinstance(plain.target, ModelRunner)
    target, draft = runner_of(plain.target, True), runner_of(plain.target, True)
    pair = semspec.Pair(target, plain.tokenizer, draft).cached()
    prompts = ["the quick brown fox", "the lazy dog jumps", "the quick brown fox jumps"]
    how = {"max_new_tokens": 24, "ignore_eos": True}
    alone = [pair.generate(p, verifier="none", **how).tokens for p in prompts]
    for drafter in ("model", "model:tree=8,top=2,depth=3"):
        made = pair.generate(prompts, verifier="exact", num_draft_tokens=4, drafter=drafter, **how)
        assert [r.tokens for r in made] == alone
    fresh = runner_of(plain.target, True)
    requests = [Decode(fresh, fresh.acquire(), text(5, 4), 12, Sampling(1.0, seed=4), 8) for _ in range(2)]
    first, second = fresh.decode(requests)
    assert first.tokens == second.tokens and len(first.tokens) == 12


def test_memory_is_planned(folder: Path) -> None:
    shape, card = Shape.of(Source.find(folder).config), torch.device("cuda")
    wide, narrow = (
        MemoryPlan.of("model", shape, card, Precision(torch.bfloat16, fp8_cache=fp8), 4, 96) for fp8 in (False, True)
    )
    assert narrow.per_token * 2 * shape.head_dim == wide.per_token * (shape.head_dim + 4)
    assert narrow.kv < wide.kv and narrow.weights == wide.weights


def test_what_cannot_be_is_refused(folder: Path) -> None:
    with pytest.raises(BadRequest, match="kv_dtype fp8 is for GPUs"):
        semspec.load(folder, device="cpu", kv_dtype="fp8")
    with pytest.raises(BadRequest, match="'int3' is not known; give auto or fp8"):
        semspec.load(folder, device="cpu", kv_dtype="int3")
    with pytest.raises(BadRequest, match="kv_dtype is for models loaded here"):
        semspec.load("http://127.0.0.1:9/v1", kv_dtype="fp8")
    source = Source.find(folder)
    alien = Source(source.path, source.config, None)
    with pytest.raises(ModelError, match="kv_dtype is for the model types semspec runs itself"):
        alien.plan("cpu", "float32", 1, None, kv_dtype="fp8")
