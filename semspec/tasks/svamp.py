"""`svamp`: word problems of one step."""

from __future__ import annotations

from dataclasses import dataclass

from semspec.tasks.base import Problem, Row
from semspec.tasks.number import NumberTask


@dataclass(frozen=True)
class Svamp(NumberTask):
    """The 1,000 one-step problems of SVAMP (Patel et al. 2021); a group is the operation."""

    name = "svamp"
    filename = "svamp/SVAMP.json"

    def problem(self, row: Row) -> Problem:
        body, question = row["Body"].strip(), row["Question"].strip()
        if body[-1:] not in ".?!":  # "If there is a discount of 25 dollars" goes on in the question
            body, question = f"{body},", question[:1].lower() + question[1:]
        group = row.get("Type", "").replace("Divison", "Division")  # one row is misspelt
        return Problem(f"svamp/{row.get('ID', row.index)}", self.prompt(f"{body} {question}"), row["Answer"], group)
