"""Drafters that read the target: they get its hidden states of every token that it has read for good."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from semspec.types import Drafter


@runtime_checkable
class HiddenStateDrafter(Drafter, Protocol):
    layers: tuple[int, ...]  # of the target, numbered as in `Transformer.forward`

    def observe(self, tokens: list[int], hidden: dict[int, Tensor]) -> None:
        """The target has read these tokens of the prompt or of the accepted text, after those observed before.
        `hidden` has a row for each, by layer. Called after `accept`; every token comes once, in order."""
        ...
