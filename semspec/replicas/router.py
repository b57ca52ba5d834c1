"""Which replica answers: the one whose prefix cache holds most of the prompt, unless it is much busier than another."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")  # a replica's name
BLOCK = 256  # characters; a prefix is known in whole blocks
MOST_BLOCKS = 64  # of a prompt that are compared
REMEMBERED = 4096  # prefixes of each replica
READ = ("instructions", "system", "messages", "prompt", "input")  # of a body, as a model reads them
UNEVEN = 4  # requests more than the idlest has, for which a known prefix is given up


class Router(Generic[T]):
    def __init__(self) -> None:
        self._known: dict[T, OrderedDict[int, None]] = {}
        self.in_flight: dict[T, int] = {}

    def begin(self, replica: T) -> None:
        self.in_flight[replica] = self.in_flight.get(replica, 0) + 1

    def end(self, replica: T) -> None:
        self.in_flight[replica] = self.in_flight.get(replica, 0) - 1

    def choose(self, ready: Sequence[T], text: str) -> T:
        """One of the ready replicas, for a prompt of this text."""
        least = min(self.in_flight.get(i, 0) for i in ready)
        free = [i for i in ready if self.in_flight.get(i, 0) <= least + UNEVEN]
        prefixes = _prefixes(text)

        def held(i: T) -> int:
            known = self._known.get(i, OrderedDict())
            return next((n for n in range(len(prefixes), 0, -1) if prefixes[n - 1] in known), 0)

        best = max(free, key=lambda i: (held(i), -self.in_flight.get(i, 0)))  # of equals the first
        self._remember(best, prefixes)
        return best

    def _remember(self, replica: T, prefixes: list[int]) -> None:
        known = self._known.setdefault(replica, OrderedDict())
        for prefix in prefixes:
            known[prefix] = None
            known.move_to_end(prefix)
        while len(known) > REMEMBERED:
            known.popitem(last=False)

    def forget(self, replica: T) -> None:
        """It was replaced, and its cache is empty."""
        self._known.pop(replica, None)


def _prefixes(text: str) -> list[int]:
    """One number for each prefix of whole blocks, and for the whole text where it is shorter than one."""
    found, before = list[int](), 0
    for begin in range(0, min(len(text), BLOCK * MOST_BLOCKS), BLOCK):
        block = text[begin : begin + BLOCK]
        if len(block) < BLOCK and begin:
            break
        before = hash((before, block))
        found.append(before)
    return found


def text_of(body: bytes) -> str:
    """What of a request the model will read, as far as routing cares: any text that begins as the prompt does."""
    try:
        found: Any = json.loads(body)
        return json.dumps([found.get(k) for k in READ], ensure_ascii=False) if isinstance(found, dict) else ""
    except (ValueError, RecursionError):
        return ""
