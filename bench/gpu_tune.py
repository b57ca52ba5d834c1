"""How to cut the work of the kernels for the shapes that matter: `bench/gpu.py --only tune` and `--only products`.

From the tiles that `Tiles.of` chooses, one number is changed at a time, and the best of all so far is changed next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from semspec.model.config import Shape
from semspec.model.kernels.attention import attend
from semspec.model.kernels.gemm import SkinnyGemmConfig, product
from semspec.model.kernels.tiles import Tiles, card_of

if TYPE_CHECKING:
    from bench.gpu import Bench

HEAD = 128
CASES = {  # name: batch, queries, kv heads, heads of each, context
    "32B, 1 query": (1, 1, 8, 5, 2048),
    "32B, 9 queries": (1, 9, 8, 5, 2048),
    "32B, 17 queries": (1, 17, 8, 5, 2048),
    "32B, 9 queries, batch 8": (8, 9, 8, 5, 2048),
    "1.5B, 1 query": (1, 1, 2, 6, 2048),
    "32B, 16 queries, 65536": (1, 16, 8, 5, 65536),
    "8B, 16 queries, 131072": (1, 16, 8, 4, 131072),
}


class Case:
    """Launches over the caches of several layers in one graph, so that none is found in the L2 cache."""

    def __init__(self, bench: Bench, batch: int, queries: int, kv_heads: int, group: int, context: int) -> None:
        self.bench, device, dtype = bench, bench.device, bench.dtype
        self.read = 2 * batch * kv_heads * context * HEAD * 2
        self.layers = max(2, min(32, int(2e9 // self.read)))
        self.q = torch.randn(batch, queries, kv_heads * group, HEAD, device=device, dtype=dtype)
        size = (self.layers, batch, kv_heads, context, HEAD)
        self.keys, self.values = (torch.empty(size, device=device, dtype=dtype).normal_() for _ in range(2))
        slots = torch.arange(batch, device=device)
        self.places = (slots, torch.full_like(slots, context - queries), torch.full_like(slots, queries))
        self.chosen = Tiles.of(queries, group, kv_heads, batch, HEAD, dtype.itemsize, card_of(device), context)

    def ms(self, tiles: Tiles) -> float:
        def launch() -> None:
            for i in range(self.layers):
                attend(self.q, self.keys[i], self.values[i], *self.places, HEAD**-0.5, tiles=tiles)

        return graphed(self.bench, launch, tiles) / self.layers


def graphed(bench: Bench, launch: Callable[[], None], what: object) -> float:
    """Milliseconds of launches in a graph."""
    try:
        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
    except Exception as failure:  # too much shared memory, mostly
        print(f"    {what}: {type(failure).__name__}")
        return float("inf")
    return bench.ms(graph.replay, repeats=7, warm=2)


def neighbours(t: Tiles) -> Iterator[Tiles]:
    yield from (replace(t, splits=n) for n in (t.splits // 2, t.splits * 2) if 1 <= n <= 128)
    yield from (replace(t, keys=n) for n in (t.keys // 2, t.keys * 2) if 16 <= n <= 128)
    yield from (replace(t, stages=n) for n in (t.stages - 1, t.stages + 1) if n >= 2)
    yield replace(t, warps=12 - t.warps)  # 4 or 8
    if t.rows > 16:
        yield replace(t, rows=t.rows // 2)


def tune_attention(bench: Bench) -> None:
    for name, shape in CASES.items():
        if bench.asked.match not in name:
            continue
        case = Case(bench, *shape)
        tried = {case.chosen: case.ms(case.chosen)}
        best = case.chosen
        for _ in range(2):
            for tiles in neighbours(best):
                if tiles not in tried:
                    tried[tiles] = case.ms(tiles)
            best = min(tried, key=lambda tiles: tried[tiles])
        bench.add(f"attention, {name}", tried[case.chosen], case.read, tiles=str(case.chosen))
        bench.add(f"best of {len(tried)} tiles", tried[best], case.read, tiles=str(best))
        print(f"    {case.chosen}\n    {best}", flush=True)
        del case


def tune_products(bench: Bench) -> None:
    """Each matrix of the draft and the target by cuBLAS and by our kernel, whole and in parts, at 1 and 9 rows."""
    for which in ("draft", "target"):
        s = Shape.of(bench.config(which))
        heads = s.heads * s.head_dim
        matrices = {
            "qkv": (heads + 2 * s.kv_heads * s.head_dim, s.width, False),
            "out": (s.width, heads, True),
            "gate and up": (2 * s.ffn, s.width, False),
            "down": (s.width, s.ffn, True),
            "head": (s.vocab_size, s.width, False),
        }
        for name, (outputs, inputs, split) in matrices.items():
            read = outputs * inputs * bench.dtype.itemsize
            copies = max(2, min(48, int(1e9 // read)))  # many times the L2 cache
            weights = torch.empty(copies, outputs, inputs, device=bench.device, dtype=bench.dtype).normal_(std=0.02)
            chosen = SkinnyGemmConfig.of((outputs, inputs), card_of(bench.device), split)
            cuts = [chosen, replace(chosen, stages=6), replace(chosen, depth=chosen.depth // 2, stages=6)]
            cuts += [replace(chosen, columns=c) for c in (chosen.columns // 2, chosen.columns * 2) if c >= 16]
            cuts += [replace(chosen, splits=n) for n in (chosen.splits // 2, chosen.splits * 2) if split and n >= 1]
            active = SkinnyGemmConfig.of((outputs, inputs), card_of(bench.device), split, gated=True)
            gated = [active, *(replace(active, columns=c) for c in (16, 64)), replace(active, depth=128, stages=4)]
            for rows in (1, 9):
                x = torch.randn(rows, inputs, device=bench.device, dtype=bench.dtype)

                def by_cublas(x: Tensor = x, weights: Tensor = weights) -> None:
                    for weight in weights:
                        F.linear(x, weight)

                def by_us(
                    cut: SkinnyGemmConfig, activation: str | None = None, x: Tensor = x, weights: Tensor = weights
                ) -> None:
                    for weight in weights:
                        product(x, weight, None, activation=activation, cut=cut)

                theirs = graphed(bench, by_cublas, "cuBLAS") / copies
                times = {cut: graphed(bench, partial(by_us, cut), cut) / copies for cut in cuts}
                best = min(times, key=lambda cut, times=times: times[cut])  # type: ignore[misc]
                told = f"{which} {name}, {rows} row{'s' if rows > 1 else ''}"
                bench.add(f"{told}, cuBLAS", theirs, read)
                bench.add(f"{told}, ours", times[chosen], read, cut=str(chosen))
                bench.add(f"{told}, ours at best", times[best], read, cut=str(best), MB=read / 1e6)
                print(f"    {best}", flush=True)
                if name == "gate and up":
                    times = {c: graphed(bench, partial(by_us, c, "silu"), c) / copies for c in gated}
                    best = min(times, key=lambda cut, times=times: times[cut])  # type: ignore[misc]
                    bench.add(f"{told}, with its activation", times[active], read, cut=str(active))
                    bench.add(f"{told}, with its activation, at best", times[best], read, cut=str(best))
            del weights
