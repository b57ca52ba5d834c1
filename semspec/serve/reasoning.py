"""Telling a model's thinking from its answer, in text that arrives piece by piece."""

from __future__ import annotations

from typing import Any, Literal

Channel = Literal["reasoning", "content"]
Span = tuple[str, Any]  # text, and what the caller wants to know it by


class Splitter:
    """Thinking is the text between the markers at the very beginning; the markers themselves are dropped."""

    def __init__(self, markers: tuple[str, str] | None, thinking: bool = False) -> None:
        self.begin, self.end = markers or ("", "")
        self.channel: Channel | None = "content" if markers is None else "reasoning" if thinking else None
        self._held: list[Span] = []  # may turn out to be part of a marker

    def feed(self, spans: list[Span], final: bool = False) -> list[tuple[Channel, str, Any]]:
        """What has become certain, by channel."""
        self._held += spans
        out: list[tuple[Channel, str, Any]] = []
        if self.channel is None:
            text = "".join(text for text, _ in self._held)
            start = text.lstrip()
            if start.startswith(self.begin):
                self._take(len(text) - len(start) + len(self.begin))
                self.channel = "reasoning"
            elif final or not self.begin.startswith(start):
                self.channel = "content"
            else:
                return out
        if self.channel == "reasoning":
            text = "".join(text for text, _ in self._held)
            at = text.find(self.end)
            certain = at if at >= 0 else len(text) - (0 if final else self._possible(text))
            out += [("reasoning", *span) for span in self._take(certain)]
            if at >= 0:
                self._take(len(self.end))
                self.channel = "content"
        if self.channel == "content":
            out += [("content", *span) for span in self._held]
            self._held = []
        return out

    def _possible(self, text: str) -> int:
        """How many characters at the end may be the beginning of the end marker."""
        longest = min(len(self.end) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if self.end.startswith(text[-n:])), 0)

    def _take(self, n: int) -> list[Span]:
        """The first n characters of what is held."""
        taken: list[Span] = []
        while n and self._held:
            text, key = self._held[0]
            taken.append((text[:n], key))
            self._held[:1] = [(text[n:], key)] if len(text) > n else []
            n -= min(n, len(text))
        return taken
