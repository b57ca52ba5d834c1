"""What went wrong, and what to do about it: the messages users read.

Every error raised on purpose derives from `SemspecError`; the CLI turns the subclass into an exit code and the
server into a status code. Messages are sentences that name the cause and the way out.
"""

from typing import Any


class SemspecError(Exception):
    """Anything semspec refuses knowingly."""

    exit_code = 1


class BadRequest(SemspecError, ValueError):
    """An option, prompt or combination that cannot work; nothing was run."""

    exit_code = 2


class ModelError(SemspecError):
    """A checkpoint or tokenizer that cannot be loaded or does not fit its partner."""

    exit_code = 3


class BatchFailed(SemspecError):
    """Some prompts of a list could not be answered. `results` holds an answer or an exception for each."""

    def __init__(self, results: list[Any]) -> None:
        failures = [r for r in results if isinstance(r, Exception)]
        super().__init__(
            f"{len(failures)} of {len(results)} prompts failed, the first with {failures[0]!r}; "
            "the answers to the others are in this error's `results`"
        )
        self.results = results
