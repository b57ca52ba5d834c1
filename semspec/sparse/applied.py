"""Applying a plan to a runner, and finding the plan of a runner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from semspec.errors import BadRequest
from semspec.model import ModelRunner
from semspec.model.wrapper import unwrap
from semspec.probe.identity import fingerprint
from semspec.sparse.ffn import MATRICES
from semspec.sparse.layer_ops import PlanSparsity
from semspec.sparse.plan import SparsePlan
from semspec.types import Runner


def apply(plan: SparsePlan | None, runner: Runner) -> None:
    """From now on the runner verifies drafts by this plan; None: densely. A plan of another model is refused."""
    if not isinstance(runner, ModelRunner):
        raise BadRequest(
            f"a sparse plan needs a model that semspec runs itself, and this one runs through {type(runner).__name__}"
        )
    if plan is not None:
        check_fits(plan, runner)
    runner.sparsity = None if plan is None else PlanSparsity(plan, runner)


class PlanSwitch:
    """Several plans of one runner, one at work at a time. They share its cache but not what they know of it, so each
    begins anew; what was captured for a plan on a GPU stays."""

    def __init__(self, runner: Runner, plans: Mapping[str, SparsePlan]) -> None:
        self.runner = unwrap(runner)
        self._own = getattr(self.runner, "sparsity", None)
        self._sparsities: dict[str, PlanSparsity] = {}
        for name, plan in plans.items():
            apply(plan, self.runner)
            self._sparsities[name] = self.runner.sparsity
        if plans:
            self.runner.sparsity = self._own

    def use(self, name: str) -> None:
        """From now on the plan of this name; another name: what the runner had at first."""
        if self._sparsities:
            self.runner.sparsity = self._sparsities.get(name, self._own)
            if isinstance(self.runner.sparsity, PlanSparsity):
                self.runner.sparsity.restart()


@contextmanager
def dense(runner: Runner) -> Iterator[None]:
    """The runner without its plan for a while; what the plan knew of the cache is forgotten."""
    inner = unwrap(runner)
    own = getattr(inner, "sparsity", None)
    if own is None:
        yield
        return
    inner.sparsity = None
    try:
        yield
    finally:
        inner.sparsity = own
        if isinstance(own, PlanSparsity):
            own.restart()


def plan_of(runner: Runner) -> SparsePlan | None:
    """The plan of a runner, or of the one it wraps."""
    sparsity = getattr(unwrap(runner), "sparsity", None)
    return sparsity.plan if isinstance(sparsity, PlanSparsity) else None


def check_fits(plan: SparsePlan, runner: ModelRunner) -> None:
    shape = runner.shape
    if not isinstance(runner.transformer.layers[0].qkv, MATRICES):
        raise BadRequest("on a CPU, sparse plans are for weights of floating point; load with dtype float32")
    if plan.model and plan.model != fingerprint(runner):
        raise BadRequest(
            f"the sparse plan is for {plan.model}, and this model is {fingerprint(runner)}; calibrate one for it with "
            "`semspec sparse calibrate`"
        )
    if plan.attention and plan.attention.anchors and max(plan.attention.anchors) >= shape.num_layers:
        raise BadRequest(
            f"the sparse plan has anchors {plan.attention.anchors}; the model has {shape.num_layers} layers"
        )
    if plan.ffn and len(plan.ffn.thresholds) != shape.num_layers:
        raise BadRequest(f"the sparse plan has {len(plan.ffn.thresholds)} thresholds for {shape.num_layers} layers")
    if plan.experts:
        if shape.mixture is None:
            raise BadRequest("the sparse plan leaves out experts, and this model has none; make a plan without them")
        if tuple(plan.experts.betas.shape) != (shape.num_layers, shape.mixture.chosen - 1):
            raise BadRequest(
                f"the sparse plan has betas of shape {tuple(plan.experts.betas.shape)}; this model has "
                f"{shape.num_layers} layers and chooses {shape.mixture.chosen} experts"
            )
