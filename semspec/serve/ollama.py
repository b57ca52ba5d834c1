"""Answers of /api/chat and /api/generate, as Ollama gives them: one JSON object a line; and what it tells of models."""

from __future__ import annotations

import datetime
from typing import Any

from semspec.serve.answers import Answer, parsed, written
from semspec.serve.deltas import Delta, Finished
from semspec.serve.http_errors import HttpError
from semspec.serve.schema.ollama import LATEST

NANO = 1e9  # durations are in nanoseconds
DETAILS = {
    "parent_model": "", "format": "semspec", "family": "semspec", "families": ["semspec"], "parameter_size": "",
    "quantization_level": "",
}  # fmt: skip
NEVER = "9999-12-31T23:59:59Z"  # when the model is unloaded


class OllamaAnswer(Answer):
    """A chat's answer; its subclass has the shape for texts."""

    prefix = "ollama"
    media_type = "application/x-ndjson"

    def line(self, data: dict[str, Any]) -> str:
        return written(data) + "\n"

    def take(self, message: Delta | Finished) -> None:
        self.chunks(message)

    def chunks(self, message: Delta | Finished) -> list[dict[str, Any]]:
        if isinstance(message, Finished):
            self.finished.append(message)
            return []
        choice = self.choices[0]
        _, shown = choice.add(message)
        # Calls are sent whole, when all of them are.
        calls = choice.calls if message.finish is not None else []
        texts = {kind: "".join(s.text for s in shown if s.kind == kind) for kind in ("content", "reasoning")}
        return [self._said(texts, calls)] if any(texts.values()) or calls else []

    def failure(self, error: HttpError) -> list[dict[str, Any]]:
        return [error.body_at("/api/chat")]

    def closing(self) -> list[dict[str, Any]]:
        return [self._said({"content": "", "reasoning": ""}, []) | self._ended()]

    def whole(self) -> dict[str, Any]:
        choice = self.choices[0]
        return self._said(choice.texts, choice.calls) | self._ended()

    def _said(self, texts: dict[str, str], calls: list[Any]) -> dict[str, Any]:
        return self._head() | {"message": self._words(texts, calls), "done": False}

    def _words(self, texts: dict[str, str], calls: list[Any]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": texts["content"]}
        if texts["reasoning"]:
            message["thinking"] = texts["reasoning"]
        if calls:
            message["tool_calls"] = [
                {"function": {"index": i, "name": call.name, "arguments": parsed(call.arguments)}}
                for i, call in enumerate(calls)
            ]
        return message

    def _head(self) -> dict[str, Any]:
        return {"model": self.model, "created_at": datetime.datetime.now(datetime.UTC).isoformat()}

    def _ended(self) -> dict[str, Any]:
        (end,) = self.finished
        return {
            "done": True, "done_reason": "length" if end.outcome in ("length", "thinking") else "stop",
            "total_duration": int(end.seconds * NANO), "load_duration": 0,
            "prompt_eval_count": end.prompt_tokens,
            "prompt_eval_duration": int((end.first_token - end.queued) * NANO),
            "eval_count": end.stats.tokens, "eval_duration": int((end.seconds - end.first_token) * NANO),
        }  # fmt: skip


class OllamaTextAnswer(OllamaAnswer):
    def _said(self, texts: dict[str, str], calls: list[Any]) -> dict[str, Any]:
        thinking = {"thinking": texts["reasoning"]} if texts["reasoning"] else {}
        return self._head() | {"response": texts["content"], **thinking, "done": False}


def loaded(kind: type[OllamaAnswer], model: str) -> dict[str, Any]:
    """What a client gets that asks nothing: Ollama's own do so to have a model loaded."""
    return kind("", model, [], 1)._said({"content": "", "reasoning": ""}, []) | {"done": True, "done_reason": "load"}


def listed(card: dict[str, Any]) -> dict[str, Any]:
    """The model in a list; what is not known of it is empty, since clients read every field."""
    name = card["id"] + LATEST
    return {
        "name": name, "model": name, "modified_at": _date(card), "size": 0, "digest": "", "details": DETAILS,
    }  # fmt: skip


def running(card: dict[str, Any]) -> dict[str, Any]:
    return listed(card) | {"expires_at": NEVER, "size_vram": 0, "context_length": card["max_model_len"]}


def shown(card: dict[str, Any], abilities: list[str]) -> dict[str, Any]:
    """Clients look for the context's length under the name of the architecture, and for tools among the abilities."""
    info = {"general.architecture": "semspec", "general.basename": card["id"]}
    return {
        "modelfile": "", "parameters": "", "template": "", "license": "", "modified_at": _date(card),
        "details": DETAILS, "model_info": info | {"semspec.context_length": card["max_model_len"]},
        "capabilities": abilities,
    }  # fmt: skip


def _date(card: dict[str, Any]) -> str:
    return datetime.datetime.fromtimestamp(card["created"], datetime.UTC).isoformat()
