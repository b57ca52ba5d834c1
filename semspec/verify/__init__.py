"""The rules, by name. To add one, define a `Rule` in a file here, list it below and write a test file.

A request gives a rule as an object, a name, or a name with options: "fly:window=4,theta=0.3".
"""

from __future__ import annotations

from semspec.errors import BadRequest
from semspec.registry import Registry
from semspec.verify.adaptive import Adaptive
from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.block import Block
from semspec.verify.confspec import ConfSpec
from semspec.verify.controls import AcceptAll, Random
from semspec.verify.csd import CorrectionMemory
from semspec.verify.ears import Ears
from semspec.verify.ensemble import Ensemble
from semspec.verify.exact import Exact
from semspec.verify.fly import Fly
from semspec.verify.glimprouter import GlimpRouter
from semspec.verify.likely_step import LikelyStep
from semspec.verify.margin import Margin
from semspec.verify.mars import Mars
from semspec.verify.none import NoSpeculation
from semspec.verify.reflective import Reflective
from semspec.verify.regret import Regret
from semspec.verify.sampling import SpeculativeSampling
from semspec.verify.semantic import Semantic
from semspec.verify.semantic_plus import SemanticPlus
from semspec.verify.spec_thinking import SpecThinking
from semspec.verify.specreason import SpecReason
from semspec.verify.speculative_cascade import SpeculativeCascade
from semspec.verify.step_controls import AcceptAllSteps, AcceptNoStep, Oracle, RandomStep
from semspec.verify.threshold import Threshold
from semspec.verify.top_or_ratio import TopOrRatio
from semspec.verify.topk import TopK
from semspec.verify.traversal import Traversal
from semspec.verify.trigreason import TrigReason
from semspec.verify.typical import Typical

_LENGTH = "give the draft length beside it: -k 6, or num_draft_tokens=6 (k=6 is for the methods of semspec bench)"
_TREE = "it is a drafter's: --drafter model:tree=30, in a method of semspec bench drafter=model:tree=30;depth=6"
_ELSEWHERE = {"k": _LENGTH, "num_draft_tokens": _LENGTH, "tree": _TREE}
REGISTRY = Registry("verifier", "semspec.rules", Rule, _ELSEWHERE)  # type: ignore[type-abstract]
register = REGISTRY.register

LOSSLESS: tuple[type[Rule], ...] = (NoSpeculation, Exact, SpeculativeSampling, Block, Traversal)
LOSSY: tuple[type[Rule], ...] = (
    Fly, TopK, Typical, Margin, Threshold, Ensemble, SpeculativeCascade, Adaptive, Reflective, TopOrRatio,
    Regret, Mars, Ears, CorrectionMemory,
)  # fmt: skip
STEP_RULES: tuple[type[Rule], ...] = (
    Semantic, SemanticPlus, LikelyStep, SpecReason, SpecThinking, GlimpRouter, ConfSpec, TrigReason,
    RandomStep, AcceptAllSteps, AcceptNoStep, Oracle,
)  # fmt: skip
CONTROLS: tuple[type[Rule], ...] = (AcceptAll, Random)
for _rule in (*LOSSLESS, *LOSSY, *CONTROLS, *STEP_RULES):
    register(_rule)


def make(spec: str | Rule) -> Rule:
    """A rule from its name and options."""
    if isinstance(spec, Rule):
        try:
            hash(spec)  # drafts are verified in groups of equal rules
        except TypeError as error:
            raise BadRequest(
                f"verifier {spec.name!r} cannot be hashed ({error}); make it a dataclass(frozen=True) "
                "whose fields can be hashed"
            ) from error
        return spec
    return REGISTRY.make(spec)


__all__ = ["REGISTRY", "Decisions", "DraftBatch", "Rule", "make", "register"]
