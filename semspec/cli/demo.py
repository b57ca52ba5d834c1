"""`semspec demo`: the pocket pair on a few held-out problems: the target alone, with exact drafts, with loose ones, and
with whole steps that stand for what they mean."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from semspec.cli.live import coloured
from semspec.loop.stats import Stats
from semspec.options import Options
from semspec.pair import Pair
from semspec.pair.loading import load
from semspec.pair.result import Result
from semspec.tasks.base import Problem
from semspec.tasks.pocket import Pocket
from semspec.verify.fly import Fly


@dataclass
class Arm:
    """One way of decoding, and what it has done so far."""

    title: str
    options: Options
    results: list[Result] = field(default_factory=list)
    correct: int = 0

    @property
    def seconds(self) -> float:
        return sum(sum(r.stats.seconds.values()) for r in self.results)

    @property
    def stats(self) -> Stats:
        return Stats.pooled(r.stats for r in self.results)


def demo(
    console: Console, problems: int = 6, seed: int = 0, num_draft_tokens: int = 6, device: str = "cpu"
) -> list[Arm]:
    """Solve problems all four ways, show the first as text, then one table of all."""
    pair, task = load("pocket", device=device, slots=1, context=1024), Pocket(split="test")
    arms = [
        Arm("target alone", Options(verifier="none")),
        Arm(f"exact, drafts of {num_draft_tokens}", Options(verifier="exact", num_draft_tokens=num_draft_tokens)),
        Arm(f"fly (loose), drafts of {Fly.draft_tokens}", Options(verifier="fly")),
        Arm("semantic+ (loose), whole steps", Options(verifier="semantic+")),
    ]
    chosen = task.problems(problems, seed)
    # The first pass through a model is slower than all others, and on a GPU the first of each length, which is
    # compiled and captured; nobody should pay for that.
    for problem in chosen[:1] if device == "cpu" else chosen:
        for arm in arms:
            solve(pair, task, problem, arm, warm_up=True)
    for i, problem in enumerate(chosen):
        for arm in arms if i % 2 == 0 else arms[::-1]:  # taking turns, so that noise falls on all
            solve(pair, task, problem, arm)
        if i == 0:
            console.print(Panel(problem.prompt[-1]["content"], title="a problem", border_style="cyan"))  # type: ignore[index]
            beside = 4 if console.width >= 160 else 2
            width = max(30, (console.width - beside + 1) // beside)
            panels = [Panel(coloured(a.results[0].events), title=a.title, width=width) for a in arms]
            console.print(Columns(panels))
            console.print(
                "[green]green[/]: written by the draft, kept by the target. Plain: written by the target. "
                "[yellow]yellow[/]: worded by the draft, where the target would have said it in other words.\n"
            )
    alone, exact, loose, meant = arms
    same = sum(a.tokens == b.tokens for a, b in zip(alone.results, exact.results, strict=True))
    console.print(table(arms, len(chosen), device))
    console.print(
        f"{exact.title} wrote the target's text, token for token, in {same} of {len(chosen)} problems; "
        f"{loose.title} let {loose.stats.relaxed} of {loose.stats.tokens} tokens stand in the draft's words; "
        f"{meant.title} took over {meant.stats.step_outcomes.get('accepted', 0)} steps of the draft's as they were."
    )
    return arms


def solve(pair: Pair, task: Pocket, problem: Problem, arm: Arm, warm_up: bool = False) -> None:
    result = pair.generate(problem.prompt, arm.options, max_new_tokens=task.max_new_tokens)
    if not warm_up:
        arm.results.append(result)
        arm.correct += task.score(problem, result.text)


def table(arms: list[Arm], problems: int, device: str) -> Table:
    view = Table(title=f"{problems} held-out problems on {device}")
    for name in ("", "correct", "seconds", "tokens", "tokens per target pass", "speedup"):
        view.add_column(name, justify="left" if not name else "right")
    for arm in arms:
        stats = arm.stats
        view.add_row(
            arm.title,
            f"{arm.correct} of {problems}",
            f"{arm.seconds:.2f}",
            str(stats.tokens),
            f"{stats.tokens / stats.target_passes:.2f}",
            f"{arms[0].seconds / arm.seconds:.2f}x",
        )
    return view
