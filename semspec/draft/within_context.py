"""A draft model whose context is shorter than the target's: beyond its end, drafts are looked up in the text."""

from __future__ import annotations

import logging

from semspec.draft.ngram import NgramDrafter
from semspec.types import Drafter, DraftRequest, ProposalGenerator, Runner

log = logging.getLogger(__name__)


class WithinContext:
    """The drafter while the context fits into its model, then n-gram lookup."""

    def __init__(self, drafter: Drafter, runner: Runner) -> None:
        self.drafter, self.capacity = drafter, runner.max_seq_len
        self.runners = drafter.runners
        self.lookup: NgramDrafter | None = None

    def begin(self, slots: list[int]) -> None:
        self.drafter.begin(slots)

    def propose(self, context: list[int], request: DraftRequest) -> ProposalGenerator:
        if self.lookup is None and len(context) > self.capacity:
            self.lookup = NgramDrafter()
            what = f"the draft model's context of {self.capacity} tokens is full; drafts are looked up in the text now"
            log.warning(what)
        return (yield from (self.lookup or self.drafter).propose(context, request))

    def accept(self, length: int) -> None:
        (self.lookup or self.drafter).accept(length)

    def close(self) -> None:
        self.drafter.close()
