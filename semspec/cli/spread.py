"""Commands that take groups of options as dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import is_dataclass
from typing import Annotated, Any, get_args, get_type_hints


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters may be dataclasses: the fields of each become options.

    A field that several of a command's dataclasses have is one option, and all of them get its value."""
    own = _parameters(command)
    kinds = {name: p.annotation for name, p in own.items()}
    groups = {name: _parameters(kinds[name]) if is_dataclass(kinds[name]) else {name: p} for name, p in own.items()}

    def run(**given: Any) -> None:
        values = {name: {key: given[key] for key in group} for name, group in groups.items()}
        command(**{k: kinds[k](**v) if is_dataclass(kinds[k]) else v[k] for k, v in values.items()})

    merged = {key: p for group in groups.values() for key, p in group.items()}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(list(merged.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {}  # the signature has the resolved types; typer must not resolve these again
    return run


def hiding(names: Collection[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """These options of a command that was spread are taken, but its help does not list them."""

    def hide(command: Callable[..., None]) -> Callable[..., None]:
        own = dict(inspect.signature(command).parameters)
        for name in names:
            kind, option = get_args(own[name].annotation)
            hidden = copy(option)
            hidden.hidden = True
            own[name] = own[name].replace(annotation=Annotated[kind, hidden])
        command.__signature__ = inspect.Signature(list(own.values()))  # type: ignore[attr-defined]
        return command

    return hide


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Of a function or a dataclass: keyword-only, with resolved types."""
    hints, signature = get_type_hints(function, include_extras=True), inspect.signature(function)
    return {n: p.replace(annotation=hints[n], kind=p.KEYWORD_ONLY) for n, p in signature.parameters.items()}
