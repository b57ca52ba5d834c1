"""`semspec advise`: does speculation pay for these models, these prompts and this machine, and with which settings?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from semspec.cli import arguments as args
from semspec.cli.calibrate import share
from semspec.cli.progress import bar, loading, warn_if_busy
from semspec.cli.spread import spread
from semspec.errors import BadRequest

if TYPE_CHECKING:
    from semspec.tasks import Problem

MIN_PROMPTS = 3  # fewer have no interval worth the name


@spread
def advise(
    model: args.LocalArguments,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Your prompts: a .jsonl file (as for task jsonl), or a .txt with one prompt per line."),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Prompts of a task instead, e.g. pocket.", autocompletion=args.tasks)
    ] = None,
    data: args.Data = None,
    n: Annotated[int, typer.Option("--problems", help="Prompts to try.")] = 8,
    verifier: Annotated[
        list[str] | None,
        typer.Option(
            help="Lossy verifier to try; may be repeated. margin, typical and fly by default.",
            autocompletion=args.verifiers,
        ),
    ] = None,
    drafter: Annotated[
        list[str] | None, typer.Option(help="Further drafter to try, e.g. eagle:PATH; may be repeated.")
    ] = None,
    max_likelihood_loss: Annotated[
        str,
        typer.Option(
            help="Largest drop in mean log-likelihood, as a share of the way from the target's text to accepting every "
            "draft token."
        ),
    ] = "10%",
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    temperature: args.Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Seed that chooses the prompts.")] = 0,
    html: Annotated[Path | None, typer.Option(help="Write the advice to this file as a page.")] = None,
    as_json: args.Json = False,
    quiet: args.NoMemoryLine = False,
) -> None:
    """Say whether speculation pays here, with which drafter, verifier and draft length, from a short run."""
    from semspec.advise.advice import advise as conclude
    from semspec.advise.measure import LOSSY, candidates, measure
    from semspec.advise.page import html as page
    from semspec.advise.page import terminal
    from semspec.bench.inputs import check_room
    from semspec.loop.cost_profile import device_name
    from semspec.model.threads import busy

    allowed = share(max_likelihood_loss, "--max-likelihood-loss")
    problems = choose(prompts, task, data, n, seed)
    warn_if_busy()
    with loading(quiet) as report:
        pair = model.load(slots=1, report=report)
    check_room(problems, pair.tokenizer, pair.target.max_seq_len, max_new_tokens)
    chosen = [problem.prompt for problem in problems]
    tried = candidates(pair, temperature, verifier or LOSSY, drafter or ())
    with bar("advise") as progress:
        found = measure(pair, chosen, tried, progress, max_new_tokens=max_new_tokens, temperature=temperature)
    device = device_name(pair.target.device)
    given = task or f"jsonl:{prompts}"
    advice = conclude(found, model.target, model.draft, device, temperature, allowed, busy() or "", given)
    if as_json:
        typer.echo(json.dumps(advice.to_dict(), ensure_ascii=False))
    else:
        Console(highlight=False).print(terminal(advice))
    if html:  # last: a file that cannot be written costs no advice
        html.write_text(page(advice), encoding="utf-8", errors="backslashreplace")


def choose(path: Path | None, task: str | None, data: Path | None, n: int, seed: int) -> list[Problem]:
    from semspec import tasks
    from semspec.tasks import base
    from semspec.tasks.jsonl import JsonLines

    if (path is None) == (task is None):
        raise BadRequest("give the prompts: either --prompts FILE or --task NAME")
    if path is not None:  # a file may have fewer than that; a task says so
        there = JsonLines(path=str(path), data=data).load()
        problems = base.choose(there, min(n, len(there)), seed, path.name)
    else:
        problems = tasks.make(task or "", data).problems(n, seed)
    if len(problems) < MIN_PROMPTS:
        there_are = "there is 1 prompt" if len(problems) == 1 else f"there are {len(problems)} different prompts"
        raise BadRequest(f"{there_are} to try; give {MIN_PROMPTS} or more, for the intervals")
    return problems
