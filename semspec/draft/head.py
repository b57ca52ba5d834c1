"""Drafting with a head that reads the target's hidden states, token after token or a block at once.

The head has nothing to go on before the target has read the prompt; the first round is therefore without a draft.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from semspec.draft.early_exit import EarlyExit
from semspec.draft.model import NO_EARLY_EXIT, ModelDrafter
from semspec.draft.tree import CHAIN, TreeOptions
from semspec.types import Draft, DraftRequest, ProposalGenerator

if TYPE_CHECKING:
    from semspec.model.heads.runner import StateRunner


class HeadDrafter(ModelDrafter):
    def __init__(self, head: StateRunner, early_exit: EarlyExit = NO_EARLY_EXIT, tree: TreeOptions = CHAIN) -> None:
        super().__init__(head, early_exit, tree)
        self.head, self.layers = head, tuple(sorted(set(head.layers)))

    def observe(self, tokens: list[int], hidden: dict[int, Tensor]) -> None:
        assert self.slot is not None
        self.head.observe(self.slot, hidden)

    def propose(self, context: list[int], request: DraftRequest) -> ProposalGenerator:
        assert self.slot is not None
        if len(context) < 2 or self.head.observed(self.slot) < len(context) - 1:
            return Draft([])
        longest = min(request.max_tokens, self.head.longest)
        return (yield from super().propose(context, replace(request, max_tokens=longest)))
