"""Every option of a request, validated before any model is loaded."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from semspec import draft, verify
from semspec.draft import DrafterKind, EarlyExit
from semspec.errors import BadRequest, did_you_mean
from semspec.loop.draft_length import MAX_DRAFT_TOKENS
from semspec.loop.repetition import PERIOD, REPEATS, RepetitionGuard
from semspec.profile import Profile
from semspec.sampling.logit_options import LogitOptions
from semspec.text.structured import grammar_of
from semspec.types import Sampling
from semspec.verify import Rule

AUTO = "auto"
REPEATABLE = "auto-repeatable"
DRAFTERS = (AUTO, *draft.REGISTRY)
NUMBERS = (
    "num_draft_tokens", "max_new_tokens", "max_thinking_tokens", "top_k", "seed", "logprobs", "prompt_logprobs",
    "prompt_logprobs_last",
)  # fmt: skip
LONGEST_DRAFT = 512  # of an automatic length, which weighs every length up to it in every round


@dataclass(frozen=True, slots=True)
class Options:
    """How to answer one prompt."""

    verifier: str | Rule = "exact"
    drafter: str = AUTO  # a name, perhaps with options; auto: the draft model if there is one, else ngram
    num_draft_tokens: int | str | None = None  # None: the verifier's default; "auto", "auto-repeatable": adaptive
    max_draft_tokens: int = MAX_DRAFT_TOKENS  # of an adaptive length
    draft_min_p: float = 0.0  # a draft ends before a token whose top probability is below this; 0: off
    draft_max_entropy: float | None = None  # or whose entropy is above this many nats
    max_new_tokens: int | None = None  # default: 256, or what fits in the context if that is less
    max_thinking_tokens: int | None = None  # then the end of thinking is forced, and the answer follows
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # default: a fresh one, reported in the result
    stop: str | tuple[str, ...] | list[str] = ()
    include_stop: bool = False  # the stop string that ends the text belongs to it
    stop_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    cache_salt: str = ""  # cached beginnings of prompts are shared by requests with the same salt only
    min_tokens: int = 0  # nothing ends the text before so many
    presence_penalty: float = 0.0  # subtracted from the logits of new tokens that have occurred
    frequency_penalty: float = 0.0  # and this for each time
    repetition_penalty: float = 1.0  # logits of tokens that have occurred, in the prompt too, shrink by this factor
    logit_bias: dict[int, float] | None = None  # added to the logits of these tokens
    bad_words: tuple[str, ...] | list[str] = ()  # texts whose tokens are not written
    allowed_token_ids: tuple[int, ...] | list[int] | None = None  # None: all
    structured_outputs: dict[str, Any] | None = None  # what the answer has to be: one of json (a schema), json_object
    # (true), regex, choice (a list of texts), grammar (Lark); what a model thinks is left free
    logprobs: int | None = None  # report each token's logprob, with this many top logprobs
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    prompt_logprobs_last: int | None = None  # for its last ones only: what is before them may come from a cache
    referee: Callable[[str, str], bool] | None = None  # for `oracle`: (text so far, step) -> whether the step is valid
    relax_span: str = "all"  # where a lossy verifier may relax: all, or thinking (between the model's thinking markers)
    loop_repeats: int = REPEATS  # copies of a block in a row after which `exact` replaces a lossy verifier; 0: off
    loop_period: int = PERIOD  # tokens of the longest such block
    count_entropy: bool = False  # of the target, in the stats; a profile counts it by itself
    profile: Profile | None = None  # a calibrated verifier; what it sets cannot be set beside it
    allow_lossy: bool = True  # False: refuse verifiers that do not keep the target's distribution

    def __post_init__(self) -> None:
        """Refuse what cannot work with any model."""
        for name in NUMBERS:
            value = getattr(self, name)
            if name == "num_draft_tokens" and isinstance(value, str):
                if value not in (AUTO, REPEATABLE):
                    raise BadRequest(f"num_draft_tokens is {value!r}; give a whole number, {AUTO} or {REPEATABLE}")
            elif value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise BadRequest(f"{name} is {value!r}; give a whole number")
        for name in ("loop_repeats", "loop_period", "max_draft_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise BadRequest(f"{name} is {value!r}; give a whole number")
        for name in ("temperature", "top_p", "min_p", "draft_min_p", "draft_max_entropy"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number and not (name == "draft_max_entropy" and value is None):
                raise BadRequest(f"{name} is {value!r}; give a number")
        if not isinstance(self.stop, str) and not _all_of(self.stop, str):
            raise BadRequest(f"stop is {self.stop!r}; give a text or a list of texts")
        if not _all_of(self.stop_ids, int):
            raise BadRequest(f"stop_ids is {self.stop_ids!r}; give a list of token ids")
        if isinstance(self.num_draft_tokens, int) and self.num_draft_tokens < 1:
            raise BadRequest(
                f"num_draft_tokens is {self.num_draft_tokens}; give 1 or more, or use verifier 'none' for no drafts"
            )
        if not 1 <= self.max_draft_tokens <= LONGEST_DRAFT:
            raise BadRequest(f"max_draft_tokens is {self.max_draft_tokens}; give 1 to {LONGEST_DRAFT}")
        minimum = 1 if self.prompt_logprobs is None else 0  # a prompt may be scored and not continued
        if self.max_new_tokens is not None and self.max_new_tokens < minimum:
            raise BadRequest(f"max_new_tokens is {self.max_new_tokens}; give {minimum} or more")
        if self.max_thinking_tokens is not None and self.max_thinking_tokens < 0:
            raise BadRequest(f"max_thinking_tokens is {self.max_thinking_tokens}; give 0 or more")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 20:
                raise BadRequest(f"{name} is {value}; give 0 to 20 top logprobs to report for each token")
        if self.prompt_logprobs_last is not None and self.prompt_logprobs_last < 1:
            raise BadRequest(f"prompt_logprobs_last is {self.prompt_logprobs_last}; give 1 or more tokens")
        if not all(self.stop_strings):
            raise BadRequest("a stop string is empty, which would end every answer at once; leave it out")
        kind = self.drafter_kind
        if self.relax_span not in ("all", "thinking"):
            raise BadRequest(f"relax_span is {self.relax_span!r}; give all or thinking")
        self.repetition_guard()
        if self.early_exit.enabled and kind and kind.looks_up:
            raise BadRequest("a lookup is never unsure; draft_min_p and draft_max_entropy need a draft model")
        self.sampling()
        self.logit_options()
        self.grammar()
        rule = verify.make(self.verifier)
        if isinstance(length := self.draft_length(), int):
            rule.for_draft_length(length)
        elif rule.min_draft_tokens() > LONGEST_DRAFT:
            raise BadRequest(
                f"verifier {rule.name!r} with these options needs drafts of {rule.min_draft_tokens()} tokens, and "
                f"automatic ones have at most {LONGEST_DRAFT}; give num_draft_tokens as a number"
            )
        if self.profile is not None and (not isinstance(self.profile, Profile) or self.profile.rule != rule):
            raise BadRequest(
                "the profile is for another verifier than this request names; take the profile's own settings "
                "(Profile.settings), or leave it out"
            )
        if getattr(rule, "refereed", False) and self.referee is None:
            raise BadRequest(
                f"verifier {rule.name!r} asks a referee which steps are valid; give one with `referee`, or use a task "
                "that has one, such as pocket"
            )
        if rule.unit == "step" and kind and not kind.needs_model:
            raise BadRequest(
                f"verifier {rule.name!r} verifies reasoning steps, which need a draft model, not {kind.name!r}"
            )
        if not rule.lossless and not self.allow_lossy:
            raise lossy_refused(rule, "allow_lossy is off", "allow lossy ones")

    def for_sequence(self, max_new_tokens: int, seed: int | None) -> Options:
        """The same for one of a request's sequences, with these two, which are good; nothing is checked again."""
        found = copy.copy(self)
        object.__setattr__(found, "max_new_tokens", max_new_tokens)
        object.__setattr__(found, "seed", seed)
        return found

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def drafter_kind(self) -> DrafterKind | None:
        """None: the draft model if the pair has one, else ngram."""
        if self.drafter == AUTO:
            return None
        if not isinstance(self.drafter, str) or self.drafter.partition(":")[0] not in draft.REGISTRY:
            names = AUTO, *sorted(draft.REGISTRY)
            near = did_you_mean(str(self.drafter).partition(":")[0], names)
            known = f"the drafters are: {', '.join(names)}{near and f'; {near}'}"
            raise BadRequest(f"there is no drafter {self.drafter!r:.80}; {known}")
        return draft.REGISTRY.make(self.drafter)

    @property
    def early_exit(self) -> EarlyExit:
        return EarlyExit(self.draft_min_p, self.draft_max_entropy)

    def repetition_guard(self) -> RepetitionGuard:
        return RepetitionGuard(self.loop_repeats, self.loop_period)

    def draft_length(self) -> int | str:
        """The requested draft length, or the verifier's default: automatic where the text is the same with any."""
        if self.num_draft_tokens is not None:
            return self.num_draft_tokens
        rule = verify.make(self.verifier)
        return AUTO if rule.same_text else rule.default_draft_tokens()

    def sampling(self) -> Sampling:
        seed = secrets.randbits(62) if self.seed is None else self.seed
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, seed)

    def grammar(self) -> str | None:
        return None if self.structured_outputs is None else grammar_of(self.structured_outputs)

    def logit_options(self) -> LogitOptions:
        return LogitOptions(**{f.name: getattr(self, f.name) for f in fields(LogitOptions)})


def _all_of(values: Any, kind: type) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(v, kind) for v in values)


def lossy_refused(rule: verify.Rule, why: str, what_to_do: str) -> BadRequest:
    return BadRequest(
        f"verifier {rule.name!r} may change what the target would have written, and {why}; "
        f"choose a lossless verifier (exact, sampling, block) or {what_to_do}"
    )
