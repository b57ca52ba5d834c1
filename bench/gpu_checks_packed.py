"""What must hold on a GPU of packed passes (semspec/model/packed_rows.py); with all other checks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bench.gpu_checks import DENSE, MIXTURES, no_rougher, runner, text
from bench.gpu_checks_kernels import HALF, TOLERANCE, check, error, kernels, near, paged
from bench.gpu_checks_trees import CHECKS as CHECKS
from bench.gpu_checks_trees import tree_course
from semspec.model import ModelRunner
from semspec.model.attention_metadata import SequenceChunk
from semspec.model.buckets import MAX_ROWS
from semspec.model.graph_runner import GraphRunner
from semspec.model.graphs import GraphCache, NoGraphs
from semspec.model.kernels import DEFAULT_FLAGS, TreeMask, reference
from semspec.model.packed_rows import PackedRows, lines_of
from semspec.types import Score

PACKED = replace(DEFAULT_FLAGS, packed=True)
SIZES = [  # tokens of three sequences in one tick: prompts' pieces, checks, single tokens; some sums come twice
    (100, 1, 70), (9, 9, 9), (9, 17, 1), (17, 1, 9), (1, 1, 1), (3, 64, 33), (33, 3, 64), (120, 2, 6), (1, 60, 1),
]  # fmt: skip


def packed_course(one: ModelRunner) -> list[Tensor]:
    """As `gpu_checks.course`, but all rows count, those of long feeds too: they come along in a packed pass."""
    slots, said = [one.acquire() for _ in range(3)], list[Tensor]()
    for step, sizes in enumerate(SIZES):
        requests = [
            Score(one, slot, text(7 * step + i, n), n) for i, (slot, n) in enumerate(zip(slots, sizes, strict=True))
        ]
        said += [rows.logits.float().cpu() for rows in one.score(requests)]
        if step % 2:
            for slot in slots:
                one.truncate(slot, one.length(slot) - 1)
    for slot in slots:
        one.release(slot)
    return said


def packed_check(family: str, device: torch.device, mixture: bool = False) -> None:
    """Float32 must be right; half precision no farther from that than one operation at a time. Of mixtures all rows
    together are compared, see `gpu_checks_grouped.mixture_check`."""
    exact = packed_course(runner(family, torch.device("cpu"), torch.float32, plain=True))
    for ours, theirs in zip(packed_course(runner(family, device, torch.float32, False, PACKED)), exact, strict=True):
        near(ours, theirs, 1e-3, "float32, packed")
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    mine, rough = (packed_course(runner(family, device, half, plain, PACKED)) for plain in (False, True))
    if mixture:
        own, theirs = (error(torch.cat(rows), torch.cat(exact)) for rows in (mine, rough))
        assert own < 2 * theirs, f"{half}: off by {own:.1e} over all passes, the plain way by {theirs:.1e}"
    else:
        no_rougher(mine, rough, exact, f"{half}, packed")


for name in (*DENSE, *MIXTURES):
    CHECKS[f"packed logits of {name}"] = lambda device, family=name: packed_check(family, device, family in MIXTURES)


@check
def packed_trees_are_the_same_everywhere(device: torch.device) -> None:
    for family in ("llama3.1", "qwen3", "gemma3", "smollm3"):
        exact = tree_course(runner(family, torch.device("cpu"), torch.float32, plain=True))
        ours = tree_course(runner(family, device, torch.float32, False, PACKED))
        for mine, theirs in zip(ours, exact, strict=True):
            near(mine, theirs, 1e-3, family)


@check
def packed_passes_over_fp8(device: torch.device) -> None:
    """What rectangles give with the same codes."""
    for family in ("qwen2", "gemma3"):
        said = []
        for flags in (DEFAULT_FLAGS, PACKED):
            transformer = runner(family, device, torch.float32, plain=True).transformer
            one = ModelRunner(transformer, 3, 512, page=None if device.type == "cuda" else 16, fp8_cache=True)
            launcher = GraphCache(device) if device.type == "cuda" else NoGraphs()
            one.use(GraphRunner(transformer, one.cache, kernels(device), launcher, flags))
            said.append(packed_course(one))
        for ours, theirs in zip(*said, strict=True):
            near(ours, theirs, 1e-2, family)


def tiles_check(
    device: torch.device, dtype: torch.dtype, chunks: list[SequenceChunk], kv_heads: int, group: int, size: int,
    window: int | None = None,
) -> None:  # fmt: skip
    """Rows of a packed pass, contiguous and paged, against each sequence by itself in float64; twice the same bits."""
    total = sum(c.count for c in chunks)
    packing, capacity = PackedRows.of(chunks, group, total), max(c.start + c.count for c in chunks)
    numbers = packing.numbers([1] * total, chunks, range(total))
    _, metadata, _ = packing.of_buffer(torch.tensor(numbers, device=device))
    assert metadata.tiles is not None
    tiles, own = metadata.tiles, kernels(device)
    q = torch.randn(packing.rows, 1, kv_heads * group, size, device=device, dtype=dtype)
    cache = [torch.randn(len(chunks), kv_heads, capacity, size, device=device, dtype=dtype) for _ in range(2)]
    for half in cache:  # what lies behind a sequence must not matter
        for c in chunks:
            half[c.slot, :, c.start + c.count :] = float("nan")
    where = (tiles.slots, tiles.starts, tiles.counts, size**-0.5, window, tiles.tree)
    ours = own.attend(q, *cache, *where, rows=tiles.rows)
    assert not ours[total:].any(), "rows that belong to nobody are not zero"
    pools, tables = paged(cache)
    for _ in range(3):
        again = own.attend(q, *pools, *where, tables=tables, rows=tiles.rows)
        assert torch.equal(again, ours), "a paged cache, or another run, gives other bits"
    row = 0
    for c in chunks:
        mask = None
        if c.parents:
            base, lines, depths = (torch.tensor([x], device=device) for x in lines_of(c))
            mask = TreeMask(base, lines, depths)
        place = [torch.tensor([x], device=device) for x in (0, c.start, c.count)]
        own_rows = slice(row, row := row + c.count)
        wide = [half[c.slot : c.slot + 1, :, : c.start + c.count].double() for half in cache]
        rows = q[own_rows].double().transpose(0, 1)
        exact = reference.attend(rows, *wide, *place, size**-0.5, window, mask)
        near(ours[own_rows].transpose(0, 1), exact, TOLERANCE[dtype], f"{c.count} tokens after {c.start}")


@check
def packed_attention_over_random_shapes(device: torch.device) -> None:
    shapes = torch.Generator().manual_seed(torch.seed() % 2**31)

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (1,), generator=shapes))]

    for i in range(24 if device.type == "cuda" else 3):  # nearly each is another kernel to compile
        dtype = (*HALF, torch.bfloat16, torch.float32)[i % 4] if device.type == "cuda" else torch.float32
        window, branching, chunks = pick(0, 0, 100, 4096) or None, bool(pick(0, 0, 1)), []
        for slot in range(pick(1, 2, 5, 8, 33)):
            count, start = pick(1, 1, 9, 9, 17, 60, 64, 200), pick(0, 1, 63, 64, 65, 500, 2048, 5000)
            count = count if sum(c.count for c in chunks) + count <= MAX_ROWS - 33 else 1  # all fit into one pass
            grown = min(count, pick(4, 16, 63)) if branching and count <= 64 and slot % 2 else 0
            parents = tuple(pick(-1, *range(n)) for n in range(grown))
            chunks.append(SequenceChunk(slot, start, count, parents))
        if all(c.count == 1 for c in chunks):
            chunks[0].count = 9
        tiles_check(device, dtype, chunks, pick(1, 2, 8), pick(1, 5, 6, 7), pick(64, 96, 128, 256), window)


@check
def packed_attention_over_140000_tokens(device: torch.device) -> None:
    longest, dtype = (140_000, torch.bfloat16) if device.type == "cuda" else (1400, torch.float32)
    starts = [longest - 70, 3, longest // 2, longest // 3]
    chunks = [SequenceChunk(i, start, n) for i, (start, n) in enumerate(zip(starts, (9, 1, 60, 16), strict=True))]
    tiles_check(device, dtype, chunks, 8, 4, 128)
    tiles_check(device, dtype, chunks, 2, 5, 128, window=4096)
