"""What one request asks of semspec inside vLLM: a rule and where it may relax, from the engine's settings and from
`SamplingParams.extra_args` (`vllm_xargs` over HTTP). Those come from a stranger and are checked as our server does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from semspec import verify
from semspec.errors import BadRequest
from semspec.loop.repetition import PERIOD, REPEATS, RepetitionGuard
from semspec.options import Options
from semspec.types import Sampling
from semspec.verify import Rule
from semspec.verify.checked import MAX_TEXT, check_paths, check_ranges

KEY = "semspec"  # in vLLM's additional_config
PREFIX = "semspec_"  # of a request's keys
LONGEST_LOOP = 8192


@dataclass(frozen=True)
class Settings:
    """What the engine was started with; a request may have each of these as `semspec_...`."""

    verifier: str = "exact"
    relax_span: str = "all"
    loop_repeats: int = REPEATS
    loop_period: int = PERIOD

    @staticmethod
    def of(given: Any) -> Settings:
        """From additional_config["semspec"]."""
        if not isinstance(given, Mapping):
            raise BadRequest(
                f"additional_config has {KEY!r}: {given!r:.80}; give an object such as {{'verifier': 'fly'}}"
            )
        return Settings()._with(dict(given), "additional_config has no semspec option")

    def of_request(self, extra: Mapping[str, Any] | None) -> Settings:
        given = {str(key): value for key, value in (extra or {}).items()}
        own = {key.removeprefix(PREFIX): value for key, value in given.items() if key.startswith(PREFIX)}
        for key, value in own.items():
            if isinstance(value, str) and len(value) > MAX_TEXT:
                raise BadRequest(f"{PREFIX}{key[:MAX_TEXT]} is longer than {MAX_TEXT} characters")
        return self._with(own, f"there is no option {PREFIX}")

    def _with(self, given: dict[str, Any], unknown: str) -> Settings:
        known = {f.name: type(f.default) for f in fields(self)}
        for key, value in given.items():
            if key not in known:
                names = ", ".join(PREFIX + name for name in known)
                raise BadRequest(f"{unknown}{str(key)[:MAX_TEXT]}; the options are: {names}")
            if isinstance(value, bool) or not isinstance(value, known[key]):
                raise BadRequest(
                    f"{PREFIX}{key} is {value!r:.80}; give {'a text' if known[key] is str else 'a number'}"
                )
        return replace(self, **given)


@dataclass(frozen=True)
class Choice:
    """A rule that vLLM's own sampler cannot do, and where it may relax."""

    rule: Rule
    thinking_only: bool
    guard: RepetitionGuard

    @staticmethod
    def of(settings: Settings, trusted: bool = False) -> Choice | None:
        """None: the rule is lossless, as vLLM's sampler is. BadRequest: it cannot be had inside vLLM."""
        options = Options(
            verifier=settings.verifier,
            relax_span=settings.relax_span,
            loop_repeats=settings.loop_repeats,
            loop_period=settings.loop_period,
        )
        rule = verify.make(settings.verifier)
        if not trusted:
            check_paths(rule)
        check_ranges(rule)
        refuse(rule)
        guard = options.repetition_guard()
        if guard.repeats * guard.period > LONGEST_LOOP:
            raise BadRequest(
                f"loop_repeats times loop_period is above {LONGEST_LOOP}, the tokens that are looked back at"
            )
        if rule.lossless:
            return None
        return Choice(rule, options.relax_span == "thinking", guard)


def refuse(rule: Rule) -> None:
    why = None
    if rule.unit == "step":
        why = "verifies reasoning steps; give two servers to `semspec serve` instead (--target URL --draft URL)"
    elif type(rule).layout is not Rule.layout:
        why = "has the target read more than the draft, which vLLM does not"
    elif rule.layers or rule.draft_layers:
        why = "reads hidden states, which vLLM keeps from its sampler"
    if why:
        raise BadRequest(f"verifier {rule.name!r} {why}")


def sampling_of(params: Any, seed: int) -> Sampling:
    """vLLM's sampling parameters in our terms; -1 and 0 both mean no top-k to vLLM."""
    own = params.seed
    return Sampling(
        float(params.temperature), max(params.top_k, 0), float(params.top_p), float(params.min_p),
        seed if own is None else own % 2**63,
    )  # fmt: skip
