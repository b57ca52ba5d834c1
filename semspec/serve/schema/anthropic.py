"""Bodies of /v1/messages, and of the count of their tokens, as chats."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from semspec.serve.schema.base import (
    MAX_COUNT,
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
from semspec.serve.schema.requests import ChatRequest
from semspec.serve.schema.sampling import Stops
from semspec.serve.schema.tools import MAX_TOOLS, Name

NEUTRAL: dict[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],), "context_management": ()}
IGNORED = ("metadata", "service_tier", "cache_control", "betas", "inference_geo")


class Block(Lenient):
    model_config = STRICT
    cache_control: Echo = None


class TextBlock(Block):
    type: Literal["text"]
    text: Text
    citations: Echo = None


Texts = Text | Annotated[list[TextBlock], Field(fail_fast=True), at_most(MAX_PARTS)]


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: Text
    signature: Echo = None


class ToolUse(Block):
    type: Literal["tool_use"]
    id: Annotated[str, Field(max_length=200)]
    name: Name
    input: Json
    caller: Echo = None


class ToolResult(Block):
    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(max_length=200)]
    content: Texts = ""
    is_error: bool = False


def _kind(block: Any) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if isinstance(kind, str) else None


Blocks = Annotated[
    list[
        Annotated[
            Annotated[TextBlock, Tag("text")]
            | Annotated[ThinkingBlock, Tag("thinking")]
            | Annotated[ToolUse, Tag("tool_use")]
            | Annotated[ToolResult, Tag("tool_result")],
            Discriminator(_kind),
        ]
    ],
    Field(fail_fast=True),
    at_most(MAX_PARTS),
]


class Turn(Lenient):
    model_config = STRICT
    role: Literal["user", "assistant", "system"]
    content: Text | Blocks

    def messages(self) -> list[dict[str, Any]]:
        """Results of tools are messages of their own."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results = [
            {"role": "tool", "tool_call_id": b.tool_use_id, "content": text_of(b.content)}
            for b in self.content
            if isinstance(b, ToolResult)
        ]
        rest = [b for b in self.content if not isinstance(b, ToolResult)]
        if not rest and results:
            return results
        message: dict[str, Any] = {"role": self.role}
        message["content"] = "".join(b.text for b in rest if isinstance(b, TextBlock))
        if thought := "".join(b.thinking for b in rest if isinstance(b, ThinkingBlock)):
            message["reasoning_content"] = thought
        if calls := [b for b in rest if isinstance(b, ToolUse)]:
            message["tool_calls"] = [
                {"id": b.id, "function": {"name": b.name, "arguments": json.dumps(b.input)}} for b in calls
            ]
        return [*results, message]


class MessagesTool(Lenient):
    model_config = STRICT
    type: Literal["custom"] = "custom"
    name: Name
    description: Text | None = None
    input_schema: Json
    cache_control: Echo = None
    strict: bool | None = None


class Choice(Lenient):
    model_config = STRICT
    type: Literal["auto", "any", "none", "tool"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False


class ThinkingOption(Lenient):
    model_config = STRICT
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, lt=MAX_COUNT)] | None = None
    display: Echo = None


class MessagesRequest(Lenient):
    model_config = STRICT | {"extra": "allow"}
    model: str
    max_tokens: Count
    messages: Annotated[
        list[Turn], Field(min_length=1, fail_fast=True), at_most_inside(MAX_INSIDE), at_most(MAX_MESSAGES)
    ]
    system: Texts | None = None
    stop_sequences: Stops = Field(default_factory=list)
    stream: bool = False
    tools: Annotated[list[MessagesTool], Field(fail_fast=True), at_most(MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Choice | None = None
    thinking: ThinkingOption | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any) -> Any:
        found = without_neutral(given, NEUTRAL)
        return {k: v for k, v in found.items() if k not in IGNORED} if isinstance(found, dict) else found

    def chat(self, kind: type[ChatRequest]) -> ChatRequest:
        given: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "system", "content": text_of(self.system)}] if self.system else [],
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
            "stream": self.stream,
            "tools": [
                {"type": "function", "function": {
                    "name": t.name, "description": t.description, "parameters": t.input_schema}}
                for t in self.tools
            ],
        }  # fmt: skip
        if (choice := self.tool_choice) is not None:
            given["parallel_tool_calls"] = not choice.disable_parallel_tool_use
            given["tool_choice"] = {"any": "required"}.get(choice.type, choice.type)
            if choice.type == "tool":
                given["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        if self.thinking is not None and self.thinking.type == "enabled":
            given["max_thinking_tokens"] = self.thinking.budget_tokens
        if self.thinking is not None and self.thinking.type == "disabled":
            given["reasoning_effort"] = "none"
        given["messages"] += [message for turn in self.messages for message in turn.messages()]
        last, more = given["messages"][-1], self.model_extra or {}
        if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
            more = {"continue_final_message": True} | more  # the answer goes on from it
        return kind.model_validate(joined(given, more)).giving_way()


class CountRequest(MessagesRequest):
    """The same, before anybody has decided how long the answer may be."""

    max_tokens: Count | None = None  # type: ignore[assignment]
