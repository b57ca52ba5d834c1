"""Where a sequence is inside the model's thinking, and when that has to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Thinking:
    """Follows the two markers between which a model thinks. One for each sequence."""

    begin: int
    end: int
    open: bool = False  # at first: the prompt ends inside the thinking, as in some chat templates
    limit: int | None = None  # tokens of thinking, markers not counted, after which `end` is forced
    relax_only: bool = False  # a lossy rule may relax nothing else
    thought: int = 0  # tokens so far
    cut: bool = False  # the limit was reached

    @property
    def over(self) -> bool:
        """Whether the next token has to be `end`."""
        return self.open and self.limit is not None and self.thought >= self.limit

    def room(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may follow before the thinking is over."""
        if self.limit is None:
            return len(tokens)
        is_open, thought = self.open, self.thought
        for i, token in enumerate(tokens):
            if is_open and thought >= self.limit:
                return i
            is_open = token == self.begin or (is_open and token != self.end)
            thought += is_open and token != self.begin
        return len(tokens)

    def feed(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.open = token == self.begin or (self.open and token != self.end)
            self.thought += self.open and token != self.begin
