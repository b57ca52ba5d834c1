"""What types.Runner asks of runners whose cache is never full, and whose passes begin when the host asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from semspec.types import Grow, Handover, Score


class BaseRunner:
    """Slots always have room for what they may hold, so nothing is preempted or given back. A runner with a pool of
    pages overrides this."""

    @property
    def windowed(self) -> bool:
        return False

    @property
    def hands_over(self) -> bool:
        return False

    def begin(self, handovers: Sequence[Handover], drafts: Tensor) -> None:
        pass

    def grow(self, requests: Sequence[Grow]) -> list[np.ndarray[Any, Any]] | None:
        return None

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
