"""How tokens are chosen and where an answer ends, from a request's fields to `Options`."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated

from pydantic import AfterValidator, Field

from semspec.options import Options
from semspec.sampling.logit_options import (
    MAX_BAD_WORD,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASES,
    MAX_PENALTY,
    LogitOptions,
)
from semspec.serve.schema.base import Lenient, Text, Token, Tokens, at_most
from semspec.serve.schema.structured import StructuredFields

MIN_TEMPERATURE = 1e-4  # below it, logits divided by it leave nothing but the greedy choice
StopString = Annotated[Text, Field(min_length=1, max_length=500)]
LOGIT_OPTIONS = tuple(f.name for f in fields(LogitOptions))
TokenKey = Annotated[str, Field(pattern="^[0-9]{1,10}$")]  # a token id, as JSON's keys are
BadWord = Annotated[Text, Field(min_length=1, max_length=MAX_BAD_WORD, pattern=r"\S")]
MAX_ALLOWED = 1 << 18  # allowed_token_ids, each counted as often as it is sent: as many as large vocabularies have
Stops = Annotated[list[StopString], Field(fail_fast=True), at_most(16)]


def _once(tokens: list[int]) -> list[int]:
    """Each of them once, so that there are no more than the vocabulary has."""
    return list(dict.fromkeys(tokens))


class SamplingFields(Lenient, StructuredFields):
    temperature: Annotated[float, Field(ge=0, le=100)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopString | Stops | None = None
    stop_token_ids: Annotated[list[Token], Field(fail_fast=True), at_most(64)] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    cache_salt: Annotated[str, Field(max_length=200)] | None = Field(
        None, description="Cached prompts are shared by requests with the same salt only."
    )
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = Field(0, description="Nothing ends the answer before so many.")
    presence_penalty: Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    logit_bias: Annotated[dict[TokenKey, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]], at_most(MAX_BIASES)] = (
        Field(default_factory=dict)
    )
    bad_words: Annotated[list[BadWord], Field(fail_fast=True), at_most(MAX_BAD_WORDS)] = Field(default_factory=list)
    allowed_token_ids: Annotated[Tokens, AfterValidator(_once), at_most(MAX_ALLOWED)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="Logprobs of the prompt's tokens, with so many of the likeliest; not for streams."
    )
    prompt_logprobs_last: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="Those of its last tokens only; what is before them may then come from a cache."
    )
    max_thinking_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="Tokens of thinking after which its end is forced and the answer follows."
    )

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def onto(self, options: Options) -> Options:
        """The options, changed as the request asks."""
        temperature = 1.0 if self.temperature is None else self.temperature
        return replace(
            options,
            temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k, 0),  # -1 means off in vLLM
            min_p=self.min_p,
            stop=self.stops,
            stop_ids=self.stop_token_ids,
            include_stop=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            cache_salt=self.cache_salt or "",
            max_thinking_tokens=self.max_thinking_tokens,
            prompt_logprobs=self.prompt_logprobs,
            prompt_logprobs_last=self.prompt_logprobs_last,
            structured_outputs=self.structured(),
            **{name: getattr(self, name) for name in LOGIT_OPTIONS},
        )
