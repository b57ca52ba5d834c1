"""`semspec calibrate`. Nothing heavy is imported before the command runs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from semspec.cli import arguments
from semspec.cli.progress import bar, interruptible, loading
from semspec.cli.spread import spread
from semspec.errors import BadRequest


@spread
def calibrate(
    models: arguments.PairArguments,
    verifier: Annotated[
        str,
        typer.Option(
            help="Verifier whose options are chosen, e.g. fly, typical, semantic+.", autocompletion=arguments.verifiers
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the run and profile.json; an unfinished run is continued.")],
    task: Annotated[
        str, typer.Option(help="Task, or prompts: jsonl:FILE.", autocompletion=arguments.tasks)
    ] = "pocket:split=probe",
    n: arguments.Problems = None,
    data: arguments.Data = None,
    max_loss: Annotated[
        str,
        typer.Option(
            help="Largest loss: a share of the target's correct answers; if none are known, of the draft's distance."
        ),
    ] = "1%",
    confidence: Annotated[float, typer.Option(help="Confidence that the loss is below --max-loss.")] = 0.95,
    values: Annotated[
        str | None,
        typer.Option(
            help="Option and values to try, the strictest first: theta=0.6,0.3. Of several options together, with "
            "semicolons between them: all combinations, in the order of their speed."
        ),
    ] = None,
    num_draft_tokens: arguments.NumDraftTokens = None,
    drafter: arguments.Drafter = "auto",
    temperature: arguments.Temperature = 0.0,
    top_p: arguments.TopP = 1.0,
    max_new_tokens: arguments.MaxAnswer = None,
    repeats: arguments.Repeats = 1,
    seed: arguments.ProblemSeed = 0,
    batch: Annotated[int, typer.Option(help="Sequences decoded at a time.")] = 8,
    encoder: Annotated[
        str, typer.Option(help="Sentence encoder for comparing meanings, where no answers are known; auto, none.")
    ] = "auto",
    quiet: arguments.NoMemoryLine = False,
) -> None:
    """Choose a verifier's options so that what it loses stays under a bound, and write them as a profile."""
    from semspec.bench.calibrate import calibrate as run_calibration
    from semspec.bench.calibrate import check_bound
    from semspec.bench.candidates import candidates, several
    from semspec.bench.outside import outside_measures
    from semspec.bench.run import Bench, Config

    methods, allowed = candidates(verifier, values), share(max_loss, "--max-loss")
    check_bound(allowed, confidence)
    config = Config(
        task=task, methods=methods, n=n, data=str(data) if data else None, repeats=repeats, seed=seed, batch=batch,
        num_draft_tokens=arguments.draft_length(num_draft_tokens), drafter=drafter, temperature=temperature,
        top_p=top_p, max_new_tokens=max_new_tokens, entropy=True,
        **vars(models) | {"sparse": str(models.sparse) if models.sparse else None},
    )  # fmt: skip
    with loading(quiet) as report:
        made = Bench(config, report=report)
    with bar(f"calibrate {verifier}") as progress, interruptible(progress.kept(out)):
        profile, choice = run_calibration(
            made,
            out,
            allowed,
            confidence,
            progress,
            lambda run, samples: outside_measures(out, run, samples, encoder)[0],
            by_speed=several(values),
        )
    path = out / "profile.json"
    profile.save(path)
    say = Console(stderr=True, soft_wrap=True, highlight=False)
    for name in made.config.methods:
        mark = "chosen" if name == choice.method else "safe" if choice.p[name] <= 1 - confidence else "not shown safe"
        say.print(f"{name}: loss {100 * choice.losses[name]:+.2f} %, p {choice.p[name]:.2g}, {mark}", markup=False)
    say.print(profile.promise, markup=False)
    if choice.own_samples is not None:
        say.print(
            f"the target's own other samples lose {100 * choice.own_samples:+.0f} % of that distance", markup=False
        )
    say.print(f"use it: --verifier profile:{path}", markup=False)
    if not sys.stdout.isatty():
        typer.echo(json.dumps({"profile": str(path), "verifier": profile.verifier, "measure": choice.measure,
                               "losses": choice.losses, "p": choice.p, "own_samples": choice.own_samples}))  # fmt: skip


def share(text: str, option: str) -> float:
    """ "1%" or "0.01"."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(%?)\s*", text)
    value = float(found[1]) / (100 if found[2] else 1) if found else 0.0
    if not 0 < value < 1:
        raise BadRequest(f"{option} is {text!r}; give a share above 0 and below 1, as 1% or 0.01")
    return value
