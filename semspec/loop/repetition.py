"""Finding loops: a block of tokens that is written again and again.

A model that loops agrees with its draft perfectly and writes many tokens per second, so loops look like success in
every figure of speed. A loop here is strict, because honest texts repeat themselves too: the copies must be equal
token for token, stand directly behind one another, and be both many and long. The block is returned with its place,
so that a person can look at what was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semspec.errors import BadRequest

REPEATS, TOKENS, PERIOD = 4, 32, 128  # a loop: copies in a row, tokens they have together, and the longest block
LONGEST_PERIOD = 1024  # that may be asked for: after every step all periods are tried


@dataclass(frozen=True, slots=True)
class Loop:
    """`block` stands `repeats` times in a row, beginning at token `start`."""

    start: int
    period: int
    repeats: int
    block: tuple[int, ...]

    @property
    def end(self) -> int:
        """One behind the last token of the last whole copy."""
        return self.start + self.period * self.repeats


def find_loop(
    tokens: Sequence[int], min_repeats: int = REPEATS, min_tokens: int = TOKENS, max_period: int = PERIOD
) -> Loop | None:
    """The loop that covers most tokens, wherever it stands; of equals the one with the shortest block, then the first.

    Whole copies only are counted: at least `min_repeats` of them, at least `min_tokens` tokens together.

    A text with period p has `tokens[i] == tokens[i - p]` over the whole loop but its first copy. That stretch is long,
    so it is enough to look at every so many places and to walk on from those that match: about one look per token for
    all periods together on ordinary text, and never more than `max_period` looks per token.
    """
    if min_repeats < 2 or max_period < 1:
        raise BadRequest(f"A loop needs two copies of one token at least: {min_repeats=}, {max_period=}.")
    best: Loop | None = None
    for period in range(1, min(max_period, len(tokens) // min_repeats) + 1):
        stride = max(min_tokens, min_repeats * period) - period  # a loop's stretch of matches is no shorter
        place = period + stride - 1
        while place < len(tokens):
            if tokens[place] != tokens[place - period]:
                place += stride
                continue
            first = place
            while first > period and tokens[first - 1] == tokens[first - 1 - period]:
                first -= 1
            last = place
            while last + 1 < len(tokens) and tokens[last + 1] == tokens[last + 1 - period]:
                last += 1
            start = first - period
            repeats = (last + 1 - start) // period
            covered = repeats * period
            enough = repeats >= min_repeats and covered >= min_tokens
            if enough and (best is None or covered > best.period * best.repeats):
                best = Loop(start, period, repeats, tuple(tokens[start : start + period]))
            place = last + 1 + stride  # last + 1 does not match: the next stretch begins behind it
    return best


@dataclass(frozen=True, slots=True)
class RepetitionGuard:
    """When a text that is being written counts as going in circles."""

    repeats: int = REPEATS  # copies in a row; 0: never
    period: int = PERIOD  # tokens of the longest block

    def __post_init__(self) -> None:
        if self.repeats < 0 or self.repeats == 1:
            raise BadRequest(f"loop_repeats is {self.repeats}; give 0 (off) or the copies that make a loop, 2 or more")
        if not 1 <= self.period <= LONGEST_PERIOD:
            raise BadRequest(
                f"loop_period is {self.period}; give the longest block that is looked for, 1 to {LONGEST_PERIOD} tokens"
            )

    def look(self, written: Sequence[int], new: int) -> Loop | None:
        """A loop that the last `new` tokens have completed. Earlier ones would have been found when they were."""
        if not self.repeats:
            return None
        longest = max(self.repeats * self.period, TOKENS + self.period)  # that a loop has to be to count as one
        return find_loop(written[-longest - new :], self.repeats, max_period=self.period)
