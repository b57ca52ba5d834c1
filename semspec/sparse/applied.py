"""Giving a runner a plan, and asking whether it has one."""

from __future__ import annotations

from semspec.errors import BadRequest
from semspec.model import ModelRunner
from semspec.model.int8 import Int8Linear
from semspec.model.wrapper import unwrap
from semspec.probe.identity import fingerprint
from semspec.sparse.layer_ops import Sparse
from semspec.sparse.plan import SparsePlan
from semspec.types import Runner


def apply(plan: SparsePlan | None, runner: Runner) -> None:
    """From now on the runner checks drafts by this plan; None: densely again. A plan of another model is refused."""
    if not isinstance(runner, ModelRunner):
        raise BadRequest(
            f"a sparse plan needs a model that semspec runs itself, and this one runs through {type(runner).__name__}"
        )
    if plan is not None:
        refuse_unfit(plan, runner)
    runner.sparsity = None if plan is None else Sparse(plan, runner)


def plan_of(runner: Runner) -> SparsePlan | None:
    """The plan that a runner, or the one inside it, checks drafts by."""
    sparsity = getattr(unwrap(runner), "sparsity", None)
    return sparsity.plan if isinstance(sparsity, Sparse) else None


def refuse_unfit(plan: SparsePlan, runner: ModelRunner) -> None:
    shape = runner.shape
    if isinstance(runner.transformer.head, Int8Linear):
        raise BadRequest("sparse plans are for weights of floating point; load with another dtype than int8")
    if plan.model and plan.model != fingerprint(runner):
        raise BadRequest(
            f"the sparse plan is for {plan.model}, and this model is {fingerprint(runner)}; calibrate one for it with "
            "`semspec sparse calibrate`"
        )
    if plan.attention and plan.attention.anchors and max(plan.attention.anchors) >= shape.depth:
        raise BadRequest(f"the sparse plan has anchors {plan.attention.anchors}; the model has {shape.depth} layers")
    if plan.ffn and len(plan.ffn.thresholds) != shape.depth:
        raise BadRequest(f"the sparse plan has {len(plan.ffn.thresholds)} thresholds for {shape.depth} layers")
    if plan.experts:
        if shape.mixture is None:
            raise BadRequest("the sparse plan leaves out experts, and this model has none; make a plan without them")
        if tuple(plan.experts.betas.shape) != (shape.depth, shape.mixture.chosen - 1):
            raise BadRequest(
                f"the sparse plan has betas of shape {tuple(plan.experts.betas.shape)}; this model has {shape.depth} "
                f"layers and chooses {shape.mixture.chosen} experts"
            )
