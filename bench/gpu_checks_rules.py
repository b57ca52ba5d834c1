"""What must hold on a GPU of filters, draws and rules in graphs. The last file of checks: its CHECKS are all."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

from bench.gpu_checks_int4 import CHECKS
from bench.gpu_checks_kernels import HALF, check
from bench.gpu_rules import logits, requests, token_rules, without_kernels
from semspec.loop.rule_graphs import PATIENCE, RuleGraphs
from semspec.model.graph_memory import rule_bytes
from semspec.sampling.draw import SamplingRows, choose, process
from semspec.sampling.noise import exponential
from semspec.types import Sampling
from semspec.verify import Rule, make

__all__ = ["CHECKS"]

OPTIONS = [
    Sampling(0.6, top_p=0.95), Sampling(1.0, top_k=20), Sampling(0.6, top_k=20, top_p=0.8), Sampling(1.0, min_p=0.05),
    Sampling(), Sampling(1.0, top_k=1), Sampling(2.0, top_p=0.5, top_k=5000), Sampling(1e-6, top_p=0.9),
]  # fmt: skip


def odd(rows: Tensor) -> Tensor:
    """The same with ties on every threshold, and one row with a single token."""
    made = torch.cat([rows, rows.float().round().to(rows.dtype), torch.full_like(rows[:1], float("-inf"))])
    made[-1, rows.shape[1] // 2] = 3.0
    return made


@check
def filters_keep_what_sorting_keeps(device: torch.device) -> None:
    size = 151936 if device.type == "cuda" else 300
    for dtype in (torch.float32, *HALF):
        own = odd(logits(2, size, device, dtype))
        for options in (*([o] * len(own) for o in OPTIONS), (OPTIONS * 2)[: len(own)]):
            rows = SamplingRows.of(options, [1] * len(own), device)
            ours = process(own, rows)
            with without_kernels():
                plain = process(own.double().float(), rows)
            for b, o in enumerate(options):
                kept, wanted = (one[b] > float("-inf") for one in (ours, plain))
                if o.top_p < 1 and not o.greedy:  # mass that rounds to top-p itself: a token more or fewer
                    off = plain[b].softmax(0) + ours[b].softmax(0)
                    assert float(off[kept != wanted].sum()) < 1e-3 and int((kept != wanted).sum()) <= 64, f"{dtype} {o}"
                else:
                    assert torch.equal(kept, wanted), f"{dtype} {o}: {int(kept.sum())} of {int(wanted.sum())} kept"
                both = kept & wanted
                torch.testing.assert_close(ours[b][both], plain[b][both], rtol=1e-4, atol=1e-4)


@check
def draws_by_key_are_those_of_the_reference(device: torch.device) -> None:
    size = 151936 if device.type == "cuda" else 300
    weights = process(logits(6, size, device, torch.bfloat16), SamplingRows.of([Sampling(0.6)], [6], device))
    picked, keys = torch.randint(6, (40,), device=device), torch.randint(2**62, (40,), device=device)
    drawn = choose(weights[picked], keys)
    scores = weights[picked].double() - exponential(keys, size).double().log()
    behind = scores.amax(-1) - scores.gather(1, drawn[:, None])[:, 0]
    assert float(behind.max()) < 1e-4, f"{float(behind.max()):.1e} behind the winner"
    weights[2, 5] = float("nan")
    assert torch.equal(choose(weights[picked], keys) == -1, picked == 2), "NaN is not found out"


@check
def rules_in_graphs_decide_as_one_operation_at_a_time(device: torch.device) -> None:
    faults = []
    for sampling in (Sampling(0.6, top_p=0.95), Sampling()):
        for rule, sequences in [*((rule, 3) for rule in token_rules()), (make("sampling"), 64), (make("fly"), 64)]:
            try:
                same_decisions(rule, sequences, sampling, device)
            except AssertionError as error:
                faults.append(f"{rule.name} at {sampling.temperature}: {error}")
    assert not faults, "; ".join(faults)


def same_decisions(rule: Rule, sequences: int, sampling: Sampling, device: torch.device) -> None:
    """Afresh, then with states; the same as with sorted logits, but for near ties."""
    vocab, dtype = (151936, torch.bfloat16) if device.type == "cuda" else (300, torch.float32)
    graphs, plain = RuleGraphs(), RuleGraphs(lambda where: None)
    states: list[Tensor | None] = [None] * sequences
    as_sorted, turns = 0, PATIENCE + 3
    for turn in range(2 * turns):
        asked = requests(rule, sequences, vocab, sampling, device, dtype, seed=7 * turn)
        for request, state in zip(asked, states, strict=True):
            request.state = state
        ours, theirs = graphs.verify(rule, asked), plain.verify(rule, asked)
        with without_kernels():
            before = plain.verify(rule, asked)
        for one, other, old in zip(ours, theirs, before, strict=True):
            decided = [(v.accepted, v.next, v.relaxed) for v in (one, other, old)]
            assert decided[0] == decided[1], f"{decided[0]} in a graph, {decided[1]} without"
            if one.state is not None and other.state is not None:
                assert torch.allclose(one.state.double(), other.state.double()), "another state"
            as_sorted += decided[0] == decided[2]
        states = [verdict.state for verdict in ours] if turn >= turns else states
    assert not any(shape.plain for shape in graphs._shapes.values()), "it was not captured"
    made = 2 * turns * sequences
    assert as_sorted >= made - 2 - made // 100, f"{as_sorted} of {made} as by sorting"


@check
def graphs_of_rules_take_no_more_memory_than_planned(device: torch.device) -> None:
    if device.type == "cpu":
        return
    vocab, rules = 151936, [make(name) for name in ("sampling", "fly", "adaptive", "block")]
    torch.cuda.empty_cache()
    graphs, before, taken = RuleGraphs(), torch.cuda.memory_reserved(), 0
    for sequences in (1, 4, 8, 16, 64):
        for rule in rules:
            asked = requests(rule, sequences, vocab, Sampling(0.6, top_p=0.95), device, torch.bfloat16)
            for _ in range(PATIENCE + 2):
                graphs.verify(rule, asked)
            assert not any(shape.plain for shape in graphs._shapes.values()), f"{rule.name} was not captured"
            del asked
            torch.cuda.empty_cache()
            taken = max(taken, torch.cuda.memory_reserved() - before)
    planned = rule_bytes(vocab, device, 16)
    assert taken <= planned, f"{taken / 1e9:.2f} GB taken, {planned / 1e9:.2f} GB planned"
    print(f"    {taken / 1e9:.2f} GB taken of {planned / 1e9:.2f} GB planned")
    del graphs
    gc.collect()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_reserved() - before
    assert left < 5e7, f"{left / 1e6:.0f} MB are not given back"
