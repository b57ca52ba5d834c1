"""Arguments that several commands have in common, and what a shell may complete them to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

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
    sources = sorted((Path(__file__).parent / package).glob("*.py"))
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
NumDraftTokens = Annotated[str, typer.Option("--num-draft-tokens", "-k", help="Draft length, or auto.")]
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
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the text only.")]


def draft_length(text: str) -> int | str:
    """A number or a word such as auto, from the command line; which words there are is not decided here."""
    try:
        return int(text)
    except ValueError:
        return text
