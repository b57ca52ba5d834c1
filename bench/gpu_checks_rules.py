"""What must hold on a GPU of filters, draws and rules in graphs. The last file of checks: its CHECKS are all."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.gpu_checks_kernels import HALF, check
from bench.gpu_checks_quantised import CHECKS
from bench.gpu_rules import logits, requests, token_rules, without_kernels
from semspec.loop.rule_graphs import PATIENCE, RuleGraphs
from semspec.sampling.draw import SamplingRows, choose, process
from semspec.sampling.noise import exponential
from semspec.types import Sampling

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
    drawn = choose(weights, keys, picked)
    scores = weights[picked].double() - exponential(keys, size).double().log()
    behind = scores.amax(-1) - scores.gather(1, drawn[:, None])[:, 0]
    assert float(behind.max()) < 1e-4, f"{float(behind.max()):.1e} behind the winner"
    weights[2, 5] = float("nan")
    assert torch.equal(choose(weights, keys, picked) == -1, picked == 2), "NaN is not found out"


@check
def rules_in_graphs_decide_as_one_operation_at_a_time(device: torch.device) -> None:
    vocab, dtype = (151936, torch.bfloat16) if device.type == "cuda" else (300, torch.float32)
    for sampling in (Sampling(0.6, top_p=0.95), Sampling()):
        for rule in token_rules():
            graphs, plain = RuleGraphs(), RuleGraphs(lambda where: None)
            states: list[Tensor | None] = [None] * 3
            sorted_as_well, turns = 0, PATIENCE + 4
            for turn in range(2 * turns):
                asked = requests(rule, 3, vocab, sampling, device, dtype, seed=7 * turn)
                for request, state in zip(asked, states, strict=True):
                    request.state = state
                ours, theirs = graphs.verify(rule, asked), plain.verify(rule, asked)
                for one, other in zip(ours, theirs, strict=True):
                    assert (one.accepted, one.next, one.relaxed) == (other.accepted, other.next, other.relaxed), (
                        rule.name
                    )
                    assert one.state is None or torch.allclose(one.state.double(), other.state.double()), rule.name
                with without_kernels():
                    before = plain.verify(rule, asked)
                pairs = zip(ours, before, strict=True)
                sorted_as_well += sum((a.accepted, a.next) == (b.accepted, b.next) for a, b in pairs)
                states = [verdict.state for verdict in ours] if turn >= turns else states
            assert not graphs._plain, f"{rule.name} was not captured"
            assert sorted_as_well >= 6 * turns - 2, f"{rule.name}: {sorted_as_well} of {6 * turns} as by sorting"
