"""Messages of a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from semspec.serve.schema.base import STRICT, Lenient, Text, at_most, at_most_inside, without_neutral
from semspec.serve.schema.tools import MAX_TOOLS, ToolCall

MAX_MESSAGES = 4096
MAX_PARTS = 256  # of one message
MAX_INSIDE = 4096  # parts and calls of all of them
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "function_call": (),
    "audio": (),
    "refusal": (),
}
"""Fields of a message that we do not have, with the values that ask for nothing: openai's own, dumped, have them."""


class TextPart(BaseModel):
    model_config = STRICT
    type: Literal["text"]
    text: Text


Content = Text | Annotated[list[TextPart], Field(fail_fast=True), at_most(MAX_PARTS)]


class Message(Lenient):
    model_config = STRICT
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = Field(None, description="The same as reasoning_content.")
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True), at_most(MAX_TOOLS)] = Field(default_factory=list)
    tool_call_id: Annotated[str, Field(max_length=200)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any) -> Any:
        return without_neutral(given, NEUTRAL)

    @model_validator(mode="after")
    def _agree(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are made by the assistant; leave them out of other messages")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError("tool_call_id belongs to messages of the role tool")
        return self

    def plain(self) -> dict[str, Any]:
        """As chat templates know it; they differ in the name they have for thinking."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content or []]
        thought = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        optional: dict[str, Any] = {
            "name": self.name,
            "reasoning_content": thought,
            "thinking": thought,
            "tool_calls": [call.plain() for call in self.tool_calls] or None,
            "tool_call_id": self.tool_call_id,
        }
        return {"role": self.role, "content": "".join(parts)} | {k: v for k, v in optional.items() if v is not None}


Messages = Annotated[
    list[Message], Field(min_length=1, fail_fast=True), at_most_inside(MAX_INSIDE), at_most(MAX_MESSAGES)
]
