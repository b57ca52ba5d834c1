"""What must hold on a GPU of each kernel, against float64; the runner made of them: gpu_checks.py.

Each check is a function that raises AssertionError; inputs are fresh noise, never zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from semspec.model.kernels import (
    COUNT,
    FIELDS,
    SEED,
    START,
    STEP,
    STREAM,
    BlockMeans,
    Kernels,
    SelectedBlocks,
    TreeMask,
    reference,
    reference_kernels,
    triton_kernels,
)  # fmt: skip
from semspec.model.page_pool import page_of
from semspec.sampling.draw import SamplingUse
from semspec.sampling.noise import exponential, key
from semspec.sparse.attention import block_lists

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
HALF = (torch.bfloat16, torch.float16)
CHECKS: dict[str, Callable[[torch.device], None]] = {}


def check(function: Callable[[torch.device], None]) -> Callable[[torch.device], None]:
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


def kernels(device: torch.device) -> Kernels:
    return triton_kernels() if device.type == "cuda" else reference_kernels()


def error(ours: Tensor, exact: Tensor) -> float:
    assert not ours.isnan().any(), "not a number"
    return float((ours.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-9))


def near(ours: Tensor, exact: Tensor, most: float, what: str = "") -> None:
    off = error(ours, exact)
    assert off < most, f"{what} is off by {off:.1e} of its size; at most {most:.1e} is right"


def paged(cache: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The same contents in pages that lie anywhere, and their tables."""
    slots, _, capacity, _ = cache[0].shape
    page = page_of(capacity)
    width = -(-capacity // page)
    order = torch.randperm(slots * width, device=cache[0].device).view(slots, width)
    pools = []
    for half in cache:
        filled = torch.nn.functional.pad(half, (0, 0, 0, width * page - capacity))
        pool = filled.new_empty(slots * width, filled.shape[1], page, filled.shape[3])
        pool[order.flatten()] = filled.unflatten(2, (width, page)).transpose(1, 2).flatten(0, 1)
        pools.append(pool)
    return pools, order.int()


def attention(
    device: torch.device, dtype: torch.dtype, lengths: list[int], queries: int, kv_heads: int, group: int, size: int,
    window: int | None = None, tree: bool = False,
) -> None:  # fmt: skip
    batch, capacity = len(lengths), max(lengths) + queries
    q = torch.randn(batch, queries, kv_heads * group, size, device=device, dtype=dtype)
    cache = [torch.randn(batch + 1, kv_heads, capacity, size, device=device, dtype=dtype) for _ in range(2)]
    for half in cache:  # what lies behind a sequence must not matter
        for b, length in enumerate(lengths):
            half[batch - b, :, length + queries - b % queries :] = float("nan")
    slots = torch.arange(batch, 0, -1, device=device)
    starts = torch.tensor(lengths, device=device)
    counts = torch.tensor([queries - b % queries for b in range(batch)], device=device)
    mask = None
    if tree:  # each query sees itself and any of the new tokens before it
        seen = torch.rand(batch, queries, queries, device=device).round().tril().long() | torch.eye(
            queries, dtype=torch.long, device=device
        )
        lines = (seen << torch.arange(queries, device=device)).sum(-1)
        mask = TreeMask(starts, lines, torch.randint(0, queries, (batch, queries), device=device))
    ours = kernels(device).attend(q, *cache, slots, starts, counts, size**-0.5, window, mask)
    pools, tables = paged(cache)
    same = kernels(device).attend(q, *pools, slots, starts, counts, size**-0.5, window, mask, tables=tables)
    assert torch.equal(same, ours), "a paged cache gives other bits"
    for b in range(batch):  # one by one: the reference takes much more memory
        one = [x[b : b + 1] for x in (slots, starts, counts)]
        marks = None if mask is None else TreeMask(*(x[b : b + 1] for x in mask))
        own = [half[slots[b] : slots[b] + 1, :, : lengths[b] + queries].double() for half in cache]
        exact = reference.attend(q[b : b + 1].double(), *own, one[0] * 0, *one[1:], size**-0.5, window, marks)
        near(ours[b : b + 1], exact, TOLERANCE[dtype], f"sequence {b} of {lengths}")


@check
def attention_over_random_shapes(device: torch.device) -> None:
    shapes = torch.Generator().manual_seed(torch.seed() % 2**31)

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (1,), generator=shapes))]

    for i in range(24 if device.type == "cuda" else 3):  # nearly each is another kernel to compile
        dtype = (*HALF, torch.bfloat16, torch.float32)[i % 4] if device.type == "cuda" else torch.float32
        lengths = [pick(0, 1, 7, 63, 64, 65, 500, 2048, 5000) for _ in range(pick(1, 2, 3, 8))]
        window, tree = pick(0, 0, 1, 100, 4096) or None, bool(pick(0, 0, 1))
        queries, heads, size = pick(1, 2, 9, 17, 33, 64), (pick(1, 2, 8), pick(1, 5, 6, 7)), pick(64, 96, 128, 256)
        attention(device, dtype, lengths, queries, *heads, size, window, tree)


@check
def attention_over_140000_tokens(device: torch.device) -> None:
    longest = 140_000 if device.type == "cuda" else 1400
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for queries in (1, 9, 16, 17):
        attention(device, dtype, [longest - queries], queries, 2, 5, 128)
    attention(device, dtype, [longest - 16, 3, longest // 2], 16, 8, 4, 128)
    attention(device, dtype, [longest - 16], 16, 2, 5, 128, window=4096)


@check
def attention_to_chosen_blocks(device: torch.device) -> None:
    chosen_blocks(device, means=False)


@check
def attention_to_chosen_blocks_and_means_of_the_others(device: torch.device) -> None:
    chosen_blocks(device, means=True)


def chosen_blocks(device: torch.device, means: bool) -> None:
    longest = 140_000 if device.type == "cuda" else 1400
    for dtype in (torch.float32, *HALF) if device.type == "cuda" else (torch.float32,):
        for span, queries, share in ((16, 9, 0.3), (64, 16, 0.1), (64, 17, 1.0), (128, 33, 0.5)):
            lengths, heads, group, size = [longest - 70, 3, longest // 3], 4, 5, 128
            q = torch.randn(3, queries, heads * group, size, device=device, dtype=dtype)
            cache = [torch.randn(3, heads, longest, size, device=device, dtype=dtype) for _ in range(2)]
            places = [torch.tensor(x, device=device) for x in ([2, 0, 1], lengths, [queries, 1, queries])]
            keep = torch.rand(3, heads, longest // span, device=device) < share
            keep &= torch.arange(longest // span, device=device) < (places[1] // span)[:, None, None]
            chosen = SelectedBlocks(*block_lists(keep), span)
            if means:  # of blocks that are whole, and of nothing else
                made = [half[:, :, : longest // span * span].unflatten(2, (-1, span)).mean(3) for half in cache]
                for slot, length in zip([2, 0, 1], lengths, strict=True):
                    for half in made:
                        half[slot, :, length // span :] = float("nan")
                chosen = chosen._replace(rest=BlockMeans(keep.to(torch.int8), made[0], made[1]))
            ours = kernels(device).attend(q, *cache, *places, size**-0.5, chosen=chosen)
            pools, tables = paged(cache)
            same = kernels(device).attend(q, *pools, *places, size**-0.5, chosen=chosen, tables=tables)
            assert torch.equal(same, ours), "a paged cache gives other bits"
            del pools
            for b, (slot, length) in enumerate(zip([2, 0, 1], lengths, strict=True)):
                own = [half[slot : slot + 1, :, : length + queries].double() for half in cache]
                one = [places[0][:1] * 0, *(x[b : b + 1] for x in places[1:])]
                few = SelectedBlocks(chosen.lists[b : b + 1], chosen.counts[b : b + 1], span)
                if means:
                    wide = [half[slot : slot + 1].double() for half in made]
                    few = few._replace(rest=BlockMeans(keep[b : b + 1], wide[0], wide[1]))
                exact = reference.attend(q[b : b + 1].double(), *own, *one, size**-0.5, chosen=few)
                near(ours[b : b + 1], exact, TOLERANCE[dtype], f"blocks of {span}, sequence {b}")


@check
def small_kernels(device: torch.device) -> None:
    k = kernels(device)
    for dtype in (torch.float32, *HALF) if device.type == "cuda" else (torch.float32,):
        for width in (64, 1536, 5120):
            x, added = (torch.randn(17, width, device=device, dtype=dtype) for _ in range(2))
            weight, inner = (torch.randn(width, device=device, dtype=dtype) for _ in range(2))
            for options in ((None,), (added,), (added, inner)):
                mine, exact_x = x.clone(), x.double()
                wide = [None if o is None else o.double() for o in options]
                ours = k.add_norm(mine, options[0], weight, 1e-6, *options[1:])
                exact = reference.add_norm(exact_x, wide[0], weight.double(), 1e-6, *wide[1:])
                near(ours, exact, TOLERANCE[dtype], "norm")
                near(mine, exact_x, TOLERANCE[dtype], "residual stream")
        for activation in ("silu", "gelu_pytorch_tanh"):
            gate_up = torch.randn(9, 2 * 8960, device=device, dtype=dtype) * 3
            near(
                k.act_and_mul(gate_up, activation),
                reference.act_and_mul(gate_up.double(), activation),
                TOLERANCE[dtype],
            )
        angles = torch.rand(100, 32, device=device) * 6
        places = [torch.tensor(x, device=device) for x in ([2, 0], [40, 3], [5, 2])]
        qkv = torch.randn(2, 5, 10 + 4, 96, device=device, dtype=dtype)
        norms = (torch.randn(96, device=device, dtype=dtype), torch.randn(96, device=device, dtype=dtype))
        cache = [torch.randn(3, 2, 100, 96, device=device, dtype=dtype) for _ in range(2)]
        exact_cache = [half.double() for half in cache]
        turns = (angles.cos(), angles.sin())
        pools, tables = paged(cache)
        ours = k.rope_and_cache(qkv, *cache, *places, turns, 10, norms, 1e-6)
        same = k.rope_and_cache(qkv, *pools, *places, turns, 10, norms, 1e-6, tables=tables)
        assert torch.equal(same[0], ours[0]), "a paged cache gives other bits"
        for pool, half in zip(pools, cache, strict=True):
            assert torch.equal(pool[tables.long()].transpose(1, 2).flatten(2, 3)[:, :, :100], half), "written elsewhere"
        exact = reference.rope_and_cache(
            qkv.double(), *exact_cache, *places, (turns[0].double(), turns[1].double()), 10,
            (norms[0].double(), norms[1].double()), 1e-6,
        )  # fmt: skip
        near(ours[0], exact[0], TOLERANCE[dtype], "queries")
        near(ours[1, :2], exact[1, :2], TOLERANCE[dtype], "queries")
        for mine, theirs in zip(cache, exact_cache, strict=True):
            near(mine, theirs, TOLERANCE[dtype], "cache")


@check
def draws_are_those_of_the_reference(device: torch.device) -> None:
    """Of a large vocabulary; where two tokens all but tie in float32, either is right."""
    sample, rows, size = kernels(device).sample, 64, 151936
    if sample is None:  # without a GPU there is none to look at
        return
    options, use = torch.tensor([[0.6, 0.0, 1.0, 0.0]], device=device).repeat(rows, 1), SamplingUse(False, True)
    options[::8, 0] = 0.0
    state = torch.randint(0, 5000, (FIELDS, rows), device=device)
    state[STEP] = 2
    for dtype in (torch.float32, *HALF):
        logits = torch.randn(rows, size + 128, device=device).mul(4).to(dtype)[:, :size]
        kept = torch.zeros(8, rows, size, device=device)
        tokens = sample(logits, options, use, state, kept)
        assert torch.equal(tokens, sample(logits, options, use, state, None)), "keeping changes the draw"
        drawn = exponential(key(state[SEED], state[START] + state[COUNT], state[STREAM]), size)
        scores = logits.double() / 0.6 - drawn.double().log()
        behind = scores.amax(-1) - scores.gather(1, tokens[:, None])[:, 0]
        greedy = options[:, 0] == 0.0
        assert torch.where(greedy, tokens == logits.argmax(-1), behind < 1e-4).all(), f"{dtype}: another draw"
        sampled = kept[2][~greedy].double().log_softmax(-1).exp()
        near(sampled, (logits.double() / 0.6).softmax(-1)[~greedy], 1e-4, f"{dtype}: what was drawn from")
        assert torch.equal(kept[2][greedy], logits[greedy].float()) and not kept[[0, 1, 3]].any()


@check
def products_of_few_rows(device: torch.device) -> None:
    for dtype in (torch.float32, *HALF) if device.type == "cuda" else (torch.float32,):
        for rows, outputs, inputs in (
            (1, 2048, 1536),
            (9, 1536, 1536),
            (16, 1536, 8960),
            (2, 17920, 1536),
            (5, 50, 100),
        ):
            x, weight = (torch.randn(size, device=device, dtype=dtype) for size in ((rows, inputs), (outputs, inputs)))
            weight *= inputs**-0.5  # or a gate times an up leaves what half precision can say
            bias = torch.randn(outputs, device=device, dtype=dtype)
            exact = reference.product(x.double(), weight.double(), bias.double())
            for parts in (False, True):
                ours = kernels(device).product(x, weight, bias, parts)
                near(ours.sum(0) if ours.dim() == 3 else ours, exact, TOLERANCE[dtype], f"{outputs} x {inputs}")
            if outputs % 2 == 0:
                exact, ours = (
                    reference.act_and_mul(exact, "silu"),
                    kernels(device).product(x, weight, bias, False, "silu"),
                )
                near(ours, exact, 2 * TOLERANCE[dtype], f"{outputs} x {inputs}, with its activation")
