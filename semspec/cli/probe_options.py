"""The options of the `semspec probe` commands, each defined once. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semspec.cli import arguments
from semspec.errors import BadRequest
from semspec.remote.address import is_url

if TYPE_CHECKING:
    from semspec.pair import Pair
    from semspec.probe_fit.config import Config
    from semspec.probe_fit.train import Training

RARE = frozenset({  # options that only those need who look for them
    "first_steps", "top_p", "max_step_tokens", "draft_layers", "poolings", "delimiters", "token_states", "shard",
    "context", "leave_one_out", "target_evidence", "target_states", "calibration", "evidence", "only", "widths",
    "dropout", "rate", "batch", "patience", "standardise", "split", "endings", "train_seed",
})  # fmt: skip
JUDGE_WIDTHS = {False: (64, 32), True: (256, 64)}  # by whether it sees states: evidence is a handful of numbers

Collection = Annotated[Path, typer.Argument(help="Folder of a collection.")]
Fitted = Annotated[Path, typer.Argument(help="Folder in which probes were fitted.")]
Unseen = Annotated[Path, typer.Argument(help="Labelled collection of other problems, made with another --seed.")]
Clusters = Annotated[
    str,
    typer.Option(
        help="What finds steps of the same meaning: canonical (the task's own parser), nli or embedding (with "
        ":model=NAME after it), or target (it is asked)."
    ),
]
Device = arguments.Device
Labels = Annotated[
    str,
    typer.Option(
        help="For the target's probe: own samples, cross (also the draft's steps) or combined (both models' samples)."
    ),
]
LeaveOut = Annotated[
    bool,
    typer.Option(
        "--leave-one-out/--count-itself",
        help="Whether a step itself counts among the samples that mean the same as it; it does by default.",
    ),
]


@dataclass(frozen=True)
class Collecting:
    """Which models, and what to sample from them."""

    target: Annotated[
        str, typer.Argument(help="Target model: a checkpoint folder, a hub id, pocket, or a server's address.")
    ]
    out: Annotated[Path, typer.Option(help="Folder of samples, labels and probes; an unfinished one is continued.")]
    draft: Annotated[str | None, typer.Argument(help="Draft model; pocket brings its own.")] = None
    task: Annotated[
        str,
        typer.Option(
            help="Task whose problems are taken, e.g. pocket, math500, pocket:steps=5.", autocompletion=arguments.tasks
        ),
    ] = "pocket"
    n: arguments.Problems = 64
    data: arguments.Data = None
    traces: Annotated[
        str,
        typer.Option(
            help="What writes the answers whose prefixes are taken: target, draft, both, or a .jsonl file of answers. "
            "Or a step rule, e.g. semantic+: then the draft's steps that it verifies are collected."
        ),
    ] = "target"
    max_new_tokens: arguments.MaxAnswer = None
    per_problem: Annotated[str, typer.Option(help="Prefixes of each problem: a number, or all.")] = "8"
    first_steps: Annotated[
        bool, typer.Option(help="Also sample first steps; not needed by rules that leave those to the target.")
    ] = True
    samples: Annotated[
        int,
        typer.Option(
            help="Steps sampled from each model after each prefix. With a step rule for --traces: from the target "
            "alone; 0 is enough for --judge-labels valid."
        ),
    ] = 20
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="Sampling temperature.")] = 0.6
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens with this total probability.")] = 0.95
    max_step_tokens: Annotated[int, typer.Option(help="Longest step, in tokens.")] = 500
    layers: Annotated[str, typer.Option(help="Layers of the target whose states are stored, e.g. 16,last.")] = "last"
    draft_layers: Annotated[str, typer.Option(help="Layers of the draft whose states are stored.")] = "last"
    poolings: Annotated[
        str, typer.Option(help="What is stored of a step's states: mean, last, second-last, last-prompt.")
    ] = "mean,last"
    delimiters: Annotated[
        str, typer.Option(help="What ends a step: all (any blank line), or released (SemanticSpec's eight tokens).")
    ] = "all"
    token_states: Annotated[
        bool, typer.Option("--token-states", help="Store every token's states, for --pooling attention; takes disk.")
    ] = False
    seed: Annotated[int, typer.Option(help="Chooses problems, prefixes and noise.")] = 0
    shard: Annotated[int, typer.Option(help="Prefixes per shard on disk; fewer than --slots leave slots empty.")] = 32
    slots: Annotated[int, typer.Option(help="Prefixes sampled at a time.")] = 16
    device: Device = "auto"
    draft_device: arguments.DraftDevice = None
    dtype: arguments.Dtype = "auto"
    context: arguments.Context = None
    quiet: arguments.NoMemoryLine = False

    @property
    def of_servers(self) -> bool:
        return is_url(self.target)

    def config(self) -> Config:
        from semspec.probe_fit.config import Config

        return Config(
            task=self.task, n=self.n, data=str(self.data) if self.data else None, traces=self.traces,
            max_new_tokens=self.max_new_tokens, per_problem=read_count(self.per_problem), first_steps=self.first_steps,
            samples=self.samples, temperature=self.temperature, top_p=self.top_p, max_step_tokens=self.max_step_tokens,
            target_layers=read_layers(self.layers), draft_layers=read_layers(self.draft_layers),
            poolings=read_names(self.poolings), delimiters=self.delimiters, token_states=self.token_states,
            seed=self.seed, shard=self.shard,
        )  # fmt: skip

    def load(self) -> Pair:
        from semspec.cli.progress import loading
        from semspec.pair.loading import load

        with loading(self.quiet) as report:
            return load(
                self.target, self.draft, device=self.device, draft_device=self.draft_device, dtype=self.dtype,
                slots=self.slots, context=self.context, report=report,
            )  # fmt: skip


@dataclass(frozen=True)
class Teaching:
    """How probes are trained."""

    labels: Labels = "cross"
    leave_one_out: LeaveOut = False
    pooling: Annotated[
        str,
        typer.Option(
            help="What a probe sees of a step's states: mean, last, second-last, last-prompt, or attention (learnt)."
        ),
    ] = "mean"
    target_evidence: Annotated[
        str,
        typer.Option(
            help="What the target's probe sees of logits, as in --evidence; nothing by default, as in the paper."
        ),
    ] = ""
    target_states: Annotated[
        bool, typer.Option(help="Let the target's probe see states; without, --target-evidence alone.")
    ] = True
    calibration: Annotated[str, typer.Option(help="isotonic, temperature or none.")] = "isotonic"
    judge_states: Annotated[
        bool, typer.Option(help="Let the judge probe (of semantic+) see states, not only --evidence.")
    ] = False
    evidence: Annotated[
        str,
        typer.Option(
            help="What the judge probe sees of logits: tokens, numbers, entropy, length, draft.",
            show_default="all but draft",
        ),
    ] = "tokens,numbers,entropy,length"
    judge_labels: Annotated[
        str,
        typer.Option(
            help="What the judge probe learns: written (would the target write it?) or valid (if the task can tell)."
        ),
    ] = "written"
    only: Annotated[str, typer.Option(help="Train one probe only: target, draft or judge.")] = ""
    epochs: Annotated[int, typer.Option(help="Maximum epochs of training.")] = 100
    widths: Annotated[
        str,
        typer.Option(
            help="Hidden layers of the target's and draft's probes; 1024,512,256 by default (2048,.. from 4096 inputs)."
        ),
    ] = ""
    dropout: Annotated[float, typer.Option(help="Dropout after the first two hidden layers.")] = 0.3
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3
    batch: Annotated[int, typer.Option(help="Steps in a batch of training.")] = 128
    patience: Annotated[int, typer.Option(help="Stop training after this many epochs without improvement.")] = 15
    standardise: Annotated[bool, typer.Option(help="Scale inputs to mean 0 and deviation 1.")] = True
    split: Annotated[str, typer.Option(help="What is split into training and test: problem or sample.")] = "problem"
    endings: Annotated[bool, typer.Option("--endings", help="Also learn from steps that end the thinking.")] = False
    paper: Annotated[
        bool,
        typer.Option("--paper", help="Train as SemanticSpec's released code does, without a judge probe."),
    ] = False
    train_seed: Annotated[int, typer.Option(help="Seed of the split and of the training.")] = 42
    device: Device = "auto"

    def trainings(self, layers: str = "", draft_layers: str = "") -> dict[str, tuple[str, Training]]:
        """What is trained: by name, whose states it reads and how it learns. No layers named: all that there are."""
        from semspec.probe_fit.train import Training, released

        both = Training(
            labels=self.labels, leave_one_out=self.leave_one_out, pooling=self.pooling, calibration=self.calibration,
            epochs=self.epochs, seed=self.train_seed, dropout=self.dropout, rate=self.rate, batch=self.batch,
            patience=self.patience, standardise=self.standardise, split=self.split, endings=self.endings,
            widths=tuple(read_count(width) or 0 for width in read_names(self.widths)) or None,
        )  # fmt: skip
        states = replace(both, layers=read_layers(layers) if layers else ())
        target = replace(states, states=self.target_states, evidence=read_groups(self.target_evidence))
        if not (target.states or target.evidence):
            raise BadRequest("the target's probe would see nothing; give it states, or some --target-evidence")
        draft = replace(both, layers=read_layers(draft_layers) if draft_layers else ())
        groups = read_groups(self.evidence)
        if self.judge_labels not in ("written", "valid"):
            raise BadRequest(f"a judge probe cannot learn {self.judge_labels!r}; give --judge-labels written or valid")
        widths = JUDGE_WIDTHS[self.judge_states]
        judge = replace(states, labels=self.judge_labels, states=self.judge_states, evidence=groups, widths=widths)
        found = {"target": ("target", target), "draft": ("draft", draft), "judge": ("target", judge)}
        if self.paper:
            found = {model: (model, released(how, model)) for model, how in (("target", states), ("draft", draft))}
        if self.only and self.only not in found:
            raise BadRequest(f"there is no {self.only!r} to train; give one of: {', '.join(found)}")
        return {self.only: found[self.only]} if self.only else found


def read_names(text: str) -> tuple[str, ...]:
    """ "mean, last" -> ("mean", "last")"""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def read_count(text: str) -> int | None:
    """ "8" -> 8, "all" -> None"""
    if text != "all" and not text.isdecimal():
        raise BadRequest(f"{text!r} is no number; give one, such as 8, or all")
    return None if text == "all" else int(text)


def read_groups(text: str) -> tuple[str, ...]:
    """ "tokens, numbers" -> ("tokens", "numbers")"""
    from semspec.probe.evidence import known_groups

    return known_groups(read_names(text))


def read_layers(text: str) -> tuple[int, ...]:
    """ "16,last" -> (16, -1)"""
    try:
        return tuple(-1 if part.strip() == "last" else int(part) for part in text.split(","))
    except ValueError:
        raise BadRequest(f"layers are {text!r}; give numbers and 'last', with commas between, e.g. 16,last") from None
