"""One JSON object as it arrives: where it ends, and if it is a call, its arguments piece by piece."""

from __future__ import annotations

import json
from typing import Any

NAMES = ("name", "function")
ARGUMENTS = ("arguments", "parameters")
SPACE = " \t\r\n"


class JsonObject:
    """Finds the end of an object, and the start and end of the values at its top."""

    def __init__(self) -> None:
        self.raw = ""
        self.done = False
        self.key: str | None = None  # whose value is being read
        self.value_at = self.value_end = -1  # where that value begins in `raw`, and where an object or list ends
        self.values: dict[str, str] = {}  # as they were written
        self._depth, self._string, self._escaped = 0, -1, False

    def read(self, text: str) -> int:
        """Take characters up to the object's end; says how many."""
        before = len(self.raw)
        self.raw += text
        for count, character in enumerate(text, 1):
            self._take(character, before + count - 1)
            if self.done:
                self.raw = self.raw[: before + count]
                return count
        return len(text)

    def _take(self, character: str, at: int) -> None:
        if self._string >= 0:
            if not self._escaped and character == '"':
                self._end_string(at)
            self._escaped = character == "\\" and not self._escaped
            return
        if self.value_at < 0 and self.key is not None and character not in SPACE + ":":
            self.value_at = at
        if character == '"':
            self._string = at
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.value_end = at + 1 if self._depth == 1 else self.value_end
        if (self._depth == 1 and character == ",") or not self._depth:
            self._end_value(at)
        self.done = not self._depth

    def _end_string(self, at: int) -> None:
        if self._depth == 1 and self.key is None:
            self.key = str(_loads(self.raw[self._string : at + 1]))
        self._string = -1

    def _end_value(self, at: int) -> None:
        if self.key is not None and self.value_at >= 0:
            self.values.setdefault(self.key, self.raw[self.value_at : at].rstrip())
        self.key, self.value_at, self.value_end = None, -1, -1

    def begun(self, names: tuple[str, ...]) -> str | None:
        """As much as there is of the value with one of these names."""
        if self.key in names and self.value_at >= 0:
            return self.raw[self.value_at : self.value_end if self.value_end >= 0 else None]
        return next((self.values[name] for name in names if name in self.values), None)


class JsonCall:
    """An object that is a call if it has a name: {"name": ..., "arguments": {...}}, in any order."""

    def __init__(self, known: frozenset[str] | None) -> None:
        """`known`: an object with any other name is no call."""
        self.object, self.known = JsonObject(), known
        self.name: str | None = None
        self._sent = 0  # characters of the arguments

    @property
    def done(self) -> bool:
        return self.object.done

    def read(self, text: str) -> tuple[int, str]:
        """Characters taken, and what they add to the arguments of the call, whose name is known then."""
        taken = self.object.read(text)
        if self.name is None:
            self.name = self._name()
        if self.name is None:
            return taken, ""
        given = self.object.begun(ARGUMENTS)
        if given is None or not given.startswith("{"):
            given = _arguments(given) if self.done else ""
        added, self._sent = given[self._sent :], len(given)
        return taken, added

    def _name(self) -> str | None:
        """A name counts once arguments have begun, or the object has ended."""
        if not self.done and self.object.begun(ARGUMENTS) is None:
            return None
        written = next((self.object.values[name] for name in NAMES if name in self.object.values), None)
        name = None if written is None else _loads(written)
        fits = isinstance(name, str) and bool(name) and (self.known is None or name in self.known)
        return name if fits else None


def _arguments(written: str | None) -> str:
    """Of a call that has none, or has them as a text."""
    value = None if written is None else _loads(written)
    if value is None:
        return "{}"
    return value if isinstance(value, str) else str(written)


def _loads(text: str) -> Any:
    """None: it is no JSON, or has half a character in it, which cannot be sent."""
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # a UnicodeEncodeError is a ValueError
        return None
    return found
