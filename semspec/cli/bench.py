"""`semspec bench`, its `ablate` and `replay`, `semspec compare`. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from semspec.cli import arguments
from semspec.cli.arguments import draft_length
from semspec.cli.progress import bar, memory_line
from semspec.errors import BadRequest

app = typer.Typer(help="Run methods on a task: speed and quality side by side, resumable.", invoke_without_command=True)


@dataclass(frozen=True, kw_only=True)
class BenchModels(arguments.PairArguments):
    target: Annotated[str, typer.Option(help="Target model.", rich_help_panel="Models")] = "pocket"


@app.callback()
@arguments.spread
def bench(
    command: typer.Context,
    models: BenchModels,
    task: Annotated[
        str,
        typer.Option(help="pocket, gsm8k, math500, ... with options: pocket:steps=5.", autocompletion=arguments.tasks),
    ] = "pocket",
    out: Annotated[Path | None, typer.Option(help="Folder of the run; an unfinished one is gone on with.")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="exact, block:k=4, ...; may be repeated.", autocompletion=arguments.verifiers),
    ] = None,
    n: Annotated[int | None, typer.Option(help="Number of problems; all by default.")] = None,
    data: arguments.Data = None,
    repeats: Annotated[int, typer.Option(help="Runs of every problem, each with another seed.")] = 1,
    seed: Annotated[int, typer.Option(help="Chooses problems and noise.")] = 0,
    batch: Annotated[int, typer.Option(help="Sequences decoded at a time; times are taken at this size.")] = 1,
    num_draft_tokens: arguments.NumDraftTokens = None,
    drafter: arguments.Drafter = "auto",
    temperature: arguments.Temperature = 0.0,
    top_p: arguments.TopP = 1.0,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer; the task's own by default.")] = None,
    quiet: arguments.NoMemoryLine = False,
) -> None:
    command.obj = partial(
        measure, out, quiet, **asdict(models) | {"sparse": str(models.sparse) if models.sparse else None}, task=task,
        methods=method or ["exact"], n=n, data=str(data) if data else None, repeats=repeats, seed=seed, batch=batch,
        drafter=drafter, num_draft_tokens=draft_length(num_draft_tokens), temperature=temperature, top_p=top_p,
        max_new_tokens=max_new_tokens,
    )  # fmt: skip
    if not command.invoked_subcommand:
        command.obj()


def measure(out: Path | None, quiet: bool, **settings: Any) -> None:
    """Run, or go on with a run, then show it."""
    from semspec.bench.run import Bench, Config

    if out is None:
        raise BadRequest("say where to keep the run with --out DIR")
    config = Config(**settings)
    made = Bench(config, report=memory_line(quiet))
    with bar(f"bench {config.task}") as progress:
        made.run(out, progress)
    finish([out], out)


@app.command()
def ablate(
    context: typer.Context,
    rule: Annotated[
        str, typer.Argument(help="Rule whose settings are changed one at a time: fly, semantic+:probes=DIR.")
    ],
    every: Annotated[bool, typer.Option("--every", help="All combinations instead of one change at a time.")] = False,
) -> None:
    """A rule's ablation, with the settings given in front: bench --task pocket --out DIR ablate fly."""
    from semspec.bench.ablate import ablation

    context.obj(methods=ablation(rule, every))


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    shape: Annotated[str, typer.Option(help="Target and draft: 32B/1.5B, 8B/1B, 30B-A3B/0.6B or tiny.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the replayed run.")] = None,
    device: arguments.Device = "auto",
) -> None:
    """Make a run's recorded passes again on random models of other sizes: its decisions, their cost."""
    from semspec.bench.replay import replay as run_replay

    where = out or run.with_name(f"{run.name}-{shape.replace('/', '-')}")
    with bar(f"replay at {shape}") as progress:
        run_replay(run, shape, where, device, progress)
    finish([where], where)


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    out: Annotated[Path | None, typer.Option(help="Where the report goes; the first run's folder by default.")] = None,
    against: Annotated[
        str | None, typer.Option(help="Also pair every arm with this method, e.g. random:rate=0.5.")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables to this file, as Markdown.")] = None,
) -> None:
    """One table and one report of runs: accuracy with intervals beside every speed."""
    finish(runs, out or runs[0], against, markdown)


def finish(folders: list[Path], out: Path, against: str | None = None, markdown: Path | None = None) -> None:
    """Table to the terminal, report to the folder, one JSON document as the last line."""
    from semspec.bench import report
    from semspec.bench.compare_to import compare_to
    from semspec.bench.markdown import write_tables
    from semspec.bench.summary import load_run, summarise
    from semspec.bench.table import render, render_duel

    runs = []
    for folder in folders:
        run, samples = load_run(folder)
        runs.append((run, samples, summarise(run, samples)))
    summaries = [summary for _, _, summary in runs]
    duels = [compare_to(run, samples, against) for run, samples, _ in runs] if against else []
    Console(stderr=True).print(render(summaries))
    for found in duels:
        Console(stderr=True).print(render_duel(found, str(against)))
    if markdown:
        markdown.write_text(write_tables(summaries, duels, against), encoding="utf-8")
    page: str | None = None
    try:
        page = str(report.write_report(runs, out))
        said = f"report: {page}"
    except BadRequest as error:  # no plots can be drawn here; the figures stand all the same
        said = f"no report: {error}"
    Console(stderr=True).print(said, soft_wrap=True)
    document: dict[str, Any] = {"report": page, "runs": summaries}
    if against:
        document |= {"against": against, "duels": duels}
    typer.echo(json.dumps(document, ensure_ascii=False))
