"""`semspec bench`, its `ablate` and `replay`, `semspec compare`. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import asdict, dataclass
from errno import EACCES
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from semspec.cli import arguments
from semspec.cli.arguments import draft_length
from semspec.cli.progress import bar, interruptible, loading, warn_if_busy
from semspec.cli.spread import spread
from semspec.errors import BadRequest

app = typer.Typer(help="Run methods on a task: speed and quality side by side, resumable.", invoke_without_command=True)


QUALITY = "Quality"
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document (the default when piped).")]


@dataclass(frozen=True, kw_only=True)
class TrustArguments:
    """How quality is measured."""

    margin: Annotated[
        str | None,
        typer.Option(
            help="Equivalence margin: points of accuracy (default: 3), or a share of the target-to-draft distance "
            "(default without right answers: 15%).",
            rich_help_panel=QUALITY,
        ),
    ] = None
    encoder: Annotated[
        str,
        typer.Option(
            help="Sentence encoder for comparing meanings: a folder or a hub id; auto: .models/all-MiniLM-L6-v2; none.",
            rich_help_panel=QUALITY,
        ),
    ] = "auto"
    judge: Annotated[
        str | None,
        typer.Option(
            help="OpenAI-compatible server that compares answers, up to /v1; none by default.", rich_help_panel=QUALITY
        ),
    ] = None
    judge_model: Annotated[
        str,
        typer.Option(help="The model to ask there; a key is read from SEMSPEC_JUDGE_KEY.", rich_help_panel=QUALITY),
    ] = ""
    judge_problems: Annotated[
        int,
        typer.Option(
            help="Problems that the judge model compares, in both orders, per method.", rich_help_panel=QUALITY
        ),
    ] = 40
    judge_parallel: Annotated[int, typer.Option(help="Requests to the judge at a time.", rich_help_panel=QUALITY)] = 16

    def checked_margin(self) -> Any:
        from semspec.bench.verdict import Margin

        return Margin.parse(self.margin)

    def check(self) -> None:
        """Before anything is run."""
        self.checked_margin()
        self._judge()

    def _judge(self) -> Any:
        from semspec.bench.judge_model import JudgeModel

        if self.judge is None:
            return None
        if not self.judge_model:
            raise BadRequest("say which model judges with --judge-model NAME")
        return JudgeModel(self.judge, self.judge_model, self.judge_problems, self.judge_parallel)

    def measures(self, folder: Path, run: dict[str, Any], samples: list[dict[str, Any]]) -> tuple[Any, Any]:
        """Of the models besides the pair's."""
        from semspec.bench.judge_model import PROMPT
        from semspec.bench.outside import outside_measures

        judge = self._judge()
        with bar("quality" if judge is None else "judge") as progress:
            found = outside_measures(folder, run, samples, self.encoder, judge, progress)
        if judge is not None:
            errors = Console(stderr=True)
            errors.print(f"{judge.cost()}. It was asked:\n{PROMPT}", style="dim", markup=False, soft_wrap=True)
        return found


@dataclass(frozen=True, kw_only=True)
class BenchModels(arguments.PairArguments):
    target: Annotated[str, typer.Option(help="Target model.", rich_help_panel="Models")] = "pocket"


@app.callback()
@spread
def bench(
    command: typer.Context,
    models: BenchModels,
    trust: TrustArguments,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run, always needed; an unfinished run is continued.")
    ] = None,
    task: Annotated[
        str,
        typer.Option(help="Task, e.g. pocket, gsm8k, math500, pocket:steps=5.", autocompletion=arguments.tasks),
    ] = "pocket",
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Verifier with options, e.g. block:k=4; may be repeated. Default: exact.",
            autocompletion=arguments.verifiers,
        ),
    ] = None,
    n: arguments.Problems = None,
    data: arguments.Data = None,
    repeats: arguments.Repeats = 1,
    seed: arguments.ProblemSeed = 0,
    batch: Annotated[int, typer.Option(help="Sequences decoded at a time; times are taken at this size.")] = 1,
    num_draft_tokens: arguments.NumDraftTokens = None,
    drafter: arguments.Drafter = "auto",
    temperature: arguments.Temperature = 0.0,
    top_p: arguments.TopP = 1.0,
    max_new_tokens: arguments.MaxAnswer = None,
    controls: Annotated[
        bool | None,
        typer.Option(
            "--controls/--no-controls",
            help="Add control arms and measure quality without right answers; by default where the task has none.",
            rich_help_panel=QUALITY,
        ),
    ] = None,
    resamples: Annotated[
        int, typer.Option(help="Samples of the target with other seeds, as a control.", rich_help_panel=QUALITY)
    ] = 3,
    shared_prompts: Annotated[
        bool, typer.Option("--shared-prompts", help="Prefill each prompt once for all methods, and do not time it.")
    ] = False,
    quiet: arguments.NoMemoryLine = False,
    as_json: Json = False,
) -> None:
    command.obj = partial(
        measure, out, quiet, as_json, trust, controls=controls, resamples=resamples, shared_prompts=shared_prompts,
        **asdict(models) | {"sparse": str(models.sparse) if models.sparse else None},
        task=task, methods=method or ["exact"], n=n, data=str(data) if data else None, repeats=repeats, seed=seed,
        batch=batch, drafter=drafter, num_draft_tokens=draft_length(num_draft_tokens), temperature=temperature,
        top_p=top_p, max_new_tokens=max_new_tokens,
    )  # fmt: skip
    if not command.invoked_subcommand:
        command.obj()


def check_folder(out: Path) -> None:
    """Whether a run can be kept there, which is said before models are loaded."""
    new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    if new:
        out.rmdir()
    elif not os.access(out, os.W_OK):
        raise PermissionError(EACCES, os.strerror(EACCES), str(out))


def measure(out: Path | None, quiet: bool, as_json: bool, trust: TrustArguments, **settings: Any) -> None:
    """Run, or go on with a run, then show it."""
    if out is None:  # said before anything heavy is imported
        raise BadRequest("say where to keep the run with --out DIR")
    from semspec.bench.run import Bench, Config

    config = Config(**settings)
    trust.check()
    check_folder(out)
    if not find_spec("matplotlib"):
        note = "no report will be drawn, only a table: a report needs matplotlib; pip install 'semspec[bench]'"
        Console(stderr=True, soft_wrap=True).print(Text(note, style="dim"))
    warn_if_busy()
    with loading(quiet) as report:
        made = Bench(config, report=report)
    with bar(f"bench {config.task}") as progress, interruptible(progress.kept(out)):
        made.run(out, progress)
    finish([out], out, trust, as_json=as_json)


@app.command()
def ablate(
    context: typer.Context,
    rule: Annotated[
        str, typer.Argument(help="Verifier whose options are changed one at a time: fly, semantic+:probes=DIR.")
    ],
    every: Annotated[bool, typer.Option("--every", help="All combinations instead of one change at a time.")] = False,
) -> None:
    """Run a verifier with each option changed in turn. bench's options go before it: bench --out DIR ablate fly."""
    from semspec.bench.ablate import ablation

    context.obj(methods=ablation(rule, every))


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    shape: Annotated[str, typer.Option(help="Target and draft: 32B/1.5B, 8B/1B, 30B-A3B/0.6B or tiny.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the replayed run; RUN-SHAPE by default.")] = None,
    device: arguments.Device = "auto",
    as_json: Json = False,
) -> None:
    """Time a finished run's decisions on random weights of another size."""
    from semspec.bench.replay import replay as run_replay

    where = out or run.with_name(f"{run.name}-{shape.replace('/', '-')}")
    with bar(f"replay at {shape}") as progress:
        run_replay(run, shape, where, device, progress)
    finish([where], where, as_json=as_json)


@spread
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    trust: TrustArguments,
    out: Annotated[Path | None, typer.Option(help="Where the report goes; the first run's folder by default.")] = None,
    against: Annotated[
        str | None, typer.Option(help="Also compare every method with this one, e.g. random:rate=0.5.")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables to this file, as Markdown.")] = None,
    as_json: Json = False,
) -> None:
    """One table and one report of runs: accuracy with intervals beside every speed."""
    trust.check()
    finish(runs, out or runs[0], trust, against, markdown, as_json)


def finish(
    folders: list[Path],
    out: Path,
    trust: TrustArguments | None = None,
    against: str | None = None,
    markdown: Path | None = None,
    as_json: bool = False,
) -> None:
    """Table to standard error, report to the folder; into a pipe, or with --json, one JSON document."""
    from semspec.bench import report
    from semspec.bench.compare_to import compare_to
    from semspec.bench.folder import load_run
    from semspec.bench.markdown import write_tables
    from semspec.bench.summary import summarise
    from semspec.bench.terminal import render, render_comparison

    runs, trust = [], trust or TrustArguments()
    for folder in folders:
        run, samples = load_run(folder)
        measures = trust.measures(folder, run, samples)
        runs.append((run, samples, summarise(run, samples, trust.checked_margin(), *measures)))
    summaries = [summary for _, _, summary in runs]
    comparisons = [compare_to(run, samples, against) for run, samples, _ in runs] if against else []
    errors = Console(stderr=True)
    errors.print(render(summaries))
    for found in comparisons:
        errors.print(render_comparison(found, str(against)))
    for folder, (run, samples, _) in zip(folders, runs, strict=True):
        if not run.get("finished", True):
            text = f"{folder} is unfinished, {len(samples)} answers so far; its bench command goes on with it"
            errors.print(text, style="yellow", markup=False, soft_wrap=True)
    if markdown:
        markdown.write_text(write_tables(summaries, comparisons, against), encoding="utf-8")
    page: str | None = None
    try:
        page = str(report.write_report(runs, out))
        line = f"report: {page}"
    except BadRequest as error:  # no plots can be drawn here; the figures are printed all the same
        line = f"no report: {error}; then `semspec compare {shlex.join(map(str, folders))}` draws it"
    errors.print(line, markup=False, soft_wrap=True)
    if to_terminal() and not as_json:
        return
    document: dict[str, Any] = {"report": page, "runs": summaries}
    if against:
        document |= {"against": against, "comparisons": comparisons}
    typer.echo(json.dumps(document, ensure_ascii=False))


def to_terminal() -> bool:
    return sys.stdout.isatty()
