"""Finding repetition: a block of tokens that is generated again and again, called a loop in options and tables.

A model in a loop agrees with its draft perfectly, so loops look like success in every measure of speed. The definition
is strict, because normal texts repeat themselves too: the copies must be equal token for token, follow each other
directly, and be both many and long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semspec.errors import BadRequest

REPEATS, TOKENS, PERIOD = 4, 32, 128  # a loop: min copies in a row, min tokens in all, max tokens of the block
MAX_PERIOD = 1024  # of a request: every round tries all periods


@dataclass(frozen=True, slots=True)
class Repetition:
    """`block` occurs `repeats` times in a row from token `start` on."""

    start: int
    period: int
    repeats: int
    block: tuple[int, ...]

    @property
    def end(self) -> int:
        """The index after the last whole copy."""
        return self.start + self.period * self.repeats


def find_repetition(
    tokens: Sequence[int], min_repeats: int = REPEATS, min_tokens: int = TOKENS, max_period: int = PERIOD
) -> Repetition | None:
    """The loop that covers most tokens; of equals the one with the shortest block, then the first.

    Only whole copies count: `min_repeats` or more of them, `min_tokens` or more tokens in all.

    In a loop of period p, `tokens[i] == tokens[i - p]` everywhere but in its first copy. That run of matches is long,
    so it is enough to test every `stride`-th position and to extend those that match: about one comparison per token
    for all periods together on normal text, and never more than `max_period` per token.
    """
    if min_repeats < 2 or max_period < 1:
        raise BadRequest(f"A loop needs two copies of one token at least: {min_repeats=}, {max_period=}.")
    best: Repetition | None = None
    for period in range(1, min(max_period, len(tokens) // min_repeats) + 1):
        stride = max(min_tokens, min_repeats * period) - period  # a loop has no shorter run of matches
        at = period + stride - 1
        while at < len(tokens):
            if tokens[at] != tokens[at - period]:
                at += stride
                continue
            first = at
            while first > period and tokens[first - 1] == tokens[first - 1 - period]:
                first -= 1
            last = at
            while last + 1 < len(tokens) and tokens[last + 1] == tokens[last + 1 - period]:
                last += 1
            start = first - period
            repeats = (last + 1 - start) // period
            covered = repeats * period
            enough = repeats >= min_repeats and covered >= min_tokens
            if enough and (best is None or covered > best.period * best.repeats):
                best = Repetition(start, period, repeats, tuple(tokens[start : start + period]))
            at = last + 1 + stride  # last + 1 does not match: the next run starts after it
    return best


@dataclass(frozen=True, slots=True)
class RepetitionGuard:
    """Detects repetition while a text is generated."""

    repeats: int = REPEATS  # copies in a row that make a loop; 0: off
    period: int = PERIOD  # tokens of the longest block

    def __post_init__(self) -> None:
        if self.repeats < 0 or self.repeats == 1:
            raise BadRequest(f"loop_repeats is {self.repeats}; give 0 (off) or the copies that make a loop, 2 or more")
        if not 1 <= self.period <= MAX_PERIOD:
            raise BadRequest(f"loop_period is {self.period}; give the longest block to find, 1 to {MAX_PERIOD} tokens")

    def find(self, tokens: Sequence[int], new: int) -> Repetition | None:
        """A loop that the last `new` tokens have completed; earlier rounds have looked for earlier ones."""
        if not self.repeats:
            return None
        return find_repetition(tokens[-self.longest - new :], self.repeats, max_period=self.period)

    @property
    def longest(self) -> int:
        """Tokens of a loop that has just become one, at most."""
        return max(self.repeats * self.period, TOKENS + self.period)
