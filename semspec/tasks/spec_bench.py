"""`spec-bench`: prompts of six kinds, for speed on many kinds of text."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import cycle

from semspec.tasks.base import Problem, Task, ask
from semspec.tasks.chat import ChatTask

SINGLE_TURN = ("translation", "summarization", "qa", "math_reasoning", "rag")
CATEGORIES = ("mt_bench", *SINGLE_TURN)
WITHOUT_MT = "single_turn"
EIGHTHS = range(2, 9)  # lengths of long prompts, in turns


@dataclass(frozen=True)
class SpecBench(ChatTask):
    """The 480 prompts of Spec-Bench (Xia et al. 2024), 80 of each category; those of `mt_bench` have two turns."""

    name = "spec-bench"
    filename = "spec_bench/question.jsonl"

    category: str = field(
        default="",
        metadata={
            "label": f"category of prompts; {WITHOUT_MT}: all but mt_bench's; empty: all",
            "choices": ("", *CATEGORIES, WITHOUT_MT),
        },
    )
    long: int = field(default=0, metadata={"label": "characters of prompts made by joining articles; 0: off", "min": 0})

    def __post_init__(self) -> None:
        object.__setattr__(self, "category", str(self.category).replace("-", "_"))
        super().__post_init__()

    def load(self) -> list[Problem]:
        wanted = self.category or ("summarization" if self.long else "")
        groups = {"": CATEGORIES, WITHOUT_MT: SINGLE_TURN}.get(wanted, (wanted,))
        problems = [problem for problem in super().load() if problem.group in groups]
        return self._joined(problems) if self.long else problems

    def _joined(self, problems: list[Problem]) -> list[Problem]:
        """No article is in two prompts, so that they say independent things; what does not fill one is left out."""
        messages = [message for p in problems if not isinstance(p.prompt, str) for message in p.prompt]
        articles = "\n\n".join(message["content"].removeprefix("Summarize: ") for message in messages)
        found: list[Problem] = []
        at = 0
        for eighths in cycle(EIGHTHS):
            end = at + self.long * eighths // 8
            if end > len(articles):
                return found
            text = articles[at:end].strip() + "\n\nSummarize the articles above."
            found.append(Problem(f"{self.name}/long/{len(found)}", ask(text), None, problems[0].group))
            at = end
        raise AssertionError("a cycle does not end")

    def for_fitting(self) -> Task:
        return replace(self, category="rag") if self.long and self.category != "rag" else self

    def group(self, category: str) -> str:
        return category if category in SINGLE_TURN else "mt_bench"  # the file names its eight parts
