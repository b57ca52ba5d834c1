"""Logits processors: what changes the logits of a row by the tokens before it, before any temperature or filter.

They are the one place where options such as penalties, biases and grammars act. Rows of the target are processed before
a rule sees them, rows of the draft model before its token is drawn, so that both models obey, and a rule that compares
distributions compares processed ones. What a processor does is a function of the new tokens before a row: what it
remembers is a cache, which follows a history that is cut back when a draft is rejected.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semspec.errors import BadRequest, SemspecError

NEG_INF = float("-inf")
NOT_NUMBERS = (
    "the model's logits are not numbers (NaN), so no token can be drawn; its weights may be damaged, or its dtype too "
    "narrow: try --dtype float32"
)


class LogitsProcessor(ABC):
    """Of one sequence. `tokens` are its new tokens, without the prompt."""

    option = "logits processors"  # what a request asks for it by
    error = ""  # why no token can follow any more, in words

    @abstractmethod
    def process(self, logits: Tensor, tokens: list[int], draft: Sequence[int]) -> None:
        """Change logits [n, V] in place: row i follows `tokens` and the first i of `draft`, which has n - 1."""

    def legal(self, tokens: list[int], draft: Sequence[int]) -> int:
        """How many of the draft's tokens may follow, one after the other."""
        return len(draft)

    def forced(self, tokens: list[int], most: int) -> list[int]:
        """What has to follow, because each time only one token may: at most so many tokens."""
        return []

    def ended(self, tokens: list[int], new: Sequence[int]) -> int | None:
        """After how many of these legal new tokens nothing may follow, if the text ends within them."""
        return None


class Processors:
    """All processors of one sequence, in the order in which they act."""

    def __init__(self, prompt: int, each: Sequence[LogitsProcessor]) -> None:
        self.prompt, self.each = prompt, each

    def after(self, context: list[int]) -> History:
        return History(self, context[self.prompt :])

    def legal(self, context: list[int], draft: Sequence[int]) -> int:
        tokens = context[self.prompt :]
        return min((one.legal(tokens, draft) for one in self.each), default=len(draft))

    def forced(self, context: list[int], most: int) -> list[int]:
        tokens = context[self.prompt :]
        found = next((found for one in self.each if (found := one.forced(tokens, most))), [])
        return found[: self.legal(context, found)]  # what others forbid is not forced: there no token may follow

    def ended(self, context: list[int], new: Sequence[int]) -> int | None:
        tokens = context[self.prompt :]
        return min((n for one in self.each if (n := one.ended(tokens, new)) is not None), default=None)

    @property
    def error(self) -> str:
        """Why no token could be drawn."""
        return next((one.error for one in self.each if one.error), "") or (
            "no token may follow here: what the request allows (allowed_token_ids, bad_words, min_tokens, a grammar) "
            "leaves none; allow more"
        )


@dataclass(slots=True)
class History:
    """The new tokens before some rows, and the processors that change those rows. Who draws tokens appends them."""

    processors: Processors
    tokens: list[int]

    def apply(self, logits: Tensor, draft: Sequence[int] = (), drafting: bool = False) -> Tensor:
        """[n, V] processed, float32; row i follows the first i tokens of the draft, and rows after those of the draft
        are left as they are. A row that allows no token becomes NaN, which whoever draws from it finds out; but a draft
        may go on as it likes from there, since the target need not follow it so far."""
        rows = logits[: len(draft) + 1].to(torch.float32, copy=True)
        for one in self.processors.each:
            one.process(rows, self.tokens, draft[: len(rows) - 1])
        nothing = logits[: len(rows)].float() if drafting else rows.new_tensor(float("nan"))
        rows = torch.where((rows.amax(-1) == NEG_INF)[:, None], nothing, rows)
        return rows if len(rows) == len(logits) else torch.cat([rows, logits[len(rows) :].float()])


def no_token(history: History | None, nan: bool) -> SemspecError:
    """Why none could be drawn: the model's logits are not numbers, or the options of the request allow none."""
    return SemspecError(NOT_NUMBERS) if nan or history is None else BadRequest(history.processors.error)


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two histories have in common at their beginning."""
    n = min(len(one), len(other))
    return n if one[:n] == other[:n] else next(i for i in range(n) if one[i] != other[i])


class Penalties(LogitsProcessor):
    """OpenAI's presence and frequency penalties, on new tokens; CTRL's repetition penalty, on the prompt's as well."""

    option = "penalties"

    def __init__(self, prompt: Sequence[int], presence: float, frequency: float, repetition: float) -> None:
        self.presence, self.frequency, self.repetition = presence, frequency, repetition
        self._prompt = sorted(set(prompt)) if repetition != 1.0 else []
        self._tokens: list[int] = []
        self._counts: Tensor | None = None  # [V] of `_tokens`
        self._in_prompt: Tensor | None = None  # [V]

    def process(self, logits: Tensor, tokens: list[int], draft: Sequence[int]) -> None:
        counts = self._follow(tokens, logits).repeat(len(logits), 1)
        for i, token in enumerate(draft):
            counts[i + 1 :, token] += 1
        if self.repetition != 1.0:
            assert self._in_prompt is not None
            punished = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
            logits.copy_(torch.where((counts > 0) | self._in_prompt, punished, logits))
        if self.presence or self.frequency:
            logits -= self.frequency * counts + self.presence * (counts > 0)

    def _follow(self, tokens: list[int], like: Tensor) -> Tensor:
        """The counts of these tokens."""
        if self._counts is None:
            with torch.inference_mode(False):  # what is made in it may not be changed outside
                self._counts = torch.zeros(like.shape[-1], device=like.device)
                self._in_prompt = torch.zeros_like(self._counts, dtype=torch.bool)
                self._in_prompt[self._prompt] = True
        if self._counts.device != like.device:  # the models of a pair may lie on different ones
            assert self._in_prompt is not None
            self._counts, self._in_prompt = self._counts.to(like.device), self._in_prompt.to(like.device)
        same = shared(self._tokens, tokens)
        for change, by in ((self._tokens[same:], -1.0), (tokens[same:], 1.0)):
            if change:
                at = torch.tensor(change, device=like.device)
                self._counts.index_add_(0, at, torch.full_like(at, by, dtype=self._counts.dtype))
        self._tokens = list(tokens)
        return self._counts


class Bias(LogitsProcessor):
    """A number added to the logits of some tokens."""

    option = "logit_bias"

    def __init__(self, bias: dict[int, float]) -> None:
        self._ids, self._values = torch.tensor(list(bias)), torch.tensor(list(bias.values()))

    def process(self, logits: Tensor, tokens: list[int], draft: Sequence[int]) -> None:
        self._ids, self._values = self._ids.to(logits.device), self._values.to(logits)
        logits[:, self._ids] += self._values


class OnlyTokens(LogitsProcessor):
    """No others may follow."""

    option = "allowed_token_ids"

    def __init__(self, allowed: Sequence[int], vocab: int) -> None:
        self.allowed = frozenset(allowed)
        self._forbidden = torch.ones(vocab, dtype=torch.bool)
        self._forbidden[list(self.allowed)] = False

    def process(self, logits: Tensor, tokens: list[int], draft: Sequence[int]) -> None:
        self._forbidden = self._forbidden.to(logits.device)
        logits.masked_fill_(self._forbidden[: logits.shape[-1]], NEG_INF)

    def legal(self, tokens: list[int], draft: Sequence[int]) -> int:
        return next((i for i, token in enumerate(draft) if token not in self.allowed), len(draft))


class Forbids(LogitsProcessor):
    """Some tokens may not follow some histories."""

    memory = 0  # how many of the last tokens matter

    @abstractmethod
    def forbidden(self, count: int, last: tuple[int, ...]) -> list[int]:
        """After `count` new tokens that end with `last`."""

    def _rows(self, tokens: list[int], draft: Sequence[int], n: int) -> list[list[int]]:
        last = (*tokens[len(tokens) - self.memory if len(tokens) > self.memory else 0 :], *draft)
        ends = [len(last) - len(draft) + i for i in range(n)]
        return [self.forbidden(len(tokens) + i, last[max(0, end - self.memory) : end]) for i, end in enumerate(ends)]

    def process(self, logits: Tensor, tokens: list[int], draft: Sequence[int]) -> None:
        each = enumerate(self._rows(tokens, draft, len(logits)))
        pairs = [(i, token) for i, forbidden in each for token in forbidden]
        if pairs:
            rows, columns = torch.tensor(pairs, device=logits.device).T
            logits[rows, columns] = NEG_INF

    def legal(self, tokens: list[int], draft: Sequence[int]) -> int:
        rows = self._rows(tokens, draft, len(draft))
        return next((i for i, token in enumerate(draft) if token in rows[i]), len(draft))


class MinTokens(Forbids):
    """Nothing that ends the text may come before so many tokens."""

    option = "min_tokens"

    def __init__(self, count: int, stop: list[int]) -> None:
        self.count, self.stop = count, stop

    def forbidden(self, count: int, last: tuple[int, ...]) -> list[int]:
        return self.stop if count < self.count else []


class BadWords(Forbids):
    """Sequences of tokens that may not be completed."""

    option = "bad_words"

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self.words = sorted({tuple(word) for word in words})
        self.memory = max(map(len, self.words), default=1) - 1

    def forbidden(self, count: int, last: tuple[int, ...]) -> list[int]:
        return [word[-1] for word in self.words if last[len(last) - len(word) + 1 :] == word[:-1]]
