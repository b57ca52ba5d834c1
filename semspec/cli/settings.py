"""Every option of every command is also an environment variable and a key of the config file.

The command line overrides the environment, which overrides the file. `SEMSPEC_VERIFIER` and a `verifier` at the top of
the file are for every command that has such an option; `SEMSPEC_CHAT_VERIFIER` and a `[chat]` table are for one, and
override those. A variable is one value, whatever spaces it has; the file has lists for options that may be repeated.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterator
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import typer

from semspec.errors import OLD_NAME, BadRequest, did_you_mean

PREFIX = "SEMSPEC"
ARGUMENTS = {"target"}  # arguments that can be set like options
# Options by key, with the names they had in the last release: of every command that has them, or of one.
FORMER = {"answers": "n", "problems": "n"}
FORMER_OF = {
    "advise": {"verifier": "rule", "max_likelihood_loss": "loss"},
    "calibrate": {"verifier": "rule", "max_loss": "loss"},
    "serve": {"max_request_draft_tokens": "max_draft_tokens"},
    "head train": {"prompts": "data"},
    "sparse search": {"max_kl": "loss"},
    "sparse quality": {"experts": "most", "experts_always": "always"},
}
# Variables that belong to no option.
OTHERS = ("CONFIG", "API_KEY", "TARGET_API_KEY", "DRAFT_API_KEY", "JUDGE_KEY")
LIKE = 0.8  # from which likeness on a variable is taken for a misspelt one; others may have some that begin as ours
HELP = (
    "Every option is also an environment variable (SEMSPEC_VERIFIER, or SEMSPEC_CHAT_VERIFIER for one command) and a "
    "key of the config file (verifier = ..., in a table named chat for that command). A variable is one value, spaces "
    "included; the file has lists for options that may be repeated."
)


def apply(context: typer.Context, config: Path | None) -> None:
    """Give the commands below their variables, and the config file's values as defaults."""
    name_variables(context.command, ())
    _warn_of_typos(context.command)
    path = config or default_path()
    if config is not None or path.is_file():
        invoked = context.invoked_subcommand or ""
        context.default_map, former = defaults(context.command, read(path), path, invoked)
        for before, now in former.items():
            _warn(f"{before} in {path}", now)
        below = dict(commands(context.command)).get(invoked)
        if below is not None:
            check(context, below, context.default_map[below.name], path)


def default_path() -> Path:
    return Path(typer.get_app_dir("semspec")) / "config.toml"


def read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise BadRequest(f"the config file {path} cannot be read: {error}") from error


def name_variables(command: Any, names: tuple[str, ...], known: Collection[str] = ()) -> None:
    known = known or {key for below in everything(command) for key, _ in settable(below)}
    command.former = {
        k: v for k, v in (FORMER | FORMER_OF.get(" ".join(names), {})).items() if k in dict(settable(command))
    }
    for parameter in command.get_params(typer.Context(command)):
        if getattr(parameter, "is_flag", False):  # help would say <bool>, as if a value could be given
            parameter.metavar = ""
        if hasattr(parameter, "display_type"):
            parameter.display_type = partial(_type_of_one, parameter.display_type)
    for key, parameter in settable(command):
        if not parameter.envvar:
            own = "_".join((PREFIX, *names, key)).upper().replace("-", "_")
            parameter.envvar, parameter.show_envvar = [own, f"{PREFIX}_{key}".upper()], False
            if before := command.former.get(key, ""):  # for all commands only if no other has such an option today
                former = [own.removesuffix(key.upper()) + before.upper()]
                former += [] if before in known else [f"{PREFIX}_{before}".upper()]
                parameter.resolve_envvar_value = partial(
                    _resolved, parameter.resolve_envvar_value, parameter.envvar, former
                )
                parameter.envvar = parameter.envvar + former
        if getattr(parameter, "multiple", False):  # click would split a variable at spaces
            parameter.value_from_envvar = partial(_whole_variable, parameter)
    _take_former_names(command)
    for name, below in commands(command):
        name_variables(below, (*names, name), known)


def _warn_of_typos(root: Any) -> None:
    """Of variables that nothing reads, and that are nearly the name of one that would be."""
    names = {name for command in everything(root) for _, parameter in settable(command) for name in parameter.envvar}
    known = {name.removeprefix(f"{PREFIX}_") for name in names} | set(OTHERS)
    for variable in sorted(os.environ):
        name = variable.removeprefix(f"{PREFIX}_")
        if name not in {variable, *known} and (near := get_close_matches(name, known, 1, LIKE)):
            text = f"semspec: nothing reads the variable {variable}; did you mean {PREFIX}_{near[0]}?"
            typer.echo(text, err=True)


def _resolved(resolve: Callable[[Any], Any], today: list[str], former: list[str], context: Any) -> Any:
    """A variable's value, with a warning where it has the option's former name."""
    value = resolve(context)
    if value is not None and not any(map(os.environ.get, today)):
        _warn(next(name for name in former if os.environ.get(name)), today[0])
    return value


def _type_of_one(display_type: Callable[[Any], str], context: Any) -> str:
    """<path> where help would say <list[Path]>: each value is given by itself."""
    return re.sub(r"list\[(\w+)\]", lambda found: found[1].lower(), display_type(context))


def _take_former_names(command: Any) -> None:
    """Let a command's arguments have options by the names they had before, with a warning."""
    renamed = {_flag(before): _flag(key) for key, before in command.former.items()}
    if not renamed or "parse_args" in vars(command):
        return

    def parse_args(context: Any, words: list[str]) -> list[str]:
        end = words.index("--") if "--" in words else len(words)
        for i, word in enumerate(words[:end]):
            name, equals, value = word.partition("=")
            if name in renamed:
                _warn(name, renamed[name])
                words[i] = renamed[name] + equals + value
        return list(type(command).parse_args(command, context, words))

    command.parse_args = parse_args


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _warn(before: str, now: str) -> None:
    typer.echo(f"semspec: {before} is now {now}; {OLD_NAME}", err=True)


def configured(context: typer.Context, key: str) -> str | None:
    """The value that the environment or the config file gives an argument which the command line has overridden."""
    source = context.get_parameter_source(key)
    if source is None or source.name != "COMMANDLINE":
        return None
    parameter = dict(settable(context.command))[key]
    value = parameter.value_from_envvar(context)
    return context.lookup_default(key) if value is None else value


def _whole_variable(parameter: Any, context: Any) -> list[str] | None:
    value = parameter.resolve_envvar_value(context)
    return None if value is None else [value]


def defaults(root: Any, values: dict[str, Any], path: Path, invoked: str = "") -> tuple[dict[str, Any], dict[str, str]]:
    """The file as click's default_map: for each command a table of values by parameter name. And of the command that is
    invoked, the former names of options there, with those of today."""
    known = {key for command in everything(root) for key, _ in settable(command)}
    tables = {name for name, _ in commands(root)}
    common = {}
    for key, value in values.items():
        if not isinstance(value, dict) and _normal(key) in known | _former_names(root):
            common[_normal(key)] = value
        elif not (isinstance(value, dict) and key in tables):
            kind, names = ("command", tables) if isinstance(value, dict) else ("option", known)
            near = did_you_mean(_normal(key), names) or "`semspec --help` and `semspec COMMAND --help` list them"
            raise BadRequest(f"{path}: there is no {kind} {key!r}; {near}")
    tables_of = {name: (below, values.get(name, {})) for name, below in commands(root)}
    former: dict[str, dict[str, str]] = {name: {} for name in tables_of}
    found = {
        name: _table(below, own, common, known, f"{path}: {name}", former[name])
        for name, (below, own) in tables_of.items()
    }
    return found, former.get(invoked, {})


def _former_names(root: Any) -> set[str]:
    return {before for command in everything(root) for before in command.former.values()}


def _table(
    command: Any, own: dict[str, Any], common: dict[str, Any], known: Collection[str], where: str,
    former: dict[str, str],
) -> dict[str, Any]:  # fmt: skip
    """`former` is filled with the former names that are used."""
    parameters, below = dict(settable(command)), dict(commands(command))
    # A former name that is another command's option today is not meant by what is said for all commands.
    given = {key: value for key, value in common.items() if key in parameters or key not in known}
    for key, value in own.items():
        if _normal(key) in parameters or _normal(key) in command.former.values():
            given[_normal(key)] = value
        elif not (isinstance(value, dict) and key in below):
            names = [*parameters, *below]
            near = did_you_mean(_normal(key), names) or f"its options are: {', '.join(sorted(names))}"
            raise BadRequest(f"{where} has no option {key!r}; {near}")
    for key, before in command.former.items():
        if key not in given and before in given:
            former[before] = key
            given[key] = given[before]
    found = {p.name: _value(p, given[key]) for key, p in parameters.items() if key in given}
    return found | {
        name: _table(c, own.get(name, {}), common, known, f"{where} {name}", former) for name, c in below.items()
    }


def _value(parameter: Any, value: Any) -> Any:
    """As it would be written on the command line, where all but switches is text."""
    if getattr(parameter, "multiple", False):
        return [str(item) for item in (value if isinstance(value, list) else [value])]
    return value if getattr(parameter, "is_flag", False) else str(value)


def check(context: typer.Context, command: Any, values: dict[str, Any], path: Path) -> None:
    """Refuse values of the wrong type for this command, and name the file."""
    for key, parameter in settable(command):
        if parameter.name in values:
            try:
                parameter.process_value(context, values[parameter.name])
            except typer.BadParameter as error:
                raise BadRequest(f"{path}: {key} is {values[parameter.name]!r}: {error.message}") from error


def settable(command: Any) -> Iterator[tuple[str, Any]]:
    """A command's options and settable arguments, by key. An option that stands for an argument is not among them."""
    arguments = {parameter.name for parameter in command.params if parameter.param_type_name == "argument"}
    for parameter in command.params:
        key = _normal(max(parameter.opts, key=len).lstrip("-"))
        if parameter.param_type_name == "option" and key in arguments:
            continue
        if parameter.param_type_name == "option" or key in ARGUMENTS:
            yield key, parameter


def commands(command: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(command, "commands", {}).items()


def everything(root: Any) -> Iterator[Any]:
    for _, command in commands(root):
        yield command
        yield from everything(command)


def _normal(key: str) -> str:
    return key.replace("-", "_")
