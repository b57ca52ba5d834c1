"""A prompt for two models that do not share their tokens: each reads it in its own, by its own chat template."""

from __future__ import annotations

from collections.abc import Sequence

from semspec.text.chat import PLAIN, ChatFormat
from semspec.text.exchange import Exchange, Side
from semspec.text.reader import Reader
from semspec.text.tokenizer import Prompt, encode, opens_thinking


class PairPrompt(list[int]):
    """A prompt in the target's tokens, with the draft's beside them."""

    def __init__(self, target: Sequence[int], draft: list[int]) -> None:
        super().__init__(target)
        self.draft = draft


def draft_prompt(
    exchange: Exchange, prompt: Prompt | list[int], target: list[int], form: ChatFormat = PLAIN
) -> list[int]:
    """A prompt, whose tokens are known for the target, in the draft's tokens."""
    if isinstance(prompt, PairPrompt):
        return prompt.draft
    if not isinstance(prompt, str) and all(isinstance(part, int) for part in prompt):
        return _translated(exchange, target)
    try:
        own = encode(exchange.draft.tokenizer, prompt, form)
    except Exception:  # no chat template, or one that fails on these messages, which the target's takes
        return _translated(exchange, target)
    own = own if isinstance(prompt, str) else _as_open(exchange, own, target)
    return [t for t in own if t < exchange.draft.vocab_size] or _translated(exchange, target)


def encode_for_pair(exchange: Exchange, prompt: Prompt | list[int], form: ChatFormat = PLAIN) -> PairPrompt:
    target = encode(exchange.target.tokenizer, prompt, form)
    return PairPrompt(target, draft_prompt(exchange, prompt, target, form))


def _as_open(exchange: Exchange, own: list[int], target: list[int]) -> list[int]:
    """The draft's prompt, ending inside the thinking if and only if the target's does: templates differ in that."""
    theirs = _opener(exchange.target, target)
    at = _opener(exchange.draft, own)
    if theirs is None:
        return own if at is None else own[:at]
    return own if at is not None else _translated(exchange, target[theirs:], own)


def _opener(side: Side, prompt: list[int]) -> int | None:
    """Where the marker is that opens the thinking at the end of a prompt."""
    markers = side.thinking
    if markers is None or not opens_thinking(side.tokenizer, prompt, markers):
        return None
    return len(prompt) - 1 - prompt[::-1].index(markers[0])


def _translated(exchange: Exchange, tokens: list[int], before: Sequence[int] | None = None) -> list[int]:
    """The target's tokens in the draft's; where nothing is before them, after what begins a text of the draft's."""
    if before is None:
        first = exchange.draft.tokenizer.encode("")[:1]
        before = [] if first in ([exchange.to_draft.get(tokens[0])], [exchange.draft.end]) else first
    reader = Reader(exchange, before, 0)
    reader.extend(tokens)
    return reader.ids or [next(iter(exchange.draft.entries))]  # a model cannot go on from nothing
