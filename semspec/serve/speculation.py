"""The `speculation` field of a request: which rule, with which options, and what is allowed here."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

from semspec import verify
from semspec.errors import BadRequest
from semspec.options import AUTO, DRAFTERS, Options
from semspec.serve.limits import Settings
from semspec.serve.schema import Speculation
from semspec.text.steps import MAX_STEP_TOKENS
from semspec.verify import REGISTRY, Rule
from semspec.verify.step_rule import StepRule

LONGEST_TEXT = 200  # characters of an option that is text
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def apply(given: Speculation | None, settings: Settings) -> Options:
    """The server's defaults, changed as the request wants. What it may not want is a BadRequest that says so."""
    options = settings.defaults
    if given is None:
        return _capped(options, settings)
    if given.off:
        return dataclasses.replace(options, verifier="none")
    changes = given.model_dump(include=set(SHARED), exclude_unset=True, exclude_none=True)
    rule = verify.make(options.verifier if given.verifier is None else given.verifier)
    rule = _adjusted(rule, given.model_extra or {})
    rule = _placed(rule, verify.make(options.verifier))
    _check(rule, changes.get("num_draft_tokens"), settings)
    return _capped(dataclasses.replace(options, verifier=rule, **changes), settings)


def _capped(options: Options, settings: Settings) -> Options:
    """A rule's own draft length gives way to the server's limit: nobody has asked for it."""
    most, length = settings.limits.draft_tokens, options.draft_length()
    if options.num_draft_tokens is None and isinstance(length, int) and length > most:
        return dataclasses.replace(options, num_draft_tokens=most)
    return options


SHARED = (
    "drafter",
    "num_draft_tokens",
    "draft_min_p",
    "draft_max_entropy",
    "relax_span",
    "loop_repeats",
    "loop_period",
)


def _placed(rule: Rule, usual: Rule) -> Rule:
    """The rule with the paths that whoever runs the server has set; a client may not point at the server's disk."""
    for field in dataclasses.fields(rule):  # type: ignore[arg-type]
        if field.metadata.get("path"):
            ours = getattr(usual, field.name) if type(usual) is type(rule) else field.default
            if getattr(rule, field.name) not in (field.default, ours):
                raise BadRequest(f"option {field.name!r} of verifier {rule.name!r} is set where the server is started")
            rule = dataclasses.replace(rule, **{field.name: ours})  # type: ignore[type-var]
    return rule


def _check(rule: Rule, draft_tokens: int | str | None, settings: Settings) -> None:
    """Refuse what this server does not allow."""
    if not (rule.lossless or settings.allow_lossy):
        allowed = ", ".join(sorted(name for name, kind in REGISTRY.items() if kind.lossless))
        raise BadRequest(
            f"verifier {rule.name!r} may change what the target would have written, and this server allows only "
            f"lossless ones: {allowed}"
        )
    for field in option_fields(type(rule)):
        _check_range(rule, field, getattr(rule, field.name))
    most = settings.limits.draft_tokens
    step = rule.max_step_tokens if isinstance(rule, StepRule) else 0
    if rule.min_draft_tokens() > most or step > max(most, MAX_STEP_TOKENS):
        raise BadRequest(
            f"verifier {rule.name!r} with these options needs drafts of {max(step, rule.min_draft_tokens())} tokens; "
            f"this server allows at most {max(most, MAX_STEP_TOKENS) if step else most}"
        )
    if isinstance(draft_tokens, int) and draft_tokens > most:
        raise BadRequest(f"num_draft_tokens is {draft_tokens}; this server allows at most {most}")


def _adjusted(rule: Rule, own: dict[str, Any]) -> Rule:
    """The rule with options of its own, each of its default's type."""
    fields = {f.name: f for f in option_fields(type(rule))}
    for name, value in own.items():
        if name not in fields:
            has = ", ".join(fields) or "none"
            raise BadRequest(
                f"verifier {rule.name!r} has no option {name!r}; its options are: {has}; "
                f"beside them there are: verifier, off, trace, detailed, {', '.join(SHARED)}"
            )
        _check_range(rule, fields[name], value)
    return dataclasses.replace(rule, **own) if own else rule  # type: ignore[type-var]


def _check_range(rule: Rule, field: dataclasses.Field[Any], value: Any) -> None:
    if not _fits(value, field.default):
        kind = KINDS[type(field.default)]
        raise BadRequest(f"option {field.name!r} of verifier {rule.name!r} is not {kind} in range")


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, str):
        return isinstance(value, str) and len(value) <= LONGEST_TEXT and value.replace("\n", " ").isprintable()
    if isinstance(value, int):
        return abs(value) < 2**31
    return isinstance(default, float) and isinstance(value, float) and math.isfinite(value)


def option_fields(rule: type[Rule]) -> list[dataclasses.Field[Any]]:
    """What a client may set."""
    fields = dataclasses.fields(rule)  # type: ignore[arg-type]
    return [f for f in fields if f.metadata.get("option", True) and not f.metadata.get("path")]


def menu(settings: Settings) -> dict[str, Any]:
    """Every rule with its options, for a page that lets people choose."""
    defaults = settings.defaults
    default = verify.make(defaults.verifier)
    return {
        "default": {
            "verifier": default.name,
            "num_draft_tokens": defaults.num_draft_tokens,
            "drafter": defaults.drafter,
            "relax_span": defaults.relax_span,
        },
        "allow_lossy": settings.allow_lossy,
        "max_draft_tokens": settings.limits.draft_tokens,
        "drafters": list(DRAFTERS),
        "auto": AUTO,
        "verifiers": [
            {
                "name": name,
                "lossless": rule.lossless,
                "allowed": rule.lossless or settings.allow_lossy,
                "unit": rule.unit,
                "drafts": rule.speculates,
                "num_draft_tokens": min(rule.draft_tokens, settings.limits.draft_tokens),
                "about": about(rule),
                "options": [
                    {"name": f.name, "type": type(f.default).__name__, "default": f.default}
                    for f in option_fields(rule)
                ],
            }
            for name, rule in REGISTRY.items()
            if not getattr(rule, "refereed", False)  # no client brings a referee
        ],
    }


def about(rule: type[Rule]) -> str:
    """The first sentence of a rule's description."""
    module = inspect.getmodule(rule)
    text = " ".join((module.__doc__ or "").split()) if module and module.__name__.startswith("semspec.") else ""
    return text.partition(": ")[2].partition(". ")[0] or text
