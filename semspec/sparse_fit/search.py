"""A joint budget: which blocks, channels and experts to skip together for a given loss, at the least cost.

The three are not independent: what two parts lose together is not the sum of what each loses alone, so choosing each by
itself either breaks the limit or wastes it. Candidates are all combinations of levels of the three parts, cheapest
first; the loss of each is measured with all its parts at work, and the first one within the limit is the cheapest there
is. A combination that skips at least as much everywhere as one that has failed is taken to fail too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from semspec.errors import BadRequest
from semspec.pair import Pair
from semspec.probe.identity import fingerprint
from semspec.sparse.applied import apply
from semspec.sparse.plan import SparsePlan
from semspec.sparse_fit.calibrate import CalibrationConfig, build_plan, native, observe, room, verified_logits
from semspec.sparse_fit.cost import cost
from semspec.sparse_fit.quality import Tally
from semspec.statistics import quantile
from semspec.tasks import Task
from semspec.text.tokenizer import encode

Levels = tuple[int, int, int]  # of blocks, channels and experts; 0 skips nothing, a higher one more
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Grid:
    """Levels of each part, the gentlest first; the first of each skips nothing."""

    rhos: tuple[float, ...] = (1.0, 0.5, 0.25, 0.1)
    channels: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6)
    experts: tuple[int, ...] = (0, 1, 2, 3)

    def __post_init__(self) -> None:
        for name, off, rising in (("rhos", 1.0, False), ("channels", 0.0, True), ("experts", 0, True)):
            levels = getattr(self, name)
            if not levels or levels[0] != off or list(levels) != sorted(set(levels), reverse=not rising):
                raise BadRequest(f"levels of {name} are {levels}; begin with {off} and give each once, in order")

    def levels(self) -> list[Levels]:
        return list(product(range(len(self.rhos)), range(len(self.channels)), range(len(self.experts))))

    def config(self, at: Levels, base: CalibrationConfig) -> CalibrationConfig:
        rho, channels, experts = self.rhos[at[0]], self.channels[at[1]], self.experts[at[2]]
        attention = replace(base.attention, rho=rho) if base.attention and rho < 1 else None
        return replace(base, attention=attention, ffn=channels, ffn_threshold=0.0, experts=experts)


@dataclass(frozen=True)
class Found:
    """A measured combination: what it costs and what it loses."""

    levels: Levels
    cost: float  # over the dense one
    loss: float  # nats
    bound: float  # the upper end of the loss's interval

    def as_dict(self) -> dict[str, Any]:
        return vars(self)


def cheapest(
    costs: dict[Levels, float], loss: Callable[[Levels], tuple[float, float]], limit: float,
    progress: Progress = lambda done, total: None,
) -> tuple[Levels, list[Found]]:  # fmt: skip
    """The cheapest levels whose loss is within the limit, by the upper end of its interval; and all that was measured.
    Levels of zeros are dense, and lose nothing."""
    tried: list[Found] = []
    failed: list[Levels] = []
    order = sorted(costs, key=lambda at: (costs[at], sum(at)))
    for i, at in enumerate(order):
        progress(i, len(order))
        if not any(at):
            return at, tried
        if any(all(a >= b for a, b in zip(at, bad, strict=True)) for bad in failed):
            continue
        tried.append(Found(at, costs[at], *loss(at)))
        if tried[-1].bound <= limit:
            return at, tried
        failed.append(at)
    raise AssertionError("dense is among the levels")


def apart(costs: dict[Levels, float], loss: Callable[[Levels], tuple[float, float]], limit: float) -> Levels:
    """Each part by itself at the highest level within the limit, put together: for comparison."""
    found = []
    for part in range(3):
        highest = max(at[part] for at in costs)
        alone = [tuple(level if p == part else 0 for p in range(3)) for level in range(highest, 0, -1)]
        found.append(next((at[part] for at in alone if loss(at)[1] <= limit), 0))  # type: ignore[arg-type]
    return (found[0], found[1], found[2])


def mean_and_bound(losses: Sequence[float]) -> tuple[float, float]:
    """Student's upper end. Not that of a ratio, whose logarithm has the interval: losses near 0 differ by powers of
    ten from problem to problem, and that end would be anywhere."""
    n = len(losses)
    return fmean(losses), fmean(losses) + (quantile(n - 1) * stdev(losses) / sqrt(n) if n > 1 else 0.0)


def search(
    pair: Pair, task: Task, n: int, limit: float, base: CalibrationConfig, grid: Grid, seed: int = 0, k: int = 8,
    max_new_tokens: int | None = None, by: str = "bytes", progress: Progress = lambda done, total: None,
) -> SparsePlan:  # fmt: skip
    """Calibrates on n problems of the fitting split, then measures on n others of it: KL of the dense target's own
    answers, verified by each candidate. `by`: the cost to reduce, "flops" or "bytes", at the mean context length."""
    runner = native(pair)
    chosen = runner.shape.mixture.chosen if runner.shape.mixture else 1
    grid = replace(grid, experts=tuple(m for m in grid.experts if m < chosen))
    observer = observe(pair, task, n, base.attention, seed, k, max_new_tokens)
    if not observer.observations.rounds:  # no text reached L0, so no block can be skipped
        grid = replace(grid, rhos=grid.rhos[:1])
    problems = task.for_model(
        task.for_fitting().problems(n, seed + 1), pair.tokenizer, runner.max_seq_len, max_new_tokens
    )
    texts: list[tuple[list[int], list[int]]] = []
    previous, runner.sparsity = runner.sparsity, None
    plans = {
        at: replace(
            build_plan(observer.observations, grid.config(at, base), observer.full_layers), model=fingerprint(runner),
            made={"k": k},
        )
        for at in grid.levels()
    }  # fmt: skip
    measured: dict[Levels, tuple[float, float]] = {(0, 0, 0): (0.0, 0.0)}
    try:
        for problem in problems:
            prompt = encode(pair.tokenizer, problem.prompt)
            most = room(runner, len(prompt), task.new_tokens(problem, max_new_tokens))
            texts.append((prompt, pair.generate(problem.prompt, verifier="none", max_new_tokens=most).tokens))
        dense = [verified_logits(runner, [one], k)[0] for one in texts]
        context = sum(len(prompt) + len(answer) // 2 for prompt, answer in texts) // len(texts)
        whole = cost(runner.shape, None, context, k + 1)
        costs = {at: cost(runner.shape, plan, context, k + 1).over(whole)[by] for at, plan in plans.items()}

        def loss(at: Levels) -> tuple[float, float]:
            if at not in measured:
                apply(plans[at], runner)
                tally = Tally()
                for one, logits in zip(texts, dense, strict=True):
                    tally.compare(verified_logits(runner, [one], k)[0], logits)
                measured[at] = mean_and_bound(tally.kl)
            return measured[at]

        best, tried = cheapest(costs, loss, limit, progress)
        separate = apart(costs, loss, limit)
        loss(separate)
    finally:
        runner.sparsity = previous
    told = {
        "limit": limit, "by": by, "context": context, "tried": [one.as_dict() for one in tried],
        "apart": {"levels": separate, "cost": costs[separate], "loss": measured[separate][0]},
        "best": {"levels": best, "cost": costs[best], "loss": measured[best][0]},
    }  # fmt: skip
    made = {"task": task.name, "problems": n, "seed": seed, "k": k, "rounds": observer.observations.rounds}
    return replace(plans[best], made=made | {"search": told}, refresh=base.refresh)


def in_words(plan: SparsePlan) -> Sequence[str]:
    """What a search found, in sentences."""
    told = plan.made["search"]
    best, separate = told["best"], told["apart"]
    within = "within" if separate["loss"] <= told["limit"] else "beyond"
    return [
        f"{plan}: {best['cost']:.3f} of the dense {told['by']} at {told['context']} tokens, KL {best['loss']:.2g} of "
        f"{told['limit']:g} nats, after {len(told['tried'])} measured combinations",
        f"each part by itself would give levels {tuple(separate['levels'])}; together they cost {separate['cost']:.3f} "
        f"and lose {separate['loss']:.2g}, {within} the limit",
    ]
