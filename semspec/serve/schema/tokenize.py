"""Bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from semspec.serve.schema.base import STRICT, Json, Lenient, Text, Tokens, without_neutral
from semspec.serve.schema.messages import Messages
from semspec.serve.schema.requests import ChatRequest
from semspec.serve.schema.tools import Tools
from semspec.text.tokenizer import Prompt


class TokenizeRequest(Lenient):
    model_config = STRICT
    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools = Field(default_factory=list)
    chat_template_kwargs: Json = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any) -> Any:
        return without_neutral(given, {"add_special_tokens": (True,)})

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either a prompt or messages")
        return self

    def chat(self, model: str) -> ChatRequest:
        """The chat that it is about."""
        own = self.model_dump(include={"tools", "chat_template_kwargs"})
        prompt = {} if self.continue_final_message else {"add_generation_prompt": self.add_generation_prompt}
        more = {"model": model, "continue_final_message": self.continue_final_message} | prompt
        return ChatRequest.model_validate({"messages": [m.model_dump() for m in self.messages or []]} | own | more)

    @property
    def to_encode(self) -> Prompt:
        return self.prompt if self.prompt is not None else [m.plain() for m in self.messages or []]


class DetokenizeRequest(Lenient):
    model_config = STRICT
    model: str | None = None
    tokens: Tokens
