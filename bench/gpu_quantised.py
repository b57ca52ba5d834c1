"""Section `quantised` of bench/gpu.py: passes and steps with weights in 8 and 4 bits, noise quantised while loading."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from semspec.model.placement import Weights

if TYPE_CHECKING:
    from bench.gpu_sections import Bench

SMALL_VOCAB = 32768  # of a draft's head over the most frequent tokens
BARS = {  # milliseconds that must be reached on an H200 at a context of 2,048
    "32B fp8 pass, 1 token": 10.8, "32B fp8 pass, 9 tokens": 10.8, "32B int4 pass, 9 tokens": 9.0,
    "1.5B fp8 token, head of 32k": 1.10, "32B bf16, 1.5B fp8 with small head: one K=8 step": 27.0,
    "32B fp8, 1.5B fp8 with small head: one K=8 step": 20.0, "70B fp8 pass, 9 tokens": 21.0,
    "70B fp8, 8B fp8: one K=15 step": 66.0,
}  # fmt: skip


def quantised(bench: Bench) -> None:
    """A 32B model in three ways, one at a time, then 70B: two do not fit beside each other."""
    if bench.asked.cuts:
        from bench.gpu_tune_quantised import use

        use(bench.asked.cuts)
    bench.vocab["draft"] = SMALL_VOCAB
    bench.drop("target", "draft")
    for weights in ("int4", "fp8"):
        passes(bench, "32B", weights, (1, 9, 17))
        if weights == "int4":
            bench.drop("target")
    bench.precisions["draft"] = "fp8"
    draft_tokens(bench)
    bench.section_round(name="32B fp8, 1.5B fp8 with small head: one K=8 step")
    bench.drop("target")
    bench.precisions["target"] = "plain"
    bench.section_round(name="32B bf16, 1.5B fp8 with small head: one K=8 step")
    bench.drop("target", "draft")
    shape, bench.asked.shape = bench.asked.shape, "70B/8B"
    bench.vocab.clear()
    passes(bench, "70B", "fp8", (1, 9, 16))
    bench.section_round(k=15, name="70B fp8, 8B fp8: one K=15 step")
    bench.drop("target", "draft")
    bench.asked.shape = shape
    bench.precisions.clear()


def passes(bench: Bench, name: str, weights: Weights, counts: tuple[int, ...]) -> None:
    bench.precisions["target"] = weights
    runner = bench.runner("target", 8, bench.asked.context + 32)
    read = bench.weights("target") + bench.kv("target", bench.asked.context)
    for tokens in counts:
        plural = "s" if tokens > 1 else ""
        time = bench.score_at(runner, bench.asked.context, tokens)
        bench.add(f"{name} {weights} pass, {tokens} token{plural}", time, read)
    time = bench.score_at(runner, bench.asked.context, 9, slots=8)
    bench.add(
        f"{name} {weights} pass, 9 tokens of 8 sequences", time, read + 7 * bench.kv("target", bench.asked.context)
    )


def draft_tokens(bench: Bench) -> None:
    runner = bench.runner("draft", 1, bench.asked.context + 128)
    short, long = (bench.roll_at(runner, bench.asked.context, n) for n in (8, 72))
    read = bench.weights("draft") + bench.kv("draft", bench.asked.context)
    bench.add("1.5B fp8 token, head of 32k", (long - short) / 64, read)


def quantised_experts(bench: Bench) -> None:
    """One layer of a 30B-A3B mixture: its experts in bfloat16 and in fewer bits, by their kernels in a graph."""
    from bench.gpu_checks_kernels import kernels
    from bench.gpu_checks_quantised import stacked
    from bench.gpu_rules import captured_ms

    number, chosen, width, hidden = (128, 8, 2048, 768) if bench.device.type == "cuda" else (6, 2, 256, 256)
    sizes, made = ((2 * hidden, width), (width, hidden)), dict[str, list[Any]]()
    made["bf16"] = [torch.randn(number, *size, device=bench.device, dtype=bench.dtype) for size in sizes]
    for kind, layout in (("fp8", (1, 0, False, False)), ("int4", (1, 128, True, False)), ("fp4", (1, 16, False, True))):
        made[kind] = [stacked(kind, number, size, layout, bench.device) for size in sizes]  # type: ignore[arg-type]
    for rows in (1, 9, 72):
        x = torch.randn(rows, width, device=bench.device, dtype=bench.dtype)
        logits = torch.randn(rows, number, device=bench.device)
        rest = ("silu", chosen, True, torch.tensor([rows], device=bench.device))
        picked = len(set(logits.topk(chosen).indices.flatten().tolist()))
        for kind, experts in made.items():
            ms = captured_ms(bench, partial(kernels(bench.device).fused_moe, x, logits, *experts, *rest))
            read = picked * 3 * width * hidden * {"bf16": 2.0, "fp8": 1.0}.get(kind, 0.5)
            bench.add(f"layer of experts, {kind}, {rows} rows", ms, read)
