"""Patterns for names of modules in a checkpoint's settings: Python's `re`, in limited time, since whoever wrote the
checkpoint chose them.

Only `regex` can be stopped. It reads more than `re` does, so what it alone knows is escaped: fuzzy matching in braces
(`a{i}`), which are letters to `re`, and classes of characters inside brackets (`[[:alpha:]]`).
"""

from __future__ import annotations

import re
import time
import warnings
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

import regex

from semspec.errors import ModelError

PATIENCE = 5.0  # seconds for all patterns of a checkpoint on all names, beyond
USUAL = 20e-6  # which each takes at most where nothing is wrong
ERRORS = (re.error, regex.error, OverflowError, RecursionError)  # of a pattern that is none
_OWN = re.compile(
    r"(?P<kept>\\N\{[^}]*\}|\\.)|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])|\{(?!(?:\d+(?:,\d*)?|,\d*)\})", re.DOTALL
)


@dataclass(slots=True)
class Patience:
    """What is left of a checkpoint's time."""

    left: float | None = None  # None: nothing is spent yet

    def matches(self, pattern: str, module: str) -> bool:
        """Whether a name is one of those that are meant: by a pattern, with stars, or by parts of it."""
        if pattern.startswith("re:"):
            return self._matches(pattern[3:], module)
        if "*" in pattern:
            return any(fnmatchcase(module, form) for form in (pattern, f"{pattern}.*", f"*.{pattern}"))
        return f".{pattern}." in f".{module}."

    def _matches(self, pattern: str, module: str) -> bool:
        left = PATIENCE if self.left is None else self.left
        begun = time.thread_time()
        try:
            found = compiled(pattern).match(module, timeout=max(left, USUAL)) is not None
        except TimeoutError as error:
            raise ModelError(
                f"the patterns of the quantisation take over {PATIENCE:g} s, the last of it {pattern!r:.80} on "
                f"{module!r:.80}; write it without repeats inside repeats"
            ) from error
        self.left = left - max(0.0, time.thread_time() - begun - USUAL)
        return found


@lru_cache(4096)
def compiled(pattern: str) -> regex.Pattern[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of what another Python may read otherwise
        re.compile(pattern)  # what is no pattern there is none here
    return regex.compile(_OWN.sub(_escaped, pattern), regex.VERSION0)


def _escaped(found: re.Match[str]) -> str:
    if found["set"]:
        return "[" + re.sub(r"(\\.)|\[", lambda inside: inside[1] or r"\[", found["set"][1:], flags=re.DOTALL)
    return found["kept"] or r"\{"
