"""`longbench`: questions about long texts, reports to summarise, code to complete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from semspec.errors import BadRequest
from semspec.tasks.answers import visible
from semspec.tasks.base import Problem, Row, Task, ask, choose, needs, read_rows
from semspec.tasks.similarity import edit_similarity, rouge_l, token_f1
from semspec.tasks.truncation import fit_prompt

Measure = Callable[[str, str], float]

ANSWER = "Answer the question from the passages {}. Reply with the answer alone, without any other words."
QUESTION = (
    f"{ANSWER.format('below')}\n\nPassages:\n{{context}}\n\n{ANSWER.format('above')}\n\nQuestion: {{input}}\nAnswer:"
)
REPORT = (
    "Below is a report by a government agency. Summarise it on one page.\n\nReport:\n{context}\n\n"
    "Now write the one-page summary of the report.\n\nSummary:"
)
CODE = "Complete the code below.\n{context}{input}Next line of code:\n"


@dataclass(frozen=True)
class Part:
    """One data set: its prompt, its measure, the longest answer. Code is continued as it is, without a chat."""

    prompt: str
    measure: Measure
    max_new_tokens: int
    chat: bool = True


PARTS = {
    "gov_report": Part(REPORT, rouge_l, 512),
    "2wikimqa": Part(QUESTION, token_f1, 32),
    "hotpotqa": Part(QUESTION, token_f1, 32),
    "lcc": Part(CODE, edit_similarity, 64, chat=False),
    "repobench-p": Part(CODE, edit_similarity, 64, chat=False),
}
LIBRARIES: dict[Measure, tuple[str, str, str]] = {
    rouge_l: ("rouge_score", "rouge-score", "ROUGE-L"),
    edit_similarity: ("rapidfuzz", "rapidfuzz", "the similarity of code"),
}


@dataclass(frozen=True)
class LongBench(Task):
    """Five data sets of LongBench (Bai et al. 2023), with the published lengths, measures and truncation; prompts have
    the published form in our words. A group is a data set."""

    name = "longbench"
    graded = True
    max_new_tokens = 512

    sets: str = field(default="all", metadata={"label": "data sets with + between them"})
    longest: int = field(default=0, metadata={"label": "tokens of a prompt; 0: as many as fit", "min": 0})

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := [name for name in self.chosen if name not in PARTS]:
            raise BadRequest(f"longbench has no set {unknown[0]!r}; give some of {'+'.join(PARTS)}, or all")
        for measure, library in LIBRARIES.items():
            if any(PARTS[name].measure is measure for name in self.chosen):
                needs(self.name, *library)

    @property
    def chosen(self) -> list[str]:
        return list(PARTS) if self.sets == "all" else list(dict.fromkeys(self.sets.split("+")))

    def problems(self, n: int | None, seed: int) -> list[Problem]:
        found = [self._problem(name, row) for name in self.chosen for row in self._rows(name)]
        if len({problem.id for problem in found}) < len(found):
            raise BadRequest("a file of longbench gives one _id to several rows; each row has its own as published")
        return choose(found, n, seed, self.name)

    def _rows(self, name: str) -> list[Row]:
        return read_rows(self.file(f"longbench/{name}.jsonl"))

    def _problem(self, name: str, row: Row) -> Problem:
        part, answers = PARTS[name], row["answers"]
        if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
            raise row.error(f"has the answers {answers!r:.80}; give a list of one or more texts")
        if row.get("dataset", name).removesuffix("_e") != name:
            raise row.error(f"is of the data set {row['dataset']!r}, in a file of {name}")
        text = part.prompt.format(context=row["context"], input=row["input"])
        id_ = f"{self.name}/{name}/{row.get('_id', row.index)}"
        return Problem(id_, ask(text) if part.chat else text, answers, name, max_new_tokens=part.max_new_tokens)

    def shortened(self, problem: Problem, tokenizer: PreTrainedTokenizerBase, room: int) -> Problem:
        return fit_prompt(problem, tokenizer, self.longest or room, room)

    def score(self, problem: Problem, text: str) -> float:
        """The best over the accepted answers."""
        return max(PARTS[problem.group].measure(visible(text), answer) for answer in problem.answer)
