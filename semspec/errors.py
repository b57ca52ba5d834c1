"""The errors that users see.

Every error raised on purpose derives from `SemspecError`; the CLI maps the subclass to an exit code and the server to a
status code. A message says what is wrong and what to do.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

OLD_NAME = "the old name goes with the next release"  # how every warning of a former name ends


class SemspecError(Exception):
    """Base class of all errors raised on purpose."""

    exit_code = 1


class BadRequest(SemspecError, ValueError):
    """An option, prompt or combination that cannot work; nothing was run."""

    exit_code = 2


class ModelError(SemspecError):
    """A checkpoint or tokenizer that cannot be loaded, or does not fit the other model of the pair."""

    exit_code = 3


class RemoteError(SemspecError):
    """A server that this pair asks cannot be reached, fails, or answers what cannot be used."""

    exit_code = 4


class BatchFailed(SemspecError):
    """Some prompts of a list could not be answered. `results` holds an answer or an exception for each."""

    def __init__(self, results: list[Any]) -> None:
        failures = [r for r in results if isinstance(r, Exception)]
        super().__init__(
            f"{len(failures)} of {len(results)} prompts failed, the first with {failures[0]!r}; "
            "the answers to the others are in this error's `results`"
        )
        self.results = results


def cause(error: Exception) -> str:
    """What is wrong with a file, in words: errors of Python itself are bare about a missing key and say little else."""
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]!r}"
    return str(error) if isinstance(error, (OSError, ValueError)) and str(error) else "it has another form"


def in_a_line(error: Exception) -> str:
    """What a library says of a file: in one line, and more than a bare name."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if isinstance(error, KeyError) or not text else text


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """For a message about an unknown name: a question after the nearest ones there are; empty if none is near."""
    near = get_close_matches(word, list(known), n=2, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else ""
