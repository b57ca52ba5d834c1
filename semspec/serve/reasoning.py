"""Telling a model's thinking from its answer, by the tokens that mark it; text that looks like a marker is text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

from semspec.serve.deltas import TokenOrigin

Channel = Literal["reasoning", "content"]
Span = tuple[str, TokenOrigin]
Part = tuple[Channel, str, TokenOrigin]


class Splitter:
    """Sorts the text of one answer into channels and drops the markers; one that is a special token has no text.

    Other special tokens become text where `specials` has them, for parsers that look for them."""

    def __init__(self, thinking: bool = False, enabled: bool = True, specials: frozenset[str] = frozenset()) -> None:
        self.enabled, self.specials = enabled, specials
        self.channel: Channel = "reasoning" if thinking and enabled else "content"
        self._markers: deque[tuple[int, bool | str]] = deque()  # token, and whether it opens the thinking, or its text
        self._blank: list[Span] = []  # white space before the answer, which is dropped if thinking follows
        self._answering = not enabled

    def feed(
        self,
        spans: Iterable[Span],
        markers: Iterable[tuple[int, bool]] = (),
        final: bool = False,
        specials: Iterable[tuple[int, str]] = (),
    ) -> list[Part]:
        """Text by channel, as far as it is certain."""
        found: list[tuple[int, bool | str]] = [*markers] if self.enabled else []
        found += [each for each in specials if each[1] in self.specials and each[0] not in dict(found)]
        self._markers += sorted(found, key=lambda marker: marker[0])
        out: list[Part] = []
        for text, origin in spans:
            self._pass_markers(origin.token, out)
            if self._markers and self._markers[0][0] == origin.token and isinstance(self._markers[0][1], bool):
                continue
            if self.channel == "content" and not (self._answering or text.strip()):
                self._blank.append((text, origin))
                continue
            self._take(text, origin, out)
        if final:
            self._pass_markers(None, out)
            out += self._flush()
        return out

    def _pass_markers(self, before: int | None, out: list[Part]) -> None:
        """Those before a token, or all."""
        while self._markers and (before is None or self._markers[0][0] < before):
            token, marker = self._markers.popleft()
            if isinstance(marker, bool):
                self._switch(marker)
            else:
                self._take(marker, TokenOrigin("target", token), out)

    def _take(self, text: str, origin: TokenOrigin, out: list[Part]) -> None:
        self._answering = self.channel == "content" or not self.enabled
        out += self._flush()
        out.append((self.channel, text, origin))

    def _switch(self, opens: bool) -> None:
        self.channel = "reasoning" if opens else "content"
        if opens:
            self._blank = []

    def _flush(self) -> list[Part]:
        blank, self._blank = self._blank, []
        return [("content", *span) for span in blank]
