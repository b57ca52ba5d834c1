"""Bodies of the completion endpoints. Fields that OpenAI has and this server has not are refused unless they ask for
nothing."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, PrivateAttr, Tag, model_validator

from semspec.options import Options
from semspec.serve.schema import sampling
from semspec.serve.schema.base import MAX_COUNT, STRICT, Count, Json, Lenient, Text, Tokens, at_most, without_neutral
from semspec.serve.schema.messages import Message, Messages
from semspec.serve.schema.speculation import Speculation
from semspec.serve.schema.tools import NamedChoice, ToolChoice, Tools
from semspec.text.tokenizer import Prompt

MAX_PROMPTS = 4096  # in one request; --max-choices says how many are answered
IGNORED = frozenset({
    "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier",
    "prompt_cache_retention", "request_id"})  # fmt: skip
"""They change nothing about an answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "suffix": ("",),
    "verbosity": ("medium",),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True, False),
    "include_reasoning": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "prediction": (),
    "web_search_options": (),
    "truncate_prompt_tokens": (-1,),
}
"""Fields that a body does not have, with the values that ask for nothing."""
MAX_VARIABLES = 10_000  # characters of chat_template_kwargs, as JSON
log = logging.getLogger("semspec.serve")


class StreamOptions(Lenient):
    model_config = STRICT
    include_usage: bool = False
    include_obfuscation: bool = Field(False, description="Taken, and without effect: nothing is added to chunks.")
    continuous_usage_stats: Literal[False] = False


class RequestBase(sampling.SamplingFields):
    """What both kinds of completion have in common."""

    model_config = STRICT
    model: str
    n: Count = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    deadline: Annotated[float, Field(gt=0)] | None = Field(None, description="Seconds this request may take.")
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = Field(
        0, description="Of a client's own requests, those with lower numbers come first."
    )
    speculation: Speculation | None = None
    ignore_unknown: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        found = {k: v for k, v in given.items() if k not in IGNORED}
        if cls.ignore_unknown:
            found = cls._without_unknown(found)
        return without_neutral(found, {k: v for k, v in NEUTRAL.items() if k not in cls.model_fields})

    @classmethod
    def _without_unknown(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Without fields that nothing here knows, in messages too; the log says which they were."""
        found = {k: v for k, v in given.items() if k in cls.model_fields}
        unknown = {k for k in given if k not in found}
        if isinstance(messages := found.get("messages"), list):
            known = Message.model_fields
            unknown |= {f"messages.{k}" for m in messages if isinstance(m, dict) for k in m if k not in known}
            found["messages"] = [{k: m[k] for k in m if k in known} if isinstance(m, dict) else m for m in messages]
        if unknown:
            log.info("ignored", extra={"fields": {"fields": sorted(name[:64] for name in unknown)[:16]}})
        return found

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> RequestBase:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams; leave it out, or set stream")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs are not for streams; leave out one of them")
        if self.prompt_logprobs_last is not None and not self.prompt_forms:
            raise ValueError("prompt_logprobs_last is about logprobs of the prompt, and none are asked for")
        return self

    @property
    def candidates(self) -> int:
        """How many answers to each prompt are made."""
        return self.n

    @property
    def prompt_forms(self) -> frozenset[str]:
        """How the prompt's logprobs are told: by themselves, or before those of the answer."""
        return frozenset() if self.prompt_logprobs is None else frozenset({"prompt"})

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(RequestBase):
    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: Annotated[Json, at_most(64)] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    _length_gives_way: bool = PrivateAttr(False)  # max_tokens may be more than there is room for

    @model_validator(mode="after")
    def _agree(self) -> ChatRequest:
        prompts = self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and prompts:
            raise ValueError("add_generation_prompt and continue_final_message exclude each other")
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice is required, and there are no tools")
        if self.named is not None and self.named not in {tool.function.name for tool in self.tools}:
            raise ValueError("tool_choice names a function that is not among the tools")
        if len(json.dumps(self.chat_template_kwargs)) > MAX_VARIABLES:
            raise ValueError(f"chat_template_kwargs are longer than {MAX_VARIABLES} characters")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if None not in (lengths := {self.max_tokens, self.max_completion_tokens}) and len(lengths) > 1:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        return self

    @property
    def length_gives_way(self) -> bool:
        return self._length_gives_way

    def giving_way(self) -> ChatRequest:
        """The same with a max_tokens that gives way to the server's limits: where clients have to send one."""
        self._length_gives_way = True
        return self

    @property
    def named(self) -> str | None:
        """The function that has to be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedChoice) else None

    @property
    def uses_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

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
    max_tokens: Annotated[int, Field(ge=0, lt=MAX_COUNT)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = Field(False, description="The answer begins with the prompt.")
    best_of: Count | None = Field(
        None, description="So many answers are made, and the n likeliest are sent; not for streams."
    )

    @model_validator(mode="after")
    def _agree(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0, which leaves nothing to do; give 1 or more, or set echo")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of is {self.best_of}, less than n, which is {self.n}")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise ValueError("the best of several answers is known when all are complete; leave out stream or best_of")
        return self

    @property
    def candidates(self) -> int:
        return self.best_of or self.n

    @property
    def prompt_forms(self) -> frozenset[str]:
        return super().prompt_forms | ({"echo"} if self.echo and self.logprobs is not None else set())

    def onto(self, options: Options) -> Options:
        """Whoever wants the prompt again wants its logprobs with those of the answer."""
        options = super().onto(options)
        if not self.echo or options.prompt_logprobs is not None or (self.logprobs is None and self.max_tokens):
            return options
        return replace(options, prompt_logprobs=self.logprobs or 0)

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs if self.candidates == self.n else self.logprobs or 0

    @property
    def prompts(self) -> list[Any]:
        return self.prompt if _kind(self.prompt) in ("some texts", "lists of token ids") else [self.prompt]  # type: ignore[return-value]


def taking_unknown(kind: type[RequestBase]) -> type[RequestBase]:
    """The same body, with fields that nothing here knows left out instead of refused."""
    own = {"ignore_unknown": True, "__annotations__": {"ignore_unknown": ClassVar[bool]}, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), own)
