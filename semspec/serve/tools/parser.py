"""From the text of an answer to content, thinking and calls, as it arrives: however it is cut into pieces, the same
comes out, and nothing is given out before it is certain what it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from semspec.serve.tools.json_call import SPACE, JsonCall, JsonObject

MAX_NAME = 64  # characters of a function's name,
MAX_HEAD = 256  # and of all that may stand before its arguments


class Piece(NamedTuple):
    kind: Literal["content", "reasoning", "call", "arguments"]  # a call begins with its name; its arguments follow
    text: str


class Parser(ABC):
    """Reads one answer."""

    def __init__(self) -> None:
        self.rest = ""  # not understood yet
        self.calls = 0
        self._out: list[Piece] = []

    def feed(self, text: str, final: bool = False) -> list[Piece]:
        """What has become certain."""
        self.rest += text
        while self.step(final):
            pass
        out, self._out = self._out, []
        return out

    @abstractmethod
    def step(self, final: bool) -> bool:
        """Understand a little more of `rest`; False: only more text will help."""

    def give(self, kind: Literal["content", "reasoning", "arguments"], text: str) -> None:
        if text:
            self._out.append(Piece(kind, text))

    def call(self, name: str) -> None:
        self.calls += 1
        self._out.append(Piece("call", name))

    def skip(self, count: int) -> str:
        skipped, self.rest = self.rest[:count], self.rest[count:]
        return skipped

    def possible(self, markers: Sequence[str]) -> int:
        """How many characters at the end of `rest` may be the beginning of a marker."""
        longest = max(map(len, markers), default=1) - 1
        for count in range(min(longest, len(self.rest)), 0, -1):
            if any(marker.startswith(self.rest[-count:]) for marker in markers):
                return count
        return 0

    def find(self, markers: Sequence[str]) -> tuple[int, str] | None:
        """The first marker in `rest`, the longest of those that begin there."""
        found = [(self.rest.find(marker), -len(marker), marker) for marker in markers]
        found = [each for each in found if each[0] >= 0]
        return (min(found)[0], min(found)[2]) if found else None


@dataclass(frozen=True)
class Family:
    """How models of one family write calls as JSON."""

    markers: tuple[str, ...]  # what announces calls
    between: tuple[str, ...]  # what may stand around calls, besides white space
    opening: str  # how an answer begins that has to be a call, before the function's name
    after_name: str  # and after it
    closing: str = "}"  # what follows the arguments of the only call
    bare: bool = False  # an answer may begin with a call, unannounced
    named: bool = False  # the name may stand before an object that holds the arguments only

    def forced(self, name: str | None) -> str:
        """How an answer begins that has to be a call, of this function or of any."""
        return self.opening + ("" if name is None else name + self.after_name)


class JsonCalls(Parser):
    """Answers of any family whose calls are JSON."""

    def __init__(self, family: Family, names: frozenset[str]) -> None:
        super().__init__()
        self.family, self.names = family, names
        self.state: Literal["start", "text", "around", "name", "call", "arguments"] = "start" if family.bare else "text"
        self.marked = False
        self.held = ""  # since the last call or certain text: content if no call follows
        self.reading: JsonCall | None = None
        self.arguments: JsonObject | None = None

    def step(self, final: bool) -> bool:
        return bool(getattr(self, f"_{self.state}")(final))

    def _start(self, final: bool) -> bool:
        """White space, until it is known whether the answer begins with a call."""
        blank = len(self.rest) - len(self.rest.lstrip(SPACE))
        if blank == len(self.rest):
            return self._end_text() if final else False
        begins = self.rest[blank:]
        marks = ("{", *self.family.markers, *self.family.between)
        if begins.startswith(marks):
            self.held += self.skip(blank)
            self.state = "around"
        elif not final and any(mark.startswith(begins) for mark in marks):
            return False
        else:
            self.state = "text"
        return True

    def _text(self, final: bool) -> bool:
        found = self.find(self.family.markers)
        if found is not None:
            at, marker = found
            self.give("content", self.skip(at).rstrip(SPACE))
            self.held = self.skip(len(marker))
            self.state, self.marked = "around", True
            return True
        if final:
            return self._end_text()
        sure = self.rest[: len(self.rest) - self.possible(self.family.markers)].rstrip(SPACE)
        self.give("content", self.skip(len(sure)))
        return False

    def _end_text(self) -> bool:
        """White space at the end is no content after a call."""
        text = self.skip(len(self.rest))
        self.give("content", text.rstrip(SPACE) if self.calls else text)
        return False

    def _around(self, final: bool) -> bool:
        """Between the marker and a call, or after a call."""
        self.held += self.skip(len(self.rest) - len(self.rest.lstrip(SPACE)))
        if not self.rest:
            return self._give_up(final) if final else False
        if self.rest.startswith("{"):
            self.reading = JsonCall(None if self.marked else self.names)
            self.state = "call"
            return True
        longer = [mark for mark in self.family.between if mark.startswith(self.rest) and mark != self.rest]
        if longer and not final:
            return False
        marks = [mark for mark in self.family.between if self.rest.startswith(mark)]
        if marks:
            mark = max(marks, key=len)
            self.held += self.skip(len(mark))
            self.marked = self.marked or mark in self.family.markers
        elif self.family.named and self.marked:
            self.state = "name"
        else:
            self._give_up(final)
        return True

    def _give_up(self, final: bool) -> bool:
        """No call comes here: what was held is content, unless it stood after a call, or the answer was cut."""
        if not self.calls and not (final and self.marked and not self.rest):
            self.give("content", self.held)
        self.held, self.marked, self.state = "", False, "text"
        return False

    def _name(self, final: bool) -> bool:
        """A name before its arguments: a word, and perhaps markers."""
        at = self.rest.find("{")
        name = (self.rest if at < 0 else self.rest[:at]).split("[")[0].strip()
        wrong = len(name) > MAX_NAME or not all(c.isalnum() or c in "_.-" for c in name) or (at >= 0 and not name)
        if wrong or (at if at >= 0 else len(self.rest) - 1) > MAX_HEAD:
            self._give_up(False)
            return True
        if at < 0:
            self.skip(len(self.rest) if final else 0)
            return False
        self.skip(at)
        self.held = ""
        self.call(name)
        self.arguments, self.state = JsonObject(), "arguments"
        return True

    def _arguments(self, final: bool) -> bool:
        assert self.arguments is not None
        self.give("arguments", self.skip(self.arguments.read(self.rest)))
        if self.arguments.done:
            self.state = "around"
        return self.arguments.done

    def _call(self, final: bool) -> bool:
        assert self.reading is not None
        begun = self.reading.name is not None
        taken, arguments = self.reading.read(self.rest)
        self.held += self.skip(taken)
        if self.reading.name is not None:
            if not begun:
                self.call(self.reading.name)
            self.give("arguments", arguments)
            self.held = ""
        if self.reading.done:
            if self.reading.name is None:  # an object that is no call
                self.give("content", self.held)
                self.held, self.marked, self.state = "", False, "text"
            else:
                self.state = "around"
            return True
        if final and self.reading.name is None and not self.marked:
            self.give("content", self.held)
            self.held = ""
        return False
