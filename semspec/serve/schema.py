"""What clients may send. Fields that OpenAI has and we have not are refused unless they ask for nothing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
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


def _well_formed(text: str) -> str:
    """JSON can spell halves of characters, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text has half a character in it (a lone surrogate); send whole ones") from None
    return text


Text = Annotated[str, AfterValidator(_well_formed)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[Text, Field(min_length=1, max_length=500)]


class StreamOptions(BaseModel):
    model_config = STRICT
    include_usage: bool = False


class Speculation(BaseModel):
    """How drafts are made and judged. The rule's own options (`theta`, `window`, ...) stand beside these."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    verifier: Annotated[str, Field(max_length=500)] | None = None
    off: bool = False
    num_draft_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    drafter: str | None = None
    draft_min_p: float | None = None
    draft_max_entropy: float | None = None
    relax_span: str | None = None
    loop_repeats: int | None = None
    loop_period: int | None = None
    detailed: bool = Field(False, description="Report every step: per_step_drafted, per_step_accepted.")
    trace: bool = Field(False, description="Say where every piece of text came from, and why relaxed tokens stand.")


class RequestBase(BaseModel):
    """What both kinds of completion have in common."""

    model_config = STRICT
    model: str
    n: Annotated[int, Field(ge=1)] = 1
    temperature: Annotated[float, Field(ge=0, le=100)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] = []
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    deadline: Annotated[float, Field(gt=0)] | None = Field(None, description="Seconds this request may take.")
    speculation: Speculation | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, nothing in NEUTRAL.items():
            if given.get(name) is not None and given[name] not in nothing:
                raise ValueError(f"{name} is not supported by this server; leave it out")
        return {k: v for k, v in given.items() if k not in IGNORED and k not in NEUTRAL}

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class TextPart(BaseModel):
    type: Literal["text"]
    text: Text


class Message(BaseModel):
    model_config = STRICT
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart] | None = None
    name: Text | None = None
    reasoning_content: Text | None = None
    refusal: None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates know it."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content or []]
        said: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": "".join(parts)}
        if self.reasoning_content is not None:
            said["reasoning_content"] = self.reasoning_content
        return said


Messages = Annotated[list[Message], Field(min_length=1)]


class ChatRequest(RequestBase):
    messages: Messages
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def wanted(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def rivals(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(RequestBase):
    prompt: (
        Text
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1)]
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def wanted(self) -> int | None:
        return self.max_tokens

    @property
    def rivals(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class TokenizeRequest(BaseModel):
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
