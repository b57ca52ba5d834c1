"""`semspec demo`: the pocket pair on a few held-out problems: the target only, then the verifiers exact, fly
and semantic+."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from semspec.cli.live import coloured
from semspec.cli.progress import loading, warn_if_busy
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
    """One method and its results so far."""

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
    """Solve problems with all four methods; print the first problem's answers, then one table."""
    warn_if_busy()
    with loading():
        pair, task = load("pocket", device=device, slots=1, context=1024), Pocket(split="test")
    arms = [
        Arm("target only", Options(verifier="none")),
        Arm(f"exact, drafts of {num_draft_tokens}", Options(verifier="exact", num_draft_tokens=num_draft_tokens)),
        Arm(f"fly (lossy), drafts of {Fly.draft_tokens}", Options(verifier="fly")),
        Arm("semantic+ (lossy), whole steps", Options(verifier="semantic+")),
    ]
    chosen = task.problems(problems, seed)
    # Warm-up: the first pass is slower than all others; on a GPU, so is the first of each length (compile, capture).
    for problem in chosen[:1] if device == "cpu" else chosen:
        for arm in arms:
            solve(pair, task, problem, arm, warm_up=True)
    for i, problem in enumerate(chosen):
        for arm in arms if i % 2 == 0 else arms[::-1]:  # alternating, so that noise affects all alike
            solve(pair, task, problem, arm)
        if i == 0:
            console.print(Panel(problem.prompt[-1]["content"], title="a problem", border_style="cyan"))  # type: ignore[index]
            beside = 4 if console.width >= 160 else 2
            width = max(30, (console.width - beside + 1) // beside)
            panels = [Panel(coloured(a.results[0].events), title=a.title, width=width) for a in arms]
            console.print(Columns(panels))
            console.print(
                "[green]green[/]: drafted, and the target's own choice too. Plain: from the target. "
                "[yellow]yellow[/]: drafted and accepted, where the target would have used other words.\n"
            )
    target, exact, fly, semantic = arms
    same = sum(a.tokens == b.tokens for a, b in zip(target.results, exact.results, strict=True))
    console.print(table(arms, len(chosen), device))
    console.print(
        f"{exact.title}: the target's text, token for token, in {same} of {len(chosen)} problems. "
        f"{fly.title}: {fly.stats.relaxed} of {fly.stats.tokens} tokens are relaxed. "
        f"{semantic.title}: {semantic.stats.step_outcomes.get('accepted', 0)} drafted steps were accepted."
    )
    return arms


def solve(pair: Pair, task: Pocket, problem: Problem, arm: Arm, warm_up: bool = False) -> None:
    result = pair.generate(problem.prompt, arm.options, max_new_tokens=task.max_new_tokens)
    if not warm_up:
        arm.results.append(result)
        arm.correct += task.score(problem, result.text)


def table(arms: list[Arm], problems: int, device: str) -> Table:
    view = Table(title=f"{problems} held-out problems on {device}")
    for name in ("", "correct", "seconds", "tokens", "tokens/pass", "speedup"):
        view.add_column(name, justify="left" if not name else "right", no_wrap=bool(name))
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
