"""Tasks that know what a step means, and whether it is right."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache

from semspec import pocket
from semspec.probe_fit.data import Sample
from semspec.probe_fit.label import Truth
from semspec.tasks import Problem, Task
from semspec.tasks.base import Referee
from semspec.tasks.pocket import Pocket


def parser(task: Task) -> Callable[[str], Hashable | None] | None:
    """A task's own reading of a step, if it has one."""
    return pocket.meaning if isinstance(task, Pocket) else None


def operation(task: Task) -> Callable[[str], str] | None:
    """What kind of step a text is, if the task knows kinds; the same "" for all that it cannot read."""
    if not isinstance(task, Pocket):
        return None

    def kind(text: str) -> str:
        read = pocket.meaning(text)
        return read.op if read else ""

    return kind


def truth(task: Task) -> Truth | None:
    """A task's own judgement of steps, if it has one; None about problems that are not its own."""
    if not isinstance(task, Pocket):
        return None

    @lru_cache(maxsize=1024)
    def referee(problem: str) -> Referee | None:
        own = problem.rpartition("/")[0] == f"{task.name}/{task.split}"
        return task.referee(Problem(problem, "")) if own else None

    def valid(sample: Sample, history: str) -> bool | None:
        of_problem = referee(sample.problem)
        return None if of_problem is None else of_problem(history, sample.text)

    return valid
