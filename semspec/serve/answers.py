"""From deltas to the JSON that OpenAI's clients expect: whole answers and chunks, for chats and for plain text."""

from __future__ import annotations

import codecs
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from semspec.serve.deltas import Delta, Finished, TokenOrigin, TokenText
from semspec.serve.reasoning import Channel, Splitter
from semspec.serve.report import metrics_of, usage_of

Parts = list[tuple[Channel, str, TokenOrigin]]


@dataclass
class Choice:
    """One answer as it grows."""

    splitter: Splitter
    texts: dict[Channel, str] = field(default_factory=lambda: {"reasoning": "", "content": ""})
    logprobs: list[TokenText] = field(default_factory=list)
    trace: dict[str, Any] = field(default_factory=lambda: {"spans": [], "relaxed": []})
    finish: str | None = None
    offset: int = 0  # characters of the tokens whose logprobs have been reported
    characters: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def add(self, delta: Delta) -> Parts:
        parts = self.splitter.feed(delta.spans, delta.markers, final=delta.finish is not None)
        for channel, text, _ in parts:
            self.texts[channel] += text
        self.finish = delta.finish
        return parts


class Answer(ABC):
    """One response. Subclasses know the two shapes there are."""

    kind = ""
    chunk_kind = ""
    prefix = ""

    def __init__(
        self, name: str, model: str, choices: Sequence[Choice], n: int, trace: bool = False, detailed: bool = False
    ) -> None:
        self.id, self.model, self.created = f"{self.prefix}-{name}", model, int(time.time())
        self.choices, self.n, self.trace, self.detailed = choices, n, trace, detailed
        self.finished: list[Finished] = []

    # -- the whole

    def take(self, message: Delta | Finished) -> None:
        if isinstance(message, Finished):
            self.finished.append(message)
            return
        choice = self.choices[message.choice]
        parts = choice.add(message)
        choice.logprobs += message.logprobs or []
        if self.trace:
            traced = trace_of(message, parts)
            choice.trace["spans"] += traced["spans"]
            choice.trace["relaxed"] += traced["relaxed"]

    def whole(self) -> dict[str, Any]:
        choices = []
        for i, choice in enumerate(self.choices):
            logprobs = self.logprobs(choice, choice.logprobs) if choice.logprobs else None
            shaped = {"index": i, **self.message(choice), "logprobs": logprobs, **ending(choice.finish)}
            choices.append(shaped | ({"trace": choice.trace} if self.trace else {}))
        return self._frame(self.kind) | {"choices": choices} | self._totals()

    @abstractmethod
    def message(self, choice: Choice) -> dict[str, Any]: ...

    # -- in chunks

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before any text."""
        return []

    def chunk(self, message: Delta | Finished) -> dict[str, Any] | None:
        if isinstance(message, Finished):
            self.finished.append(message)
            return None
        choice = self.choices[message.choice]
        parts = choice.add(message)
        logprobs = self.logprobs(choice, message.logprobs) if message.logprobs else None
        if not (parts or logprobs or message.finish or self.trace):
            return None
        shaped = {"index": message.choice, **self.delta(parts), "logprobs": logprobs, **ending(message.finish)}
        if self.trace:
            shaped["trace"] = trace_of(message, parts)
        return self._frame(self.chunk_kind) | {"choices": [shaped]}

    @abstractmethod
    def delta(self, parts: Parts) -> dict[str, Any]: ...

    def closing(self) -> dict[str, Any]:
        """The chunk after all text, with usage and metrics."""
        return self._frame(self.chunk_kind) | {"choices": []} | self._totals()

    # -- both

    @abstractmethod
    def logprobs(self, choice: Choice, tokens: list[TokenText]) -> dict[str, Any]: ...

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _totals(self) -> dict[str, Any]:
        return {"usage": usage_of(self.finished, self.n), "metrics": metrics_of(self.finished, self.detailed)}


class ChatAnswer(Answer):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def message(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.texts["content"], "refusal": None}
        if choice.texts["reasoning"]:
            message["reasoning_content"] = choice.texts["reasoning"]
        return {"message": message}

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            self._frame(self.chunk_kind)
            | {"choices": [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}]}
            for i in range(len(self.choices))
        ]

    def delta(self, parts: Parts) -> dict[str, Any]:
        delta: dict[str, str] = {}
        for channel, text, _ in parts:
            key = "content" if channel == "content" else "reasoning_content"
            delta[key] = delta.get(key, "") + text
        return {"delta": delta}

    def logprobs(self, choice: Choice, tokens: list[TokenText]) -> dict[str, Any]:
        return {
            "content": [
                _entry(t.raw, t.logprob) | {"top_logprobs": [_entry(raw, p) for raw, p in t.top]} for t in tokens
            ],
            "refusal": None,
        }


class TextAnswer(Answer):
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def message(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.texts["content"]}

    def delta(self, parts: Parts) -> dict[str, Any]:
        return {"text": "".join(text for _, text, _ in parts)}

    def logprobs(self, choice: Choice, tokens: list[TokenText]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(choice.offset)
            choice.offset += len(choice.characters.decode(token.raw))
        return {
            "tokens": [_text(t.raw) for t in tokens],
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [{_text(raw): p for raw, p in t.top} for t in tokens],
            "text_offset": offsets,
        }


def ending(finish: str | None) -> dict[str, Any]:
    """Why an answer ended, as OpenAI names it; that it ended inside the thinking is said beside that."""
    return {"finish_reason": "length", "stop_reason": "thinking"} if finish == "thinking" else {"finish_reason": finish}


def _entry(raw: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(raw), "logprob": logprob, "bytes": list(raw)}


def _text(raw: bytes) -> str:
    """A token as text; a part of a character by its bytes, as OpenAI writes it, so that no two are the same."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def trace_of(delta: Delta, parts: Parts) -> dict[str, Any]:
    """Where every piece of text came from, and why relaxed tokens were accepted."""
    return {
        "spans": [
            {"text": text, "origin": origin.origin, "channel": channel, "token": origin.token}
            for channel, text, origin in parts
        ],
        "relaxed": [
            {"token": token, "text": text, "instead": target, "why": why} for token, text, target, why in delta.relaxed
        ],
        "tokens": delta.tokens,
        "drafted": delta.drafted,
        "accepted": delta.accepted,
    }
