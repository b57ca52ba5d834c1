"""A plan for a model, from texts it wrote itself: which layers choose blocks, below what gates do not matter, when
experts do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from semspec.errors import BadRequest
from semspec.model import ModelRunner
from semspec.pair import Pair
from semspec.probe.identity import fingerprint
from semspec.sparse.attention import AttentionPlan
from semspec.sparse.experts import ExpertsPlan
from semspec.sparse.ffn import FfnPlan
from semspec.sparse.plan import SparsePlan
from semspec.sparse_fit.observe import Notes, Watching
from semspec.tasks import Task
from semspec.text.tokenizer import encode
from semspec.types import Runner, Score

PIECE = 512  # tokens of a prompt in one pass


@dataclass(frozen=True)
class Wish:
    """What a plan should leave out; calibration finds the numbers that do so."""

    attention: AttentionPlan | None = field(default_factory=AttentionPlan)  # its anchors are found
    reuse: float = 0.7  # a layer whose blocks overlap less with the last anchor's is one itself
    shallow: int = 4  # first layers that always choose for themselves: theirs are unlike any other's
    ffn: float = 0.0  # share of a token's channels
    ffn_by: str = "union"
    experts: int = 0  # of a token, at most
    quantile: float = 0.5  # beta_m is what so many tokens stay below
    refresh: int = 0

    def __post_init__(self) -> None:
        for name in ("reuse", "ffn", "quantile"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise BadRequest(f"{name} is {getattr(self, name)}; give a share from 0 to 1")
        if self.shallow < 0 or self.experts < 0:
            raise BadRequest(f"{self.shallow} shallow layers and {self.experts} experts: give no negative numbers")


def calibrate(
    pair: Pair, task: Task, n: int, wish: Wish, seed: int = 0, k: int = 8, max_new_tokens: int = 256,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SparsePlan:  # fmt: skip
    """Problems that are never tested on are answered by the target alone, and the answers checked as drafts of k."""
    runner = pair.target
    if not isinstance(runner, ModelRunner):
        raise BadRequest(f"a plan needs a model that semspec runs itself; {type(runner).__name__} is none")
    if wish.experts and (runner.shape.mixture is None or wish.experts >= runner.shape.mixture.chosen):
        chosen = runner.shape.mixture.chosen if runner.shape.mixture else 0
        raise BadRequest(f"{wish.experts} experts to be left out, and the model uses {chosen} for a token; give fewer")
    before, runner.sparsity = runner.sparsity, None
    problems = task.for_fitting().problems(n, seed)
    watching = Watching(runner, wish.attention or AttentionPlan())
    try:
        for i, problem in enumerate(problems):
            progress(i, n)
            prompt = encode(pair.tokenizer, problem.prompt)
            most = min(max_new_tokens, runner.capacity - len(prompt))
            runner.sparsity = None
            answer = pair.generate(problem.prompt, verifier="none", max_new_tokens=most).tokens
            runner.sparsity = watching
            checked(runner, [(prompt, answer)], k)
        progress(n, n)
    finally:
        runner.sparsity = before
    made = {"task": task.name, "problems": n, "seed": seed, "k": k, "rounds": watching.notes.rounds}
    return replace(plan_from(watching.notes, wish, watching.open), model=fingerprint(runner), made=made)


def checked(runner: Runner, texts: Sequence[tuple[list[int], list[int]]], k: int) -> list[list[Tensor]]:
    """For each prompt and answer the logits [k + 1, V] of one check after the other, as if the answer had been drafted
    and stood. All answers are checked side by side, each in a slot of its own."""
    slots = [runner.acquire() for _ in texts]
    found: list[list[Tensor]] = [[] for _ in texts]
    try:
        for slot, (prompt, _) in zip(slots, texts, strict=True):
            for at in range(0, len(prompt) - 1, PIECE):
                runner.score([Score(runner, slot, prompt[at : min(at + PIECE, len(prompt) - 1)], 0)])
        drafts = [[*prompt[-1:], *answer[:-1]] for prompt, answer in texts]
        for at in range(0, max(map(len, drafts)), k + 1):
            going = [i for i, draft in enumerate(drafts) if at < len(draft)]
            pieces = [drafts[i][at : at + k + 1] for i in going]
            rows = runner.score([Score(runner, slots[i], p, len(p)) for i, p in zip(going, pieces, strict=True)])
            for i, row in zip(going, rows, strict=True):
                found[i].append(row.logits)
    finally:
        for slot in slots:
            runner.release(slot)
    return found


def plan_from(notes: Notes, wish: Wish, layers: list[int]) -> SparsePlan:
    """`layers` are those that see all of the context."""
    seen: dict[str, Tensor] = {}
    attention, ffn, experts = wish.attention, None, None
    if attention is not None:
        if not notes.rounds:
            raise BadRequest(
                f"no text was long enough to leave blocks out: attention is dense below {attention.dense_below} "
                "tokens; take a task with longer prompts, or a smaller --dense-below"
            )
        seen |= {"layer_overlap": notes.layer_overlap(), "token_overlap": notes.token_overlap()}
        attention = replace(attention, anchors=anchors(seen["layer_overlap"], layers, wish.reuse, wish.shallow))
    if wish.ffn:
        thresholds = torch.stack([quantile(notes.gates[i], wish.ffn) for i in range(len(notes.layers))])
        seen["union_share"] = notes.union_share(thresholds)
        ffn = FfnPlan(thresholds, wish.ffn_by, wish.ffn)
    if wish.experts:
        width = max(rows[0].shape[1] for rows in notes.ratios.values() if rows)
        betas = torch.zeros(len(notes.layers), width)
        for layer, rows in notes.ratios.items():
            if rows:
                betas[layer] = torch.cat(rows).float().quantile(wish.quantile, dim=0)
        experts = ExpertsPlan(betas, wish.experts)
    return SparsePlan(attention=attention, ffn=ffn, experts=experts, refresh=wish.refresh, seen=seen)


def anchors(overlap: Tensor, layers: list[int], reuse: float, shallow: int) -> tuple[int, ...]:
    """Walking up: a layer whose blocks are too unlike those of the last anchor becomes one."""
    found: list[int] = []
    for layer in layers:
        if not found or layer < shallow or float(overlap[layer, found[-1]]) < reuse:
            found.append(layer)
    return tuple(found)


def quantile(parts: list[Tensor], share: float, most: int = 1 << 22) -> Tensor:
    """What this share of all values is below, from an even sample where there are very many."""
    if not parts:
        return torch.zeros(())
    values = torch.cat([p.flatten() for p in parts]).float()
    return values[:: -(-len(values) // most)].quantile(share)
