"""What to collect, checked before anything is loaded or written."""

from __future__ import annotations

from dataclasses import dataclass

from semspec.errors import BadRequest
from semspec.probe.features import FIXED
from semspec.probe_fit.data import MODELS
from semspec.text.steps import DELIMITERS, MAX_STEP_TOKENS
from semspec.types import Sampling
from semspec.verify import REGISTRY, make
from semspec.verify.step_rule import StepRule


@dataclass(frozen=True)
class Config:
    """What to collect; a folder is continued only with the config it was started with."""

    task: str = "pocket"
    n: int | None = 64  # problems
    data: str | None = None
    traces: str = "target"  # what writes the answers that prefixes are cut from: target, draft, both, a rule, or a file
    max_new_tokens: int | None = None  # of an answer; None: as many as the task has
    per_problem: int | None = 8  # prefixes of a problem; None: all
    first_steps: bool = True  # also after the prompt alone, see traces.cut
    samples: int = (
        20  # from each model, after each prefix; from the target alone where a rule verified the draft's step
    )
    temperature: float = 0.6
    top_p: float = 0.95
    max_step_tokens: int = MAX_STEP_TOKENS
    target_layers: tuple[int, ...] = (-1,)
    draft_layers: tuple[int, ...] = (-1,)
    poolings: tuple[str, ...] = ("mean", "last")  # of a step's states that are kept
    delimiters: str = "all"  # what ends a step, see text/steps.py
    token_states: bool = False  # keep the states of every token, which pooling by attention learns from
    seed: int = 0
    shard: int = 32  # prefixes collected between two writings to the disk

    def __post_init__(self) -> None:
        for name in ("samples", "shard", "per_problem", "max_new_tokens"):
            value, lowest = getattr(self, name), 0 if name == "samples" and self.rule else 1
            if value is not None and value < lowest:
                rule = (
                    ", or 0 with a rule of steps for --traces, as semantic+" if name == "samples" and not value else ""
                )
                raise BadRequest(f"{name} is {value}; give {lowest} or more{rule}")
        Sampling(self.temperature, top_p=self.top_p)
        for given, known in ((self.poolings, FIXED), ((self.delimiters,), DELIMITERS)):
            if wrong := [name for name in given if name not in known]:
                raise BadRequest(f"there is no {wrong[0]!r} to collect; give one of: {', '.join(known)}")
        if self.rule and self.rule.delimiters != self.delimiters:
            raise BadRequest(
                f"{self.rule.name}'s steps end at delimiters={self.rule.delimiters}, those of the collection at "
                f"{self.delimiters}; give both the same"
            )
        if self.rule and self.rule.max_step_tokens != self.max_step_tokens:
            raise BadRequest(
                f"{self.rule.name}'s steps have up to {self.rule.max_step_tokens} tokens, those of the collection "
                f"{self.max_step_tokens}; give the rule max_step_tokens={self.max_step_tokens} as well"
            )

    @property
    def by(self) -> tuple[str, ...]:
        """Which writers there are; none, if traces are in a file."""
        return MODELS if self.traces == "both" else (self.traces,) if self.traces in MODELS or self.rule else ()

    @property
    def rule(self) -> StepRule | None:
        """By which traces are written, so that what is collected is what it verifies."""
        if self.traces.partition(":")[0] not in REGISTRY:
            return None
        rule = make(self.traces)
        if not isinstance(rule, StepRule):
            raise BadRequest(f"traces is {rule.name}, which judges tokens; give a rule that judges steps, as semantic+")
        if rule.candidates > 1:
            raise BadRequest(f"traces show one candidate for a step; leave out {rule.name}'s candidates")
        return rule
