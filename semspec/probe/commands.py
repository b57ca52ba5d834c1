"""`semspec probe fit`, its stages, and `measure`. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from semspec.arguments import tasks
from semspec.errors import BadRequest
from semspec.live import bar

if TYPE_CHECKING:
    from semspec.pair import Pair
    from semspec.probe.collect import Config

JUDGE_WIDTHS = (64, 32)  # evidence is a handful of numbers

app = typer.Typer(help="Fit the probes that predict what a step's meaning is worth to a model.", no_args_is_help=True)

Target = Annotated[str, typer.Argument(help="Target model: a checkpoint folder, a hub id, or pocket.")]
Draft = Annotated[str | None, typer.Argument(help="Draft model; pocket brings its own.")]
Folder_ = Annotated[Path, typer.Argument(help="Folder of a collection.")]
Out = Annotated[Path, typer.Option(help="Folder of samples, labels and probes; an unfinished one is gone on with.")]
Task_ = Annotated[
    str,
    typer.Option(help="Whose problems: pocket, math500, ... with options: pocket:steps=5.", autocompletion=tasks),
]
N = Annotated[int | None, typer.Option(help="Number of problems.")]
Data = Annotated[Path | None, typer.Option(help="Folder with the data sets.")]
Traces = Annotated[str, typer.Option(help="Who writes the answers to cut: target, draft, both, or a .jsonl of them.")]
PerProblem = Annotated[int | None, typer.Option(help="Prefixes of each problem.")]
Samples = Annotated[int, typer.Option(help="Steps sampled from each model after each prefix.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="Of sampling.")]
TopP = Annotated[float, typer.Option(help="Sample from the best tokens of this mass.")]
MaxStep = Annotated[int, typer.Option(help="Longest step, in tokens.")]
Layers = Annotated[str, typer.Option(help="Layers of the target to keep, e.g. 16,last.")]
DraftLayers = Annotated[str, typer.Option(help="Layers of the draft to keep.")]
Seed = Annotated[int, typer.Option(help="Chooses problems, prefixes and noise.")]
Shard = Annotated[int, typer.Option(help="Prefixes between two writings to the disk.")]
Slots = Annotated[int, typer.Option(help="Prefixes sampled at a time.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
DraftDevice = Annotated[str | None, typer.Option(help="Where the draft model runs, if elsewhere.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Context = Annotated[int | None, typer.Option("--context", help="Tokens a sequence may have.")]
Clusters = Annotated[str, typer.Option(help="canonical, nli:model=..., embedding:model=..., or judge.")]
Labels = Annotated[str, typer.Option(help="For the target's probe: own, cross (and the draft's steps) or combined.")]
LeaveOut = Annotated[bool, typer.Option("--leave-one-out/--count-itself", help="Does a step count for itself?")]
Pooling = Annotated[str, typer.Option(help="Of a step's states: mean or last.")]
Calibration = Annotated[str, typer.Option(help="isotonic, temperature or none.")]
Epochs = Annotated[int, typer.Option(help="Longest training.")]
TrainSeed = Annotated[int, typer.Option(help="Splits the problems and begins the training.")]


@app.command()
def fit(
    target: Target,
    out: Out,
    draft: Draft = None,
    task: Task_ = "pocket",
    n: N = 64,
    data: Data = None,
    traces: Traces = "target",
    per_problem: PerProblem = 8,
    samples: Samples = 20,
    temperature: Temperature = 0.6,
    top_p: TopP = 0.95,
    max_step_tokens: MaxStep = 500,
    layers: Layers = "last",
    draft_layers: DraftLayers = "last",
    seed: Seed = 0,
    shard: Shard = 32,
    slots: Slots = 16,
    device: Device = "auto",
    draft_device: DraftDevice = None,
    dtype: Dtype = "auto",
    context: Context = None,
    clusters: Clusters = "canonical",
    labels: Labels = "cross",
    leave_one_out: LeaveOut = False,
    pooling: Pooling = "mean",
    calibration: Calibration = "isotonic",
    epochs: Epochs = 100,
    train_seed: TrainSeed = 42,
) -> None:
    """Everything: sample steps of both models, label them by meaning, train and measure a probe for each."""
    config = _config(task, n, data, traces, per_problem, samples, temperature, top_p, max_step_tokens, layers, draft_layers, seed, shard)  # noqa: E501  # fmt: skip
    _check(config, clusters)
    pair = _load(target, draft, device, draft_device, dtype, slots, context)
    _collect(config, out, pair)
    _label(out, clusters, device, pair)
    _train(out, device, labels, leave_one_out, pooling, calibration, epochs, train_seed)


@app.command()
def collect(
    target: Target,
    out: Out,
    draft: Draft = None,
    task: Task_ = "pocket",
    n: N = 64,
    data: Data = None,
    traces: Traces = "target",
    per_problem: PerProblem = 8,
    samples: Samples = 20,
    temperature: Temperature = 0.6,
    top_p: TopP = 0.95,
    max_step_tokens: MaxStep = 500,
    layers: Layers = "last",
    draft_layers: DraftLayers = "last",
    seed: Seed = 0,
    shard: Shard = 32,
    slots: Slots = 16,
    device: Device = "auto",
    draft_device: DraftDevice = None,
    dtype: Dtype = "auto",
    context: Context = None,
) -> None:
    """Sample steps of both models after prefixes of answers, with the states that predicted them."""
    config = _config(task, n, data, traces, per_problem, samples, temperature, top_p, max_step_tokens, layers, draft_layers, seed, shard)  # noqa: E501  # fmt: skip
    _collect(config, out, _load(target, draft, device, draft_device, dtype, slots, context))


@app.command()
def label(
    folder: Folder_,
    clusters: Clusters = "canonical",
    target: Annotated[str | None, typer.Option(help="The target model; only judge asks it.")] = None,
    device: Device = "auto",
) -> None:
    """Sort collected steps by meaning and count."""
    pair = None if target is None else _load(target, None, device, None, "auto", 16, None)
    _label(folder, clusters, device, pair)


@app.command()
def train(
    folder: Folder_,
    labels: Labels = "cross",
    leave_one_out: LeaveOut = False,
    pooling: Pooling = "mean",
    calibration: Calibration = "isotonic",
    layers: Annotated[str, typer.Option(help="Of the target's collected layers, those to use; all by default.")] = "",
    draft_layers: Annotated[str, typer.Option(help="Of the draft's collected layers, those to use.")] = "",
    judge_states: Annotated[
        bool, typer.Option(help="Let the judge of semantic+ see states beside the evidence of the logits.")
    ] = False,
    epochs: Epochs = 100,
    train_seed: TrainSeed = 42,
    device: Device = "auto",
) -> None:
    """Train, calibrate and measure both probes, and the judge of semantic+, on a labelled collection."""
    _train(
        folder, device, labels, leave_one_out, pooling, calibration, epochs, train_seed, layers, draft_layers,
        judge_states,
    )  # fmt: skip


@app.command()
def calibrate(
    probes: Annotated[Path, typer.Argument(help="Folder in which probes were fitted.")],
    folder: Annotated[Path, typer.Argument(help="Labelled collection of other problems, made with another --seed.")],
    risk: Annotated[float, typer.Option(help="Largest share of bad steps among those that semantic+ lets stand.")],
    confidence: Annotated[float, typer.Option(help="How sure that must be.")] = 0.95,
    bad: Annotated[str, typer.Option(help="Which steps are bad: invalid (if the task can tell) or unwritten.")] = "",
) -> None:
    """Choose the threshold of semantic+ from a bound on risk, and keep it with the judge."""
    from dataclasses import asdict

    from semspec.probe.data import Folder
    from semspec.probe.evaluate import judged_steps
    from semspec.probe.head import Probe
    from semspec.probe.risk import choose_least

    collection = Folder(folder)
    judge = Probe.load(probes / "judge", collection.run["models"]["target"])
    steps = judged_steps(judge, collection, bad)
    bound = choose_least(steps.scores, steps.bad, risk, confidence)
    judge.data |= {"least": bound.least, "bound": asdict(bound) | {"bad": steps.meant_by_bad, "stood_bad": bound.bad}}
    judge.save(probes / "judge")
    typer.echo(json.dumps(judge.data["bound"], ensure_ascii=False))


@app.command()
def measure(
    probes: Annotated[Path, typer.Argument(help="Folder in which probes were fitted.")],
    folder: Annotated[Path, typer.Argument(help="Labelled collection of other problems, made with another --seed.")],
    labels: Labels = "cross",
    leave_one_out: LeaveOut = False,
) -> None:
    """Measure finished probes on another collection, with intervals."""
    from semspec.probe.data import MODELS, Folder
    from semspec.probe.evaluate import evaluate
    from semspec.probe.head import Probe

    collection, document = Folder(folder), {}
    kinds = {"target": labels, "draft": "own" if labels == "cross" else labels, "judge": "written"}
    for name, kind in kinds.items():
        model = name if name in MODELS else "target"
        probe = Probe.load(probes / name, collection.run["models"][model])
        document[name] = evaluate(probe, collection, model, kind, leave_one_out)
    typer.echo(json.dumps(document, ensure_ascii=False))


def read_layers(text: str) -> tuple[int, ...]:
    """ "16,last" -> (16, -1)"""
    try:
        return tuple(-1 if part.strip() == "last" else int(part) for part in text.split(","))
    except ValueError:
        raise BadRequest(f"layers are {text!r}; give numbers and 'last', with commas between, e.g. 16,last") from None


def _config(
    task: str, n: int | None, data: Path | None, traces: str, per_problem: int | None, samples: int,
    temperature: float, top_p: float, max_step_tokens: int, layers: str, draft_layers: str, seed: int, shard: int,
) -> Config:  # fmt: skip
    from semspec.probe.collect import Config

    return Config(
        task=task, n=n, data=str(data) if data else None, traces=traces, per_problem=per_problem, samples=samples,
        temperature=temperature, top_p=top_p, max_step_tokens=max_step_tokens, target_layers=read_layers(layers),
        draft_layers=read_layers(draft_layers), seed=seed, shard=shard,
    )  # fmt: skip


def _check(config: Config, clusters: str) -> None:
    """What would fail after hours of sampling fails now."""
    from semspec import tasks
    from semspec.probe import cluster
    from semspec.probe.meaning import parser

    if not clusters.startswith("judge"):
        task = tasks.make(config.task, Path(config.data) if config.data else None)
        cluster.make(clusters, cluster.Source(parser(task)))


def _load(
    target: str, draft: str | None, device: str, draft_device: str | None, dtype: str, slots: int, context: int | None
) -> Pair:
    from semspec.loading import load

    return load(target, draft, device=device, draft_device=draft_device, dtype=dtype, slots=slots, context=context)


def _collect(config: Config, out: Path, pair: Pair) -> None:
    from semspec.probe.collect import collect as run

    with bar("collect") as progress:
        folder = run(config, out, pair, progress)
    Console(stderr=True).print(f"samples of {len(folder.shards)} shards in {out}", soft_wrap=True)


def _label(out: Path, clusters: str, device: str, pair: Pair | None) -> None:
    from semspec import tasks
    from semspec.probe import cluster
    from semspec.probe.data import Folder
    from semspec.probe.label import label as run
    from semspec.probe.meaning import parser, truth

    folder = Folder(out)
    config = folder.run["config"]
    task = tasks.make(config["task"], Path(config["data"]) if config["data"] else None).for_fitting()
    clusterer = cluster.make(clusters, cluster.Source(parser(task), pair, device))
    with bar("label") as progress:
        run(folder, clusterer, {"clusters": clusters}, truth(task), progress)


def _train(
    out: Path, device: str, labels: str, leave_one_out: bool, pooling: str, calibration: str, epochs: int, seed: int,
    layers: str = "", draft_layers: str = "", judge_states: bool = False,
) -> None:  # fmt: skip
    """Both probes and the judge, their plots, and one JSON document as the last line."""
    from semspec.model.runner import choose_device
    from semspec.probe.data import MODELS, Folder
    from semspec.probe.fit import Training
    from semspec.probe.fit import fit as run
    from semspec.probe.plot import draw_reliability

    training = Training(
        labels=labels, leave_one_out=leave_one_out, pooling=pooling, calibration=calibration, epochs=epochs, seed=seed
    )
    chosen = dict(zip(MODELS, (layers, draft_layers), strict=True))
    kinds = {m: (m, replace(training, layers=read_layers(chosen[m]) if chosen[m] else ())) for m in MODELS}
    judge = replace(kinds["target"][1], labels="written", states=judge_states, evidence=True, widths=JUDGE_WIDTHS)
    kinds["judge"] = ("target", judge)
    document: dict[str, Any] = {}
    for name, (model, how) in kinds.items():
        with bar(f"train {name}") as progress:
            fitted = run(Folder(out), model, how, choose_device(device), progress)
        fitted.probe.save(out / name)
        said = f"{name}: probe in {out / name}"
        try:
            draw_reliability(out / name / "reliability.png", f"{name} probe", fitted.raw, fitted.said, fitted.labels)
        except BadRequest as error:  # no plots can be drawn here; the probe stands all the same
            said += f"; no plot: {error}"
        Console(stderr=True).print(said, soft_wrap=True)
        document[name] = {"probe": str(out / name), "metrics": fitted.probe.metrics}
    typer.echo(json.dumps(document, ensure_ascii=False))
