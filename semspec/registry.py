"""Rules, tasks, drafters and clusterers, asked for as "name:key=value,...". Dataclass fields are the options.

Packages add their own by an entry point in the registry's group (`semspec.rules`, ...), whose name is the thing's name:
it is imported when it is first asked for.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from inspect import isabstract
from typing import Any, Generic, TypeVar

from semspec.errors import OLD_NAME, BadRequest, did_you_mean

T = TypeVar("T")

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_READ: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class Registry(MutableMapping[str, type[T]], Generic[T]):
    """Classes of one kind by name, built in or from other packages; built-in names cannot be taken."""

    def __init__(self, kind: str, group: str, base: type[T], elsewhere: Mapping[str, str] | None = None) -> None:
        self.kind, self.group, self.base = kind, group, base
        self.elsewhere = elsewhere or {}  # what people take for an option of such a thing, and where it belongs
        self._classes: dict[str, type[T]] = {}

    def register(self, cls: type[T]) -> type[T]:
        """Make a class available by its `name`, everywhere a name is accepted. May be used as a decorator."""
        name = getattr(cls, "name", None)
        if not (isinstance(cls, type) and issubclass(cls, self.base)) or not isinstance(name, str) or not name:
            raise BadRequest(f"a {self.kind} is a subclass of {self.base.__name__} with a `name`; this is {cls!r}")
        other = self._classes.get(name, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):  # defining it anew is fine
            raise BadRequest(f"there is a {self.kind} {name!r} already; give this one another name")
        self._classes[name] = cls
        return cls

    def make(self, spec: str, **fixed: Any) -> T:
        """An object of the named class. `fixed` fields are no options."""
        if not isinstance(spec, str):
            example = next(iter(self))
            hint = f"; give one of them, as {spec[0]!r}" if isinstance(spec, list | tuple) and spec else ""
            raise BadRequest(f"a {self.kind} is given by name, such as {example!r}; this is {spec!r:.80}{hint}")
        name, _, options = spec.partition(":")
        if name not in self:
            near = did_you_mean(name, self)
            known = f"the {self.kind}s are: {', '.join(sorted(self))}{near and f'; {near}'}"
            raise BadRequest(f"there is no {self.kind} {name!r}; {known}")
        cls = self[name]
        return cls(**parse_options(f"{self.kind} {name!r}", cls, options, fixed, self.elsewhere), **fixed)

    @cached_property
    def _entry_points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.group)}

    def __getitem__(self, name: str) -> type[T]:
        if name not in self._classes:
            point = self._entry_points[name]
            try:
                self._classes[name] = cls = point.load()
                if not issubclass(cls, self.base) or isabstract(cls):
                    raise TypeError(f"it is no subclass of {self.base.__name__} that can be used")
                if getattr(cls, "name", None) != name:
                    raise TypeError(f"its name is {getattr(cls, 'name', None)!r}; an entry point has the same")
            except Exception as error:  # whatever another package's code raises
                self._classes.pop(name, None)
                raise BadRequest(f"{self.kind} {name!r} cannot be loaded from {point.value}: {error}") from error
        return self._classes[name]

    def load_all(self) -> tuple[dict[str, type[T]], dict[str, str]]:
        """All that can be loaded by name, and of the others why not: they are other packages' affair."""
        found, broken = dict[str, type[T]](), dict[str, str]()
        for name in self:
            try:
                found[name] = self[name]
            except BadRequest as error:
                broken[name] = str(error)
        return found, broken

    def __setitem__(self, name: str, cls: type[T]) -> None:
        self._classes[name] = cls

    def __delitem__(self, name: str) -> None:
        del self._classes[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._classes, **self._entry_points})

    def __len__(self) -> int:
        return len({*self._classes, *self._entry_points})

    def __contains__(self, name: object) -> bool:  # without loading it
        return name in self._classes or name in self._entry_points


def parse_options(
    what: str, cls: type, text: str, hidden: Collection[str] = (), elsewhere: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Values for the fields of `cls`, each read as the type of its default. `what` names it in messages.

    A field with the metadata {"option": False} is filled in by the program, and is no option.
    """
    fields = {f.name: f for f in dataclasses.fields(cls) if f.name not in hidden and f.metadata.get("option", True)}
    values: dict[str, Any] = {}
    main = getattr(cls, "main_option", "")
    for i, item in enumerate(filter(None, text.split(","))):
        key, equals, value = item.partition("=")
        if main and not i and not (equals and key.strip().isidentifier()):  # a path may have an equals sign in it
            key, value = main, item
        key = current_name(what, fields.values(), key.strip().replace("-", "_"))
        if key not in fields:
            near = did_you_mean(key, fields)
            known = f"its options are: {', '.join(fields) or 'none'}{near and f'; {near}'}"
            raise BadRequest(f"{what} has no option {key!r}; {(elsewhere or {}).get(key, known)}")
        if key in values:
            raise BadRequest(f"option {key!r} of {what} is given twice; give it once")
        values[key] = _read(what, value.strip(), fields[key])
    return values


def current_name(what: str, fields: Collection[dataclasses.Field[Any]], name: str) -> str:
    """An option's name today. A field's former name, in the metadata "was", is taken with a warning."""
    for field in fields:
        if field.metadata.get("was") == name:
            text = f"option {name!r} of {what} is now called {field.name!r}; {OLD_NAME}"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return field.name
    return name


def check_limits(what: str, thing: Any) -> None:
    """Refuse values that fields' metadata do not allow. A class that overrides a field keeps its limits."""
    for cls in type(thing).__mro__:
        for field in getattr(cls, "__dataclass_fields__", {}).values():
            value, limits = getattr(thing, field.name), dict(field.metadata)
            if isinstance(other := limits.get("max"), str):
                limits["max"] = getattr(thing, other)
            if not (_allowed(value, limits) or (value is None and field.default is None)):
                about = f" ({limits['label']})" if "label" in limits else ""
                raise BadRequest(f"{what}'s {field.name} is {value!r}; give {limits_in_words(limits)}{about}")


def _allowed(value: Any, limits: Mapping[str, Any]) -> bool:
    try:  # written so that NaN is refused
        least = "min" not in limits or value >= limits["min"]
        above = "above" not in limits or value > limits["above"]
        most = "max" not in limits or value <= limits["max"]
    except TypeError:  # no number
        return False
    return bool(least and above and most and ("choices" not in limits or value in limits["choices"]))


def limits_in_words(limits: Mapping[str, Any]) -> str:
    """What an option may be, by its metadata; empty: anything of its type. The "max" may be another option's name; what
    else depends on others, and is checked with them, is in a "note"."""
    return ", ".join(filter(None, (_bounds(limits), limits.get("note"))))


def _bounds(limits: Mapping[str, Any]) -> str:
    if "choices" in limits:
        *others, last = (str(choice) or "nothing" for choice in limits["choices"])
        return f"{', '.join(others)} or {last}" if others else last
    low, high, above = (limits.get(name) for name in ("min", "max", "above"))
    if low is not None and low == high:
        return f"{low}"
    if above is not None:
        return f"a number above {above}" + ("" if high is None else f", at most {high}")
    if low is None:
        return "" if high is None else f"{high} or less"
    return f"{low:g} or more" if high is None else f"{low} to {high}"


def _read(what: str, text: str, field: dataclasses.Field[Any]) -> Any:
    """As the type of the default; where that is None, as the first of the field's own types that a text can be."""
    default, names = field.default, re.findall(r"\w+", str(field.type))
    kind = type(default) if default is not None else next((_READ[name] for name in names if name in _READ), object)
    if kind not in _READ.values():
        raise BadRequest(f"option {field.name!r} of {what} cannot be given as text; set it in Python")
    try:
        return _TRUTH[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        example = KINDS[kind] + ("" if default is None else f", e.g. {default}")
        raise BadRequest(f"option {field.name!r} of {what} is {text!r}; give {example}") from None
