"""Room in a cache, as the scheduler asks about it (types.Runner)."""

from __future__ import annotations

from collections.abc import Sequence

from semspec.types import Score


class EnoughRoom:
    """A runner whose slots always have room for what they may hold: nothing is preempted or given back."""

    @property
    def windowed(self) -> bool:
        return False

    def admits(self, prompt: Sequence[int], salt: str = "") -> bool:
        return not self.lacks([(None, len(prompt))])

    def lacks(self, tokens: Sequence[tuple[int | None, int]], without: Sequence[int] = ()) -> bool:
        return False

    def shortest(self, slot: int) -> int:
        return 0

    def park(self, slot: int) -> int | None:
        return None

    def preempt(self, slot: int) -> bool:
        return False

    def lost(self, slot: int) -> list[int]:
        return []

    def expect(self, request: Score) -> None:
        pass
