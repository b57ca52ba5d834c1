"""A grammar as a logits processor: only tokens that continue a text of the grammar may follow.

The matcher follows a history, is rolled back where a draft was rejected, and keeps the masks it has computed: a mask
that the draft model needed serves the target as well. What a model thinks is left free; the grammar begins after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from semspec.sampling.processors import NEG_INF, LogitsProcessor, shared
from semspec.text.structured import reason

State = Literal["free", "text", "over", "illegal"]  # thinking; in the grammar; its text is complete; it was left
Mask = np.ndarray[Any, np.dtype[np.uint8]]  # one bit for each token, the first one lowest


class GrammarProcessor(LogitsProcessor):
    option = "structured_outputs"

    def __init__(
        self,
        matcher: Any,
        vocab: int,
        ends: Sequence[int],
        stop: frozenset[int],
        thinking: tuple[int, int] | None = None,
        is_open: bool = False,
        failed: Callable[[], object] = lambda: None,
    ) -> None:
        """`ends`: what the library would end a text with; `stop`: what does. With markers of thinking the model may
        think first; `is_open`: the prompt has it thinking already. `failed` is told that the matcher has given up."""
        self._matcher, self._vocab, self._ends, self._failed = matcher, vocab, ends, failed
        self._stop, self._thinking = [t for t in stop if 0 <= t < vocab], thinking
        self._tokens: list[int] = []
        self._states: list[State] = ["free" if is_open else "text"]  # after each number of tokens
        self._fed: list[bool] = []  # which tokens the matcher was given
        self._masks: dict[int, Mask | None] = {}  # after so many tokens; None: everything is allowed

    def process(self, logits: Tensor, tokens: list[int], draft: Sequence[int]) -> None:
        self._follow([*tokens, *draft], len(tokens))
        masks = [self._masks[len(tokens) + i] for i in range(len(logits))]
        if all(mask is None for mask in masks):
            return
        everything = np.full_like(next(mask for mask in masks if mask is not None), 255)
        packed = np.stack([everything if mask is None else mask for mask in masks])
        forbidden = np.unpackbits(~packed, axis=1, count=logits.shape[-1], bitorder="little").view(np.bool_)
        logits.masked_fill_(torch.from_numpy(forbidden).to(logits.device), NEG_INF)

    def legal(self, tokens: list[int], draft: Sequence[int]) -> int:
        self._follow([*tokens, *draft], len(tokens))
        after = self._states[len(tokens) :]
        fine = [before in ("free", "text") and then != "illegal" for before, then in pairwise(after)]
        return (*fine, False).index(False)

    def forced(self, tokens: list[int], most: int) -> list[int]:
        found: list[int] = []
        while len(found) < most:
            self._follow([*tokens, *found], len(tokens) + len(found))
            mask = self._masks[len(tokens) + len(found)]
            if mask is None or int(np.bitwise_count(mask).sum()) != 1:
                break
            found.append(int(np.unpackbits(mask, bitorder="little").argmax()))
        return found

    def ended(self, tokens: list[int], new: Sequence[int]) -> int | None:
        self._follow([*tokens, *new], len(tokens) + len(new))
        states = self._states[len(tokens) + 1 :]
        return next((i + 1 for i, state in enumerate(states) if state == "over"), None)

    def _follow(self, tokens: list[int], first: int) -> None:
        """Be after these tokens, with a mask after every number of them from `first` on."""
        at = same = shared(self._tokens, tokens)
        if first <= same:
            at = next((i for i in range(first, same) if i not in self._masks), same)
        self._go_back(at)
        self._masks = {i: mask for i, mask in self._masks.items() if first <= i <= at}
        for i in range(at, len(tokens) + 1):
            if i > at:
                self._step(tokens[i - 1])
            if i >= first and i not in self._masks:
                self._masks[i] = self._mask()

    def _go_back(self, count: int) -> None:
        if back := sum(self._fed[count:]):
            self._matcher.rollback(back)
        del self._tokens[count:], self._fed[count:], self._states[count + 1 :]

    def _step(self, token: int) -> None:
        state, fed = self._states[-1], False
        begin, end = self._thinking or (None, None)
        if state == "free" and token == end:
            state = "text"
        elif state == "text":
            if token == begin and not self._tokens:
                state = "free"
            elif token in self._stop and self._matcher.is_accepting():
                state = "over"
            elif token not in self._ends and self._matcher.try_consume_tokens([token]):
                state, fed = "over" if self._is_complete() else "text", True
            else:
                state = "illegal"
        self._tokens.append(token)
        self._fed.append(fed)
        self._states.append(state)

    def _is_complete(self) -> bool:
        """Whether nothing may follow."""
        if self._matcher.is_stopped():
            return not self._matcher.is_error()
        return self._matcher.is_accepting() and not self._continuations().any()

    def _continuations(self) -> Mask:
        """What may follow inside the text, without what ends it; nothing, once the matcher has given up for good."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: (self._vocab + 7) // 8].copy()
        _set(mask, self._ends, False)
        if self._matcher.is_error():
            self.error = f"this grammar or schema has become too complex: {reason(self._matcher)}"
            self._failed()
            mask[:] = 0
        return mask

    def _mask(self) -> Mask | None:
        if self._matcher.is_error():
            return self._continuations()
        if self._states[-1] != "text":
            return None
        mask = self._continuations()
        if self._matcher.is_accepting():
            _set(mask, self._stop, True)
        if self._thinking is not None and not self._tokens:
            _set(mask, [self._thinking[0]], True)
        return mask


def _set(mask: Mask, tokens: Sequence[int], allowed: bool) -> None:
    for token in tokens:
        bit = np.uint8(1 << token % 8)
        mask[token // 8] = mask[token // 8] | bit if allowed else mask[token // 8] & ~bit
