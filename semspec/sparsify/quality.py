"""What leaving things out costs: the same problems checked densely and by several plans.

Two looks at each plan. The dense target's own answer is checked as a draft that stands: how far the logits move
(KL divergence from the dense ones, and whether the favourite stays). Then the problem is solved with the plan: is the
answer right, and how many draft tokens stand in a step. Problems are the unit of all intervals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from semspec.answer import Result
from semspec.bench.statistics import Share, difference, draws, mean
from semspec.errors import BadRequest
from semspec.model import ModelRunner
from semspec.model.remember import Remembering
from semspec.pair import Pair
from semspec.sparse.applied import apply
from semspec.sparse.plan import SparsePlan
from semspec.sparse.way import Sparse
from semspec.sparsify.calibrate import checked
from semspec.tasks import Task
from semspec.text import encode


def variants(plan: SparsePlan, depth: int, rhos: list[float], most: list[int]) -> dict[str, SparsePlan | None]:
    """Dense, each part of a plan alone by its budgets, and all parts together: the paper's table. `*` marks attention
    in which only anchors choose."""
    found: dict[str, SparsePlan | None] = {"dense": None}
    alone = replace(plan, attention=None, ffn=None, experts=None)
    if plan.attention is not None:
        for rho in rhos or [plan.attention.rho]:
            every = replace(plan.attention, rho=rho, anchors=None)
            found[f"attention, rho {rho:g}"] = replace(alone, attention=every)
            if plan.attention.anchors is not None and len(plan.attention.anchors) < depth:
                found[f"attention*, rho {rho:g}"] = replace(alone, attention=replace(plan.attention, rho=rho))
    if plan.ffn is not None:
        found[f"ffn {plan.ffn.sparsity:.0%} by token"] = replace(alone, ffn=replace(plan.ffn, by="token"))
        found[f"ffn {plan.ffn.sparsity:.0%} by union"] = replace(alone, ffn=replace(plan.ffn, by="union"))
    if plan.experts is not None:
        for m in most or [plan.experts.most]:
            found[f"up to {m} experts fewer"] = replace(alone, experts=replace(plan.experts, most=m))
    if sum(part is not None for part in (plan.attention, plan.ffn, plan.experts)) > 1:
        found["all of the plan"] = plan
    return found


@dataclass
class Tally:
    """One variant's figures, problem by problem."""

    kl: list[float] = field(default_factory=list)  # nats a token
    kept: list[tuple[int, int]] = field(default_factory=list)  # favourites that stayed, of so many
    right: list[bool] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)  # the text is the dense target's
    drift: list[float] = field(default_factory=list)

    def compare(self, ours: list[Tensor], dense: list[Tensor]) -> None:
        pairs = [(a.float().log_softmax(-1), b.float().log_softmax(-1)) for a, b in zip(ours, dense, strict=True)]
        tokens = sum(len(b) for _, b in pairs)
        self.kl.append(float(sum((b.exp() * (b - a)).sum() for a, b in pairs)) / tokens)
        self.kept.append((sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in pairs), tokens))

    def solve(self, result: Result, right: bool | None, dense: Result) -> None:
        self.accepted.append(result.stats.accepted)
        self.steps.append(result.stats.steps)
        self.same.append(result.tokens == dense.tokens)
        if right is not None:
            self.right.append(right)

    def figures(self, name: str, dense: Tally) -> dict[str, Any]:
        loss = difference([float(a) - float(b) for a, b in zip(self.right, dense.right, strict=True)])
        return {
            "plan": name,
            "kl": _told(mean(self.kl)),
            "favourite_kept": Share.clustered(self.kept).as_dict(),
            "same_text": Share(sum(self.same), len(self.same)).as_dict(),
            "right": Share(sum(self.right), len(self.right)).as_dict() if self.right else None,
            "right_against_dense": _told(loss),
            "tau": 1 + sum(self.accepted) / max(sum(self.steps), 1),
            "tau_against_dense": self._relative(dense),
            "drift": sum(self.drift) / len(self.drift) if self.drift else None,
        }

    def _relative(self, dense: Tally) -> dict[str, float]:
        """tau over the dense tau, with a paired bootstrap interval."""
        drawn = draws(len(self.steps), 0)

        def tau(tally: Tally, weights: Any) -> Any:
            return 1 + weights @ np.array(tally.accepted, float) / np.maximum(weights @ np.array(tally.steps, float), 1)

        ratios = tau(self, drawn) / tau(dense, drawn)
        low, high = np.percentile(ratios, [2.5, 97.5])
        once = np.ones((1, len(self.steps)))
        return {"value": float(tau(self, once)[0] / tau(dense, once)[0]), "low": float(low), "high": float(high)}


def _told(estimate: Any) -> dict[str, float | None] | None:
    return None if estimate is None else estimate.as_dict()


def measure(
    pair: Pair, task: Task, n: int, plans: dict[str, SparsePlan | None], seed: int = 0, k: int = 8,
    verifier: str = "exact", max_new_tokens: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Figures of each plan, the dense one's first. Takes all slots of the pair, of which there must be two."""
    runner = pair.target
    if not isinstance(runner, ModelRunner):
        raise BadRequest(f"a plan needs a model that semspec runs itself; {type(runner).__name__} is none")
    tallies = {name: Tally() for name in plans}
    slot = runner.acquire()  # for checks; the others remember prompts, which no plan touches
    draft = Remembering(pair.draft) if pair.draft else None
    reader = Pair(Remembering(runner), pair.tokenizer, draft, pair.eos, pair.probe_folder)
    longest = max_new_tokens or task.max_new_tokens
    for i, problem in enumerate(task.problems(n, seed)):
        progress(i, n)
        prompt = encode(pair.tokenizer, problem.prompt)
        most = min(longest, runner.capacity - len(prompt))
        runner.truncate(slot, 0)
        for name, plan in plans.items():
            apply(plan, runner)
            result = reader.generate(
                problem.prompt, verifier=verifier, num_draft_tokens=k, max_new_tokens=most, stop=task.stop,
                referee=task.referee(problem),
            )  # fmt: skip
            if plan is None:
                dense, logits = result, list(checked(runner, slot, prompt, result.tokens, k))
            tally = tallies[name]
            tally.solve(result, bool(task.score(problem, result.text)) if task.scored else None, dense)
            tally.compare(logits if plan is None else list(checked(runner, slot, prompt, dense.tokens, k)), logits)
            if isinstance(runner.sparsity, Sparse):
                tally.drift += [d.values for d in runner.sparsity.guard.drifts]
    apply(None, runner)
    progress(n, n)
    return [tally.figures(name, tallies["dense"]) for name, tally in tallies.items()]
