"""Bodies of the completion endpoints. Fields that OpenAI has and this server has not are refused unless they ask for
nothing."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from semspec.serve.schema import sampling
from semspec.serve.schema.base import STRICT, Lenient, Text, Tokens, at_most, without_neutral
from semspec.serve.schema.messages import Messages
from semspec.serve.schema.speculation import Speculation
from semspec.text.tokenizer import Prompt

MAX_PROMPTS = 4096  # in one request; --max-choices says how many are answered
IGNORED = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"})
"""They change nothing about an answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "modalities": (["text"],),
    "suffix": ("",),
}
"""Fields we do not have, with the values that ask for nothing; sampling.py has more of them."""


class StreamOptions(Lenient):
    model_config = STRICT
    include_usage: bool = False


class RequestBase(sampling.SamplingFields):
    """What both kinds of completion have in common."""

    model_config = STRICT
    model: str
    n: Annotated[int, Field(ge=1)] = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    deadline: Annotated[float, Field(gt=0)] | None = Field(None, description="Seconds this request may take.")
    speculation: Speculation | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any) -> Any:
        found = without_neutral(given, sampling.NEUTRAL | NEUTRAL)
        return {k: v for k, v in found.items() if k not in IGNORED} if isinstance(found, dict) else found

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> RequestBase:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams; leave it out, or set stream")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(RequestBase):
    messages: Messages
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _agree(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if None not in (lengths := {self.max_tokens, self.max_completion_tokens}) and len(lengths) > 1:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompts(self) -> list[Prompt | list[int]]:
        return [[message.plain() for message in self.messages]]


def _kind(prompt: Any) -> str | None:
    """Which of its four forms a prompt has, by its first item: it is validated as that and nothing else."""
    if isinstance(prompt, list) and prompt:
        kinds = {str: "some texts", int: "token ids"}
        return kinds.get(type(prompt[0]), "lists of token ids")
    return "a text" if isinstance(prompt, str) else None


class CompletionRequest(RequestBase):
    prompt: Annotated[
        Annotated[Text, Tag("a text")]
        | Annotated[Tokens, Tag("token ids")]
        | Annotated[list[Text], Field(fail_fast=True), at_most(MAX_PROMPTS), Tag("some texts")]
        | Annotated[list[Tokens], Field(fail_fast=True), at_most(MAX_PROMPTS), Tag("lists of token ids")],
        Discriminator(_kind),
    ]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[Any]:
        return self.prompt if _kind(self.prompt) in ("some texts", "lists of token ids") else [self.prompt]  # type: ignore[return-value]


class TokenizeRequest(Lenient):
    model_config = STRICT
    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either a prompt or messages")
        return self

    @property
    def to_encode(self) -> Prompt:
        return self.prompt if self.prompt is not None else [m.plain() for m in self.messages or []]
