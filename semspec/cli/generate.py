"""`semspec generate`: answers to one prompt."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from semspec.cli import arguments as args
from semspec.cli import settings
from semspec.cli.live import Writer
from semspec.cli.progress import interruptible, loading
from semspec.cli.show import reasons, relaxed_tokens, report, show, summary, terminal
from semspec.cli.spread import spread
from semspec.errors import BadRequest
from semspec.pocket.chat import outside

SLOTS = 16  # answers decoded at a time


@spread
def generate(
    command: typer.Context,
    model: args.PairArguments,
    request: args.GenerationArguments,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; standard input if missing or '-'.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Send the prompt as a chat message, or as it is; by default a message where the model has a chat "
            "template.",
        ),
    ] = None,
    n: Annotated[int, typer.Option("--answers", help="Number of answers, decoded as one batch.")] = 1,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the end-of-text token.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the text.")] = False,
    quiet: args.Quiet = False,
    why: Annotated[bool, typer.Option("--why", help="List every relaxed token with the verifier's reason.")] = False,
) -> None:
    """Answer one prompt. Tokens are coloured by origin: green drafted, yellow relaxed, plain from the target."""
    if prompt is None and file is None and (configured := settings.configured(command, "target")) is not None:
        model, prompt = replace(model, target=configured), model.target  # the only argument is the prompt then
    text = read(prompt, file)
    options = request.options(ignore_eos=ignore_eos)
    if n < 1:
        raise BadRequest(f"--answers is {n}; give 1 or more")
    if n > 1 and options.temperature == 0:
        raise BadRequest(f"at temperature 0 all {n} answers would be the same; give a temperature above 0")
    errors = terminal(stderr=True)
    with loading(quiet or as_json) as memory:
        pair = model.load(min(n, SLOTS), drafter=options.drafter, allow_lossy=options.allow_lossy, report=memory)
    if chat is None:
        chat = bool(pair.tokenizer.chat_template)
        if chat and not (quiet or as_json):
            errors.print("sent as a chat message; --raw sends the text as it is", style="dim")
    if not (quiet or as_json) and (note := outside(pair.tokenizer.chat_template, text)):
        errors.print(note, style="dim")
    message = [{"role": "user", "content": text}] if chat else text
    each = [options if options.seed is None else replace(options, seed=options.seed + i) for i in range(n)]
    if as_json:
        answers = [report(result, pair.spelling) | {"chat": chat} for result in pair.generate([message] * n, each)]
        typer.echo(json.dumps(answers[0] if n == 1 else {"answers": answers}, ensure_ascii=False))
        return
    console = terminal()
    if n == 1:
        stream = pair.stream(message, options)
        with interruptible(lambda: f"the {stream.stats.tokens} tokens above are all that was written"):
            results = [show(stream, console, live=not quiet)]
    else:
        results = pair.generate([message] * n, each)
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
    """The prompt, from the argument, the file or standard input, without a final newline of the latter two."""
    text = _read(prompt, file)
    if not text.strip():
        raise BadRequest("the prompt is empty; write something for the model to answer or to go on from")
    return text


def _read(prompt: str | None, file: Path | None) -> str:
    if file is not None:
        if prompt is not None:
            raise BadRequest("there is a prompt and a --file; give one of them")
        try:
            text = file.read_text(encoding="utf-8", errors="surrogateescape")
        except OSError as error:
            raise BadRequest(f"the prompt cannot be read from {file}: {error}") from error
        return args.valid_text(text.removesuffix("\n"), str(file))
    if prompt is None and sys.stdin.isatty():
        raise BadRequest("there is no prompt; give it as an argument, with --file, or through a pipe")
    if prompt is not None and prompt != "-":
        return args.valid_text(prompt, "the prompt")
    return args.valid_text(sys.stdin.read().removesuffix("\n"), "standard input")
