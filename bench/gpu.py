"""What passes cost on this GPU, against what its memory allows. Weights are noise; only shapes matter for time.

    python bench/gpu.py --check                      # is everything right? PASS or FAIL for each item
    python bench/gpu.py --only pass,roll,step        # a part of the table
    python bench/gpu.py --only transformers          # the same steps in transformers, by itself: both do not fit
    python bench/gpu.py --only sparse                # checks of drafts with blocks of the cache left out
    python bench/gpu.py --only experts,ffn           # the same with experts and with channels left out
    python bench/gpu.py --only breakdown             # kernels by name, and the gaps between them
    python bench/gpu.py --only arms,step,batch       # which choices are fastest, and steps made with those
    python bench/gpu.py --only tune                  # which tiles the attention kernel should have
    python bench/gpu.py --only products              # our product of few rows against cuBLAS, by size of weights

Prints one table, and as its last line JSON, which also goes to the file named by --out. The limit is the bytes that a
pass must read (weights, keys and values) over the bandwidth of a large copy, measured here. docs/gpu.md says more.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import PreTrainedConfig

from bench.gpu_arms import parse, told
from semspec import costs
from semspec.bench.replay import SHAPES, RandomWeights
from semspec.decode import Decoder, Job
from semspec.draft.model import ModelDrafter
from semspec.execute import Executor
from semspec.model import ModelRunner
from semspec.model.config import Shape
from semspec.model.fast import Fast
from semspec.model.graphs import Graphs
from semspec.model.kernels import MEASURED, Choices
from semspec.model.transformer import Transformer
from semspec.stats import Stats
from semspec.types import Roll, Sampling, Score
from semspec.verify.exact import Exact

SECTIONS = ("start", "pass", "roll", "step", "batch", "long", "llama")  # start first: later, kernels are compiled
ASIDE = (
    "sparse",
    "experts",
    "ffn",
    "arms",
    "long_arms",
    "breakdown",
    "tune",
    "products",
    "transformers",
)  # only if asked for
BARS = {  # milliseconds that must be reached on an H200 with 32B/1.5B
    "target pass, 1 token": 18.3, "target pass, 9 tokens": 18.3, "target pass, 17 tokens": 18.3,
    "draft token inside a roll": 1.60, "one K=8 step": 32.0, "batch 8, one K=8 step": 40.0,
    "target pass, 16 tokens, long context": 24.0, "8B pass, 16 tokens, longest context": 10.0,
    "host time of a step": 1.0, "start to first token": 30000.0, "30B-A3B check of 16 tokens, dense": 12.5,
}  # fmt: skip


class Bench:
    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.device = asked, torch.device(asked.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.rows: list[dict[str, Any]] = []
        self.bandwidth = costs.bandwidth(self.device)
        self.models: dict[str, Transformer] = {}
        self.choices: dict[str, Choices] = {}  # winners of arms, by model

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def ms(self, work: Callable[[], Any], repeats: int | None = None, warm: int = 3) -> float:
        """Median milliseconds from asking to having, host included."""
        for _ in range(warm):
            work()
        times = []
        for _ in range(repeats or self.asked.repeats):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            times.append((time.perf_counter() - began) * 1000)
        return statistics.median(times)

    def add(self, what: str, ms: float, read: float = 0.0, **more: Any) -> None:
        limit = read / self.bandwidth * 1000
        bar = BARS.get(what) if (self.asked.shape, self.device.type) == ("32B/1.5B", "cuda") else None
        self.rows.append({"what": what, "ms": ms, "limit_ms": limit, "bar_ms": bar, **more})
        self.show(self.rows[-1])

    @staticmethod
    def show(row: dict[str, Any]) -> None:
        limit, bar = row["limit_ms"], row["bar_ms"]
        ratio = f"{row['ms'] / limit:7.2f}x" if limit else " " * 8
        told = f"{bar:9.2f} {'reached' if row['ms'] <= bar else 'MISSED'}" if bar else ""
        print(f"{row['what']:40} {row['ms']:9.3f} {limit:9.3f} {ratio} {told}", flush=True)

    # -- models

    def config(self, which: str) -> PreTrainedConfig:
        others = {"8B": self.asked.long_shape, "mixture": self.asked.mixture_shape}
        return SHAPES[others.get(which, self.asked.shape)][which == "draft"]

    def runner(self, which: str, slots: int, capacity: int) -> ModelRunner:
        """A model with slots that are full of noise; every slot is taken."""
        if which not in self.models:
            self.models[which] = Transformer(Shape.of(self.config(which)), RandomWeights(), self.device, self.dtype)
        made = ModelRunner(self.models[which], slots, capacity)
        choices = self.choices.get(which, self.asked.choices)
        made.use(None if self.asked.plain else Fast.of(self.models[which], made.cache, choices))
        for layer in range(made.depth):
            made.cache.keys[layer].normal_()
            made.cache.values[layer].normal_()
        for _ in range(slots):
            made.acquire()
        return made

    def drop(self, *which: str) -> None:
        for name in which:
            self.models.pop(name, None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def weights(self, which: str) -> float:
        """Bytes of weights that a pass reads; of an embedding that is not the head it reads a few rows."""
        shape = Shape.of(self.config(which))
        return (shape.parameters - (0 if shape.tied else shape.vocab * shape.width)) * self.dtype.itemsize

    def kv(self, which: str, tokens: int) -> float:
        shape = Shape.of(self.config(which))
        return 2 * shape.depth * shape.kv_heads * shape.head_dim * tokens * self.dtype.itemsize

    # -- sections

    def score_at(self, runner: ModelRunner, context: int, tokens: int, slots: int = 1) -> float:
        def work() -> None:
            for slot in range(slots):
                runner.cache.lengths[slot] = context - tokens
            self.score_once(runner, tokens, slots)

        return self.ms(work)

    @staticmethod
    def score_once(runner: ModelRunner, tokens: int, slots: int = 1) -> None:
        runner.score([Score(runner, slot, [1 + i for i in range(tokens)], tokens) for slot in range(slots)])

    def roll_at(self, runner: ModelRunner, context: int, n: int, slots: int = 1) -> float:
        def work() -> None:
            for slot in range(slots):
                runner.cache.lengths[slot] = context
            runner.roll([Roll(runner, slot, [3, 4], n, Sampling(), 0) for slot in range(slots)])

        return self.ms(work)

    def section_pass(self) -> None:
        context = self.asked.context
        runner = self.runner("target", 1, context + 32)
        for tokens in (1, 2, 5, 9, 17, 33):
            read = self.weights("target") + self.kv("target", context)
            plural = "s" if tokens > 1 else ""
            self.add(f"target pass, {tokens} token{plural}", self.score_at(runner, context, tokens), read)

    def section_roll(self) -> None:
        context = self.asked.context
        runner = self.runner("draft", 1, context + 128)
        short, long = (self.roll_at(runner, context, n) for n in (8, 72))
        read = self.weights("draft") + self.kv("draft", context)
        self.add("draft token inside a roll", (long - short) / 64, read)
        self.add("draft roll of 8", short, 8 * read)

    def section_step(self, batch: int = 1) -> None:
        """Whole steps as the Executor makes them: roll, score, judge, commit."""
        context, k, steps = self.asked.context, 8, self.asked.steps
        capacity = context + max((k + 2) * (steps + 4), 128)
        target, draft = (self.runner(which, batch, capacity) for which in ("target", "draft"))
        draft.vocab = target.vocab = min(draft.vocab, target.vocab)
        for runner in (target, draft):
            for slot in range(batch):
                runner.release(slot)
        executor, tasks, stats = Executor(budget=8192), [], [Stats() for _ in range(batch)]
        for i in range(batch):
            prompt = torch.randint(1000 % target.vocab, [context], generator=torch.Generator().manual_seed(i)).tolist()
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
            "one K=8 step" if batch == 1 else f"batch {batch}, one K=8 step", ms, read, parts_ms=spent, passes=each
        )
        # Passes are only launched; whoever next asks for a number waits for them.
        print("    by the host's clock: " + ", ".join(f"{part} {value:.2f}" for part, value in spent.items() if value))
        if batch == 1:
            # The device's part: scores one after the other without waiting, and tokens inside a long roll.
            for runner in (target, draft):
                runner.acquire()
            several = 10

            def scores() -> None:
                for _ in range(several):
                    target.cache.lengths[0] = context
                    target.score([Score(target, 0, list(range(1, k + 2)), k + 1)])

            short, long = (self.roll_at(draft, context, n) for n in (8, 72))
            busy = self.ms(scores) / several + k * (long - short) / 64
            self.add("host time of a step", ms - busy, device_ms=busy)

    def section_batch(self) -> None:
        self.section_step(batch=self.asked.batch)

    def section_long(self) -> None:
        context = self.asked.long
        runner = self.runner("target", 1, context + 32)
        for tokens in (1, 16):
            read = self.weights("target") + self.kv("target", context)
            name = f"target pass, {tokens} token{'s' if tokens > 1 else ''}, long context"
            self.add(name, self.score_at(runner, context, tokens), read, context=context)

    def section_llama(self) -> None:
        self.drop("target", "draft")
        context = self.asked.longest
        runner = self.runner("8B", 1, context + 32)
        for tokens in (1, 16):
            read = self.weights("8B") + self.kv("8B", context)
            name = f"8B pass, {tokens} token{'s' if tokens > 1 else ''}, longest context"
            self.add(name, self.score_at(runner, context, tokens), read, context=context)
        self.drop("8B")

    def section_start(self) -> None:
        """From weights on the card to a first token, with every graph that a K=8 step needs."""
        target, draft = (self.runner(which, 1, self.asked.context) for which in ("target", "draft"))
        self.wait()
        began = time.perf_counter()
        for runner in (target, draft):
            for n in (1, 9) if runner is target else (1,):
                runner.score([Score(runner, 0, [1] * n, n)])
        draft.roll([Roll(draft, 0, [3, 4], 8, Sampling(), 0)])
        self.wait()
        captured = sum(r.fast.runs.seconds for r in (target, draft) if r.fast and isinstance(r.fast.runs, Graphs))
        self.add("start to first token", (time.perf_counter() - began) * 1000, capture_ms=captured * 1000)

    def section_arms(self) -> None:
        from bench.gpu_arms import all_arms

        all_arms(self)

    def section_long_arms(self) -> None:
        from bench.gpu_arms import long_arms

        long_arms(self)

    def section_breakdown(self) -> None:
        from bench.gpu_breakdown import break_down

        break_down(self)

    def section_tune(self) -> None:
        from bench.gpu_tune import tune_attention

        tune_attention(self)

    def section_products(self) -> None:
        from bench.gpu_tune import tune_products

        tune_products(self)

    def section_sparse(self) -> None:
        from bench.gpu_sparse import sparse

        self.drop("target", "draft")
        sparse(self)
        self.drop("8B")

    def section_experts(self) -> None:
        from bench.gpu_grouped import experts

        self.drop("target", "draft")
        experts(self)
        self.drop("mixture")

    def section_ffn(self) -> None:
        from bench.gpu_grouped import ffn

        ffn(self)

    def section_transformers(self) -> None:
        from bench.gpu_transformers import time_transformers

        time_transformers(self)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="verify kernels and the runner, and time nothing")
    parser.add_argument(
        "--part", default="0/1", help="i/n: every n-th check from the i-th, to run n processes at a time"
    )
    parser.add_argument("--match", default="", help="only checks, or cases of tune, with this in their names")
    parser.add_argument(
        "--only",
        default=",".join(SECTIONS),
        help="sections: " + ", ".join((*SECTIONS, *ASIDE)),
    )
    parser.add_argument("--shape", default="32B/1.5B", choices=SHAPES)
    parser.add_argument("--long-shape", default="8B/1B", choices=SHAPES)
    parser.add_argument("--mixture-shape", default="30B-A3B/0.6B", choices=SHAPES)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--long", type=int, default=65536)
    parser.add_argument("--longest", type=int, default=131072)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=170.0, help="begin no section after so much time")
    parser.add_argument("--plain", action="store_true", help="one operation at a time, without graphs and kernels")
    parser.add_argument("--choices", type=parse, default=MEASURED, help="as in gate,turn,early,ahead or small=0")
    parser.add_argument("--batch", type=int, default=8, help="sequences of the section batch")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu runs the script on a CPU, where its figures mean nothing")
    report: dict[str, Any] = {
        "date": date.today().isoformat(), "torch": torch.__version__, "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if asked.device == "cuda" else "CPU", "shape": asked.shape,
        "context": asked.context, "plain": asked.plain, "choices": told(asked.choices),
    }  # fmt: skip
    began = time.perf_counter()
    failed = False
    if asked.check:
        report["checks"] = run_checks(torch.device(asked.device), asked.part, asked.match)
        failed = any(result != "PASS" for result in report["checks"].values())
    else:
        with torch.inference_mode():
            bench = Bench(asked)
            report["bandwidth_GBps"] = bench.bandwidth / 1e9
            print(f"{report['device']}, copies at {bench.bandwidth / 1e12:.2f} TB/s, {asked.shape} at {asked.context}")
            print(f"{'what':40} {'ms':>9} {'limit':>9} {'ratio':>8} {'must':>9}")
            for section in asked.only.split(","):
                if time.perf_counter() - began > asked.seconds:
                    print(f"{section} left out: {asked.seconds:.0f} s are over")
                    continue
                started = time.perf_counter()
                getattr(bench, f"section_{section}")()
                print(f"    ({section} took {time.perf_counter() - started:.0f} s)", flush=True)
                report |= {"rows": bench.rows, "winners": {which: told(c) for which, c in bench.choices.items()}}
                write(report, asked.out)  # whatever becomes of the sections that follow
    report["seconds"] = time.perf_counter() - began
    if asked.device == "cuda":
        report["peak_GB"] = torch.cuda.max_memory_allocated() / 1e9
    write(report, asked.out)
    print(json.dumps(report))
    sys.exit(failed)


def write(report: dict[str, Any], out: Path | None) -> None:
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report) + "\n")


def run_checks(device: torch.device, part: str, match: str) -> dict[str, str]:
    from bench.gpu_checks_grouped import CHECKS

    first, parts = (int(number) for number in part.split("/"))
    results = {}
    for name, function in [(n, f) for n, f in CHECKS.items() if match in n][first::parts]:
        began = time.perf_counter()
        try:
            function(device)
            results[name] = "PASS"
        except Exception as failure:  # whatever it is, the other checks are worth knowing
            results[name] = f"FAIL: {type(failure).__name__}: {str(failure)[:300]}"
        print(f"{results[name][:4]} {name} ({time.perf_counter() - began:.1f} s){results[name][4:]}", flush=True)
    return results


if __name__ == "__main__":
    main()
