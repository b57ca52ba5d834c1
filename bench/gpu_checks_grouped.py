"""What must hold on a GPU of kernels that read some experts or channels, or select blocks; others: gpu_checks.py."""

from __future__ import annotations

from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_checks import MIXTURES, course, courses, runner
from bench.gpu_checks_kernels import CHECKS, HALF, TOLERANCE, check, error, kernels, near
from semspec.model.kernels import DEFAULT_FLAGS, KernelFlags, reference
from semspec.sparse import AttentionPlan, ExpertsPlan, FfnPlan, SparsePlan, apply
from semspec.sparse.attention import SCORES, SPREADS, block_scores, select_blocks

__all__ = ["CHECKS"]


def types(device: torch.device) -> tuple[torch.dtype, ...]:
    return (torch.float32, *HALF) if device.type == "cuda" else (torch.float32,)


def whole(device: torch.device, *numbers: int) -> Tensor:
    return torch.tensor(numbers, device=device)


@check
def experts_of_a_pass(device: torch.device) -> None:
    """Whole and with experts left out, up to more tokens than a tile has; the same bits every time. What nobody chose
    is not a number."""
    large = device.type == "cuda"
    number, chosen, width, hidden = (128, 8, 2048, 768) if large else (16, 4, 64, 24)
    for dtype in types(device):
        gate_up = torch.randn(number, 2 * hidden, width, device=device, dtype=dtype) * width**-0.5
        down = torch.randn(number, width, hidden, device=device, dtype=dtype) * hidden**-0.5
        for rows, batch, parts in ((1, 1, 0), (16, 1, 4), (17, 1, 0), (64, 4, 0), (180, 2, 0)):
            x = torch.randn(rows, width, device=device, dtype=dtype)
            logits = torch.randn(*([parts] if parts else []), rows, number, device=device)
            if rows == 180:
                logits[..., 3] += 9.0  # more tokens of one expert than fit into a tile
            counts = whole(device, *(max(rows // batch - b, 1) for b in range(batch)))
            marks = whole(device, *(1 - b % 2 for b in range(batch)))
            for betas in (None, torch.linspace(0.05, 1.5, chosen - 1, device=device)):
                skipping = None if betas is None else (betas, 3, marks)
                rest = ("silu", chosen, True, counts)
                wide = [t.double() for t in (x, logits, gate_up, down)]
                exact = reference.fused_moe(*wide, *rest, None if betas is None else (betas.double(), 3, marks))
                read = gate_up.clone()
                if rows == 1:
                    score = logits.flatten()
                    read[score < score.topk(chosen).values[-1]] = float("nan")
                ours, again = (kernels(device).fused_moe(x, logits, read, down, *rest, skipping) for _ in range(2))
                what = f"{rows} rows, {dtype}, {'all' if betas is None else 'some'}"
                near(ours, exact, 2 * TOLERANCE[dtype], what)
                assert torch.equal(ours, again), f"{what}: not the same twice"


@check
def some_channels_of_a_network(device: torch.device) -> None:
    width, number = (5120, 27648) if device.type == "cuda" else (48, 300)
    for dtype in types(device):
        up, down = (torch.randn(number, width, device=device, dtype=dtype) * width**-0.5 for _ in range(2))
        biases = [torch.randn(n, device=device, dtype=dtype) for n in (number, width)]
        for rows, batch, threshold in ((1, 1, 0.5), (16, 1, 2.0), (17, 1, 1e9), (18, 2, 2.5), (100, 4, 1e-30)):
            x = torch.randn(rows, width, device=device, dtype=dtype)
            gate = torch.randn(rows, number, device=device, dtype=dtype)
            # What is nearly at the threshold may round to either side of it.
            gate[(F.silu(gate.double()).abs() - threshold).abs() < 0.02 * threshold] = 0.0
            counts = whole(device, *(rows // batch - b for b in range(batch)))
            for marks in (whole(device, *[1] * batch), whole(device, *(b % 2 for b in range(batch)))):
                wide = [t.double() for t in (x, gate, up, biases[0], down, biases[1])]
                exact = reference.sparse_mlp(*wide, "silu", threshold, counts, marks)[0]
                thin_up, thin_down = up, down
                if bool(marks.all()) and device.type == "cuda":  # the reference reads everything
                    inside = (torch.arange(rows // batch, device=device) < counts[:, None]).flatten()
                    unread = ~((F.silu(gate.double()).abs() >= threshold) & inside[:, None]).any(0)
                    thin_up, thin_down = up.clone(), down.clone()
                    thin_up[unread] = thin_down[unread] = float("nan")
                ours = kernels(device).sparse_mlp(
                    x, gate, thin_up, biases[0], thin_down, biases[1], "silu", threshold, counts, marks
                )
                near(ours.sum(0), exact, 2 * TOLERANCE[dtype], f"{rows} rows, {dtype}, at {threshold}")


@check
def blocks_are_chosen_as_by_sorting(device: torch.device) -> None:
    """The same blocks, but for those whose scores are as good as equal to the last one's that was chosen; the same
    every time."""
    own = kernels(device).choose_blocks
    if own is None:
        return
    for dtype, capacity, span, heads, queries in (
        (torch.bfloat16, 131_104, 64, 8, 16), (torch.bfloat16, 131_104, 16, 8, 9), (torch.float16, 9_000, 64, 4, 17),
        (torch.float32, 4_000, 16, 2, 3),
    ):  # fmt: skip
        size, most = 128, capacity // span
        q = torch.randn(2, queries, 4 * heads, size, device=device, dtype=dtype)
        means = torch.randn(3, heads, most, size, device=device, dtype=dtype) * 0.3
        slots, starts, counts = (
            torch.tensor(n, device=device) for n in ([2, 0], [capacity - 40, capacity // 3], [queries, 2])
        )
        full = starts // span
        spreads = torch.rand(3, heads, most, size, device=device, dtype=dtype)
        for score, spread in product(SCORES, SPREADS):
            plan = AttentionPlan(span, 1024, 0.1, score=score, spread=spread)
            pairs = torch.tensor([plan.pairs(n, heads) for n in starts.tolist()], device=device)
            rule = (span, (plan.sinks, plan.recent), size**-0.5, score != "first", spread == "heads")
            wide = spreads if score == "reach" else None
            marks = torch.zeros(2, heads, most, dtype=torch.int8, device=device)
            lists, numbers = own(q, means, slots, starts, counts, pairs, *rule, variances=wide)
            again = own(q, means, slots, starts, counts, pairs, *rule, marks=marks, variances=wide)
            known = (None if wide is None else wide[slots].double(),)
            scores = block_scores(q.double(), means[slots].double(), full, plan, size**-0.5, counts, *known)
            exact = select_blocks(scores, full, pairs, plan)
            ours = torch.zeros_like(exact)
            for b in range(2):
                for h in range(heads):
                    here = lists[b, h, : numbers[b, h]].long()
                    assert torch.equal(here, again[0][b, h, : again[1][b, h]].long()), "not the same twice"
                    assert bool((here[1:] > here[:-1]).all()), "not in rising order"
                    ours[b, h, here] = True
                    assert torch.equal(marks[b, h] != 0, ours[b, h]), "not what is listed is marked"
                groups = [slice(None)] if spread == "pairs" else [slice(h, h + 1) for h in range(heads)]
                for group in groups:
                    mine, theirs, values = ours[b, group], exact[b, group], scores[b, group]
                    assert mine.sum() == theirs.sum(), f"{int(mine.sum())} pairs instead of {int(theirs.sum())}"
                    other = values[mine != theirs]
                    spread_out = float((other.max() - other.min()) / values.std()) if len(other) else 0.0
                    # What a query reaches is made of its squares, rounded to its type.
                    most_apart = 2e-2 if score == "reach" and dtype in HALF else 1e-4
                    assert spread_out < most_apart, (
                        f"{dtype}, {score}, {spread}: {len(other)} others, {spread_out:.1e} apart"
                    )


def mixture_check(family: str, device: torch.device, choices: KernelFlags) -> None:
    """As `family_check`, but a token whose experts are nearly even goes another way if it is rounded another way, which
    moves a row far in either way of making a pass; so in bfloat16 only all rows together are compared."""
    ours, rough, exact, half = courses(family, device, choices)
    mine, theirs = (error(torch.cat(rows), torch.cat(exact)) for rows in (ours, rough))
    assert mine < 2 * theirs, f"{half}: off by {mine:.1e} over all passes, the plain way by {theirs:.1e}"


for name in MIXTURES:
    CHECKS[f"logits of {name}"] = lambda device, family=name: mixture_check(family, device, DEFAULT_FLAGS)


@check
def checks_without_experts_or_channels_are_the_same_everywhere(device: torch.device) -> None:
    attention = AttentionPlan(8, 16, 0.2)
    for family, parts in (
        ("qwen3-moe", {"experts": lambda depth: ExpertsPlan(torch.full((depth, 1), 0.6), 1)}),
        ("mixtral", {"experts": lambda depth: ExpertsPlan(torch.full((depth, 1), 0.6), 1)}),
        ("llama-bias", {"ffn": lambda depth: FfnPlan(torch.full((depth,), 0.4))}),
        ("gemma3", {"ffn": lambda depth: FfnPlan(torch.full((depth,), 0.4))}),
    ):
        for attended in (None, attention):
            said = []
            for where, plain in ((torch.device("cpu"), True), (device, True), (device, False)):
                one = runner(family, where, torch.float32, plain)
                apply(SparsePlan(attention=attended, **{k: make(one.num_layers) for k, make in parts.items()}), one)
                said.append(course(one))
            for i, (exact, *others) in enumerate(zip(*said, strict=True)):
                for ours in others:
                    near(ours, exact, 2e-3, f"{family}, pass {i // 3}")
