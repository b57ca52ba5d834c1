"""What clients may send. Fields that OpenAI has and this server has not are refused unless they ask for nothing.

Lists stop being validated at their first bad item, and long ones before it: a body of garbage must not hold up the
event loop.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    create_model,
    model_validator,
)

from semspec.options import Options
from semspec.text.tokenizer import Prompt

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
MAX_MESSAGES = 4096
MAX_PROMPTS = 4096  # in one request; --max-choices says how many are answered
MAX_PARTS = 256  # of one message
MAX_FIELDS = 64  # of one object
IGNORED = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"})
"""They change nothing about an answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
"""Fields we do not have, with the values that ask for nothing."""
NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "tool_calls": ([],),
    "function_call": (),
    "audio": (),
    "refusal": (),
}
"""The same for messages: openai's own, dumped, have all of them."""
SHARED = (
    "drafter",
    "num_draft_tokens",
    "draft_min_p",
    "draft_max_entropy",
    "relax_span",
    "loop_repeats",
    "loop_period",
)
"""Fields of `Options` that a request may set in `speculation`."""


def _well_formed(text: str) -> str:
    """JSON can spell halves of characters, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text has half a character in it (a lone surrogate); send whole ones") from None
    return text


def _at_most(count: int) -> BeforeValidator:
    """Checks a list's length before its items."""

    def check(items: Any) -> Any:
        if isinstance(items, list) and len(items) > count:
            raise ValueError(f"there are {len(items)} items; send at most {count}")
        return items

    return BeforeValidator(check)


def _without_neutral(given: Any, neutral: dict[str, tuple[Any, ...]]) -> Any:
    """Without fields that ask for nothing; those that ask for something we cannot do are refused."""
    if not isinstance(given, dict):
        return given
    for name, nothing in neutral.items():
        if given.get(name) is not None and given[name] not in nothing:
            raise ValueError(f"{name} is not supported by this server; leave it out")
    return {k: v for k, v in given.items() if k not in neutral}


def _without_null(given: Any) -> Any:
    """A null is as good as nothing, but for max_tokens, which it makes unlimited."""
    if not isinstance(given, dict):
        return given
    if len(given) > MAX_FIELDS:
        raise ValueError(f"there are {len(given)} fields; send at most {MAX_FIELDS}")
    return {k: v for k, v in given.items() if v is not None or k == "max_tokens"}


Text = Annotated[str, AfterValidator(_well_formed)]
Token = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
StopString = Annotated[Text, Field(min_length=1, max_length=500)]
Stops = Annotated[list[StopString], Field(fail_fast=True), _at_most(16)]


class Lenient(BaseModel):
    """Takes null for any field that has a default, and true and false for no number."""

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, given: Any) -> Any:
        found = _without_null(given)
        for name in [k for k, v in found.items() if isinstance(v, bool)] if isinstance(found, dict) else ():
            kind = cls.model_fields[name].annotation if name in cls.model_fields else bool
            if bool not in (kind, *get_args(kind)):
                raise ValueError(f"{name} is true or false, which it cannot be; give a number or a text")
        return found


class StreamOptions(Lenient):
    model_config = STRICT
    include_usage: bool = False


class SpeculationBase(Lenient):
    """How drafts are made and verified. The rule's own options (`theta`, `window`, ...) go beside these."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    verifier: Annotated[str, Field(max_length=500)] | None = None
    off: bool = False
    detailed: bool = Field(False, description="Report every round: per_step_drafted, per_step_accepted.")
    trace: bool = Field(False, description="Report where each piece of text came from, and why tokens were relaxed.")


_HINTS = get_type_hints(Options)
Speculation = create_model(
    "Speculation",
    __base__=SpeculationBase,
    __doc__=SpeculationBase.__doc__,
    **{name: (_HINTS[name] | None, None) for name in SHARED},  # type: ignore[call-overload]
)


class RequestBase(Lenient):
    """What both kinds of completion have in common."""

    model_config = STRICT
    model: str
    n: Annotated[int, Field(ge=1)] = 1
    temperature: Annotated[float, Field(ge=0, le=100)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopString | Stops | None = None
    stop_token_ids: Annotated[list[Token], Field(fail_fast=True), _at_most(64)] = []
    ignore_eos: bool = False
    max_thinking_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="Tokens of thinking after which its end is forced and the answer follows."
    )
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    deadline: Annotated[float, Field(gt=0)] | None = Field(None, description="Seconds this request may take.")
    speculation: Speculation | None = None  # type: ignore[valid-type]

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any) -> Any:
        found = _without_neutral(given, NEUTRAL)
        return {k: v for k, v in found.items() if k not in IGNORED} if isinstance(found, dict) else found

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> RequestBase:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams; leave it out, or set stream")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class TextPart(BaseModel):
    model_config = STRICT
    type: Literal["text"]
    text: Text


class Message(Lenient):
    model_config = STRICT
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True), _at_most(MAX_PARTS)] | None = None
    name: Text | None = None
    reasoning_content: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any) -> Any:
        return _without_neutral(given, NEUTRAL_IN_MESSAGE)

    def plain(self) -> dict[str, Any]:
        """As chat templates know it."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content or []]
        role = "system" if self.role == "developer" else self.role
        optional = {"name": self.name, "reasoning_content": self.reasoning_content}
        return {"role": role, "content": "".join(parts)} | {k: v for k, v in optional.items() if v is not None}


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), _at_most(MAX_MESSAGES)]


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
        | Annotated[list[Text], Field(fail_fast=True), _at_most(MAX_PROMPTS), Tag("some texts")]
        | Annotated[list[Tokens], Field(fail_fast=True), _at_most(MAX_PROMPTS), Tag("lists of token ids")],
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
