"""Arguments that several commands have in common, and what a shell may complete them to."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

DRAFTERS = ("auto", "cascade", "model", "ngram")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
SPANS = ("all", "thinking")


def verifiers() -> list[str]:
    return _named("verify")


def tasks() -> list[str]:
    return _named("tasks")


def _named(package: str) -> list[str]:
    """The names in a registry, read from its source: importing it takes seconds, and a shell waits for the answer."""
    sources = sorted((Path(__file__).parent.parent / package).glob("*.py"))
    return sorted(name for s in sources for name in re.findall(r'^    name = "(.+)"$', s.read_text(), re.MULTILINE))


Target = Annotated[str, typer.Argument(help="Target model: a checkpoint folder, a .gguf file or a hub id.")]
Draft = Annotated[str | None, typer.Option(help="Draft model. Without one, drafts are looked up in the text.")]
Verifier = Annotated[
    str, typer.Option(help="Rule, e.g. exact, sampling, fly:window=4, none.", autocompletion=verifiers)
]
Drafter = Annotated[
    str,
    typer.Option(help="auto, model, ngram or cascade (a model sped up by ngram).", autocompletion=lambda: DRAFTERS),
]
NumDraftTokens = Annotated[
    str | None, typer.Option("--num-draft-tokens", "-k", help="Draft length, or auto; by default the rule's own.")
]
DraftMinP = Annotated[float, typer.Option(help="Stop drafting where the draft's best has less; 0 is off.")]
DraftMaxEntropy = Annotated[float | None, typer.Option(help="Or where its entropy is above this.")]
MaxNewTokens = Annotated[int | None, typer.Option("--max-new-tokens", "-n", help="Longest answer.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Sample from the k best tokens; 0 is off.")]
TopP = Annotated[float, typer.Option(help="Sample from the best tokens of this mass; 1 is off.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the best; 0 is off.")]
Seed = Annotated[int | None, typer.Option(help="Makes a sampled answer repeatable.")]
RelaxSpan = Annotated[
    str, typer.Option(help="Where a lossy rule may relax: all or thinking.", autocompletion=lambda: SPANS)
]
LoopRepeats = Annotated[int, typer.Option(help="Copies in a row at which a lossy rule gives way to exact; 0 is off.")]
LoopPeriod = Annotated[int, typer.Option(help="Tokens of the longest block whose copies are noticed.")]
Lossy = Annotated[bool, typer.Option("--allow-lossy/--no-allow-lossy", help="Refuse lossy rules or not.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer at this text; may be repeated.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", autocompletion=lambda: DEVICES)]
DraftDevice = Annotated[
    str | None, typer.Option(help="Where the draft model runs, if elsewhere.", autocompletion=lambda: DEVICES)
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or int8.", autocompletion=lambda: DTYPES)]
Context = Annotated[int | None, typer.Option(help="Tokens a sequence may have, prompt included.")]
Sparse = Annotated[
    Path | None,
    typer.Option(help="Folder of a plan that says what checking a draft may leave out; see semspec sparse."),
]
NoMemoryLine = Annotated[bool, typer.Option("--quiet", "-q", help="Do not say what memory will be taken.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the text only.")]


def draft_length(text: str | None) -> int | str | None:
    """A number or a word such as auto, from the command line; which words there are is not decided here."""
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        return text


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters may be dataclasses: each stands for its fields, which become the options.

    So options that several commands share are said once. A field that several of a command's dataclasses have is one
    option, and all of them get its value."""
    groups: dict[str, dict[str, inspect.Parameter]] = {}
    kinds = get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters
    for name, parameter in own.items():
        found = {name: parameter.replace(annotation=kinds[name], kind=parameter.KEYWORD_ONLY)}
        groups[name] = _fields(kinds[name]) if is_dataclass(kinds[name]) else found

    def run(**given: Any) -> None:
        values = {name: {key: given[key] for key in group} for name, group in groups.items()}
        command(**{k: kinds[k](**v) if is_dataclass(kinds[k]) else v[k] for k, v in values.items()})

    merged = {key: p for group in groups.values() for key, p in group.items()}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(list(merged.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {}  # typer would look into these for what the signature has resolved already
    return run


def _fields(group: Any) -> dict[str, inspect.Parameter]:
    kinds = get_type_hints(group, include_extras=True)
    kind, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    return {
        f.name: inspect.Parameter(
            f.name, kind, default=empty if f.default is MISSING else f.default, annotation=kinds[f.name]
        )
        for f in fields(group)
    }
