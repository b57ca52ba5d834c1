"""What the engine hands to the event loop: plain data, no tensors, text already decoded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from semspec.loop.stats import Stats
from semspec.pair import Pair
from semspec.pair.result import Ticket
from semspec.profile import Drift
from semspec.types import Event, Origin, TokenLogprob


@dataclass(frozen=True, slots=True)
class TokenOrigin:
    """Where a piece of text came from."""

    origin: Origin
    token: int  # counted from the answer's first


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token with its logprob and the likeliest tokens, as the bytes they add to a text."""

    raw: bytes
    logprob: float | None  # None: the first of a prompt
    top: tuple[tuple[bytes, float], ...]

    @property
    def either(self) -> tuple[tuple[bytes, float | None], ...]:
        """The likeliest tokens and this one."""
        return (*self.top, *([] if self.raw in dict(self.top) else [(self.raw, self.logprob)]))


@dataclass(slots=True)
class Delta:
    """What one round added to one answer."""

    choice: int
    tokens: int
    spans: list[tuple[str, TokenOrigin]]
    relaxed: list[tuple[int, str, str | None, str]]  # token, its text, the target's choice, why it was accepted
    markers: list[tuple[int, bool]]  # tokens that open (True) or close the thinking
    drafted: int
    accepted: int
    logprobs: list[TokenText] | None
    finish: str | None
    prompt: list[dict[str, Any] | None] | None = None  # the prompt's logprobs as vLLM has them, with the first delta
    echo: list[TokenText | None] | None = None  # the same as those of an answer; None: its first token, which has none
    specials: list[tuple[int, str]] = field(default_factory=list)  # special tokens, which have no text in the spans
    stopped_by: str | None = None  # the stop string, where one has ended the answer


@dataclass(slots=True)
class Finished:
    """One answer, complete or not, and what it took. Times in seconds since the request arrived."""

    choice: int
    outcome: str  # stop, length, thinking, aborted, deadline or error
    stats: Stats
    rounds: list[tuple[int, int]]  # drafted and accepted in each
    verifier: str
    lossless: bool
    seed: int
    prompt_tokens: int
    num_draft_tokens: int  # the draft length that was asked for, or the longest draft
    thought: int = 0  # tokens of thinking, its markers not counted
    drift: Drift | None = None  # from what the profile was calibrated on, if there is one
    first_of_prompt: bool = True  # of several answers to one prompt
    key: str | None = None  # the name of the API key it was asked with
    gaps: list[float] = field(default_factory=list)  # seconds between rounds that brought tokens
    queued: float = 0.0
    first_token: float = 0.0
    seconds: float = 0.0

    @staticmethod
    def of(ticket: Ticket, choice: int, outcome: str | None) -> Finished:
        result = ticket.result()
        length = ticket.job.num_draft_tokens
        num_draft_tokens = length if isinstance(length, int) else max(result.stats.drafts, default=0)
        return Finished(
            choice=choice,
            outcome=outcome or result.finish_reason or "error",
            stats=result.stats,
            rounds=[(event.drafted, event.accepted) for event in result.events],
            verifier=result.verifier,
            lossless=result.lossless,
            seed=result.seed,
            prompt_tokens=result.prompt_tokens,
            num_draft_tokens=num_draft_tokens if ticket.job.rule.speculates else 0,
            thought=ticket.job.thinking.thought if ticket.job.thinking is not None else 0,
            drift=result.drift,
        )


def special_tokens(pair: Pair) -> dict[int, str]:
    """Tokens that are no text, such as markers of calls."""
    added = getattr(pair.tokenizer, "added_tokens_decoder", {})
    return {i: token.content for i, token in added.items() if token.special}


def delta_of(
    pair: Pair, choice: int, event: Event, start: int, specials: Mapping[int, str] | None = None,
    forms: Collection[str] = ("prompt", "echo"),
) -> Delta:  # fmt: skip
    """An event as plain data; `start` tokens came before it. Called by the thread that owns the pair's tokenizer.
    A prompt's logprobs are many: only those of its `forms` that somebody reads are made."""
    scored = event.prompt_logprobs
    relaxed, (opens, closes) = [], pair.resources.thinking or (None, None)
    for i, relaxation in sorted(event.relaxed.items()):
        target = None if relaxation.target_token is None else pair.spelling(relaxation.target_token)
        relaxed.append((start + i, pair.spelling(event.tokens[i]), target, relaxation.reason))
    return Delta(
        choice,
        len(event.tokens),
        [
            (text, TokenOrigin(origin, token))
            for (text, origin), token in zip(event.spans, event.span_tokens, strict=True)
        ],
        relaxed,
        [(start + i, token == opens) for i, token in enumerate(event.tokens) if token in (opens, closes)],
        event.drafted,
        event.accepted,
        None if event.logprobs is None else [token_text(pair, lp) for lp in event.logprobs],
        event.finish_reason,
        None if scored is None or "prompt" not in forms else [prompt_entry(pair, lp) for lp in scored],
        None
        if scored is None or "echo" not in forms
        else [lp if lp is None else token_text(pair, lp) for lp in scored],
        [(start + i, specials[token]) for i, token in enumerate(event.tokens) if token in specials] if specials else [],
    )


def token_text(pair: Pair, lp: TokenLogprob) -> TokenText:
    raw = pair.resources.bytes_of
    return TokenText(raw(lp.token), finite(lp.logprob), tuple((raw(t), finite(p)) for t, p in lp.top))


def prompt_entry(pair: Pair, lp: TokenLogprob | None) -> dict[str, Any] | None:
    """A prompt's token and the likeliest ones in its place, by id, the prompt's own first."""
    if lp is None:
        return None
    ranks = {token: i + 1 for i, (token, _) in enumerate(lp.top)}
    entries = {lp.token: lp.logprob} | dict(lp.top)
    return {
        str(token): {"logprob": finite(p), "rank": ranks.get(token, lp.rank), "decoded_token": pair.spelling(token)}
        for token, p in entries.items()
    }


def finite(logprob: float) -> float:
    """JSON has no minus infinity; OpenAI writes this for it."""
    return logprob if logprob > -9999.0 else -9999.0
