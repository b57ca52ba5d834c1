"""Drafting by lookup: if the last tokens occurred before, propose what followed them there. Needs no model.

Uses the longest suffix of the context, from `longest` tokens down to `shortest`, that occurred earlier, and of its
occurrences the latest, since text resembles its recent past (`earliest=True`: the first, as in FLy's code). A tree
draft has several of these, the latest first, then those of shorter suffixes.
Source: prompt lookup decoding, Saxena 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from semspec.draft.tree import CHAIN, TreeOptions, in_order
from semspec.tree import normal
from semspec.types import Draft, DraftRequest, ProposalGenerator, Runner

Ngram = tuple[int, ...]
LOOKS = 32  # occurrences that a draft is made of
MAX_PROMPT_TOKENS = 16384  # indexed at the start; indexing more would block all sequences


class NgramDrafter:
    def __init__(self, longest: int = 4, shortest: int = 1, earliest: bool = False, tree: TreeOptions = CHAIN) -> None:
        self.longest, self.shortest, self.earliest, self.tree = longest, shortest, earliest, tree
        self.runners: list[Runner] = []
        self._start = 0  # the first indexed position of the context
        self._follower: dict[Ngram, int] = {}  # n-gram -> index of the token that followed it
        self._history: list[list[tuple[Ngram, int | None]]] = []  # for each token: the entries it replaced

    def begin(self, slots: list[int]) -> None:
        self._follower.clear()
        self._history.clear()

    def propose(self, context: list[int], request: DraftRequest) -> ProposalGenerator:
        self._index(context)
        for size in range(min(self.longest, len(context) - 1), self.shortest - 1, -1):
            start = self._follower.get(tuple(context[-size:]))
            if start is not None and self.tree.size:
                return self._tree(context, size, self.tree.levels(request.max_tokens))
            if start is not None:
                return Draft(_repeat(context, start, request.max_tokens))
        return Draft([])
        yield  # makes this a generator, as the protocol requires

    def _tree(self, context: list[int], longest: int, levels: int) -> Draft:
        """Several continuations, sharing their beginnings."""
        nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        for start in islice(self._starts(context, longest), LOOKS):
            node = -1
            for token in _repeat(context, start, levels):
                there = (node, token) in nodes
                if not there and (len(nodes) == self.tree.size or self._full(nodes, node)):
                    break
                node = nodes.setdefault((node, token), len(nodes))
        return in_order(Draft([token for _, token in nodes], parents=normal([parent for parent, _ in nodes])))

    def _full(self, nodes: dict[tuple[int, int], int], node: int) -> bool:
        return sum(parent == node for parent, _ in nodes) == self.tree.top

    def _starts(self, context: list[int], longest: int) -> Iterator[int]:
        """What followed the last tokens elsewhere: after the longest suffixes first, and the latest first."""
        for size in range(longest, self.shortest - 1, -1):
            key = tuple(context[-size:])
            start = self._follower.get(key)
            while start is not None:
                yield start
                start = next((before for old, before in self._history[start - self._start] if old == key), None)

    def _index(self, context: list[int]) -> None:
        """Index the n-grams before every token that is new since the last call."""
        if not self._history:
            self._start = max(0, len(context) - MAX_PROMPT_TOKENS)
        for follower in range(self._start + len(self._history), len(context)):
            replaced: list[tuple[Ngram, int | None]] = []
            for size in range(self.shortest, min(self.longest, follower - self._start) + 1):
                key = tuple(context[follower - size : follower])
                if not (self.earliest and key in self._follower):
                    replaced.append((key, self._follower.get(key)))
                    self._follower[key] = follower
            self._history.append(replaced)

    def accept(self, length: int) -> None:
        """Remove rejected tokens from the index; only the inner drafter of a cascade has indexed any."""
        while self._start + len(self._history) > length:
            for key, before in self._history.pop():
                if before is None:
                    del self._follower[key]
                else:
                    self._follower[key] = before

    def close(self) -> None:
        pass


def _repeat(context: list[int], start: int, n: int) -> list[int]:
    """n tokens from `start` on; at the end of the context it continues at `start`."""
    period = len(context) - start
    return [context[start + i % period] for i in range(n)]
