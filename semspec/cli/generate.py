"""`semspec generate`: answers to one prompt."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import semspec
from semspec.cli import arguments as args
from semspec.cli.live import Writer
from semspec.cli.progress import memory_line
from semspec.cli.show import reasons, relaxed_tokens, report, show, summary, terminal
from semspec.errors import BadRequest

SLOTS = 16  # answers decoded at a time


def generate(
    target: args.Target,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; without it, or '-': standard input.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    draft: args.Draft = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a chat message.")] = False,
    n: Annotated[int, typer.Option("--n", help="Number of answers, decoded together.")] = 1,
    verifier: args.Verifier = "exact",
    drafter: args.Drafter = "auto",
    num_draft_tokens: args.NumDraftTokens = None,
    draft_min_p: args.DraftMinP = 0.0,
    draft_max_entropy: args.DraftMaxEntropy = None,
    max_new_tokens: args.MaxNewTokens = None,
    temperature: args.Temperature = 0.0,
    top_k: args.TopK = 0,
    top_p: args.TopP = 1.0,
    min_p: args.MinP = 0.0,
    seed: args.Seed = None,
    relax_span: args.RelaxSpan = "all",
    loop_repeats: args.LoopRepeats = 4,
    loop_period: args.LoopPeriod = 128,
    lossy: args.Lossy = True,
    stop: args.Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Write on past the end of the text.")] = False,
    device: args.Device = "auto",
    draft_device: args.DraftDevice = None,
    dtype: args.Dtype = "auto",
    context: args.Context = None,
    sparse: args.Sparse = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the text.")] = False,
    quiet: args.Quiet = False,
    why: Annotated[bool, typer.Option("--why", help="List every relaxed token with the rule's reason.")] = False,
) -> None:
    """Answer one prompt, tokens coloured by origin: green from the draft, yellow relaxed, plain from the target."""
    text = read(prompt, file)
    options = semspec.Options(
        verifier=verifier, drafter=drafter, num_draft_tokens=args.draft_length(num_draft_tokens),
        draft_min_p=draft_min_p, draft_max_entropy=draft_max_entropy, max_new_tokens=max_new_tokens,
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, stop=stop or (),
        ignore_eos=ignore_eos, relax_span=relax_span, loop_repeats=loop_repeats, loop_period=loop_period,
        allow_lossy=lossy,
    )  # fmt: skip
    if n < 1:
        raise BadRequest(f"n is {n}; give 1 or more, the number of answers")
    if n > 1 and temperature == 0:
        raise BadRequest(f"at temperature 0 all {n} answers would be the same; give a temperature above 0")
    errors = terminal(stderr=True)
    pair = semspec.load(
        target, draft, device=device, draft_device=draft_device, dtype=dtype, slots=min(n, SLOTS), context=context,
        sparse=sparse, allow_lossy=lossy,
        report=memory_line(quiet or as_json),
    )  # fmt: skip
    asked = [{"role": "user", "content": text}] if chat else text
    each = [options if seed is None else replace(options, seed=seed + i) for i in range(n)]
    if as_json:
        answers = [report(result, pair.spelling) for result in pair.generate([asked] * n, each)]
        typer.echo(json.dumps(answers[0] if n == 1 else {"answers": answers}, ensure_ascii=False))
        return
    console = terminal()
    results = (
        [show(pair.stream(asked, options), console, live=not quiet)] if n == 1 else pair.generate([asked] * n, each)
    )
    for i, result in enumerate(results):
        if n > 1:
            with Writer(console) as writer:
                for event in result.events:
                    writer.write(event)
            if i < n - 1:
                console.print()
        if why:
            errors.print(reasons(relaxed_tokens(result, pair.spelling)))
        if not quiet:
            errors.print(f"{i + 1} of {n}: {summary(result)}" if n > 1 else summary(result), style="dim")


def read(prompt: str | None, file: Path | None) -> str:
    """The prompt, from where it was said to be. A last newline is the file's, not the prompt's."""
    if file is not None:
        if prompt is not None:
            raise BadRequest("there is a prompt and a --file; give one of them")
        try:
            return file.read_text().removesuffix("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequest(f"the prompt cannot be read from {file}: {error}") from error
    if prompt is None and sys.stdin.isatty():
        raise BadRequest("there is no prompt; give it as an argument, with --file, or through a pipe")
    return sys.stdin.read().removesuffix("\n") if prompt in (None, "-") else prompt
