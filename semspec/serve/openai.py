"""Answers in the JSON that OpenAI's clients expect: whole and in chunks, for chats and for plain text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from semspec.serve.answers import Answer, Choice, Shown, written
from semspec.serve.deltas import Delta, Finished, TokenText
from semspec.serve.reasoning import Part
from semspec.serve.report import metrics_of, usage_of


class ChoicesAnswer(Answer):
    """OpenAI's shapes for chats and texts, with one choice or several."""

    kind = ""
    chunk_kind = ""
    last_line = "data: [DONE]\n\n"

    # -- the whole

    def take(self, message: Delta | Finished) -> None:
        if isinstance(message, Finished):
            self.finished.append(message)
            return
        choice = self.choices[message.choice]
        parts, _ = choice.add(message)
        choice.logprobs += message.logprobs or []
        choice.prompt = message.prompt or choice.prompt
        if self.trace:
            traced = trace_of(message, parts)
            choice.trace["spans"] += traced["spans"]
            choice.trace["relaxed"] += traced["relaxed"]

    def whole(self) -> dict[str, Any]:
        choices = []
        for i, choice in enumerate(self.selected()):
            logprobs = self.logprobs(choice, choice.logprobs) if choice.logprobs else None
            shaped = {"index": i, **self.message(choice), "logprobs": logprobs, **ending(choice)}
            shaped |= {"prompt_logprobs": choice.prompt} if choice.prompt else {}
            choices.append(shaped | ({"trace": choice.trace} if self.trace else {}))
        return self._frame(self.kind) | {"choices": choices} | self._totals()

    def selected(self) -> Sequence[Choice]:
        """The answers that the client gets."""
        return self.choices

    @abstractmethod
    def message(self, choice: Choice) -> dict[str, Any]: ...

    # -- in chunks

    def chunks(self, message: Delta | Finished) -> list[dict[str, Any]]:
        if isinstance(message, Finished):
            self.finished.append(message)
            return []
        choice = self.choices[message.choice]
        parts, shown = choice.add(message)
        logprobs = self.logprobs(choice, message.logprobs) if message.logprobs else None
        if not (shown or logprobs or message.finish or self.trace):
            return []
        shaped = {"index": message.choice, **self.delta(choice, shown), "logprobs": logprobs, **ending(choice)}
        if self.trace:
            shaped["trace"] = trace_of(message, parts)
        return [self._chunk([shaped])]

    @abstractmethod
    def delta(self, choice: Choice, shown: list[Shown]) -> dict[str, Any]: ...

    def closing(self) -> list[dict[str, Any]]:
        """Usage and metrics."""
        return [self._frame(self.chunk_kind) | {"choices": []} | self._totals()] if self.include_usage else []

    def line(self, data: dict[str, Any]) -> str:
        return f"data: {written(data)}\n\n"

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self.include_usage else {}
        return self._frame(self.chunk_kind) | {"choices": choices} | usage

    # -- both

    @abstractmethod
    def logprobs(self, choice: Choice, tokens: list[TokenText]) -> dict[str, Any]: ...

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _totals(self) -> dict[str, Any]:
        return {"usage": usage_of(self.finished, self.n), "metrics": metrics_of(self.finished, self.detailed)}


class ChatAnswer(ChoicesAnswer):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def whole(self) -> dict[str, Any]:
        prompt = self.choices[0].prompt
        return super().whole() | ({"prompt_logprobs": prompt} if prompt else {})

    def message(self, choice: Choice) -> dict[str, Any]:
        content = choice.texts["content"]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.texts["reasoning"]:
            message["reasoning_content"] = message["reasoning"] = choice.texts["reasoning"]
        if choice.calls:
            message["content"] = content if content.strip() else None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in choice.calls
            ]
        return {"message": message}

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
            for i in range(len(self.choices))
        ]

    def delta(self, choice: Choice, shown: list[Shown]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for kind, text, index in shown:
            if kind == "call":
                named = {"id": choice.calls[index].id, "type": "function", "function": {"name": text, "arguments": ""}}
                calls[index] = {"index": index} | named
            elif kind == "arguments":
                calls.setdefault(index, {"index": index, "function": {"arguments": ""}})["function"]["arguments"] += (
                    text
                )
            else:
                for key in ("content",) if kind == "content" else ("reasoning_content", "reasoning"):
                    delta[key] = delta.get(key, "") + text
        return {"delta": delta | ({"tool_calls": list(calls.values())} if calls else {})}

    def logprobs(self, choice: Choice, tokens: list[TokenText]) -> dict[str, Any]:
        return {
            "content": [
                _entry(t.raw, t.logprob) | {"top_logprobs": [_entry(raw, p) for raw, p in t.top]} for t in tokens
            ],
            "refusal": None,
        }


class TextAnswer(ChoicesAnswer):
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    best: int | None = None  # so many answers to each prompt, the likeliest, are the client's
    tells_logprobs = True  # else they were only needed to choose

    def selected(self) -> Sequence[Choice]:
        found: list[Choice] = []
        for start in range(0, len(self.choices), self.n):
            group = list(self.choices[start : start + self.n])
            found += group if self.best is None else sorted(group, key=mean_logprob, reverse=True)[: self.best]
        for choice in found:
            choice.logprobs = choice.logprobs if self.tells_logprobs else []
        return found

    def message(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.echo + choice.texts["content"]}

    def opening(self) -> list[dict[str, Any]]:
        return [
            self._chunk([{"index": i, "text": choice.echo, "logprobs": None, "finish_reason": None}])
            for i, choice in enumerate(self.choices)
            if choice.echo
        ]

    def delta(self, choice: Choice, shown: list[Shown]) -> dict[str, Any]:
        return {"text": "".join(each.text for each in shown)}

    def logprobs(self, choice: Choice, tokens: list[TokenText]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(choice.offset)
            choice.offset += len(choice.characters.decode(token.raw))
        return {
            "tokens": [_text(t.raw) for t in tokens],
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [None if t.logprob is None else {_text(raw): p for raw, p in t.either} for t in tokens],
            "text_offset": offsets,
        }


def mean_logprob(choice: Choice) -> float:
    """Of an answer's own tokens, by which the best of several is chosen."""
    own = [token.logprob for token in choice.logprobs if token.logprob is not None]
    return sum(own) / max(len(own), 1)


def ending(choice: Choice) -> dict[str, Any]:
    """Why an answer ended, as OpenAI names it; beside that the stop string, as vLLM names it, or that it was cut inside
    the thinking."""
    if choice.finish == "thinking":
        return {"finish_reason": "length", "stop_reason": "thinking"}
    return {"finish_reason": choice.finish} | ({"stop_reason": choice.stopped_by} if choice.stopped_by else {})


def _entry(raw: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": _text(raw), "logprob": logprob, "bytes": list(raw)}


def _text(raw: bytes) -> str:
    """A token as text; a part of a character by its bytes, as OpenAI writes it, so that no two are the same."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def trace_of(delta: Delta, parts: list[Part]) -> dict[str, Any]:
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
