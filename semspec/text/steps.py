"""Where a reasoning step ends, on streams of token ids: nothing is detokenized or tokenized again at run time.

A step is text up to and including a blank line. Which tokens can form one is derived once from a tokenizer's
vocabulary, by decoding every token by itself. A blank line may be inside one token (".\\n\\n") or formed by several
("\\n" after ":\\n", spaces between them allowed). Blank lines before the first word belong to the step that follows,
so no step is empty. A step also ends at the end of thinking, at the end of the text, and at `max_tokens`.

The released code of SemanticSpec knows eight delimiter tokens of Qwen's tokenizer instead, and ends a step at any of
them, wherever it stands: `by("released")`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from transformers import PreTrainedTokenizerBase

from semspec.errors import BadRequest
from semspec.text.tokenizer import thinking_markers

MAX_STEP_TOKENS = 500
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n\Z")
_NEW_LINE = re.compile(r"\n[ \t\r]*\Z")

RELEASED = frozenset(f"{before}\n\n" for before in (" ", ".", ":", "", ")", "?", "]", ")."))  # the eight, as text
DELIMITERS = ("all", "released")

StepEnd = Literal["blank line", "length", "end of thinking", "end of text"]


@dataclass(frozen=True, slots=True)
class StepDelimiters:
    """The tokens that decide where steps end."""

    delimiters: frozenset[int]  # end in a blank line
    openers: frozenset[int]  # end in a newline, perhaps with spaces after it: open a line that is blank so far
    closers: frozenset[int]  # only whitespace, ending in a newline: close a line that is blank so far
    blanks: frozenset[int]  # only whitespace
    end_of_thinking: int | None = None
    end_of_text: frozenset[int] = frozenset()
    max_tokens: int = MAX_STEP_TOKENS
    released: frozenset[int] = frozenset()  # the tokens that are one of `RELEASED`

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise BadRequest(f"max_step_tokens is {self.max_tokens}; give 1 or more")

    @staticmethod
    def of(
        tokenizer: PreTrainedTokenizerBase,
        end_of_text: Iterable[int] = (),
        max_step_tokens: int = MAX_STEP_TOKENS,
    ) -> StepDelimiters:
        """From the vocabulary. Takes about a second for a large one: keep the result."""
        ids = sorted(tokenizer.get_vocab().values())
        # Decoders may drop a space at the start of a text, which does not matter here.
        texts = tokenizer.batch_decode(
            [[i] for i in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        begin, end = thinking_markers(tokenizer) or (None, None)
        known = list(zip(ids, texts, strict=True))
        delimiters = frozenset(i for i, text in known if _BLANK_LINE.search(text))
        openers = frozenset(i for i, text in known if _NEW_LINE.search(text))
        closers = frozenset(i for i, text in known if text.endswith("\n") and not text.strip())
        blanks = {i for i, text in known if not text.strip()}
        if begin is not None:
            blanks.add(begin)
        ends = {*end_of_text, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
        released = frozenset(i for i, text in known if text in RELEASED)
        return StepDelimiters(
            delimiters, openers, closers, frozenset(blanks), end, frozenset(ends), max_step_tokens, released
        )

    def by(self, delimiters: str) -> StepDelimiters:
        """These, or those of the released code of SemanticSpec."""
        if delimiters == "all":
            return self
        if not self.released:
            raise BadRequest("this tokenizer has none of the eight delimiters of the released code; use delimiters=all")
        none = frozenset[int]()
        return replace(self, delimiters=self.released, openers=none, closers=none, blanks=none)

    @property
    def stops(self) -> frozenset[int]:
        """Tokens at which decoding has to pause because a step may end there; `Step` decides whether it does."""
        ends = self.delimiters | self.closers | self.end_of_text
        return ends if self.end_of_thinking is None else ends | {self.end_of_thinking}

    def step_end(self, tokens: Sequence[int]) -> int | None:
        """How many of these tokens belong to the first step, or None if it does not end within them."""
        return StepTracker(self).feed(tokens)

    def cuts(self, tokens: Sequence[int]) -> list[int]:
        """The indices after the last token of each step; an unfinished last step has none."""
        step, cuts = StepTracker(self), []
        for i, token in enumerate(tokens):
            if step.feed([token]) is not None:
                cuts.append(i + 1)
                step = StepTracker(self)
        return cuts


class StepTracker:
    """One step in progress, fed token by token or in chunks of any size."""

    def __init__(self, steps: StepDelimiters) -> None:
        self.steps = steps
        self.length = 0
        self.end: StepEnd | None = None
        self._visible = False  # the step has visible text
        self._new_line = False  # nothing visible since the last newline

    @property
    def tokens_left(self) -> int:
        """Tokens that may still come."""
        return 0 if self.end else self.steps.max_tokens - self.length

    def feed(self, tokens: Sequence[int]) -> int | None:
        """Add tokens up to the end of the step. Returns how many of them belong to it, or None if it goes on."""
        assert self.end is None, "this step has ended; the next tokens belong to another"
        for i, token in enumerate(tokens):
            self.end = self._add(token)
            if self.end:
                return i + 1
        return None

    def _add(self, token: int) -> StepEnd | None:
        steps, self.length = self.steps, self.length + 1
        blank = token in steps.blanks
        self._visible = self._visible or not blank
        ended = token in steps.delimiters or (self._new_line and token in steps.closers)
        self._new_line = token in steps.openers or (self._new_line and blank)
        if token in steps.end_of_text:
            return "end of text"
        if token == steps.end_of_thinking:
            return "end of thinking"
        if ended and self._visible:
            return "blank line"
        return "length" if self.length == steps.max_tokens else None
