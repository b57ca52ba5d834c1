"""What tree drafts cost: the target's pass over a tree, an EAGLE-3 head's token, and whole steps of both.

Part of bench/gpu.py (`--only trees`, `--only long_trees`). Weights and cache are noise: only times mean anything here.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from semspec import tree
from semspec.bench.shapes import random_head
from semspec.draft.head import HeadDrafter
from semspec.draft.tree import TreeOptions, fixed_shape
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.model import ModelRunner
from semspec.model.experts import FeedForward
from semspec.model.heads.levels import Levels
from semspec.model.heads.runner import HeadRunner
from semspec.sparse import SparsePlan, apply
from semspec.sparse_fit.presets import config
from semspec.types import Decode, Sampling, Score
from semspec.verify.exact import Exact

if TYPE_CHECKING:
    from bench.gpu import Bench

SIZE, DEPTH, TOP = 60, 7, 10


def shape_of(target: ModelRunner) -> tuple[int, ...]:
    """Parents in the order in which drafters give them."""
    return tree.preorder(fixed_shape(min(SIZE, target.max_seq_len // 4), DEPTH, TOP))[1]


def score_tree(bench: Bench, target: ModelRunner, context: int, parents: tuple[int, ...], last: int) -> float:
    tokens, kept = list(range(1, len(parents) + 2)), tree.path(parents, last)

    def work() -> None:
        target.cache.pretend(0, context - 1)
        target.score([Score(target, 0, tokens, len(tokens), parents=parents)])
        target.compact(0, context, kept)

    return bench.ms(work)


def trees(bench: Bench) -> None:
    context = bench.asked.context
    target = bench.runner("target", 1, context + 64 + 12 * (bench.asked.steps + 8))
    read, parents = bench.weights("target") + bench.kv("target", context), shape_of(target)
    chain = bench.score_at(target, context, len(parents) + 1)
    bench.add(f"target pass, chain of {len(parents)}", chain, read)
    lines = [tree.path(parents, i) for i in range(len(parents))]
    first = max(i for i, line in enumerate(lines) if line == tuple(range(i + 1)))
    deepest = max(range(len(parents)), key=lambda i: (len(lines[i]), i))
    bench.add("target pass, tree of 60", score_tree(bench, target, context, parents, first), read)
    bench.add("the same, another path moved together", score_tree(bench, target, context, parents, deepest), read)
    head = random_head(target)
    slot = head.acquire()
    made = torch.randn(context, target.shape.width, device=bench.device, dtype=bench.dtype)
    head.observe(slot, dict.fromkeys(head.layers, made))
    head.score([Score(head, slot, [1] * context, 0)])
    layer = head.head.layers[0]
    assert isinstance(layer.ffn, FeedForward)
    matrices = [layer.qkv, layer.out, layer.ffn.gate_up, layer.ffn.down, head.head.head]
    size = 2 * context * head.shape.kv_heads * head.shape.head_dim * bench.dtype.itemsize

    def roll(n: int) -> float:
        def work() -> None:
            head.truncate(slot, context)
            head.decode([Decode(head, slot, [3], n, Sampling(), 0)])

        return bench.ms(work)

    short, long = roll(2), roll(DEPTH + 2)
    bench.add("head token", (long - short) / DEPTH, sum(m.nbytes for m in matrices) + size)
    head.release(slot)
    step(bench, target, head)


def step(bench: Bench, target: ModelRunner, head: HeadRunner) -> None:
    """Whole steps as the Executor makes them: draft, score, judge, commit."""
    context, steps = bench.asked.context, bench.asked.steps
    prompt = torch.randint(
        1, min(1000, target.vocab_size), [context], generator=torch.Generator().manual_seed(0)
    ).tolist()
    branching = TreeOptions(SIZE, DEPTH, TOP)
    on_device = None if head.graphs is None else Levels(head.graphs, head.vocab_size)
    for name, options, levels in (
        ("one step, tree of 60, paths of 7", branching, on_device),
        ("one step, tree of 60, level by level", branching, None),
        ("one step, chain of 7", TreeOptions(), None),
    ):
        head.levels = levels
        while not target.free:
            target.release(0)
        executor, stats = Executor(budget=8192), Stats()
        job = Job(prompt, Exact(), DEPTH, max_new_tokens=target.max_seq_len - context - 64)
        task = executor.submit(Decoder(job, target, HeadDrafter(head, tree=options), stats).decode(), stats)

        def once(task=task, executor=executor) -> None:  # type: ignore[no-untyped-def]
            task.events.clear()
            while not task.events and not task.done:
                executor.tick()

        for _ in range(4):
            once()
        before, times = dict(stats.seconds), list[float]()
        bench.wait()
        for _ in range(steps):
            began = time.perf_counter()
            once()
            times.append((time.perf_counter() - began) * 1000)
        if task.error:
            raise task.error
        spent = {part: (stats.seconds[part] - before[part]) / steps * 1000 for part in before}
        drafted = stats.drafted / max(stats.rounds, 1)
        bench.add(name, statistics.median(times), parts_ms=spent, drafted=drafted)
        print("    by the host's clock: " + ", ".join(f"{part} {value:.2f}" for part, value in spent.items() if value))
        executor.cancel(task)
    target.acquire()


def long_trees(bench: Bench) -> None:
    """At a long context: the attention of the paper's sparse plan against dense, over the same tree."""
    context = bench.asked.long
    target = bench.runner("target", 1, context + 128)
    parents, attention = shape_of(target), config("paper", dense_below=min(4096, context // 16)).attention
    assert attention is not None
    few = tuple(sorted({*range(min(4, target.num_layers)), *range(4, target.num_layers, 4)}))
    read, found = bench.weights("target") + bench.kv("target", context), dict[str, float]()
    for name, plan in (("dense", None), ("paper", SparsePlan(attention=replace(attention, anchors=few)))):
        apply(plan, target)
        found[name] = score_tree(bench, target, context, parents, 0)
        bench.add(f"target pass, tree of 60, long, {name}", found[name], read, context=context)
    apply(None, target)
    print(f"    the paper's plan takes {found['paper'] / found['dense']:.2f} of a dense pass")
