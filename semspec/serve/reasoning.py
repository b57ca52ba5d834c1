"""Telling a model's thinking from its answer, by the tokens that mark it; text that looks like a marker is text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

from semspec.serve.deltas import TokenOrigin

Channel = Literal["reasoning", "content"]
Span = tuple[str, TokenOrigin]


class Splitter:
    """Sorts the text of one answer into channels and drops the markers; one that is a special token has no text."""

    def __init__(self, thinking: bool = False, enabled: bool = True) -> None:
        self.enabled = enabled
        self.channel: Channel = "reasoning" if thinking and enabled else "content"
        self._markers: deque[tuple[int, bool]] = deque()  # token, and whether it opens the thinking
        self._blank: list[Span] = []  # white space before the answer, which is dropped if thinking follows
        self._answering = False

    def feed(
        self, spans: Iterable[Span], markers: Iterable[tuple[int, bool]] = (), final: bool = False
    ) -> list[tuple[Channel, str, TokenOrigin]]:
        """Text by channel, as far as it is certain."""
        if not self.enabled:
            return [("content", *span) for span in spans]
        self._markers += markers
        out: list[tuple[Channel, str, TokenOrigin]] = []
        for text, origin in spans:
            while self._markers and self._markers[0][0] < origin.token:
                self._switch(self._markers.popleft()[1])
            if self._markers and self._markers[0][0] == origin.token:
                continue
            if self.channel == "content" and not (self._answering or text.strip()):
                self._blank.append((text, origin))
                continue
            self._answering = self.channel == "content"
            out += self._flush()
            out.append((self.channel, text, origin))
        return out + self._flush() if final else out

    def _switch(self, opens: bool) -> None:
        self.channel = "reasoning" if opens else "content"
        if opens:
            self._blank = []

    def _flush(self) -> list[tuple[Channel, str, TokenOrigin]]:
        blank, self._blank = self._blank, []
        return [("content", *span) for span in blank]
