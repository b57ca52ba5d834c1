"""A drafter that never proposes: the target's steps are one token each."""

from __future__ import annotations

from semspec.types import Draft, ProposalGenerator, Runner, Sampling
from semspec.verify.base import Rule


class NoDrafter:
    def __init__(self) -> None:
        self.runners: list[Runner] = []

    def begin(self, slots: list[int]) -> None:
        pass

    def propose(self, context: list[int], n: int, sampling: Sampling, round: int, rule: Rule) -> ProposalGenerator:
        return Draft([])
        yield  # a generator, as the protocol says, that asks for nothing

    def accept(self, length: int) -> None:
        pass

    def close(self) -> None:
        pass
