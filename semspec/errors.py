"""What went wrong, and what to do about it: the messages users read.

Every error raised on purpose derives from `SemspecError`; the CLI turns the subclass into an exit code and the
server into a status code. Messages are sentences that name the cause and the way out.
"""


class SemspecError(Exception):
    """Anything semspec refuses knowingly."""

    exit_code = 1


class BadRequest(SemspecError, ValueError):
    """An option, prompt or combination that cannot work; nothing was run."""

    exit_code = 2


class ModelError(SemspecError):
    """A checkpoint or tokenizer that cannot be loaded or does not fit its partner."""

    exit_code = 3
