"""`semspec probe fit`, its stages, and `measure`. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from semspec.cli.probe_options import (
    RARE,
    Clusters,
    Collecting,
    Collection,
    Device,
    Fitted,
    Labels,
    LeaveOut,
    Teaching,
    Unseen,
)
from semspec.cli.progress import bar, interruptible
from semspec.cli.spread import hiding, spread
from semspec.errors import BadRequest

if TYPE_CHECKING:
    from semspec.pair import Pair
    from semspec.probe_fit.config import Config
    from semspec.probe_fit.train import Training

app = typer.Typer(
    help="Fit probes, the small networks by which semantic and semantic+ accept steps.", no_args_is_help=True
)


@app.command()
@hiding(RARE)
@spread
def fit(what: Collecting, how: Teaching, clusters: Clusters = "canonical") -> None:
    """Everything: sample steps of both models, label them by meaning, train and measure the probes.

    Takes every option of `probe collect`, `probe label` and `probe train`; only the common ones are listed.
    """
    config, trainings = what.config(), how.trainings()
    if what.of_servers:  # they send no states, so there is one probe to fit
        trainings = {"judge": trainings["judge"]}
    _check(config, clusters, what.device, trainings)
    pair = what.load()
    _collect(config, what.out, pair)
    _label(what.out, clusters, what.device, pair)
    _train(what.out, how.device, trainings)


@app.command()
@spread
def collect(what: Collecting) -> None:
    """Sample steps of both models after prefixes of answers, or take those that a rule verified."""
    _collect(what.config(), what.out, what.load())


@app.command()
def label(
    folder: Collection,
    clusters: Clusters = "canonical",
    target: Annotated[str | None, typer.Option(help="The target model; needed by --clusters target only.")] = None,
    device: Device = "auto",
) -> None:
    """Cluster collected steps by meaning, and count how often each meaning was sampled."""
    _label(folder, clusters, device, Collecting(target, folder, device=device).load() if target else None)


@app.command()
def join(
    folders: Annotated[list[Path], typer.Argument(help="Labelled collections, alike but for --seed and --problems.")],
    out: Annotated[Path, typer.Option(help="Folder for all of them together.")],
    mixed: Annotated[
        bool, typer.Option("--mixed", help="They may also differ in --task and --traces: mathematics and science, say.")
    ] = False,
) -> None:
    """Join collections that were made in parallel, on several machines for example."""
    from semspec.probe_fit.data import Folder
    from semspec.probe_fit.join import join as run

    run([Folder(folder) for folder in folders], out, mixed)


@app.command("import")
def import_(
    files: Annotated[list[Path], typer.Argument(help="Weights (.pt): the target's probe, then the draft's.")],
    target: Annotated[str, typer.Option(help="The target model: a checkpoint folder, a hub id, or pocket.")],
    out: Annotated[Path, typer.Option(help="Folder for the probes.")],
    draft: Annotated[str | None, typer.Option(help="The draft model; pocket brings its own.")] = None,
    pooling: Annotated[str, typer.Option(help="Of a step's states: mean, last, second-last or last-prompt.")] = "mean",
    device: Device = "auto",
) -> None:
    """Take over probes that SemanticSpec's released code trained; nothing in the files is executed."""
    from semspec.probe_fit.imported import import_probe

    if len(files) != 2:
        raise BadRequest("give two files of weights: the target's, then the draft's")
    pair = Collecting(target, out, draft, device=device, slots=1).load()
    if pair.draft is None:
        raise BadRequest("semantic needs both models' probes; name the draft model with --draft")
    probes = [import_probe(file, run, pooling) for file, run in zip(files, (pair.target, pair.draft), strict=True)]
    for name, probe in zip(("target", "draft"), probes, strict=True):
        probe.save(out / name)
    Console(stderr=True).print(f"probes in {out}: use them with semantic:paper=true,probes={out}", soft_wrap=True)


@app.command()
@spread
def train(
    folder: Collection,
    how: Teaching,
    layers: Annotated[str, typer.Option(help="Of the target's collected layers, those to use; all by default.")] = "",
    draft_layers: Annotated[
        str, typer.Option(help="Of the draft's collected layers, those to use; all by default.")
    ] = "",
) -> None:
    """Train, calibrate and measure both probes, and the judge probe of semantic+, on a labelled collection."""
    _train(folder, how.device, how.trainings(layers, draft_layers))


@app.command()
def calibrate(
    probes: Fitted,
    folder: Unseen,
    risk: Annotated[float, typer.Option(help="Largest share of bad steps among those that semantic+ accepts.")],
    confidence: Annotated[float, typer.Option(help="Probability with which that bound holds.")] = 0.95,
    bad: Annotated[
        str, typer.Option(help="Which steps are bad: invalid (the default if the task can tell) or unwritten.")
    ] = "",
    splits: Annotated[int, typer.Option(help="Also try the bound on this many random halves of the collection.")] = 0,
) -> None:
    """Choose the threshold of semantic+ from a bound on bad steps, and store it with the judge probe."""
    from semspec.probe import Probe
    from semspec.probe_fit.data import Folder
    from semspec.probe_fit.evaluate import reservation, scored_steps
    from semspec.probe_fit.risk import choose_threshold, try_splits

    collection = Folder(folder)
    judge = Probe.load(probes / "judge", collection.run["models"]["target"])
    steps = scored_steps(judge, collection, bad)
    bound = choose_threshold(steps.scores, steps.bad, risk, confidence)
    policy = collection.run.get("collected_by")
    found: dict[str, Any] = {
        "threshold": bound.threshold, "risk": risk, "confidence": confidence, "steps": bound.steps,
        "accepted": bound.accepted, "bad": steps.meaning_of_bad, "accepted_bad": bound.bad,
    }  # fmt: skip
    judge.data |= {"threshold": bound.threshold, "bound": found | ({"collected_by": policy} if policy else {})}
    judge.save(probes / "judge")
    if doubt := reservation(judge, policy, bound.threshold):
        Console(stderr=True).print(f"the bound holds for steps like these; {doubt}", soft_wrap=True, markup=False)
    document = dict(judge.data["bound"])
    if splits:
        tried = try_splits(steps.scores, steps.bad, risk, confidence, splits)
        document["tried"] = {
            "splits": tried.splits, "broken": tried.violated, "impossible": tried.impossible,
            "accepted": tried.accepted, "bad": tried.bad,
        }  # fmt: skip
    typer.echo(json.dumps(document, ensure_ascii=False))


@app.command()
def measure(
    probes: Fitted,
    folder: Unseen,
    labels: Labels = "cross",
    leave_one_out: LeaveOut = False,
    only: Annotated[str, typer.Option(help="Measure one probe only: target, draft or judge.")] = "",
) -> None:
    """Measure finished probes on another collection, beside cheaper predictors, with intervals."""
    from semspec.probe import Probe
    from semspec.probe_fit.data import MODELS, Folder
    from semspec.probe_fit.evaluate import evaluate
    from semspec.probe_fit.table import print_tables

    collection, document = Folder(folder), {}
    kinds = {"target": labels, "draft": "own" if labels == "cross" else labels, "judge": ""}
    there = [only] if only else [name for name in kinds if (probes / name).exists()]
    for name in there or kinds:
        if name not in kinds:
            raise BadRequest(f"there is no {name!r} to measure; give one of: {', '.join(kinds)}")
        kind = kinds[name]
        model = name if name in MODELS else "target"
        probe = Probe.load(probes / name, collection.run["models"][model])
        kind = kind or probe.data.get("training", {}).get("labels", "written")  # a judge probe: by what it was taught
        document[name] = evaluate(probe, collection, model, kind, leave_one_out)
        print_tables(name, document[name])
    typer.echo(json.dumps(document, ensure_ascii=False))


def _check(config: Config, clusters: str, device: str, trainings: dict[str, tuple[str, Training]]) -> None:
    """What would fail after hours of sampling fails now."""
    from semspec import tasks
    from semspec.probe_fit import cluster
    from semspec.probe_fit.meaning import parser
    from semspec.probe_fit.train import learnable

    for model, training in trainings.values():
        learnable(config.samples, config.rule is not None, model, training)
    if not cluster.asks_target(clusters):
        task = tasks.make(config.task, Path(config.data) if config.data else None)
        cluster.make(clusters, cluster.Source(parser(task), device=device)).try_out()


def _collect(config: Config, out: Path, pair: Pair) -> None:
    from semspec.probe_fit.collect import collect as run

    with bar("collect") as progress, interruptible(progress.kept(out)):
        folder = run(config, out, pair, progress)
    Console(stderr=True).print(f"samples of {len(folder.shards)} shards in {out}", soft_wrap=True, markup=False)


def _label(out: Path, clusters: str, device: str, pair: Pair | None) -> None:
    from semspec import tasks
    from semspec.probe_fit import cluster
    from semspec.probe_fit.data import Folder
    from semspec.probe_fit.label import label as run
    from semspec.probe_fit.meaning import operation, parser, truth

    folder = Folder(out)
    config = folder.run["config"]
    task = tasks.make(config["task"], Path(config["data"]) if config["data"] else None).for_fitting()
    clusterer = cluster.make(clusters, cluster.Source(parser(task), pair, device))
    kinds = operation(task)
    about = {"clusters": clusters, "operations": kinds is not None, "own": "apart"}
    with bar("label") as progress:
        run(folder, clusterer, about, truth(task), kinds, progress)


def _train(out: Path, device: str, trainings: dict[str, tuple[str, Training]]) -> None:
    """Both probes and the judge probe, their plots, and one JSON document as the last line."""
    from semspec.model.placement import choose_device
    from semspec.probe_fit.data import Folder
    from semspec.probe_fit.plot import draw_reliability
    from semspec.probe_fit.table import print_tables
    from semspec.probe_fit.train import fit, learnable

    run, document = Folder(out).run, dict[str, Any]()
    for model, how in trainings.values():
        learnable(run["config"].get("samples", 1), "collected_by" in run, model, how)
    for name, (model, how) in trainings.items():
        with bar(f"train {name}") as progress:
            fitted = fit(Folder(out), model, how, choose_device(device), progress)
        fitted.probe.save(out / name)
        line = f"{name}: probe in {out / name}"
        try:
            draw_reliability(
                out / name / "reliability.png", f"{name} probe", fitted.raw, fitted.predicted, fitted.labels
            )
        except BadRequest as error:  # no plots can be drawn here; the probe is saved all the same
            line += f"; no plot: {error}"
        print_tables(name, fitted.probe.metrics)
        Console(stderr=True).print(line, soft_wrap=True, markup=False)
        document[name] = {"probe": str(out / name), "metrics": fitted.probe.metrics}
    typer.echo(json.dumps(document, ensure_ascii=False))
