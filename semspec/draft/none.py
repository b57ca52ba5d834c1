"""A drafter that never proposes."""

from __future__ import annotations

from semspec.types import Draft, DraftRequest, ProposalGenerator, Runner


class NoDrafter:
    def __init__(self) -> None:
        self.runners: list[Runner] = []

    def begin(self, slots: list[int]) -> None:
        pass

    def propose(self, context: list[int], request: DraftRequest) -> ProposalGenerator:
        return Draft([])
        yield  # makes this a generator, as the protocol requires

    def accept(self, length: int) -> None:
        pass

    def close(self) -> None:
        pass
