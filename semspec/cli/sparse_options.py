"""What several commands of `semspec sparse` take, each said once. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from semspec.cli import arguments as args
from semspec.cli.progress import loading

if TYPE_CHECKING:
    from semspec.pair import Pair
    from semspec.tasks import Task

N = Annotated[int, typer.Option("--problems", help="Number of problems.")]
K = Annotated[int, typer.Option("--num-draft-tokens", "-k", help="Draft length.")]


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The problems whose answers are looked at."""

    task: Annotated[str, typer.Option(help="Task, with options, e.g. pocket:long=true.", autocompletion=args.tasks)] = (
        "pocket:long=true"
    )
    n: N = 8
    data: args.Data = None
    seed: Annotated[int, typer.Option(help="Seed that chooses the problems.")] = 0
    k: K = 8
    max_new_tokens: args.MaxAnswer = None

    def problems(self) -> Task:
        from semspec import tasks

        return tasks.make(self.task, self.data)


@dataclass(frozen=True, kw_only=True)
class MoreTexts(Texts):
    n: N = 20


@dataclass(frozen=True, kw_only=True)
class TargetArguments:
    """A target without a draft, for one answer at a time."""

    target: args.LocalTarget
    device: args.Device = "auto"
    dtype: args.Dtype = "auto"
    context: args.Context = None
    quiet: args.NoMemoryLine = False

    def load(self) -> Pair:
        from semspec.pair.loading import load, readable

        how = {"device": self.device, "dtype": readable(self.dtype, self.device), "context": self.context}
        with loading(self.quiet) as report:
            return load(self.target, **how, slots=1, report=report)  # type: ignore[arg-type]
