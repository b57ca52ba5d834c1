"""The `speculation` field of a request: which rule, with which options, and what is allowed here."""

from __future__ import annotations

import dataclasses
from typing import Any

from semspec import verify
from semspec.draft import DrafterKind
from semspec.errors import BadRequest
from semspec.options import Options
from semspec.registry import current_name
from semspec.serve.limits import LONGEST_STEP, Settings
from semspec.serve.schema.speculation import SHARED, SpeculationBase
from semspec.verify import REGISTRY, Rule
from semspec.verify.checked import MAX_TEXT, check_paths, check_range, check_ranges, option_fields, path_fields
from semspec.verify.step_rule import StepRule


def apply(given: SpeculationBase | None, settings: Settings) -> Options:
    """The server's defaults, changed as the request asks. What is not allowed here is a BadRequest that says so."""
    options = settings.defaults
    if given is None:
        return _capped(options, settings)
    changes = given.model_dump(include=set(SHARED), exclude_unset=True, exclude_none=True)
    if changes.get("drafter") == options.drafter.partition(":")[0]:  # by name the server's own, with its options
        del changes["drafter"]
    rule = default = _capped_rule(verify.make(options.verifier), settings)
    if given.verifier is not None:
        rule = verify.make(given.verifier)
        check_paths(rule)
        rule = _with_paths_of(rule, default)
    rule = _adjusted(rule, given.model_extra or {})
    _check(rule, settings)
    for name in ("num_draft_tokens", "max_draft_tokens"):
        _check_length(name, changes.get(name), settings)
    options = _replaced(options, verifier=rule, **changes)
    if options.drafter != settings.defaults.drafter:
        _check_drafter(options.drafter_kind, settings)
    return _capped(_replaced(options, verifier="none") if given.off else options, settings)


def _replaced(options: Options, **changes: Any) -> Options:
    """With these changes. A profile promises something for its own rule and drafts and for no others."""
    profile = options.profile
    if profile is not None:
        kept = verify.make(changes.get("verifier", options.verifier)) == profile.rule and all(
            changes.get(name, getattr(options, name)) == getattr(profile, name)
            for name in ("num_draft_tokens", "drafter")
        )
        changes["profile"] = profile if kept else None
    return dataclasses.replace(options, **changes)


def check_defaults(settings: Settings) -> None:
    """Refuse, at the start, defaults that are beyond the server's own limits."""
    _check_length("num_draft_tokens", settings.defaults.num_draft_tokens, settings)


def _capped(options: Options, settings: Settings) -> Options:
    """A rule's own lengths give way to the server's limit: nobody has asked for them."""
    rule, limit = verify.make(options.verifier), settings.limits.draft_tokens
    length = options.draft_length()
    too_long = options.num_draft_tokens is None and isinstance(length, int) and length > limit
    return _replaced(
        options,
        verifier=_capped_rule(rule, settings),
        num_draft_tokens=limit if too_long else options.num_draft_tokens,
        max_draft_tokens=min(limit, options.max_draft_tokens),
    )


def _capped_rule(rule: Rule, settings: Settings) -> Rule:
    if isinstance(rule, StepRule) and rule.rewrite_tokens > settings.limits.draft_tokens:
        return dataclasses.replace(rule, rewrite_tokens=settings.limits.draft_tokens)
    return rule


def _check_drafter(kind: DrafterKind | None, settings: Settings) -> None:
    """The same for drafters, whose texts may all be paths: those of other packages are not known here."""
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    for field in fields:
        value = getattr(kind, field.name)
        if value != field.default and not isinstance(value, bool | int | float):
            raise BadRequest(f"option {field.name!r} of that drafter is set where the server is started")
    if kind is not None and kind.reads_target and settings.defaults.drafter.partition(":")[0] != kind.name:
        raise BadRequest(f"drafter {kind.name!r} has weights, which are loaded where the server is started: --drafter")
    limit = settings.limits.draft_tokens
    if kind is not None and kind.tree_options.size > limit:
        raise BadRequest(f"a draft's tree is {kind.tree_options.size} tokens; this server takes at most {limit}")


def _with_paths_of(rule: Rule, default: Rule) -> Rule:
    """The rule with the paths that the server was started with."""
    if type(rule) is not type(default):
        return rule
    return dataclasses.replace(rule, **{f.name: getattr(default, f.name) for f in path_fields(rule)})  # type: ignore[type-var]


def _check(rule: Rule, settings: Settings) -> None:
    """Refuse what this server does not allow."""
    if not (rule.lossless or settings.allow_lossy):
        allowed = ", ".join(sorted(name for name, kind in REGISTRY.load_all()[0].items() if kind.lossless))
        raise BadRequest(
            f"verifier {rule.name!r} may change what the target would have written, and this server allows only "
            f"lossless ones: {allowed}"
        )
    check_ranges(rule)
    limit = settings.limits.draft_tokens
    lengths = {"min_draft_tokens": (rule.min_draft_tokens(), limit)}
    if isinstance(rule, StepRule):
        lengths["max_step_tokens"] = rule.max_step_tokens, max(limit, LONGEST_STEP)
        # Its own default gives way to the limit, see `_capped`.
        lengths["rewrite_tokens"] = rule.rewrite_tokens, max(limit, type(rule).rewrite_tokens)
        if rule.rewrite:
            _check_nested(rule, settings)
    for name, (length, most) in lengths.items():
        if length > most:
            raise BadRequest(
                f"verifier {rule.name!r} with these options needs drafts of {length} tokens ({name}); this server "
                f"allows at most {most}"
            )


def _check_nested(rule: StepRule, settings: Settings) -> None:
    """A rule that is named by an option of another goes through the same checks."""
    nested = verify.make(rule.rewrite)
    check_paths(nested)
    if nested.unit != "token" or not nested.speculates:
        raise BadRequest(
            f"option 'rewrite' of verifier {rule.name!r} is {rule.rewrite!r}; give a rule that verifies drafts token "
            "by token, or nothing"
        )
    _check(nested, settings)


def _check_length(name: str, length: int | str | None, settings: Settings) -> None:
    limit = settings.limits.draft_tokens
    if isinstance(length, int) and length > limit:
        raise BadRequest(f"{name} is {length}; this server allows at most {limit}")


def _adjusted(rule: Rule, own: dict[str, Any]) -> Rule:
    """The rule with options of its own, each of its default's type."""
    fields = {f.name: f for f in option_fields(type(rule))}
    given, own = own, {}
    for name, value in given.items():
        name = current_name(f"verifier {rule.name!r}", fields.values(), name)
        if name not in fields:
            raise BadRequest(
                f"verifier {rule.name!r} has no option {name[:MAX_TEXT]!r}; its options are: "
                f"{', '.join(fields) or 'none'}; any request has: verifier, off, trace, detailed, {', '.join(SHARED)}"
            )
        if name in own:
            raise BadRequest(f"option {name!r} of verifier {rule.name!r} is given twice, by its old name, too")
        check_range(rule, fields[name], value)
        own[name] = value
    return dataclasses.replace(rule, **own) if own else rule  # type: ignore[type-var]
