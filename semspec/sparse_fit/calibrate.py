"""A plan for a model, from texts it generated itself: which layers select blocks, and the thresholds of gate
activations and of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from semspec.errors import BadRequest
from semspec.model import ModelRunner
from semspec.model.config import Shape
from semspec.model.wrapper import unwrap
from semspec.pair import Pair
from semspec.probe.identity import fingerprint
from semspec.sparse.attention import AttentionPlan
from semspec.sparse.experts import ExpertsPlan
from semspec.sparse.ffn import FfnPlan
from semspec.sparse.plan import SparsePlan
from semspec.sparse_fit.observe import Observations, Observer
from semspec.tasks import Task
from semspec.text.tokenizer import encode
from semspec.types import Runner, Score

PREFILL_CHUNK = 512
MOST_EXPERTS = 3  # up to which the paper lost nothing, of eight


@dataclass(frozen=True)
class CalibrationConfig:
    """What a plan should skip; calibration finds the thresholds and anchors."""

    attention: AttentionPlan | None = field(default_factory=AttentionPlan)  # without its anchors
    reuse: float = 0.7  # a layer whose blocks overlap less with the last anchor's is an anchor itself
    shallow: int = 4  # first layers are always anchors: their blocks are unlike any other layer's
    ffn: float = 0.0  # share of a token's channels to skip
    ffn_threshold: float = 0.0  # or skip what is below this, in every layer
    ffn_by: str = "union"
    experts: int | None = 0  # maximum experts of a token to skip; None: three, if the model has so many
    quantile: float = 0.5  # of r_m over the tokens; beta_m
    refresh: int = 0

    def __post_init__(self) -> None:
        for name in ("reuse", "ffn", "quantile"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise BadRequest(f"{name} is {getattr(self, name)}; give a share from 0 to 1")
        if min(self.shallow, self.experts or 0, self.ffn_threshold) < 0:
            raise BadRequest(
                f"{self.shallow} shallow layers, {self.experts} experts, activations below {self.ffn_threshold}: give "
                "no negative numbers"
            )
        if self.ffn and self.ffn_threshold:
            raise BadRequest("give a share of channels to skip or a threshold for their activations, not both")

    def for_shape(self, shape: Shape) -> CalibrationConfig:
        """With a number of experts that the model can skip; a given one that it cannot is refused."""
        chosen = shape.mixture.chosen if shape.mixture else 0
        if self.experts is None:
            return replace(self, experts=max(0, min(MOST_EXPERTS, chosen - 1)))
        if self.experts and self.experts >= chosen:
            raise BadRequest(f"{self.experts} experts to skip, and the model uses {chosen} for a token; give fewer")
        return self


def calibrate(
    pair: Pair, task: Task, n: int, config: CalibrationConfig, seed: int = 0, k: int = 8,
    max_new_tokens: int | None = None, progress: Callable[[int, int], None] = lambda done, total: None,
) -> SparsePlan:  # fmt: skip
    """A plan from what the target would have skipped; see `observe`."""
    runner = native(pair)
    config = config.for_shape(runner.shape)
    observer = observe(pair, task, n, config.attention, seed, k, max_new_tokens, progress)
    made = {"task": task.name, "problems": n, "seed": seed, "k": k, "rounds": observer.observations.rounds}
    return replace(
        build_plan(observer.observations, config, observer.full_layers), model=fingerprint(runner), made=made
    )


def native(pair: Pair) -> ModelRunner:
    """The target, if it can have a plan."""
    runner = unwrap(pair.target)
    if not isinstance(runner, ModelRunner):
        raise BadRequest(f"a plan needs a model that semspec runs itself; {type(runner).__name__} is none")
    return runner


def observe(
    pair: Pair, task: Task, n: int, attention: AttentionPlan | None, seed: int, k: int,
    max_new_tokens: int | None = None, progress: Callable[[int, int], None] = lambda done, total: None,
) -> Observer:  # fmt: skip
    """The target answers problems of the fitting split; its answers are then verified as drafts of k tokens."""
    runner = native(pair)
    previous, runner.sparsity = runner.sparsity, None
    problems = task.for_fitting().problems(n, seed)
    problems = task.for_model(problems, pair.tokenizer, runner.max_seq_len, max_new_tokens)
    observer = Observer(runner, attention or AttentionPlan())
    try:
        for i, problem in enumerate(problems):
            progress(i, n)
            prompt = encode(pair.tokenizer, problem.prompt)
            most = room(runner, len(prompt), task.new_tokens(problem, max_new_tokens))
            runner.sparsity = None
            answer = pair.generate(problem.prompt, verifier="none", max_new_tokens=most).tokens
            runner.sparsity = observer
            verified_logits(runner, [(prompt, answer)], k)
        progress(n, n)
    finally:
        runner.sparsity = previous
    return observer


def room(runner: Runner, prompt: int, wanted: int) -> int:
    """New tokens that may follow a prompt of this length, at most as many as wanted."""
    if prompt >= runner.max_seq_len:
        raise BadRequest(
            f"a problem has {prompt} tokens and the context is {runner.max_seq_len}; give a larger --context, or a "
            "task with shorter problems"
        )
    return min(wanted, runner.max_seq_len - prompt)


def verified_logits(runner: Runner, texts: Sequence[tuple[list[int], list[int]]], k: int) -> list[list[Tensor]]:
    """For each (prompt, answer) the logits [k + 1, V] of every round, as if the answer had been drafted and accepted.
    All answers are verified as one batch."""
    slots = [runner.acquire() for _ in texts]
    found: list[list[Tensor]] = [[] for _ in texts]
    try:
        for slot, (prompt, _) in zip(slots, texts, strict=True):
            for at in range(0, len(prompt) - 1, PREFILL_CHUNK):
                runner.score([Score(runner, slot, prompt[at : min(at + PREFILL_CHUNK, len(prompt) - 1)], 0)])
        drafts = [[*prompt[-1:], *answer[:-1]] for prompt, answer in texts]
        for at in range(0, max(map(len, drafts)), k + 1):
            active = [i for i, draft in enumerate(drafts) if at < len(draft)]
            pieces = [drafts[i][at : at + k + 1] for i in active]
            rows = runner.score([Score(runner, slots[i], p, len(p)) for i, p in zip(active, pieces, strict=True)])
            for i, row in zip(active, rows, strict=True):
                found[i].append(row.logits)
    finally:
        for slot in slots:
            runner.release(slot)
    return found


def build_plan(observations: Observations, config: CalibrationConfig, layers: list[int]) -> SparsePlan:
    """`layers` are those with full attention."""
    seen: dict[str, Tensor] = {}
    attention, ffn, experts = config.attention, None, None
    if attention is not None:
        if not observations.rounds:
            raise BadRequest(
                f"no text was long enough to skip blocks: attention is dense below {attention.dense_below} "
                "tokens; take a task with longer prompts, or a smaller --dense-below"
            )
        seen |= {"layer_overlap": observations.layer_overlap(), "token_overlap": observations.token_overlap()}
        attention = replace(attention, anchors=anchors(seen["layer_overlap"], layers, config.reuse, config.shallow))
    if config.ffn or config.ffn_threshold:
        depth = range(len(observations.layers))
        thresholds = torch.full((len(depth),), config.ffn_threshold)
        if config.ffn:
            thresholds = torch.stack([quantile(observations.gates[i], config.ffn) for i in depth])
        seen |= {"token_share": observations.token_share(thresholds)}
        seen |= {"union_share": observations.union_share(thresholds)}
        skipped = config.ffn or float(seen["token_share"].nanmean())
        ffn = FfnPlan(thresholds, config.ffn_by, skipped, config.ffn_threshold)
    if config.experts:
        width = max(rows[0].shape[1] for rows in observations.ratios.values() if rows)
        betas = torch.zeros(len(observations.layers), width)
        for layer, rows in observations.ratios.items():
            if rows:
                betas[layer] = torch.cat(rows).float().quantile(config.quantile, dim=0)
        seen["token_experts"], seen["pass_experts"] = observations.experts_used(betas)
        experts = ExpertsPlan(betas, config.experts)
    return SparsePlan(attention=attention, ffn=ffn, experts=experts, refresh=config.refresh, seen=seen)


def anchors(overlap: Tensor, layers: list[int], reuse: float, shallow: int) -> tuple[int, ...]:
    """From the bottom up: a layer whose blocks overlap too little with the last anchor's becomes an anchor."""
    found: list[int] = []
    for layer in layers:
        if not found or layer < shallow or float(overlap[layer, found[-1]]) < reuse:
            found.append(layer)
    return tuple(found)


def quantile(parts: list[Tensor], share: float, sample: int = 1 << 22) -> Tensor:
    """Of all values, from an evenly spaced sample where there are more."""
    if not parts:
        return torch.zeros(())
    values = torch.cat([p.flatten() for p in parts]).float()
    return values[:: -(-len(values) // sample)].quantile(share)
