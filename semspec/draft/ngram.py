"""Drafting by lookup: if the last tokens occurred before, propose what followed them then. No model, no cost.

The longest suffix of the context, from `longest` tokens down to `shortest`, that occurred earlier wins; among its
occurrences the latest, since text resembles its recent past (`earliest=True` takes the first, as FLy's code does).
Source: prompt lookup decoding, Saxena 2023.
"""

from __future__ import annotations

from semspec.errors import BadRequest
from semspec.types import Draft, Proposing, Runner, Sampling
from semspec.verify.base import Rule


class NgramDrafter:
    def __init__(self, longest: int = 4, shortest: int = 1, earliest: bool = False) -> None:
        if not 1 <= shortest <= longest:
            raise BadRequest(
                f"n-gram lengths {shortest} to {longest}: the shortest must be 1 or more, not above the longest"
            )
        self.longest, self.shortest, self.earliest = longest, shortest, earliest
        self.runners: list[Runner] = []
        self._indexed = 0  # tokens of the context whose n-grams are in the table
        self._follower: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token that followed it

    def begin(self, slots: list[int]) -> None:
        self._indexed = 0
        self._follower.clear()

    def propose(self, context: list[int], n: int, sampling: Sampling, round: int, rule: Rule) -> Proposing:
        self._index(context)
        for size in range(min(self.longest, len(context) - 1), self.shortest - 1, -1):
            start = self._follower.get(tuple(context[-size:]))
            if start is not None:
                return Draft(_repeat(context, start, n))
        return Draft([])
        yield  # a generator, as the protocol says, that asks for nothing

    def _index(self, context: list[int]) -> None:
        """Enter every n-gram that has a follower. The context only ever grows, so each token is entered once."""
        for follower in range(max(self._indexed, self.shortest), len(context)):
            for size in range(self.shortest, min(self.longest, follower) + 1):
                key = tuple(context[follower - size : follower])
                if not (self.earliest and key in self._follower):
                    self._follower[key] = follower
        self._indexed = len(context)

    def accept(self, length: int) -> None:
        pass

    def close(self) -> None:
        pass


def _repeat(context: list[int], start: int, n: int) -> list[int]:
    """n tokens from `start` on; a match that reaches the end of the context goes round again."""
    period = len(context) - start
    return [context[start + i % period] for i in range(n)]
