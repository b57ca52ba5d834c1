"""The sections of bench/gpu.py: what each measures. Those only for who asks have files of their own."""

from __future__ import annotations

import statistics
import time
from importlib import import_module

import torch

from bench.gpu_table import Table
from semspec.draft.model import ModelDrafter
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.model import ModelRunner
from semspec.model.graphs import GraphCache
from semspec.types import Decode, Sampling, Score
from semspec.verify.exact import Exact

SECTIONS = ("start", "pass", "decode", "round", "batch", "long", "llama")  # start first: later, kernels are compiled
# Only if asked for: the file, its function, and the models dropped before and after it.
ASIDE: dict[str, tuple[str, str, str, str]] = {
    "sparse": ("gpu_sparse", "sparse", "target draft", "8B"),
    "paper": ("gpu_sparse_paper", "paper", "target draft 8B mixture", "target"),
    "experts": ("gpu_grouped", "experts", "target draft", "mixture"),
    "ffn": ("gpu_grouped", "ffn", "", ""),
    "arms": ("gpu_arms", "all_arms", "", ""),
    "long_arms": ("gpu_arms", "long_arms", "", ""),
    "long_fp8": ("gpu_sections", "long_fp8", "", ""),
    "fp8_tiles": ("gpu_fp8_tiles", "fp8_tiles", "target draft", ""),
    "breakdown": ("gpu_breakdown", "break_down", "", ""),
    "tune": ("gpu_tune", "tune_attention", "", ""),
    "products": ("gpu_tune", "tune_products", "", ""),
    "one_token": ("gpu_one_token", "one_token", "", ""),
    "quantised": ("gpu_quantised", "quantised", "", ""),
    "rules": ("gpu_rules", "rules", "", ""),
    "quantised_experts": ("gpu_quantised", "quantised_experts", "", ""),
    "trees": ("gpu_trees", "trees", "", ""),
    "long_trees": ("gpu_trees", "long_trees", "", ""),
    "transformers": ("gpu_transformers", "time_transformers", "", ""),
    "load": ("gpu_load", "load", "", ""),
    "packed": ("gpu_packed", "packed", "", ""),
    "bars": ("gpu_bars", "bars", "", ""),
    "auto": ("gpu_bars", "automatic", "", ""),
}
FORMER = {"roll": "decode", "step": "round", "judgement": "rules"}  # as sections were called before


class Bench(Table):
    """`section_NAME` for each of SECTIONS."""

    def section(self, name: str) -> None:
        if name not in ASIDE:
            return getattr(self, f"section_{name}")()
        file, function, before, after = ASIDE[name]
        self.drop(*before.split())
        getattr(import_module(f"bench.{file}"), function)(self)
        self.drop(*after.split())

    def score_at(
        self, runner: ModelRunner, context: int, tokens: int, slots: int = 1, repeats: int | None = None
    ) -> float:
        def work() -> None:
            for slot in range(slots):
                runner.cache.pretend(slot, context - tokens)
            self.score_once(runner, tokens, slots)

        return self.ms(work, repeats)

    @staticmethod
    def score_once(runner: ModelRunner, tokens: int, slots: int = 1) -> None:
        runner.score([Score(runner, slot, [1 + i for i in range(tokens)], tokens) for slot in range(slots)])

    def roll_at(self, runner: ModelRunner, context: int, n: int, slots: int = 1, temperature: float = 0.0) -> float:
        """What a sampled token was drawn from is kept, as rules that sample want it."""
        drawn, keep = Sampling(temperature), temperature > 0

        def work() -> None:
            for slot in range(slots):
                runner.cache.pretend(slot, context)
            runner.decode([Decode(runner, slot, [3, 4], n, drawn, 0, keep_logits=keep) for slot in range(slots)])

        return self.ms(work)

    def section_pass(self) -> None:
        context = self.asked.context
        runner = self.runner("target", 1, context + 32)
        for tokens in (1, 2, 5, 9, 17, 33):
            read = self.weights("target") + self.kv("target", context)
            plural = "s" if tokens > 1 else ""
            self.add(f"target pass, {tokens} token{plural}", self.score_at(runner, context, tokens), read)

    def section_decode(self) -> None:
        context = self.asked.context
        runner = self.runner("draft", 1, context + 128)
        short, long = (self.roll_at(runner, context, n) for n in (8, 72))
        read = self.weights("draft") + self.kv("draft", context)
        self.add("draft token inside a roll", (long - short) / 64, read)
        self.add("draft roll of 8", short, 8 * read)
        short, long = (self.roll_at(runner, context, n, temperature=0.6) for n in (8, 72))
        self.add("draft token inside a roll, sampled", (long - short) / 64, read)

    def section_round(self, batch: int = 1, k: int = 8, name: str | None = None) -> None:
        """Whole rounds as the Executor makes them: decode, score, verify, commit."""
        context, steps = self.asked.context, self.asked.steps
        capacity = context + max((k + 2) * (steps + 4), 128)
        target, draft = (self.runner(which, batch, capacity) for which in ("target", "draft"))
        draft.vocab_size = target.vocab_size = min(draft.vocab_size, target.vocab_size)
        for runner in (target, draft):
            for slot in range(batch):
                runner.release(slot)
        executor, tasks, stats = Executor(budget=8192), [], [Stats() for _ in range(batch)]
        for i in range(batch):
            prompt = torch.randint(
                1000 % target.vocab_size, [context], generator=torch.Generator().manual_seed(i)
            ).tolist()
            job = Job(prompt, Exact(), k, max_new_tokens=capacity - context - k)
            tasks.append(executor.submit(Decoder(job, target, ModelDrafter(draft), stats[i]).decode(), stats[i]))

        def step() -> None:
            """Until every sequence has made one more step."""
            for task in tasks:
                task.events.clear()
            while not all(task.events for task in tasks):
                executor.tick()

        for _ in range(4):  # prompts, and graphs
            step()
        before = [dict(s.seconds) for s in stats]
        passes = [s.target_passes for s in stats]
        # The host waits for each step's tokens anyway. Waiting for the device besides would hide what the next step
        # still has to wait for, and count it for no part.
        self.wait()
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            step()
            times.append((time.perf_counter() - began) * 1000)
        ms = statistics.median(times)
        each = sum(s.target_passes - p for s, p in zip(stats, passes, strict=True)) / batch / steps
        spent = {
            part: sum(s.seconds[part] - b[part] for s, b in zip(stats, before, strict=True)) / steps * 1000
            for part in before[0]
        }
        for task in tasks:
            executor.cancel(task)
        read = self.weights("target") + self.kv("target", context) * batch
        read += k * (self.weights("draft") + self.kv("draft", context) * batch)
        self.add(
            name or ("one K=8 step" if batch == 1 else f"batch {batch}, one K=8 step"),
            ms,
            read,
            parts_ms=spent,
            passes=each,
        )
        # Passes are only launched; whoever next asks for a number waits for them.
        print("    by the host's clock: " + ", ".join(f"{part} {value:.2f}" for part, value in spent.items() if value))
        if batch == 1 and name is None:
            # The device's part: scores one after the other without waiting, and tokens inside a long roll.
            for runner in (target, draft):
                runner.acquire()
            several = 10

            def scores() -> None:
                for _ in range(several):
                    target.cache.pretend(0, context)
                    target.score([Score(target, 0, list(range(1, k + 2)), k + 1)])

            short, long = (self.roll_at(draft, context, n) for n in (8, 72))
            busy = self.ms(scores) / several + k * (long - short) / 64
            self.add("host time of a step", ms - busy, device_ms=busy)

    def section_batch(self) -> None:
        self.section_round(batch=self.asked.batch)

    def section_long(self) -> None:
        self.passes_at("target", self.asked.long, "target pass", "long context")

    def section_llama(self) -> None:
        self.drop("target", "draft")
        self.passes_at("8B", self.asked.longest, "8B pass", "longest context")
        self.drop("8B")

    def passes_at(self, which: str, context: int, what: str, where: str) -> None:
        runner = self.runner(which, 1, context + 32)
        read = self.weights(which) + self.kv(which, context)
        for tokens in (1, 16):
            name = f"{what}, {tokens} token{'s' if tokens > 1 else ''}, {where}"
            self.add(name, self.score_at(runner, context, tokens), read, context=context)

    def section_start(self) -> None:
        """From weights on the card to a first token, with every graph that a K=8 step needs."""
        target, draft = (self.runner(which, 1, self.asked.context) for which in ("target", "draft"))
        self.wait()
        began = time.perf_counter()
        for runner in (target, draft):
            for n in (1, 9) if runner is target else (1,):
                runner.score([Score(runner, 0, [1] * n, n)])
        draft.decode([Decode(draft, 0, [3, 4], 8, Sampling(), 0)])
        self.wait()
        captured = sum(
            r.graph_runner.launcher.seconds
            for r in (target, draft)
            if r.graph_runner and isinstance(r.graph_runner.launcher, GraphCache)
        )
        self.add("start to first token", (time.perf_counter() - began) * 1000, capture_ms=captured * 1000)


def long_fp8(bench: Bench) -> None:
    """Long contexts with keys and values in fp8 beside bfloat16, in turns: the same weights, two caches."""
    wide, arms = bench.runner("target", 1, bench.asked.long + 32), dict[str, list[float]]()
    narrow = ModelRunner(wide.transformer, 1, wide.max_seq_len, fp8_cache=True)
    for _ in range(3):
        for name, runner in (("bfloat16", wide), ("fp8", narrow)):
            for tokens in (1, 16):
                ms = bench.score_at(runner, bench.asked.long, tokens)
                arms.setdefault(f"target pass, {tokens} tokens, long context, KV in {name}", []).append(ms)
    for name, times in arms.items():
        read = bench.kv("target", bench.asked.long) * (0.5 * (1 + 4 / wide.shape.head_dim) if "fp8" in name else 1)
        bench.add(name, statistics.median(times), bench.weights("target") + read, context=bench.asked.long)
