"""`pocket`: word problems of the pocket world, made from the seed, as many as wanted; needs no data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from semspec import pocket
from semspec.pocket import meaning, valid
from semspec.pocket.shapes import FEWEST_STEPS, MOST_STEPS
from semspec.pocket.world import SPLITS
from semspec.tasks.base import Problem, Referee, Task, ask, made_numbers

STEPS = (0, *range(FEWEST_STEPS, MOST_STEPS + 1))


@dataclass(frozen=True)
class Pocket(Task):
    name = "pocket"
    max_new_tokens = 768

    steps: int = field(
        default=0, metadata={"label": "derivations that a solution needs; 0: as they come", "choices": STEPS}
    )
    split: str = field(
        default="test",
        metadata={
            "label": "held-out numbers (test) or templates; probe and train are for fitting",
            "choices": tuple(SPLITS),
        },
    )
    long: bool = field(default=False, metadata={"label": "bury the story in idle facts"})

    def problems(self, n: int | None, seed: int) -> list[Problem]:
        return [self._problem(i) for i in made_numbers(self.name, n, seed)]

    def score(self, problem: Problem, text: str) -> bool:
        return pocket.answer_of(text) == problem.answer

    def for_fitting(self) -> Task:
        return replace(self, split="probe") if self.split == "test" else self

    def referee(self, problem: Problem) -> Referee:
        story = self.story(problem)

        def is_valid(so_far: str, step: str) -> bool:
            own = pocket.steps_of(step)  # the first one comes with <think>
            return len(own) == 1 and valid(own[0], story, pocket.steps_of(so_far))

        return is_valid

    def story(self, problem: Problem) -> pocket.Problem:
        """The problem with its web of quantities, as `valid` wants it."""
        return self._make(int(problem.id.rsplit("/", 1)[1]))

    def _problem(self, number: int) -> Problem:
        made = self._make(number)
        return Problem(f"pocket/{self.split}/{number}", ask(made.text), made.answer, f"{made.steps} steps")

    def _make(self, number: int) -> pocket.Problem:
        return pocket.problem(number, self.steps or None, self.split, long=self.long)


__all__ = ["Pocket", "meaning", "valid"]
