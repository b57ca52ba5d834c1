"""Bodies of /v1/responses, as chats."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from semspec.serve.schema.base import (
    STRICT,
    Count,
    Echo,
    Json,
    Lenient,
    Text,
    at_most,
    at_most_inside,
    joined,
    text_of,
    without_neutral,
)
from semspec.serve.schema.messages import MAX_INSIDE, MAX_MESSAGES, MAX_PARTS
from semspec.serve.schema.requests import IGNORED, ChatRequest, StreamOptions
from semspec.serve.schema.tools import MAX_TOOLS, Function, Name, Named

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([], ["reasoning.encrypted_content"]),
    "max_tool_calls": (),
    "prompt": (),
    "conversation": (),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "context_management": (),
}


class Part(Lenient):
    model_config = STRICT
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: Text
    annotations: Echo = None
    logprobs: Echo = None


Content = Text | Annotated[list[Part], Field(fail_fast=True), at_most(MAX_PARTS)]


class Item(Lenient):
    model_config = STRICT
    id: Echo = None
    status: Echo = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: Echo = None


class CallItem(Item):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(max_length=200)]
    name: Name
    arguments: Text
    namespace: Echo = None


class ResultItem(Item):
    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(max_length=200)]
    output: Content


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: Content | None = None
    content: Content | None = None
    encrypted_content: Echo = None


def _kind(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    return kind if isinstance(kind, str) else None


Items = Annotated[
    list[
        Annotated[
            Annotated[MessageItem, Tag("message")]
            | Annotated[CallItem, Tag("function_call")]
            | Annotated[ResultItem, Tag("function_call_output")]
            | Annotated[ReasoningItem, Tag("reasoning")],
            Discriminator(_kind),
        ]
    ],
    Field(min_length=1, fail_fast=True),
    at_most_inside(MAX_INSIDE),
    at_most(MAX_MESSAGES),
]


class ResponsesTool(Function):
    type: Literal["function"]


class NamedFunction(Named):
    type: Literal["function"]


class Reasoning(Lenient):
    model_config = STRICT
    effort: str | None = None
    summary: Echo = None
    generate_summary: Echo = None


class TextFormat(Lenient):
    model_config = STRICT
    format: Json | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(Lenient):
    model_config = STRICT | {"extra": "allow"}
    model: str
    input: Text | Items
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True), at_most(MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    text: TextFormat | None = None
    previous_response_id: str | None = None
    metadata: Json = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any) -> Any:
        found = without_neutral(given, NEUTRAL)
        if not isinstance(found, dict):
            return found
        return {k: v for k, v in found.items() if k == "metadata" or k not in IGNORED}

    @model_validator(mode="after")
    def _agree(self) -> ResponsesRequest:
        if self.previous_response_id is not None:
            raise ValueError("responses are not kept here; send the whole conversation as input")
        return self

    def chat(self, kind: type[ChatRequest]) -> ChatRequest:
        """The same as a chat; what is wrong with it is told in a chat's words."""
        given: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "system", "content": self.instructions}] if self.instructions else [],
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "parallel_tool_calls": self.parallel_tool_calls,
            "tools": [{"type": "function", "function": t.model_dump(exclude={"type"})} for t in self.tools],
            "tool_choice": self.tool_choice,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
        }
        if isinstance(self.tool_choice, NamedFunction):
            given["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        if self.text is not None and self.text.format is not None and self.text.format.get("type") != "text":
            schema = {k: v for k, v in self.text.format.items() if k != "type"}
            given["response_format"] = {"type": self.text.format.get("type")} | (
                {"json_schema": schema} if schema else {}
            )
        given["messages"] += _messages(self.input)
        return kind.model_validate(joined(given, self.model_extra or {}))

    def asked(self) -> dict[str, Any]:
        """What a response repeats of its request."""
        choice = self.tool_choice
        return {
            "instructions": self.instructions, "max_output_tokens": self.max_output_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "parallel_tool_calls": self.parallel_tool_calls,
            "tools": [tool.model_dump() for tool in self.tools],
            "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "text": {"format": self.text.format if self.text and self.text.format else {"type": "text"}},
            "metadata": self.metadata,
        }  # fmt: skip


def _messages(items: str | list[Any]) -> list[dict[str, Any]]:
    """Calls in a row are one message of the assistant, with the thinking before them."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    thought = ""
    for item in items:
        if isinstance(item, ReasoningItem):
            thought += text_of(item.content or item.summary or "")
        elif isinstance(item, MessageItem):
            messages.append({"role": item.role, "content": text_of(item.content)})
        elif isinstance(item, ResultItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.name, "arguments": item.arguments}
            messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
        if thought and messages and messages[-1]["role"] == "assistant" and not isinstance(item, ReasoningItem):
            messages[-1].setdefault("reasoning_content", thought)
            thought = ""
    return messages
