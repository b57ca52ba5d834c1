"""What types.Runner asks about room in the cache, for runners whose cache is never full."""

from __future__ import annotations

from collections.abc import Sequence

from semspec.types import Score


class BaseRunner:
    """Slots always have room for what they may hold, so nothing is preempted or given back. A runner with a pool of
    pages overrides this."""

    @property
    def windowed(self) -> bool:
        return False

    def can_admit(self, prompt: Sequence[int], salt: str = "") -> bool:
        return not self.lacks_room([(None, len(prompt))])

    def lacks_room(self, tokens: Sequence[tuple[int | None, int]], without: Sequence[int] = ()) -> bool:
        return False

    def min_length(self, slot: int) -> int:
        return 0

    def park(self, slot: int) -> int | None:
        return None

    def preempt(self, slot: int) -> bool:
        return False

    def tokens_to_recompute(self, slot: int) -> list[int]:
        return []

    def expect(self, request: Score) -> None:
        pass
