"""Attention over keys and values in fp8 beside bfloat16: how one layer's work is best cut, `bench/gpu.py --only
fp8_tiles`.

Each cut is held against a reference in float64 over the same codes, then timed in a CUDA graph that goes through the
caches of several layers, so that none is found in the L2 cache. What the package would choose comes first, then what
promises most. A cut that does not compile, does not fit or is wrong is named and left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from semspec.model.kernels import KvScales, reference
from semspec.model.kernels.attention import attend
from semspec.model.kernels.tiles import Tiles, card_of
from semspec.model.kv_fp8 import encode

if TYPE_CHECKING:
    from bench.gpu import Bench

SHAPE = (8, 5, 128)  # of 32B: key heads, heads of each, head_dim
QUERIES = (16, 1, 9)
PAGE = 64  # below 65,536 tokens; from there on 128
SECONDS = 50.0  # of all cuts together; most of it is compiling
OFF = 2e-2  # of the answer's size
LAYERS = 3


def changed(chosen: Tiles, fp8: bool) -> list[Tiles]:
    """What is tried: first what is chosen, the most promising next."""
    more, less = (replace(chosen, splits=max(1, min(64, n))) for n in (chosen.splits * 2, chosen.splits // 2))
    other = replace(chosen, rows=64, warps=4) if chosen.rows != 64 else replace(chosen, rows=128, warps=8)
    if not fp8:
        return [chosen, other, more]
    wide = replace(chosen, keys=128 if chosen.keys == 64 else 64)
    deep = replace(other if chosen.rows == 16 else chosen, stages=4)
    tried = [chosen, other, deep, more, wide, less, replace(chosen, stages=2), replace(wide, warps=8)]
    return list(dict.fromkeys([*tried, replace(chosen, warps=8), replace(wide, stages=2)]))


class Layers:
    """Keys and values of a few layers in pages that lie anywhere."""

    def __init__(self, bench: Bench, context: int, page: int, shape: tuple[int, int, int]) -> None:
        self.bench, device = bench, bench.device
        heads, self.group, size = shape
        pages = -(-context // page)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
        self.tables = order[None].to(device, torch.int32)
        self.context, self.shape = context, shape
        self.wide, self.codes, self.scales = [], [], []
        for _ in range(LAYERS):
            pair = [torch.randn(pages, heads, page, size, device=device, dtype=bench.dtype) for _ in range(2)]
            coded = [encode(half) for half in pair]
            self.wide.append(pair)
            self.codes.append([codes for codes, _ in coded])
            self.scales.append(KvScales(*(scale for _, scale in coded)))

    def asked(self, queries: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        heads, group, size = self.shape
        q = torch.randn(1, queries, heads * group, size, device=self.bench.device, dtype=self.bench.dtype)
        slots = torch.zeros(1, dtype=torch.long, device=q.device)
        return q, (slots, slots + self.context - queries, slots + queries)

    def launch(
        self,
        layer: int,
        q: Tensor,
        places: tuple[Tensor, Tensor, Tensor],
        fp8: bool,
        how: Callable[..., Tensor] | None = None,
        **more: Tiles,
    ) -> Tensor:
        kept = self.codes[layer] if fp8 else [half.to(q.dtype) for half in self.wide[layer]]
        scales = self.scales[layer] if fp8 else None
        return (how or attend)(q, *kept, *places, self.shape[2] ** -0.5, tables=self.tables, scales=scales, **more)

    def all_layers(self, q: Tensor, places: tuple[Tensor, Tensor, Tensor], fp8: bool, tiles: Tiles) -> None:
        for layer in range(LAYERS):
            self.launch(layer, q, places, fp8, tiles=tiles)

    def bytes(self, fp8: bool) -> float:
        heads, _, size = self.shape
        return 2 * heads * self.context * (size + 4 if fp8 else size * self.bench.dtype.itemsize)


def graphed(bench: Bench, work: Callable[[], object]) -> Callable[[], object]:
    if bench.device.type != "cuda":
        return work
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def fp8_tiles(bench: Bench, shape: tuple[int, int, int] = SHAPE, page: int = PAGE) -> None:
    began, context, (heads, group, size) = time.perf_counter(), bench.asked.long, shape
    layers = {of: Layers(bench, context, of, shape) for of in (page, 128)}
    cases = []
    for queries, fp8 in product(QUERIES, (True, False)):
        card = card_of(bench.device)
        chosen = Tiles.of(queries, group, heads, 1, size, bench.dtype.itemsize, card, context, fp8)
        cases += [(rank, queries, fp8, tiles) for rank, tiles in enumerate(changed(chosen, fp8))]
    exact: dict[tuple[int, bool, int], Tensor] = {}
    best: dict[tuple[int, bool], tuple[float, Tiles]] = {}
    for rank, queries, fp8, tiles in sorted(cases, key=lambda case: case[0]):
        name = f"attention, {queries} token{'s' * (queries > 1)}, KV in {'fp8' if fp8 else 'bfloat16'}"
        if time.perf_counter() - began > SECONDS:
            print(f"    {name}, {tiles} left out: {SECONDS:.0f} s are over", flush=True)
            continue
        at = 128 if tiles.keys == 128 else page
        cache = layers[at]
        torch.manual_seed(queries)
        q, places = cache.asked(queries)
        try:
            if (queries, fp8, at) not in exact:
                exact[queries, fp8, at] = cache.launch(0, q.double(), places, fp8, reference.attend)
            ours = cache.launch(0, q, places, fp8, tiles=tiles).double()
            off = float((ours - exact[queries, fp8, at]).norm() / exact[queries, fp8, at].norm())
            if not off < OFF:
                raise ValueError(f"wrong, {off:.1e} from the reference")
            ms = bench.ms(graphed(bench, partial(cache.all_layers, q, places, fp8, tiles)), warm=2) / LAYERS
        except Exception as failure:
            print(f"    {name}, {tiles} left out: {type(failure).__name__}: {str(failure)[:100]}", flush=True)
            continue
        read = cache.bytes(fp8)
        bench.add(name + " (chosen)" * (not rank), ms, read, tiles=str(tiles), page=at, off=off)
        print(f"    {tiles}, off {off:.1e}", flush=True)
        best[queries, fp8] = min(best.get((queries, fp8), (ms, tiles)), (ms, tiles), key=lambda pair: pair[0])
    for (queries, fp8), (ms, tiles) in sorted(best.items()):
        print(f"    best of {queries}, {'fp8' if fp8 else 'bfloat16'}: {ms:.4f} ms, {tiles}")
