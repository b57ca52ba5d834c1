"""From deltas to answers: a choice as it grows, and what every API's answer can do, whole and as a stream."""

from __future__ import annotations

import codecs
import json
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from semspec.serve.deltas import Delta, Finished, TokenText
from semspec.serve.http_errors import HttpError
from semspec.serve.reasoning import Channel, Part, Splitter
from semspec.serve.tools.parser import Parser

ENDS_OF_LINES = re.compile("[\x85\u2028\u2029]")  # besides control characters, which JSON escapes by itself


class Shown(NamedTuple):
    """A piece of an answer as clients see it."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str  # of a call: the function's name
    call: int = 0  # which call it belongs to


@dataclass
class Call:
    id: str
    name: str
    arguments: str = ""


def parsed(arguments: str) -> dict[str, Any]:
    """For the APIs that send an object: empty where the answer was cut inside it, is none, or is nested without end.
    Numbers that JSON has not are null there, and halves of characters, which cannot be sent, question marks."""
    try:
        found = json.loads(arguments or "{}", parse_constant=lambda _: None, parse_float=_finite)
        whole = json.dumps(found, ensure_ascii=False).encode("utf-8", "replace")
        return dict(json.loads(whole)) if isinstance(found, dict) else {}
    except (ValueError, RecursionError):
        return {}


def _finite(written: str) -> float | None:
    return number if math.isfinite(number := float(written)) else None


def written(data: dict[str, Any]) -> str:
    """JSON for a line of a stream. Many clients split lines at every character that Unicode calls a line's end."""
    return ENDS_OF_LINES.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(data, ensure_ascii=False))


@dataclass
class Choice:
    """One answer as it grows."""

    splitter: Splitter
    parser: Parser | None = None
    call_id: Callable[[], str] = lambda: ""
    single: bool = False  # calls after the first are left out
    opening: str = ""  # what the prompt has begun of the answer already
    texts: dict[str, str] = field(default_factory=lambda: {"reasoning": "", "content": ""})
    calls: list[Call] = field(default_factory=list)
    logprobs: list[TokenText] = field(default_factory=list)
    prompt: list[dict[str, Any] | None] | None = None  # logprobs of the prompt
    echo: str = ""  # the prompt, if the answer repeats it
    echo_first: bytes | None = None  # its first token, if logprobs of all of them are repeated
    trace: dict[str, Any] = field(default_factory=lambda: {"spans": [], "relaxed": []})
    finish: str | None = None
    stopped_by: str | None = None  # a stop string
    offset: int = 0  # characters of the tokens whose logprobs have been reported
    characters: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def add(self, delta: Delta) -> tuple[list[Part], list[Shown]]:
        """The text that a delta adds, by its tokens, and what of it clients see."""
        final = delta.finish is not None
        if self.echo_first is not None and delta.echo is not None:
            first = TokenText(self.echo_first, None, ())
            delta.logprobs = [*(token or first for token in delta.echo), *(delta.logprobs or [])]
        parts = self.splitter.feed(delta.spans, delta.markers, final, delta.specials)
        shown = [each for channel, text, _ in parts for each in self._read(channel, text)]
        if self.parser is not None and (final or self.opening):
            shown += self._parsed("", final)
        self.finish = "tool_calls" if self.calls and delta.finish == "stop" else delta.finish
        self.stopped_by = delta.stopped_by
        return parts, shown

    def _read(self, channel: Channel, text: str) -> list[Shown]:
        if channel == "content" and self.parser is not None:
            return self._parsed(text)
        self.texts[channel] += text
        return [Shown(channel, text)]

    def _parsed(self, text: str, final: bool = False) -> list[Shown]:
        assert self.parser is not None
        opening, self.opening = self.opening, ""
        shown = []
        for kind, piece in self.parser.feed(opening + text, final):
            if self.single and self.parser.calls > 1 and kind in ("call", "arguments"):
                continue
            if kind == "call":
                self.calls.append(Call(self.call_id(), piece))
            elif kind == "arguments":
                self.calls[-1].arguments += piece
            else:
                self.texts[kind] += piece
            shown.append(Shown(kind, piece, len(self.calls) - 1))
        return shown


class Answer(ABC):
    """One response. Subclasses know its shape, whole and as a stream."""

    prefix = ""
    media_type = "text/event-stream"
    last_line = ""  # of a stream that is whole

    def __init__(
        self, name: str, model: str, choices: Sequence[Choice], n: int, trace: bool = False,
        detailed: bool = False, include_usage: bool = False, prompt_tokens: int = 0,
    ) -> None:  # fmt: skip
        self.id, self.model, self.created = f"{self.prefix}-{name}", model, int(time.time())
        self.choices, self.n, self.trace, self.detailed = choices, n, trace, detailed
        self.include_usage, self.prompt_tokens = include_usage, prompt_tokens
        self.cached_tokens = 0  # of the prompt; known when a stream begins
        self.finished: list[Finished] = []

    @abstractmethod
    def take(self, message: Delta | Finished) -> None:
        """For a whole answer: something has come."""

    @abstractmethod
    def whole(self) -> dict[str, Any]: ...

    def opening(self) -> list[dict[str, Any]]:
        """What a stream sends before any text."""
        return []

    @abstractmethod
    def chunks(self, message: Delta | Finished) -> list[dict[str, Any]]:
        """For a stream: something has come."""

    @abstractmethod
    def closing(self) -> list[dict[str, Any]]:
        """After all text."""

    def failure(self, error: HttpError) -> list[dict[str, Any]]:
        """Instead of that; an answer that was cut never looks whole."""
        return [error.body]

    @abstractmethod
    def line(self, data: dict[str, Any]) -> str:
        """As it is sent."""
