"""`svamp`: word problems of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from semspec.tasks.base import Problem, ask, field, read_rows
from semspec.tasks.number import INSTRUCTION, NumberTask


@dataclass(frozen=True)
class Svamp(NumberTask):
    """The 1,000 one-step problems of SVAMP (Patel et al. 2021); a group is the operation."""

    name = "svamp"
    path: ClassVar[str] = "svamp/SVAMP.json"

    def load(self) -> list[Problem]:
        path = self.file(self.path)
        problems = []
        for i, row in enumerate(read_rows(path)):
            body, question = field(row, "Body", path, i).strip(), field(row, "Question", path, i).strip()
            if body[-1:] not in ".?!":  # "If there is a discount of 25 dollars" goes on in the question
                question = f"{body}, {question[:1].lower()}{question[1:]}"
            else:
                question = f"{body} {question}"
            kind = row.get("Type", "").replace("Divison", "Division")  # one row is misspelt
            answer = field(row, "Answer", path, i)
            problems.append(Problem(f"svamp/{row.get('ID', i)}", ask(f"{question}\n\n{INSTRUCTION}"), answer, kind))
        return problems
