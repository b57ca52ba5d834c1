"""What was learnt of draft lengths, kept for later prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping

from semspec.loop.draft_length import NO_STEPS, AdaptiveLength


class DraftLengths:
    """An `AdaptiveLength` per combination of rule and drafter, so that later prompts start from earlier estimates. The
    least recently used are dropped."""

    def __init__(
        self, size: int = 64, row_cost: float | None = None, step_costs: Mapping[int, float] = NO_STEPS
    ) -> None:
        self.size, self.row_cost, self.step_costs = size, row_cost, step_costs
        self._policies: OrderedDict[Hashable, AdaptiveLength] = OrderedDict()

    def of(
        self, key: Hashable, max_tokens: int, min_tokens: int, lookup: bool = False, draft_cost: float = 0.0
    ) -> AdaptiveLength:
        made = AdaptiveLength(max_tokens, min_tokens, lookup, draft_cost, self.row_cost, self.step_costs)
        policy = self._policies.setdefault(key, made)
        self._policies.move_to_end(key)
        if len(self._policies) > self.size:
            self._policies.popitem(last=False)
        return policy

    def fresh(self) -> DraftLengths:
        """With nothing learnt but what was measured when the models were loaded."""
        return DraftLengths(self.size, self.row_cost, self.step_costs)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._policies)
