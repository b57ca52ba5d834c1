"""Many sequences at a time: attention over pages against one page a slot, steps of batches, prompts in pieces."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

from bench.gpu_tune import CASES, HEAD, Case, graphed
from semspec.model.config import Shape
from semspec.model.kernels.attention import attend
from semspec.model.page_pool import page_of
from semspec.types import Score

if TYPE_CHECKING:
    from bench.gpu import Bench

BATCHES = (1, 8, 32, 64)
PEAK = 790e12  # floating-point operations a second that an H200 reaches with large products
PIECES = (512, 1024, 2048, 8192)  # tokens of a prompt in one pass


def load(bench: Bench) -> None:
    if bench.device.type == "cuda":
        for name, shape in CASES.items():
            pages(bench, name, Case(bench, *shape))
    for batch in BATCHES:
        bench.section_round(batch, name=f"load: batch {batch}, one K=8 step")
        if bench.device.type == "cuda":
            print(f"    {torch.cuda.max_memory_allocated() / 1e9:.1f} GB at most", flush=True)
    bench.drop("draft")
    prefill(bench)


def pages(bench: Bench, name: str, case: Case) -> None:
    """The same launches over pages: one after the other, as a new pool hands them out, and anywhere."""
    layers, slots, heads, context, _ = case.keys.shape
    page = page_of(context)
    count = slots * (context // page)
    bench.add(f"attention, {name}, one page a slot", case.ms(case.chosen), case.read)
    for told, order in (("in order", torch.arange(count)), ("anywhere", torch.randperm(count))):
        tables = order.to(bench.device, torch.int32).view(slots, -1)

        def launch(tables: torch.Tensor = tables) -> None:
            for i in range(layers):
                keys, values = (half[i].view(-1, heads, page, HEAD) for half in (case.keys, case.values))
                attend(case.q, keys, values, *case.places, HEAD**-0.5, tiles=case.chosen, tables=tables)

        ms = graphed(bench, launch, case.chosen) / layers
        bench.add(f"attention, {name}, pages of {page} {told}", ms, case.read)


def prefill(bench: Bench) -> None:
    """A prompt of 8,192 tokens in pieces of several sizes, as a share of the card's arithmetic."""
    total = PIECES[-1] if bench.device.type == "cuda" else PIECES[0]
    runner = bench.runner("target", 1, total + 64)
    for piece in (p for p in PIECES if p <= total):
        times = []
        for _ in range(3):
            runner.truncate(0, 0)
            bench.wait()
            began = time.perf_counter()
            for start in range(0, total, piece):
                runner.score([Score(runner, 0, [1 + i % 200 for i in range(start, start + piece)], 0)])
            bench.wait()
            times.append(time.perf_counter() - began)
        share = work_of(runner.shape, total) / statistics.median(times) / PEAK
        bench.add(f"prefill of {total} in pieces of {piece}", 1000 * statistics.median(times), share_of_peak=share)
        print(f"    {share:.1%} of {PEAK / 1e12:.0f} TFLOP/s", flush=True)


def work_of(shape: Shape, tokens: int) -> float:
    """Floating-point operations of reading a prompt."""
    dense = 2 * (shape.parameters - shape.vocab_size * shape.width * (1 if shape.tied else 2)) * tokens
    return dense + 2 * tokens * tokens * shape.num_layers * shape.heads * shape.head_dim  # causal: half of the square
