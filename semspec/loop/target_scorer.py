"""The target's slot of one sequence, and the hidden states for a drafter that wants them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semspec.draft.hidden_states import HiddenStateDrafter
from semspec.sampling.copies import to_device
from semspec.types import Drafter, Handover, Request, Runner, Score, ScoreOutput


class TargetScorer:
    """Scores on the target's slot. A `HiddenStateDrafter` gets the states of all that stays, once and in order."""

    def __init__(self, target: Runner, drafter: Drafter) -> None:
        self.target, self.slot = target, -1
        self._reader = drafter if isinstance(drafter, HiddenStateDrafter) else None
        self.layers = self._reader.layers if self._reader else ()  # of the target, that the drafter reads
        self._unobserved: list[dict[int, Tensor]] = []  # their states in passes since the last commit
        self._observed = 0  # tokens of the context whose states the drafter has

    def score(
        self,
        tokens: list[int],
        logits_to_keep: int,
        layers: tuple[int, ...] = (),
        dense: bool = True,
        parents: tuple[int, ...] = (),
        handover: Handover | None = None,
    ) -> Generator[Request, Any, ScoreOutput]:
        """Feed tokens to the target. Returns what was asked for; a drafter that wants states gets all."""
        if not self.layers:
            return (
                yield Score(
                    self.target, self.slot, tokens, logits_to_keep, layers, dense=dense, parents=parents,
                    handover=handover,
                )
            )  # fmt: skip
        both, states = tuple(sorted({*self.layers, *layers})), len(tokens)
        rows: ScoreOutput = yield Score(
            self.target, self.slot, tokens, logits_to_keep, both, False, states, dense, parents
        )
        self.add({layer: rows.hidden[layer] for layer in self.layers})
        return ScoreOutput(rows.logits, {layer: rows.hidden[layer][len(tokens) - logits_to_keep :] for layer in layers})

    def add(self, hidden: dict[int, Tensor]) -> None:
        """States of the next tokens in the target's cache."""
        self._unobserved.append(hidden)

    def compact(self, drafted: int, path: tuple[int, ...]) -> None:
        """Of a tree draft of so many tokens only this path: in the target's cache, and in the states it made."""
        self.target.compact(self.slot, self.target.length(self.slot) - drafted, path)
        if self.layers:
            part = self._unobserved[-1]
            first = next(iter(part.values())).shape[0] - drafted
            if path == tuple(range(len(path))):  # what is left lies one after the other, as mostly: these are no copies
                self._unobserved[-1] = {layer: states[: first + len(path)] for layer, states in part.items()}
                return
            rows = np.array([*range(first), *(first + i for i in path)])
            at = to_device(rows, next(iter(part.values())).device)
            self._unobserved[-1] = {layer: states.index_select(0, at) for layer, states in part.items()}

    def observe(self, context: list[int]) -> None:
        """Give the drafter the states of all that was committed."""
        read, self._unobserved = self._unobserved, []
        tokens = context[self._observed : self.target.length(self.slot)]
        if self._reader is not None and tokens:
            hidden = {layer: _joined([part[layer] for part in read])[: len(tokens)] for layer in self.layers}
            self._reader.observe(tokens, hidden)
            self._observed += len(tokens)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
