"""Options of a rule that come from someone who is not trusted: over HTTP, to our server or to another engine."""

from __future__ import annotations

import dataclasses
from typing import Any

from semspec.errors import BadRequest
from semspec.registry import KINDS, limits_in_words
from semspec.verify.base import Rule

MAX_TEXT = 200  # characters of an option that is text
MAX_FLOAT = 3e38  # about what float32 holds


def option_fields(rule: type[Rule]) -> list[dataclasses.Field[Any]]:
    """What a client may set."""
    fields = dataclasses.fields(rule)  # type: ignore[arg-type]
    return [f for f in fields if f.metadata.get("option", True) and not f.metadata.get("path")]


def path_fields(rule: Rule) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(rule) if f.metadata.get("path")]  # type: ignore[arg-type]


def check_paths(rule: Rule) -> None:
    """A client may not point at the server's disk."""
    for field in path_fields(rule):
        if getattr(rule, field.name) != field.default:
            raise BadRequest(f"option {field.name!r} of verifier {rule.name!r} is set where the server is started")


def check_ranges(rule: Rule) -> None:
    for field in option_fields(type(rule)):
        check_range(rule, field, getattr(rule, field.name))


def check_range(rule: Rule, field: dataclasses.Field[Any], value: Any) -> None:
    if not _fits(value, field.default):
        kind, limits = KINDS[type(field.default)], limits_in_words(field.metadata)
        if isinstance(field.default, str) and not limits:
            limits = f"at most {MAX_TEXT} characters that can be printed"
        if isinstance(value, int) and not isinstance(value, bool) and type(field.default) in (int, float):
            kind += " of at most 31 bits"
        given = f"option {field.name!r} of verifier {rule.name!r} has to be {kind}"
        raise BadRequest(given + (f", {limits}" if limits else ""))


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, str):
        return isinstance(value, str) and len(value) <= MAX_TEXT and value.replace("\n", " ").isprintable()
    if isinstance(value, int):
        return abs(value) < 2**31
    return isinstance(default, float) and isinstance(value, float) and abs(value) <= MAX_FLOAT
