"""What all bodies have in common: kinds of values, and how null and values that ask for nothing are read.

Lists stop being validated at their first bad item, and long ones before it: a body of garbage must not hold up the
event loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Protocol, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from semspec.errors import BadRequest

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
MAX_FIELDS = 64  # of one object
MAX_DEPTH = 64  # of values that are passed on
INSIDE = ("content", "tool_calls", "output", "summary")  # lists of a message, and of what is in them
MAX_NODES = 50_000  # values in one of them


def _well_formed(text: str) -> str:
    """JSON can spell halves of characters, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text has half a character in it (a lone surrogate); send whole ones") from None
    return text


class HasText(Protocol):
    text: str


def text_of(content: str | Sequence[HasText]) -> str:
    """Of a message's content: a text, or parts that have texts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def at_most(count: int) -> BeforeValidator:
    """Checks the length of a list or object before its items."""

    def check(items: Any) -> Any:
        if isinstance(items, list | dict) and len(items) > count:
            raise ValueError(f"there are {len(items)} items; send at most {count}")
        return items

    return BeforeValidator(check)


def at_most_inside(count: int) -> BeforeValidator:
    """The same for what the messages of a chat have in them together: each part and call is a body of its own."""

    def check(messages: Any) -> Any:
        inside = _inside(messages) if isinstance(messages, list) else []
        found = len(inside) + len(_inside(inside))  # results of tools have parts of their own
        if found > count:
            raise ValueError(f"there are {found} parts and calls in these messages; send at most {count}")
        return messages

    return BeforeValidator(check)


def _inside(items: list[Any]) -> list[Any]:
    objects = [item for item in items if isinstance(item, dict)]
    lists = [each for item in objects for name in INSIDE if isinstance(each := item.get(name), list)]
    return [inner for each in lists for inner in each]


def without_neutral(given: Any, neutral: dict[str, tuple[Any, ...]], refuse: bool = True) -> Any:
    """Without fields that ask for nothing; those that ask for something we cannot do are refused."""
    if not isinstance(given, dict):
        return given
    for name, nothing in neutral.items():
        if refuse and given.get(name) is not None and given[name] not in nothing:
            raise ValueError(f"{name} is not supported by this server; leave it out")
    return {k: v for k, v in given.items() if k not in neutral}


def joined(own: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """A body of another API as one of ours, with fields of ours that were sent beside its own."""
    for name, value in more.items():
        if own.get(name) is not None and own[name] != value:
            raise BadRequest(f"{name} is given twice, perhaps under two names; leave out one of them")
    return own | more


def _without_null(given: Any) -> Any:
    """A null is as good as nothing, but for max_tokens, which it makes unlimited."""
    if not isinstance(given, dict):
        return given
    if len(given) > MAX_FIELDS:
        raise ValueError(f"there are {len(given)} fields; send at most {MAX_FIELDS}")
    return {k: v for k, v in given.items() if v is not None or k == "max_tokens"}


def shallow(value: Any) -> Any:
    """Values that are passed on, or repeated, as they are: what walks through them or writes them has limits."""
    level, count = [value], 0
    for _ in range(MAX_DEPTH):
        count += sum(map(len, level))
        if count > MAX_NODES:
            raise ValueError(f"there are more than {MAX_NODES} values in it; send fewer")
        inner = [v for each in level for v in (each.values() if isinstance(each, dict) else each)]
        texts = [v for v in inner if isinstance(v, str)] + [k for each in level if isinstance(each, dict) for k in each]
        level = [v for v in inner if isinstance(v, dict | list)]
        for text in texts:
            _well_formed(text)
        if not all(math.isfinite(v) for v in inner if isinstance(v, float)):
            raise ValueError("there is a number in it that JSON has not (NaN or an infinity); send a finite one")
        if not level:
            return value
    raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} deep; send flatter ones")


Text = Annotated[str, AfterValidator(_well_formed)]
MAX_COUNT = 2**31  # of anything; without a limit a number may have thousands of digits
Count = Annotated[int, Field(ge=1, lt=MAX_COUNT)]
Token = Annotated[int, Field(ge=0, lt=MAX_COUNT, strict=True)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Json = Annotated[dict[str, Any], AfterValidator(shallow)]
Echo = Annotated[Any, Field(description="Taken, and without effect.")]


class Lenient(BaseModel):
    """Takes null for any field that has a default, and true and false for no number."""

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, given: Any) -> Any:
        found = _without_null(given)
        for name in [k for k, v in found.items() if isinstance(v, bool)] if isinstance(found, dict) else ():
            kind = cls.model_fields[name].annotation if name in cls.model_fields else bool
            if bool not in (kind, *get_args(kind)):
                raise ValueError(f"{name} is true or false, which it cannot be; give a value of its own kind")
        return found
