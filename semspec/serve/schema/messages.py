"""Messages of a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from semspec.serve.schema.base import STRICT, Lenient, Text, at_most, without_neutral

MAX_MESSAGES = 4096
MAX_PARTS = 256  # of one message
NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "tool_calls": ([],),
    "function_call": (),
    "audio": (),
    "refusal": (),
}
"""The same for messages: openai's own, dumped, have all of them."""


class TextPart(BaseModel):
    model_config = STRICT
    type: Literal["text"]
    text: Text


class Message(Lenient):
    model_config = STRICT
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True), at_most(MAX_PARTS)] | None = None
    name: Text | None = None
    reasoning_content: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any) -> Any:
        return without_neutral(given, NEUTRAL_IN_MESSAGE)

    def plain(self) -> dict[str, Any]:
        """As chat templates know it."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content or []]
        role = "system" if self.role == "developer" else self.role
        optional = {"name": self.name, "reasoning_content": self.reasoning_content}
        return {"role": role, "content": "".join(parts)} | {k: v for k, v in optional.items() if v is not None}


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), at_most(MAX_MESSAGES)]
