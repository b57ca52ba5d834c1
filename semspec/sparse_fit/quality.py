"""What a plan costs in quality: the same problems with dense verification and with several plans.

Two measurements of each plan. Problems are solved with it: is the answer right, and how many draft tokens are accepted
in a round. And the dense target's own answers are verified as accepted drafts: how far the logits move (KL divergence
from the dense ones, and whether the top-1 token stays). Problems are the unit of all intervals; as many as the pair has
slots are solved as one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semspec.errors import BadRequest
from semspec.model import ModelRunner
from semspec.model.prefix_cache import PrefixCache
from semspec.options import Options
from semspec.pair import Pair
from semspec.pair.result import Result
from semspec.sparse.applied import apply
from semspec.sparse.experts import ExpertsPlan
from semspec.sparse.ffn import BY
from semspec.sparse.layer_ops import PlanSparsity
from semspec.sparse.plan import SparsePlan
from semspec.sparse_fit.calibrate import native, room, verified_logits
from semspec.sparse_fit.cost import cost
from semspec.statistics import Share, difference, product_of_ratios, ratio
from semspec.tasks import Task
from semspec.text.tokenizer import encode


def variants(
    plan: SparsePlan, depth: int, rhos: Sequence[float] = (), most: Sequence[int] = (), always: Sequence[int] = (),
    dense_below: Sequence[int] = (), thresholds: Sequence[float] = (),
) -> dict[str, SparsePlan | None]:  # fmt: skip
    """Dense, each part of a plan by itself at its budgets, and all parts together: the paper's table. `*` marks
    attention in which only anchors select; `always` are numbers of experts to skip for every token, `thresholds` are
    activations of channels."""
    found: dict[str, SparsePlan | None] = {"dense": None}
    empty = replace(plan, attention=None, ffn=None, experts=None)
    if plan.attention is not None:
        for below, rho in product(dense_below or [plan.attention.dense_below], rhos or [plan.attention.rho]):
            own, name = replace(plan.attention, rho=rho, dense_below=below), f"rho {rho:g}"
            name += f" above {below}" if dense_below else ""
            found[f"attention, {name}"] = replace(empty, attention=replace(own, anchors=None))
            if own.anchors is not None and len(own.anchors) < depth:
                found[f"attention*, {name}"] = replace(empty, attention=own)
    if plan.ffn is not None:
        for network in [plan.ffn.below(t) for t in thresholds] or [plan.ffn]:
            for by in BY:
                one = replace(network, by=by)
                found[str(one)] = replace(empty, ffn=one)
    if plan.experts is not None:
        for m in most or [plan.experts.most]:
            found[f"up to {m} experts fewer"] = replace(empty, experts=replace(plan.experts, most=m))
        for m in always:
            every_token = ExpertsPlan(torch.full_like(plan.experts.betas, float("inf")), m)
            found[f"always {m} experts fewer"] = replace(empty, experts=every_token)
    if sum(part is not None for part in (plan.attention, plan.ffn, plan.experts)) > 1:
        found["all of the plan"] = plan
    return found


def select(plans: dict[str, SparsePlan | None], only: list[str]) -> dict[str, SparsePlan | None]:
    """The dense plan and those with one of these words in their names; all if there are no words."""
    found = {name: p for name, p in plans.items() if p is None or not only or any(word in name for word in only)}
    if len(found) == 1:
        raise BadRequest(f"no variant of the plan has {' or '.join(only)} in its name; there are: {', '.join(plans)}")
    return found


@dataclass
class Tally:
    """One variant's figures, problem by problem."""

    kl: list[float] = field(default_factory=list)  # nats a token
    kept: list[tuple[int, int]] = field(default_factory=list)  # top-1 tokens that stayed, of how many
    right: list[float] = field(default_factory=list)  # 0 or 1; of a graded task, scores
    accepted: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)  # as the dense target's text
    drift: list[float] = field(default_factory=list)

    def compare(self, ours: list[Tensor], dense: list[Tensor]) -> None:
        a, b = (torch.cat(rows).float().log_softmax(-1) for rows in (ours, dense))  # [answer, V]
        self.kl.append(float((b.exp() * (b - a)).sum()) / len(b))
        self.kept.append((int((a.argmax(-1) == b.argmax(-1)).sum()), len(b)))

    def solve(self, result: Result, right: float | None, dense: Result) -> None:
        self.accepted.append(result.stats.accepted)
        self.steps.append(result.stats.rounds)
        self.same.append(result.tokens == dense.tokens)
        if right is not None:
            self.right.append(right)

    def figures(self, name: str, dense: Tally) -> dict[str, Any]:
        return {
            "plan": name,
            "kl": _as_dict(ratio(self.kl, [1.0] * len(self.kl))),
            "top1_agreement": Share.clustered(self.kept).as_dict(),
            "same_text": Share(sum(self.same), len(self.same)).as_dict(),
            "right": Share.clustered((right, 1) for right in self.right).as_dict() if self.right else None,
            "right_against_dense": _as_dict(difference(self.right, dense.right)),
            "tau": 1 + sum(self.accepted) / max(sum(self.steps), 1),
            "tau_against_dense": self._relative(dense),
            "drift": sum(self.drift) / len(self.drift) if self.drift else None,
            "each": asdict(self),
        }

    def _relative(self, dense: Tally) -> dict[str, float | None] | None:
        """tau over the dense tau, paired by problem."""
        committed, dense_committed = (np.add(t.accepted, t.steps) for t in (self, dense))
        return _as_dict(product_of_ratios([committed, dense.steps], [self.steps, dense_committed]))


def merge(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One document from several of `quality`, on the same plans and different problems."""
    first = documents[0]
    same = ("label", "task", "target", "plan", "k", "verifier", "drafter", "dtype")
    for other in documents[1:]:
        differ = [name for name in same if other.get(name) != first.get(name)]
        if differ or [row["plan"] for row in other["rows"]] != [row["plan"] for row in first["rows"]]:
            raise BadRequest(f"these are figures of different runs: {', '.join(differ) or 'their plans'} differ")
    if any("each" not in row for document in documents for row in document["rows"]):
        raise BadRequest("a file holds no figures by problem; run quality again with this version")
    ids = [name for document in documents for name in document["ids"]]
    if len(set(ids)) < len(ids):
        raise BadRequest(f"{len(ids) - len(set(ids))} problems are in two of the files; give runs of other problems")
    names = [f.name for f in fields(Tally)]
    tallies = [
        Tally(*([x for row in rows for x in row["each"][name]] for name in names))
        for rows in zip(*(document["rows"] for document in documents), strict=True)
    ]
    found = [
        tally.figures(row["plan"], tallies[0]) | {name: row[name] for name in ("cost",) if name in row}
        for tally, row in zip(tallies, first["rows"], strict=True)
    ]
    seeds = [document["seed"] for document in documents]
    return first | {"seed": seeds, "problems": len(ids), "ids": ids, "rows": found}


def _as_dict(estimate: Any) -> dict[str, float | None] | None:
    return None if estimate is None else estimate.as_dict()


def measure(
    pair: Pair, task: Task, n: int, plans: dict[str, SparsePlan | None], seed: int = 0, k: int = 8,
    verifier: str = "exact", max_new_tokens: int | None = None, drafter: str = "auto",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[list[dict[str, Any]]]:  # fmt: skip
    """Figures of each plan, the dense one's first; yields those so far after every batch. A batch takes all
    slots of the pair."""
    runner = native(pair)
    tallies, lengths = {name: Tally() for name in plans}, list[int]()
    batch = runner.free
    reader = pair.wrapped(PrefixCache)  # prompts are prefilled once
    problems = task.for_model(task.problems(n, seed), pair.tokenizer, runner.max_seq_len, max_new_tokens)
    progress(0, n)
    for begin in range(0, n, batch):
        group = problems[begin : begin + batch]
        prompts = [encode(pair.tokenizer, problem.prompt) for problem in group]
        options = [
            Options(
                verifier=verifier, drafter=drafter, num_draft_tokens=k, stop=task.stop,
                max_new_tokens=room(runner, len(prompt), task.new_tokens(problem, max_new_tokens)),
                referee=task.referee(problem),
            )
            for problem, prompt in zip(group, prompts, strict=True)
        ]  # fmt: skip
        dense: list[Result] = []
        logits: list[list[Tensor]] = []
        for name, plan in plans.items():  # the dense one comes first
            apply(plan, runner)
            results = reader.generate([problem.prompt for problem in group], options)
            dense = dense or results
            found = verified_logits(reader.target, list(zip(prompts, (d.tokens for d in dense), strict=True)), k)
            logits = logits or found
            tally = tallies[name]
            for i, (problem, result) in enumerate(zip(group, results, strict=True)):
                text = reader.resources.common_markers(result.tokens, result.text)
                tally.solve(result, float(task.score(problem, text)) if task.scored else None, dense[i])
                tally.compare(found[i], logits[i])
            if isinstance(runner.sparsity, PlanSparsity):
                tally.drift += [error.values for error in runner.sparsity.refresh.errors]
        apply(None, runner)
        progress(begin + len(group), n)
        lengths += [len(prompt) + len(d.tokens) // 2 for prompt, d in zip(prompts, dense, strict=True)]
        context = sum(lengths) // len(lengths)
        yield [
            tallies[name].figures(name, tallies["dense"]) | {"cost": _cost_ratios(runner, plan, context, k + 1)}
            for name, plan in plans.items()
        ]


def _cost_ratios(runner: ModelRunner, plan: SparsePlan | None, context: int, tokens: int) -> dict[str, Any] | None:
    """FLOPs and bytes of a pass over the dense ones; None where calibration has not seen what the plan skips."""
    try:
        ratios = cost(runner.shape, plan, context, tokens).over(cost(runner.shape, None, context, tokens))
    except BadRequest:
        return None
    return ratios | {"context": context, "tokens": tokens}
