"""Bodies of Ollama's API: /api/chat and /api/generate as chats and completions, and /api/show."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from semspec.serve.schema.base import (
    STRICT,
    Echo,
    Json,
    Lenient,
    Text,
    at_most,
    at_most_inside,
    joined,
    without_neutral,
)
from semspec.serve.schema.messages import MAX_INSIDE, MAX_MESSAGES
from semspec.serve.schema.requests import ChatRequest, CompletionRequest
from semspec.serve.schema.tools import MAX_TOOLS, Tool

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "images": ([],), "suffix": ("",), "template": ("",), "context": ([],), "logprobs": (False,), "top_logprobs": (0,),
}  # fmt: skip
IGNORED = (
    "keep_alive", "num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread", "numa", "num_keep",
    "low_vram", "f16_kv", "vocab_only", "use_mlock", "logits_all", "mirostat_tau", "mirostat_eta",
)  # fmt: skip
"""They are settings of a server, or tune one, or a sampler that is off."""
OFF: dict[str, tuple[Any, ...]] = {"mirostat": (0,), "tfs_z": (1,), "typical_p": (1,), "repeat_last_n": (-1,)}
"""Options that we do not have, with the values that ask for nothing: penalties look at all of a text."""
LATEST = ":latest"  # which Ollama's clients add to a model's name
SAMPLING = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}  # other options have our names


class CalledFunction(Lenient):
    model_config = STRICT
    name: str
    arguments: Json = Field(default_factory=dict)
    index: int | None = None


class OllamaCall(Lenient):
    model_config = STRICT
    id: str | None = None
    type: str | None = None
    function: CalledFunction


def _no_images(given: Any) -> Any:
    if given:
        raise ValueError("this server's model reads text alone; leave images out")
    return given


class OllamaMessage(Lenient):
    model_config = STRICT
    role: str
    content: Text = ""
    thinking: Text | None = None
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True), at_most(MAX_TOOLS)] = Field(default_factory=list)
    tool_name: Text | None = None
    tool_call_id: str | None = None
    images: Annotated[list[str], Field(max_length=0), BeforeValidator(_no_images)] = Field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": self.content, "reasoning_content": self.thinking}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": c.id, "function": {"name": c.function.name, "arguments": json.dumps(c.function.arguments)}}
                for c in self.tool_calls
            ]
        return message | {"name": self.tool_name, "tool_call_id": self.tool_call_id}


class OllamaRequest(Lenient):
    model_config = STRICT
    model: str
    stream: bool = True
    format: str | Json | None = Field(None, description="json, or a JSON schema.")
    think: bool | str | None = None
    options: Json = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any) -> Any:
        found = without_neutral(given, NEUTRAL)
        if not isinstance(found, dict):
            return found
        options = {"options": without_neutral(found["options"], OFF)} if "options" in found else {}
        return {k: v for k, v in (found | options).items() if k not in IGNORED}

    @property
    def name(self) -> str:
        return self.model.removesuffix(LATEST)

    def with_options(self, own: dict[str, Any]) -> dict[str, Any]:
        """A negative num_predict means as much as there is room for."""
        options: dict[str, Any] = {}
        for name, value in self.options.items():
            if name not in IGNORED and value is not None:
                options = joined(options, {SAMPLING.get(name, name): value})
        if isinstance(wanted := options.get("max_tokens"), int) and wanted < 0:
            options["max_tokens"] = None
        own |= {"model": self.name, "stream": self.stream}
        if isinstance(self.format, dict):
            own["response_format"] = {"type": "json_schema", "json_schema": {"name": "it", "schema": self.format}}
        elif self.format:
            own["response_format"] = {"type": "json_object" if self.format == "json" else self.format}
        return joined(own, {"max_tokens": None} | options)

    def thinks(self) -> dict[str, Any]:
        if isinstance(self.think, str):
            return {"reasoning_effort": self.think}
        return {"reasoning_effort": "none"} if self.think is False else {}


class OllamaChat(OllamaRequest):
    messages: Annotated[
        list[OllamaMessage], Field(fail_fast=True), at_most_inside(MAX_INSIDE), at_most(MAX_MESSAGES)
    ] = Field(default_factory=list, description="None: the answer only says that the model is loaded.")
    tools: Annotated[list[Tool], Field(fail_fast=True), at_most(MAX_TOOLS)] = Field(default_factory=list)

    def chat(self, kind: type[ChatRequest]) -> ChatRequest:
        given = {"messages": [m.plain() for m in self.messages], "tools": [t.model_dump() for t in self.tools]}
        return kind.model_validate(self.with_options(given | self.thinks()))


class OllamaGenerate(OllamaRequest):
    prompt: Text = Field("", description="Empty: the answer only says that the model is loaded.")
    system: Text | None = None
    raw: bool = False

    @model_validator(mode="after")
    def _raw_is_all(self) -> OllamaGenerate:
        if self.raw and (self.system or self.think):
            raise ValueError("raw goes on with the prompt as it is; leave system and think out")
        return self

    def chat(self, kind: type[ChatRequest]) -> ChatRequest:
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt}]
        return kind.model_validate(self.with_options({"messages": messages} | self.thinks()))

    def completion(self, kind: type[CompletionRequest]) -> CompletionRequest:
        return kind.model_validate(self.with_options({"prompt": self.prompt}))


class OllamaShow(Lenient):
    model_config = STRICT
    model: str | None = None
    name: str | None = Field(None, description="The same as model, for clients that are older.")
    verbose: bool = Field(False, description="Taken, and without effect.")
    options: Echo = None
    system: Echo = None
    template: Echo = None

    @model_validator(mode="after")
    def _one_name(self) -> OllamaShow:
        if len({self.model, self.name} - {None}) != 1:
            raise ValueError("give the model's name, as model")
        return self

    @property
    def wanted(self) -> str:
        return ((self.name if self.model is None else self.model) or "").removesuffix(LATEST)
