"""Section `rules` of bench/gpu.py: what rules cost after a pass, from logits to verdicts on the host.

Four ways in turns: with the kernels of semspec/sampling or with what they replace (sorting, and some forty operations a
draw), each in graphs and one operation at a time. Logits are like a language model's: few likely tokens, a long tail.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.gpu_breakdown import table, trace
from semspec.loop.rule_graphs import PATIENCE, RuleGraphs
from semspec.sampling import noise
from semspec.sampling.draw import SamplingRows, choose, process
from semspec.types import Draft, Sampling, ScoreOutput, VerifyRequest
from semspec.verify import REGISTRY, Rule, make
from semspec.verify.decide import decide

if TYPE_CHECKING:
    from bench.gpu_sections import Bench

K = 8
COOL = Sampling(0.6, top_p=0.95)
FILTERS = {"top-p 0.95": COOL, "top-k 20": Sampling(0.6, top_k=20), "no filter": Sampling(0.6)}
NAMED = ("sampling", "typical", "fly")  # the rules that have a bar, and are looked at closely
BARS = {f"{name}, 8 sequences, top-p 0.95": 0.5 for name in NAMED}  # milliseconds, on an H200
WAYS = ("before", "kernels", "graphs", "both")


def token_rules() -> list[Rule]:
    """Without those that first have to be bound to a pair."""
    names = [name for name in sorted(REGISTRY) if REGISTRY[name].unit == "token" and name != "reflective"]
    return [make(name) for name in names]


def logits(rows: int, vocab: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    random = torch.Generator(device).manual_seed(seed)
    made = torch.randn(rows, vocab, device=device, generator=random) * 2.5
    likely = torch.randint(vocab, (rows, 24), device=device, generator=random)
    raised = 8 + 10 * torch.rand(rows, 24, device=device, generator=random)
    return made.scatter_add_(1, likely, raised).to(dtype)


def requests(
    rule: Rule, sequences: int, vocab: int, sampling: Sampling, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> list[VerifyRequest]:
    """Drafts of K tokens, each drawn from the target's own logits with some noise on them."""
    made = []
    for i in range(sequences):
        own = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed + i)
        target = logits(K + 1, vocab, device, dtype, seed + i)
        q = target[:K].float() + torch.randn(K, vocab, device=device) * 0.5
        kept = q if own.greedy else process(q, SamplingRows.of([own], [K], device))
        tokens = choose(kept, torch.arange(K, device=device) + 1000 * seed).tolist()
        draft = Draft(tokens, kept if rule.keeps_draft_logits else None)
        made.append(VerifyRequest(rule, draft, ScoreOutput(target), own, 100 + seed, seed))
    return made


@contextmanager
def without_kernels(off: bool = True) -> Iterator[None]:
    found = noise.kernels_for
    if off:
        noise.kernels_for = lambda tensor: None
    try:
        yield
    finally:
        noise.kernels_for = found


def rules(bench: Bench) -> None:
    vocab = min(bench.config(which).vocab_size for which in ("target", "draft"))
    parts(bench, vocab)
    for sequences in (8, 1):
        for rule in token_rules():
            one_rule(bench, rule, sequences, vocab)


def parts(bench: Bench, vocab: int) -> None:
    """Filtering and drawing by themselves, in a graph."""
    for dtype in (bench.dtype, torch.float32):
        rows = logits(72, vocab, bench.device, dtype)
        for name, options in FILTERS.items():
            work = partial(process, rows, SamplingRows.of([options], [72], bench.device))
            for way in (False, True):
                with without_kernels(not way):
                    ms = captured_ms(bench, work)
                what = f"72 rows of {str(dtype)[6:]}, {name}, {'bisected' if way else 'sorted'}"
                bench.add(what, ms, rows.numel() * (rows.element_size() + 4))
    made, keys = rows.float(), torch.arange(72, device=bench.device)
    for way in (False, True):
        with without_kernels(not way):
            ms = captured_ms(bench, partial(choose, made, keys))
        bench.add(f"72 draws, {'in a kernel' if way else 'one by one'}", ms, made.numel() * 4)


def captured_ms(bench: Bench, work: Callable[[], Any]) -> float:
    """Of one replay among ten, so that launching them costs nothing."""
    if bench.device.type != "cuda":
        return bench.ms(work)
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return bench.ms(lambda: [graph.replay() for _ in range(10)]) / 10


def one_rule(bench: Bench, rule: Rule, sequences: int, vocab: int) -> None:
    asked = [requests(rule, sequences, vocab, COOL, bench.device, bench.dtype, seed) for seed in (1, 2, 3)]
    arms = {way: RuleGraphs() if way in ("graphs", "both") else RuleGraphs(lambda device: None) for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    decided: dict[str, list[tuple[int, int]]] = {way: [] for way in WAYS}
    for turn in range(PATIENCE + 2 + bench.asked.repeats):
        for way, rules in arms.items():
            with without_kernels(way in ("before", "graphs")):
                bench.wait()
                began = time.perf_counter()
                verdicts = rules.verify(rule, asked[turn % 3])
                times[way].append((time.perf_counter() - began) * 1000)
            decided[way] += [(v.accepted, v.next) for v in verdicts]
    differ = {way: sum(a != b for a, b in zip(decided[way], decided["before"], strict=True)) for way in WAYS}
    ms = {way: statistics.median(taken[PATIENCE + 2 :]) for way, taken in times.items()}
    rows = sequences * (K + 1)
    read = rows * vocab * bench.dtype.itemsize + (rows - sequences) * vocab * 4 * rule.keeps_draft_logits
    plural = "s" if sequences > 1 else ""
    own = arms["both"]
    launcher = own._launcher(asked[0][0].rows.logits.device)
    one = partial(own._decide, launcher, rule, asked[0]) if launcher else partial(decide, rule, asked[0])
    device = bench.ms(lambda: [one() for _ in range(10)]) / 10
    more = {"before_ms": ms["before"], "kernels_ms": ms["kernels"], "graphs_ms": ms["graphs"], "device_ms": device}
    bench.add(f"{rule.name}, {sequences} sequence{plural}, top-p 0.95", ms["both"], read, **more, differ=differ)
    print("    " + ", ".join(f"{name} {value:.2f}" for name, value in more.items()) + f", differ {differ}")
    if rule.name in NAMED and sequences == 8 and bench.device.type == "cuda":
        found = table(trace(lambda: own.verify(rule, asked[0]), times=3), times=3)
        bench.rows[-1]["breakdown"] = found
        print(f"    profiled {found['whole_us']:.0f} us: kernels {found['busy_us']:.0f}, gaps {found['gap_us']:.0f}")
        for kernel, row in list(found["kernels"].items())[:16]:
            print(f"    {row['count']:6.1f} x {row['us'] / row['count']:8.2f} us, gaps {row['gap_us']:6.1f}  {kernel}")
