"""Section `bars` of bench/gpu.py: everything that is asked of a server under load, in one run, beside another engine's
figures: steps of batches, draft lengths that know the load, prompts as a server reads them, rules after a pass, the
sequences that memory holds, and how long others wait while a long prompt is read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from bench.gpu_load import PEAK, work_of
from bench.gpu_rules import NAMED, one_rule
from semspec.bench.shapes import SHAPES, planned
from semspec.draft import ModelDrafter, NoDrafter
from semspec.loop.decoder import Decoder, Job
from semspec.loop.draft_length import AdaptiveLength, DraftLengthPolicy
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.loop.work import Task
from semspec.model import memory_plan
from semspec.model.graph_memory import rule_bytes
from semspec.serve.warm_up import MAX_PASS_SECONDS, measure_budget
from semspec.types import Sampling
from semspec.verify import make

if TYPE_CHECKING:
    from bench.gpu_sections import Bench

VLLM = "vLLM 0.24 on the same machine, whose host slows it down"
LENGTH, SLOTS = 4096, 64  # of sequences that memory has to hold, and how many may run
H200 = 139 * 2**30  # bytes that a process finds free
WARM = 8  # tokens of each sequence for each step, before the clock runs: lengths of a batch take some to be learnt
ACCEPTED = 0.8  # of draft tokens, by a coin: models of noise never agree


@dataclass(frozen=True)
class Bar:
    what: str
    unit: str
    must: float
    aim: float | None = None
    limit: float | None = None
    before: float | None = None
    vllm: tuple[float, float] | None = None  # the least and the most that it took
    least: bool = False  # more is better

    def verdict(self, found: float) -> str:
        def reached(bar: float) -> bool:
            return found >= bar if self.least else found <= bar

        if not reached(self.must):
            return "MISSED"
        return "aim reached" if self.aim is not None and reached(self.aim) else "reached"


BARS = {  # one H200, 32B/1.5B in bfloat16, context 2,048
    "batch 1": Bar("batch 1, one K=8 step", "ms", 30.9, None, 21.4, 30.9, (111, 149)),
    "batch 8": Bar("batch 8, one K=8 step", "ms", 34, 31, 23.1, 35.9, (101, 116)),
    "batch 32": Bar("batch 32, one K=8 step", "ms", 48, 43, 38, 55.9, (110, 164)),
    "batch 64": Bar("batch 64, one K=8 step", "ms", 84, 75, 65, 99.1),
    "auto": Bar("batch 64, tokens per second of auto against K=8", "x", 1.0, 1.2, least=True),
    "prefill": Bar("8,192 tokens as a server reads them, of 790 TFLOP/s", "%", 66, 72, None, 57, least=True),
    "held": Bar("sequences of 4,096 tokens held at once, by the plan", "", 55, 60, 62, 15, least=True),
    **{name: Bar(f"{name}, 72 rows", "ms", 0.5, 0.25, 0.03) for name in NAMED},
    "stall": Bar("a prompt of 32k adds to others' rounds, at most", "s", MAX_PASS_SECONDS),
}


def bars(bench: Bench) -> None:
    found = dict[str, float]()
    for batch in (1, 8, 32, 64):
        bench.section_round(batch, name=f"bars: batch {batch}, one K=8 step")
        found[f"batch {batch}"] = bench.rows[-1]["ms"]
    vocab = min(bench.config(which).vocab_size for which in ("target", "draft"))
    for name in NAMED:
        one_rule(bench, make(name), 8, vocab)
        found[name] = bench.rows[-1]["ms"]
    found["prefill"], found["stall"] = prompts(bench)
    found["held"] = held(torch.cuda.mem_get_info()[1] if bench.device.type == "cuda" else H200)
    found["auto"] = automatic(bench)  # last: it takes longest
    print(f"{'bar':56} {'found':>9} {'must':>7} {'aim':>7} {'limit':>7} {'before':>7}  {VLLM}")
    for key, bar in BARS.items():
        verdict = bar.verdict(found[key]) if bench.asked.shape == "32B/1.5B" and bench.device.type == "cuda" else None
        bench.rows.append({"bar": key, **asdict(bar), "found": found[key], "verdict": verdict})
        figures = " ".join(f"{'' if n is None else f'{n:g}':>7}" for n in (bar.must, bar.aim, bar.limit, bar.before))
        other = "" if bar.vllm is None else f"{bar.vllm[0]:g}-{bar.vllm[1]:g}"
        print(f"{bar.what:56} {found[key]:9.2f} {figures}  {other} {verdict or ''}", flush=True)


def automatic(bench: Bench, batch: int = SLOTS) -> float:
    """Tokens per second with the lengths that `auto` picks, against drafts of 8. Both with the same chance that a draft
    token is accepted."""
    cost = bench.weights("draft") / bench.weights("target")
    shared = AdaptiveLength(max_tokens=8, draft_cost=cost)
    rates = {
        name: tokens_per_second(bench, batch, length)
        for name, length in {
            "K=8": lambda executor: 8,
            "auto": lambda executor: executor.lengths.within(shared),
        }.items()
    }
    for name, rate in rates.items():
        bench.add(f"bars: batch {batch}, {name}, a token of each", 1000 * batch / rate, tokens_per_second=rate)
    return rates["auto"] / rates["K=8"]


def tokens_per_second(bench: Bench, batch: int, length: Callable[[Executor], int | DraftLengthPolicy]) -> float:
    context, steps = bench.asked.context, bench.asked.steps
    capacity = context + (WARM + 3) * steps * 5 // 4 + 36  # some write more than others
    target, draft = (bench.runner(which, batch, capacity) for which in ("target", "draft"))
    draft.vocab_size = target.vocab_size = min(draft.vocab_size, target.vocab_size)
    for runner in (target, draft):
        for slot in range(batch):
            runner.release(slot)
    executor, rule = Executor(budget=8192), make(f"random:rate={ACCEPTED}")
    tasks = []
    for i in range(batch):
        text = some_text(context, target.vocab_size, i)
        sampling = Sampling(temperature=1.0, seed=i)  # greedy noise loops
        job = Job(text, rule, length(executor), capacity - context, sampling)
        decoder = Decoder(job, target, ModelDrafter(draft), Stats())
        tasks.append(executor.submit(decoder.decode(), decoder.stats))

    def written() -> int:
        return sum(task.stats.tokens for task in tasks)

    while not all(task.events for task in tasks):  # prompts
        executor.tick()

    def captured() -> float:
        return sum(task.stats.seconds["capture"] for task in tasks)

    began = time.perf_counter()
    while written() < WARM * batch * steps and time.perf_counter() - began < 60:  # graphs, and what lengths learn
        executor.tick()
    bench.wait()
    known, before, began = captured(), written(), time.perf_counter()
    while (
        time.perf_counter() - began < 60 and written() - before < 3 * batch * steps and not any(t.done for t in tasks)
    ):
        executor.tick()
    bench.wait()
    rate = (written() - before) / (time.perf_counter() - began)
    drafts = sum((task.stats.drafts for task in tasks), Counter[int]())
    told = f"captures {known:.1f} s before and {captured() - known:.1f} s within"
    print(f"    drafts {dict(sorted(drafts.items()))}, {told}", flush=True)
    for task in tasks:
        executor.cancel(task)
    return rate


def prompts(bench: Bench) -> tuple[float, float]:
    """The share of the card's arithmetic that 8,192 tokens reach, in the pieces a server reads them in; and the seconds
    by which a tick with a piece of 32k tokens is longer than one without."""
    short, long = (8192, 32768) if bench.device.type == "cuda" else (64, 256)
    target = bench.runner("target", 4, long + 128)
    for slot in range(4):
        target.release(slot)
    executor = Executor()
    measure_budget(SimpleNamespace(target=target, executor=executor), time.perf_counter)  # type: ignore[arg-type]

    def submit(prompt: int, tokens: int) -> Task:
        job = Job(some_text(prompt, target.vocab_size, prompt), make("none"), 0, tokens)
        decoder = Decoder(job, target, NoDrafter(), Stats())
        return executor.submit(decoder.decode(), decoder.stats)

    def ticks(until: Callable[[], bool]) -> list[float]:
        taken = []
        while not until():
            bench.wait()
            began = time.perf_counter()
            executor.tick()
            bench.wait()
            taken.append(time.perf_counter() - began)
        return taken

    seconds = []
    for _ in range(3):
        reader = submit(short, 1)
        seconds.append(sum(ticks(lambda: reader.done)))  # noqa: B023
    share = 100 * work_of(target.shape, short) / sorted(seconds)[1] / PEAK
    bench.add(f"bars: {short} tokens as a server reads them", 1000 * sorted(seconds)[1], share_of_peak=share)
    writer = submit(16, 120)
    alone = sorted(ticks(lambda: len(writer.events) >= 2))[0]
    reader = submit(long, 1)
    taken = ticks(lambda: reader.done or writer.done)
    executor.cancel(writer)
    executor.cancel(reader)
    bench.add(f"bars: longest tick while {long} tokens are read", 1000 * max(taken), alone_ms=1000 * alone)
    return share, max(taken) - alone


def held(memory: int) -> int:
    """Sequences of 4,096 tokens in the pool that a server takes at its start for 64 slots of 16k, by the plan."""
    device, found = torch.device("cuda"), memory_plan.available
    plans = [
        planned(which, config, SLOTS, 4 * LENGTH, device, torch.bfloat16)
        for which, config in zip(("target", "draft"), SHAPES["32B/1.5B"], strict=True)
    ]
    rules = rule_bytes(SHAPES["32B/1.5B"][0].vocab_size, device, SLOTS)
    plans[0] = replace(plans[0], graphs=plans[0].graphs + rules)
    memory_plan.available = lambda device: memory
    try:
        return memory_plan.fitted(plans)[0].held // LENGTH
    finally:
        memory_plan.available = found


def some_text(length: int, vocab: int, seed: int) -> list[int]:
    made = torch.randint(min(1000, vocab), [length], generator=torch.Generator().manual_seed(seed))
    return [int(token) for token in made]
