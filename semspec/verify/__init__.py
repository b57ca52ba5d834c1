"""The rules, by name. Adding one is one file here and one test file: define a `Rule`, list it below.

A rule is asked for as an object, a name, or a name with options: "fly:window=4,theta=0.3".
"""

from __future__ import annotations

import dataclasses
from typing import Any

from semspec.errors import BadRequest
from semspec.verify.base import Decisions, Drafts, Rule
from semspec.verify.block import Block
from semspec.verify.exact import Exact
from semspec.verify.none import Alone
from semspec.verify.rejection import SpeculativeSampling

REGISTRY: dict[str, type[Rule]] = {}


def register(rule: type[Rule]) -> type[Rule]:
    """Make a rule available by its name, everywhere a name is accepted."""
    REGISTRY[rule.name] = rule
    return rule


for _rule in (Alone, Exact, SpeculativeSampling, Block):
    register(_rule)


def make(spec: str | Rule) -> Rule:
    """A rule from its name and options."""
    if isinstance(spec, Rule):
        return spec
    name, _, options = spec.partition(":")
    if name not in REGISTRY:
        raise BadRequest(f"there is no verifier {name!r}; the verifiers are: {', '.join(sorted(REGISTRY))}")
    rule = REGISTRY[name]
    fields = {f.name: f for f in dataclasses.fields(rule)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for item in filter(None, options.split(",")):
        key, _, text = item.partition("=")
        key = key.strip().replace("-", "_")
        if key not in fields:
            allowed = ", ".join(fields) or "none"
            raise BadRequest(f"verifier {name!r} has no option {key!r}; its options are: {allowed}")
        values[key] = _parse(name, key, text.strip(), fields[key].default)
    return rule(**values)


def _parse(rule: str, key: str, text: str, default: Any) -> Any:
    """An option's text as the type of its default."""
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        return type(default)(text)
    except (ValueError, KeyError):
        kind = type(default).__name__
        raise BadRequest(f"option {key!r} of verifier {rule!r} is {text!r}; give a {kind}, e.g. {default}") from None


__all__ = ["REGISTRY", "Decisions", "Drafts", "Rule", "make", "register"]
