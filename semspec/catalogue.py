"""The verifiers, drafters and tasks there are, in words: for `semspec list`, the chat and the server's menu."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection
from typing import Any

from semspec import draft, tasks, verify
from semspec.options import AUTO
from semspec.registry import Registry, limits_in_words
from semspec.verify import Rule
from semspec.verify.step_rule import StepRule

SHOWN = ("label", "main", "choices", "unset")  # of an option's metadata


def catalogue(kinds: Collection[str]) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """By kind: names with one line each, what they need, and their options. And by name what is wrong with those of
    other packages that cannot be used; the rest are listed all the same."""
    ways: dict[str, tuple[Registry[Any], Callable[[Any], dict[str, Any]]]] = {
        "verifiers": (verify.REGISTRY, _rule),
        "drafters": (draft.REGISTRY, lambda kind: _entry(kind, _drafter_needs(kind))),
        "tasks": (tasks.REGISTRY, lambda task: _entry(task, []) | {"scored": task.scored}),
    }
    found, broken = dict[str, list[dict[str, Any]]](), dict[str, str]()
    for kind in kinds:
        registry, entry = ways[kind]
        classes, wrong = registry.load_all()
        broken |= wrong
        found[kind] = []
        for name, cls in classes.items():
            try:
                found[kind].append(entry(cls))
            except Exception as error:  # whatever another package's class is like
                broken[name] = f"{registry.kind} {name!r} cannot be described: {error!r}"
    return found, broken


def _rule(rule: Any) -> dict[str, Any]:
    traits = {"title": rule.title or rule.name, "lossless": rule.lossless, "unit": rule.unit, "control": rule.control}
    length = default_length(rule) if rule.speculates else None
    return _entry(rule, _needs(rule)) | traits | {"num_draft_tokens": length}


def default_length(rule: type[Rule]) -> int | str:
    """The draft length of a request that names none."""
    return AUTO if rule.same_text else rule.draft_tokens


def option(cls: type, field: dataclasses.Field[Any]) -> dict[str, Any]:
    """A field in words, also where a class that overrides it gives a new default only."""
    words: dict[str, Any] = {}
    for kind in reversed(cls.__mro__):
        own = getattr(kind, "__dataclass_fields__", {}).get(field.name)
        words |= {key: own.metadata[key] for key in SHOWN if own is not None and key in own.metadata}
    default = None if field.default is dataclasses.MISSING else field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    plain = {"name": field.name, "type": type(default).__name__, "default": default}
    return plain | {"label": field.name.replace("_", " "), "main": False} | words


def about(cls: type) -> str:
    """The first sentence of its description: of its class, or of our file if that is about one thing."""
    own = cls.__dict__.get("__doc__") or ""
    if own and not own.startswith(f"{cls.__name__}("):  # what a dataclass writes for itself
        return " ".join(own.split()).partition(". ")[0].rstrip(".")
    module = inspect.getmodule(cls)
    text = " ".join((module.__doc__ or "").split()) if module and module.__name__.startswith("semspec.") else ""
    return text.partition(": ")[2].partition(". ")[0] or text


def _entry(cls: Any, needs: list[str]) -> dict[str, Any]:
    own = [f for f in dataclasses.fields(cls) if f.metadata.get("option", True) and f.name != "data"]
    options = [option(cls, f) | {"allowed": _allowed(cls, f.name)} for f in own]
    main = getattr(cls, "main_option", "")
    return {"name": cls.name, "about": _one_line(cls), "needs": needs, "main_option": main, "options": options}


def _allowed(cls: Any, name: str) -> str:
    kinds = [getattr(kind, "__dataclass_fields__", {}).get(name) for kind in cls.__mro__]
    return next((words for f in kinds if f is not None and (words := limits_in_words(f.metadata))), "")


def _needs(rule: Any) -> list[str]:
    found = ["draft probabilities"] if rule.needs_draft_logits else []
    if issubclass(rule, StepRule):
        found.append("draft model")
        found += ["referee"] if rule.refereed else []
        found += ["probes"] if "probes" in {f.name for f in dataclasses.fields(rule)} else []
    return found


def _drafter_needs(kind: Any) -> list[str]:
    return ["draft model"] * kind.needs_model + ["draft head"] * kind.reads_target


def _one_line(cls: Any) -> str:
    """What it is: as the file that is about it begins, else as its class does."""
    module = inspect.getmodule(cls)
    text = " ".join(((module and module.__doc__) or "").split())
    own = text.removeprefix(f"`{cls.name}`: ")
    line = about(cls) if own == text else own.partition(". ")[0].rstrip(".")
    return line[:1].upper() + line[1:]
