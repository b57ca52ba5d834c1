"""`semspec list`: the verifiers, drafters and tasks there are, and the options of each."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from semspec.cli.arguments import Json
from semspec.cli.show import terminal
from semspec.errors import BadRequest, did_you_mean

KINDS = ("verifiers", "drafters", "tasks")
GROUPS = {
    "Lossless verifiers": lambda rule: rule["lossless"],
    "Lossy verifiers, token by token": lambda rule: rule["unit"] == "token" and not rule["control"],
    "Lossy verifiers of whole reasoning steps; they need a draft model": lambda rule: not rule["control"],
    "Controls, to compare lossy verifiers with": lambda rule: True,
}


def listing(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Whose options to show; or verifiers, drafters or tasks, to list those.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the verifiers, drafters and tasks: what each does and needs; with a NAME, its options."""
    from semspec.catalogue import catalogue

    found, broken = catalogue([name] if name in KINDS else KINDS)
    if name is not None and name not in KINDS:
        if name in broken:
            raise BadRequest(broken[name])
        named = {kind: [one for one in ones if one["name"] == name] for kind, ones in found.items()}
        if not any(named.values()):
            near = did_you_mean(name, [one["name"] for ones in found.values() for one in ones])
            raise BadRequest(f"there is no {name!r}; semspec list shows all names{near and f'; {near}'}")
        found = {kind: ones for kind, ones in named.items() if ones}
        broken = {}
    if as_json:
        typer.echo(json.dumps(found | ({"broken": broken} if broken else {}), ensure_ascii=False, default=str))
        return
    console = terminal()
    if name is None or name in KINDS:
        for kind, ones in found.items():
            console.print(*(rule_tables(ones) if kind == "verifiers" else [_table(kind.capitalize(), ones)]), sep="\n")
        for why in broken.values():
            console.print(Text(why, "red"))
        console.print(Text("semspec list NAME shows the options of one. Which verifier when: docs/methods.md", "dim"))
        return
    for kind, one in [(kind, one) for kind, ones in found.items() for one in ones]:
        describe(kind, one, console)


def rule_tables(rules: list[dict[str, Any]]) -> list[RenderableType]:
    left, tables = list(rules), list[RenderableType]()
    for title, belongs in GROUPS.items():
        tables.append(_table(title, [rule for rule in left if belongs(rule)]))
        left = [rule for rule in left if not belongs(rule)]
    return tables


def _table(title: str, entries: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, min_width=16, style="cyan")
    table.add_column()
    for one in entries:
        needs = ", ".join(what for what in one["needs"] if one.get("unit") != "step" or what != "draft model")
        needs = needs and f" (needs {needs})"
        table.add_row(one["name"], Text.assemble(one["about"], (needs, "dim")))
    return table


def describe(kind: str, one: dict[str, Any], console: Console) -> None:
    facts = [kind.removesuffix("s"), *([f"needs {' and '.join(one['needs'])}"] if one["needs"] else [])]
    if kind == "verifiers":
        facts += ["lossless" if one["lossless"] else "lossy", f"verifies {one['unit']}s"]
        if one["unit"] == "token" and one["num_draft_tokens"] is not None:
            facts.append(f"draft length {one['num_draft_tokens']}")
    console.print(Text.assemble((one["name"], "bold cyan"), f": {one['about']}"))
    console.print(Text(" · ".join(facts), "dim"))
    if not one["options"]:
        return
    table = Table("option", "default", "allowed", "meaning", box=None, pad_edge=False)
    for option in one["options"]:
        default = option.get("unset") or json.dumps(option["default"], ensure_ascii=False, default=str)
        table.add_row(option["name"], Text(default), option["allowed"] or "", Text(option["label"]))
    console.print(table)
    first = max(one["options"], key=lambda option: option["main"])
    value = json.dumps(first["default"]).strip('"') or "..."  # true and false as the parser reads them
    example = (
        f"{one['name']}:{main.upper()}" if (main := one["main_option"]) else f"{one['name']}:{first['name']}={value}"
    )
    console.print(Text(f"Given as {example}; several options with commas between them.", "dim"))
