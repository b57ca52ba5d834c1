"""Options of a request that change logits by the tokens before them, checked; and the processors that obey them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from semspec.errors import BadRequest
from semspec.sampling.processors import BadWords, Bias, LogitsProcessor, MinTokens, OnlyTokens, Penalties

MAX_BIASES = 1024  # entries of logit_bias
MAX_BAD_WORDS = 256
MAX_BAD_WORD = 200  # characters
MAX_BIAS = 100.0
MAX_PENALTY = 2.0  # OpenAI's


@dataclass(frozen=True, slots=True)
class LogitOptions:
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None  # None: all

    def __post_init__(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.logit_bias is None:
            object.__setattr__(self, "logit_bias", {})
        if not isinstance(self.logit_bias, dict):
            raise BadRequest("logit_bias is no mapping; give numbers by token id")
        if len(self.logit_bias) > MAX_BIASES:
            raise BadRequest(f"logit_bias has {len(self.logit_bias)} entries; give at most {MAX_BIASES}")
        object.__setattr__(self, "logit_bias", {_token_id("logit_bias", k): v for k, v in self.logit_bias.items()})
        for value in self.logit_bias.values():
            _check_number("a value of logit_bias", value, -MAX_BIAS, MAX_BIAS)
        if not isinstance(self.min_tokens, int) or isinstance(self.min_tokens, bool) or self.min_tokens < 0:
            raise BadRequest(f"min_tokens is {self.min_tokens!r:.80}; give a whole number, 0 or more")
        words = self.bad_words
        if not isinstance(words, list | tuple) or not all(isinstance(w, str) and w.strip() for w in words):
            raise BadRequest("bad_words is no list of texts with something in them")
        if len(words) > MAX_BAD_WORDS or any(len(word) > MAX_BAD_WORD for word in words):
            raise BadRequest(f"bad_words: give at most {MAX_BAD_WORDS} texts of at most {MAX_BAD_WORD} characters")
        if self.allowed_token_ids is not None:
            if not isinstance(self.allowed_token_ids, list | tuple) or not self.allowed_token_ids:
                raise BadRequest("allowed_token_ids is no list of token ids with at least one of them; leave it out")
            allowed: tuple[int, ...] = tuple(self.allowed_token_ids)
            if set(map(type, allowed)) != {int} or min(allowed) < 0:  # there may be many: look at each only if need be
                allowed = tuple(_token_id("allowed_token_ids", t) for t in allowed)
            object.__setattr__(self, "allowed_token_ids", allowed)

    def processors(
        self, prompt: Sequence[int], vocab: int, stop: frozenset[int], tokens_of: Callable[[str], list[int]]
    ) -> list[LogitsProcessor]:
        """For one sequence with this prompt; nothing for options that ask for nothing."""
        found: list[LogitsProcessor] = []
        _check_ids("logit_bias", self.logit_bias, vocab)
        if self.allowed_token_ids is not None:
            _check_ids("allowed_token_ids", self.allowed_token_ids, vocab)
            found.append(OnlyTokens(self.allowed_token_ids, vocab))
        if self.bad_words:
            # A word has other tokens at the beginning of a text than after a space.
            spelled = [tokens_of(text) for word in self.bad_words for text in (word, f" {word.lstrip()}")]
            found.append(BadWords([tokens for tokens in spelled if tokens]))
        if self.min_tokens:
            found.append(MinTokens(self.min_tokens, [t for t in stop if 0 <= t < vocab]))
        if self.logit_bias:
            found.append(Bias(self.logit_bias))
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        if penalties != (0.0, 0.0, 1.0):
            found.append(Penalties(prompt, *penalties))
        return found


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high:
        raise BadRequest(f"{name} is {value!r:.80}; give a number from {low:g} to {high:g}")


def _token_id(name: str, value: Any) -> int:
    """Keys of JSON objects are texts."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadRequest(f"{name} has {value!r:.80}, which is no token id; give whole numbers, 0 or more")
    return value


def _check_ids(name: str, ids: Iterable[int], vocab: int) -> None:
    if (token := max(ids, default=0)) >= vocab:
        raise BadRequest(f"{name} has the token id {token}, but the model knows ids below {vocab}")
