"""Things asked for as "name:key=value,...", such as rules and tasks; a class's dataclass fields are its options."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from semspec.errors import BadRequest

T = TypeVar("T")

_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def make(kind: str, spec: str, registry: Mapping[str, type[T]], **fixed: Any) -> T:
    """An object of the named class. `kind` is what the registry holds, for messages; `fixed` fields are no options."""
    if not isinstance(spec, str):
        raise BadRequest(f"a {kind} is given by name, such as {next(iter(registry))!r}; this is {spec!r:.80}")
    name, _, options = spec.partition(":")
    if name not in registry:
        raise BadRequest(f"there is no {kind} {name!r}; the {kind}s are: {', '.join(sorted(registry))}")
    return registry[name](**parse_options(f"{kind} {name!r}", registry[name], options, hidden=fixed), **fixed)


def parse_options(what: str, cls: type, text: str, hidden: Collection[str] = ()) -> dict[str, Any]:
    """Values for the fields of `cls`, each read as the type of its default. `what` names it in messages.

    A field with the metadata {"option": False} is filled in by the program, and is no option.
    """
    fields = {f.name: f for f in dataclasses.fields(cls) if f.name not in hidden and f.metadata.get("option", True)}
    values: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        key = key.strip().replace("-", "_")
        if key not in fields:
            raise BadRequest(f"{what} has no option {key!r}; its options are: {', '.join(fields) or 'none'}")
        if key in values:
            raise BadRequest(f"option {key!r} of {what} is given twice; give it once")
        values[key] = _read(what, key, value.strip(), fields[key].default)
    return values


def _read(what: str, key: str, text: str, default: Any) -> Any:
    try:
        return _TRUTH[text.lower()] if isinstance(default, bool) else type(default)(text)
    except (ValueError, KeyError):
        example = f"{_KINDS[type(default)]}, e.g. {default}"
        raise BadRequest(f"option {key!r} of {what} is {text!r}; give {example}") from None
