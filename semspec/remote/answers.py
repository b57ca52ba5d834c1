"""What servers answer, checked: nothing a server sends is believed before it was looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

UNFINISHED = "\ufffd"  # of bytes that are no whole character
BYTES = "bytes:"  # how OpenAI writes such a token
MOST_ABOVE = 1e-3  # a log-probability is at most 0, up to rounding
LEAST = -1e4  # none counts as less
MAX_TOP = 64  # likeliest tokens of one position
MAX_TOKEN = 4096  # characters of one token


class Malformed(ValueError):
    """An answer that is not what was asked for."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A token by its text, with the log-probabilities (temperature 1) of it and of the likeliest there."""

    text: str
    logprob: float | None = None  # None: not known, as of a prompt's first token
    top: dict[str, float] = field(default_factory=dict)

    @property
    def partial(self) -> bool:
        """Whether it is a part of a character, so that its text is none."""
        return UNFINISHED in self.text or self.text.startswith(BYTES)


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion."""

    text: str  # what was generated
    finish: str
    stop: str | None  # the stop string that ended it; None: none, or not said
    pieces: list[Piece]  # what was generated, in tokens, as far as that is reported
    prompt: list[Piece] | None = None  # the same of the prompt
    prompt_tokens: int | None = None


def read_answer(body: dict[str, Any], scored: str | None = None) -> Answer:
    """From a completion's JSON. With `scored` it must have the prompt's log-probabilities, in the form that was asked
    for: echo or prompt_logprobs. (vLLM sends both for the first.)"""
    choice = _first(body.get("choices"))
    text, finish = choice.get("text"), choice.get("finish_reason")
    if not isinstance(text, str) or not isinstance(finish, str):
        _wrong("a completion without a text or a finish_reason")
    usage = body.get("usage")
    counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    count = counted if type(counted) is int and counted >= 0 else None
    pieces = read_pieces(choice.get("logprobs"))
    before: list[Piece] | None = None
    if scored == "prompt_logprobs":
        before = read_prompt_logprobs(choice.get("prompt_logprobs") or [])
    elif scored:
        written = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if type(written) is not int or not 0 <= written <= len(pieces):
            written = min(1, len(pieces))
        at = len(pieces) - written
        before, pieces = pieces[:at], pieces[at:]
        # The prompt comes back as the server spells it, perhaps without special tokens; and the end is a token, too.
        text = "" if finish == "stop" else "".join(piece.text for piece in pieces)
    if scored and not any(piece.logprob is not None for piece in before or ()):
        _wrong("no log-probabilities of the prompt")
    named = (choice.get(key) for key in ("stop_reason", "matched_stop") if finish == "stop")
    stop = next((word for word in named if isinstance(word, str)), None)
    return Answer(text, finish, stop, pieces, before, count)


def read_pieces(logprobs: Any) -> list[Piece]:
    """`logprobs` of a completion, in OpenAI's form of completions or in that of chats."""
    if logprobs is None:
        return []
    if not isinstance(logprobs, dict):
        _wrong("logprobs that are no object")
    if isinstance(entries := logprobs.get("content"), list):
        return [_entry(entry) for entry in entries]
    tokens, own = logprobs.get("tokens"), logprobs.get("token_logprobs")
    top = logprobs.get("top_logprobs")
    if not isinstance(tokens, list) or not isinstance(own, list) or len(tokens) != len(own):
        _wrong("log-probabilities that are not as many as tokens")
    if top is None:
        top = [None] * len(tokens)
    if not isinstance(top, list) or len(top) != len(tokens):
        _wrong("top_logprobs that are not as many as tokens")
    return [Piece(_text(t), _logprob(p), _top(best)) for t, p, best in zip(tokens, own, top, strict=True)]


def read_prompt_logprobs(rows: Any) -> list[Piece]:
    """vLLM's form: for each token of the prompt, entries by id, the prompt's own first."""
    if not isinstance(rows, list):
        _wrong("prompt_logprobs that are no list")
    found = []
    for row in rows:
        if row is None:
            found.append(Piece(""))
            continue
        many = len(row) if isinstance(row, dict) and all(isinstance(e, dict) for e in row.values()) else 0
        if not 0 < many <= MAX_TOP:
            _wrong("prompt_logprobs of another form")
        entries = [(_text(e.get("decoded_token")), _logprob(e.get("logprob"))) for e in row.values()]
        top = {text: p for text, p in entries if p is not None}
        found.append(Piece(*entries[0], top))
    return found


def _entry(entry: Any) -> Piece:
    if not isinstance(entry, dict):
        _wrong("logprobs.content of another form")
    top = entry.get("top_logprobs") or []
    if not isinstance(top, list) or len(top) > MAX_TOP or not all(isinstance(e, dict) for e in top):
        _wrong("top_logprobs of another form")
    best = {_text(e.get("token")): _logprob(e.get("logprob")) for e in top}
    return Piece(
        _text(entry.get("token")), _logprob(entry.get("logprob")), {t: p for t, p in best.items() if p is not None}
    )


def _first(choices: Any) -> dict[str, Any]:
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        _wrong("an answer without choices")
    return choices[0]


def _text(text: Any) -> str:
    if not isinstance(text, str) or len(text) > MAX_TOKEN:
        _wrong("a token that is no text")
    return text


def _logprob(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value <= MOST_ABOVE:
        _wrong("a log-probability that is none")
    return float(max(min(value, 0), LEAST))


def _top(best: Any) -> dict[str, float]:
    if best is None:
        return {}
    if not isinstance(best, dict) or len(best) > MAX_TOP:
        _wrong("top_logprobs of another form")
    found = {_text(text): _logprob(p) for text, p in best.items()}
    return {text: p for text, p in found.items() if p is not None}


def _wrong(what: str) -> NoReturn:
    raise Malformed(what)


def tail(pieces: Sequence[Piece], text: str) -> list[Piece] | None:
    """The last pieces, which spell this text; the first may have begun before it and then has the rest of its text.
    None: they do not spell it.

    From the end, since servers put tokens of their own before a prompt. Parts of characters have no text: what no
    whole token accounts for is theirs, and the first of them gets it."""
    found: list[Piece] = []
    left, pending = text, list[Piece]()
    for piece in reversed(pieces):
        if not left:
            break
        if piece.partial:
            pending.append(piece)
            continue
        short = not left.endswith(piece.text) and piece.text.endswith(left) and not pending
        at = 0 if short else left.rfind(piece.text)
        own = left if short else piece.text
        if at < 0 or (not pending and at + len(own) != len(left)):
            return None
        found += _parts(pending, left[at + len(own) :])
        pending, left = [], left[:at]
        found.append(Piece(own, piece.logprob, piece.top))
    if left and not pending:
        return None
    found += _parts(pending, left)
    return found[::-1]


def _parts(pieces: list[Piece], text: str) -> list[Piece]:
    """Parts of characters, from the last to the first, as pieces: the first has all the text."""
    return [Piece(text if i == len(pieces) - 1 else "", p.logprob, p.top) for i, p in enumerate(pieces)]


def head(pieces: Sequence[Piece], text: str) -> list[Piece]:
    """The first pieces, which spell this text; the last may go on beyond it. None of them: they do not spell it."""
    found = _spelling(pieces, text)
    whole = "".join(p.text for p in found) == text and not any(p.partial for p in pieces[: len(found)])
    return found if whole else []


def spelled(pieces: Sequence[Piece], text: str, split: Callable[[str], list[str]]) -> list[str]:
    """A generated text in tokens: those reported, as far as they spell it, else what `split` makes of it."""
    found = [piece.text for piece in _spelling(pieces, text)]
    left = text[sum(map(len, found)) :]
    return found + (split(left) if left else [])


def _spelling(pieces: Sequence[Piece], text: str) -> list[Piece]:
    """The first pieces as far as they spell this text; the last may be cut, where it goes on into a stop string."""
    found, at = list[Piece](), 0
    for piece in pieces:
        own = piece.text[: len(text) - at]
        if at == len(text) or not text.startswith(own, at):
            break
        found.append(replace(piece, text=own))
        at += len(own)
    return found
