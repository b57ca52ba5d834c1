"""What is reported about an answer: a line of figures, the reasons of relaxed tokens, everything as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from semspec.cli.live import STYLES, Writer

if TYPE_CHECKING:
    from semspec.loop.stats import Stats
    from semspec.pair.result import Result, Stream


def relaxed_tokens(result: Result, spelling: Callable[[int], str]) -> list[dict[str, Any]]:
    """Every relaxed token: its position, the target's own token there, and the rule's reason."""
    found: list[dict[str, Any]] = []
    start = 0
    for event in result.events:
        for i, why in sorted(event.relaxed.items()):
            instead = None if why.target_token is None else spelling(why.target_token)
            found.append({"at": start + i, "text": spelling(event.tokens[i]), "instead": instead, "why": why.reason})
        start += len(event.tokens)
    return found


def reasons(relaxed: list[dict[str, Any]]) -> Text:
    """One line for each relaxed token."""
    lines = []
    for token in relaxed:
        instead = "" if token["instead"] is None else f" instead of {token['instead']!r}"
        lines.append(f"token {token['at']}: {token['text']!r}{instead} ({token['why']})")
    return Text("\n".join(lines) or "nothing was relaxed", style=STYLES["relaxed"])


def figures(stats: Stats) -> list[str]:
    """The figures of an answer, most important first."""
    if not stats.tokens:
        return ["prefill"]
    seconds = sum(stats.seconds.values())
    found = [f"{stats.tokens} tokens", f"{stats.tokens / max(seconds, 1e-9):.1f}/s", f"tau {stats.tau:.2f}"]
    if stats.relaxed:
        found.append(f"{stats.relaxed} relaxed")
    if stats.drafted:
        found.append(f"{stats.accepted}/{stats.drafted} drafted accepted")
    return [*found, f"{stats.target_passes} passes", f"{seconds:.1f} s"]


# -n, or where it is larger the context, was full before there was an answer.
THINKING = "still thinking when -n or --context was reached: no answer (--max-thinking-tokens forces one)"


def show(stream: Stream, console: Console, live: bool = True) -> Result:
    """Print an answer as it is generated, coloured by origin; with `live`, a line of figures below it."""
    with Writer(console, (lambda: figures(stream.stats)) if live else None) as writer:
        for event in stream:
            writer.write(event)
    return stream.result()


def summary(result: Result) -> str:
    """One line of figures."""
    s = result.stats
    seconds = sum(s.seconds.values())
    ending = str(result.finish_reason)
    if result.finish_reason == "thinking":
        ending = THINKING
    elif result.thinking_cut:
        ending += ", thinking cut"
    if result.drift is not None and result.drift.unlike:
        named = f" ({', '.join(result.drift.otherwise)})" if result.drift.otherwise else ""
        ending += f" · unlike what the profile was calibrated on{named}, so its bound may not hold"
    kind = "lossless" if result.lossless else f"{'sparse, ' if result.sparse else ''}{s.relaxed} relaxed"
    return (
        f"{s.tokens} tokens in {seconds:.2f} s ({s.tokens / max(seconds, 1e-9):.1f}/s) · {result.verifier}, {kind} · "
        f"tau {s.tau:.2f} · {s.accepted}/{s.drafted} drafted tokens accepted · {s.target_passes} target passes · "
        f"{ending}"
    )


def report(result: Result, spelling: Callable[[int], str]) -> dict[str, Any]:
    """A result as JSON."""
    return {
        "text": result.text,
        "tokens": result.tokens,
        "origins": [origin for event in result.events for origin in event.origins],
        "relaxed": relaxed_tokens(result, spelling),
        "finish_reason": result.finish_reason,
        "thinking_cut": result.thinking_cut,
        "verifier": result.verifier,
        "lossless": result.lossless,
        "sparse": result.sparse or None,
        **({"drift": result.drift.as_dict()} if result.drift is not None else {}),
        "seed": result.seed,
        "prompt_tokens": result.prompt_tokens,
        "stats": result.stats.to_dict(),
    }


def terminal(stderr: bool = False) -> Console:
    """A console that wraps at words in a terminal and never in a pipe."""
    console = Console(stderr=stderr, highlight=False, markup=False)
    console.soft_wrap = not console.is_terminal
    return console
