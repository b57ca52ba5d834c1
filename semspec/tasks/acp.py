"""`acp-prog-gen`: what an action changes in a described world."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass

from semspec.tasks.answers import visible
from semspec.tasks.base import FileTask, Problem, Row, ask

CHANGES = (
    'Split what the action "{}" changes into two lists. Positive effects are propositions that are false now and true '
    "after it; negative effects are propositions that are true now and false after it."
)
EXAMPLES = [  # (world, action, effects)
    (
        "A crane moves crates between the pads of a yard; it lifts a crate from a pad if it holds none, and a pad has "
        "room for one crate. There are 2 crates and 3 pads. Now the crane holds nothing, crate c1 is on pad p1, crate "
        "c2 is on pad p3, and pad p2 is free. The available propositions are: (on ?c ?p) - crate ?c is on pad ?p, "
        "(free ?p) - pad ?p is free, (holding ?c) - the crane holds crate ?c, and (idle) - the crane holds nothing.",
        "lift crate c1 from pad p1",
        "[(holding c1), (free p1)] [(on c1 p1), (idle)]",
    ),
    (
        "A nurse walks between rooms that are next to each other and switches lamps in the room she is in. There are 3 "
        "rooms and 1 lamp. Now the nurse is in room r2 and lamp l1, which is in room r3, is off. The available "
        "propositions are: (nurse-in ?r) - the nurse is in room ?r and (lit ?l) - lamp ?l is on.",
        "walk from room r2 to room r3",
        "[(nurse-in r3)] [(nurse-in r2)]",
    ),
]
_LIST = re.compile(r"\[([^\[\]]{,20000})\]")
_HEADINGS = re.compile(r"\**\s*(positive|negative) effects\s*:?\s*\**:?", re.IGNORECASE)
_PROPOSITION = re.compile(r"\(([^()]{,1000})\)")


@dataclass(frozen=True)
class AcpProgGen(FileTask):
    """Progression in ACPBench Hard (Kokel et al. 2025): 130 questions in the form of lm-evaluation-harness, after two
    examples, which are ours."""

    name = "acp-prog-gen"
    filename = "acp/acp_prog_gen.jsonl"
    max_new_tokens = 1000

    def problem(self, row: Row) -> Problem:
        answer = row["answer"]
        if isinstance(answer, str):
            with suppress(ValueError):
                answer = json.loads(answer)
        if not isinstance(answer, dict) or not all(isinstance(answer.get(part), list) for part in ("pos", "neg")):
            raise row.error(f"has the answer {answer!r:.80}; give the lists pos and neg")
        examples = [(_question(world, CHANGES.format(action)), effects) for world, action, effects in EXAMPLES]
        prompt = ask(_question(row["context"], row["question"]), examples)
        lists = {part: [str(one) for one in answer[part]] for part in ("pos", "neg")}
        return Problem(f"{self.name}/{row.get('id', row.index)}", prompt, lists)

    def score(self, problem: Problem, text: str) -> bool:
        found = effects(text)
        return found is not None and found == tuple(_propositions(" ".join(problem.answer[p])) for p in ("pos", "neg"))


def _question(world: str, question: str) -> str:
    return f"**Question**: {world} {question} Give only the two lists of ground propositions. **Final Answer**:"


def _propositions(text: str) -> set[str]:
    return {" ".join(one.lower().split()) for one in _PROPOSITION.findall(text)}


def effects(text: str) -> tuple[set[str], set[str]] | None:
    """The first two lists of an output, or what stands under the headings of positive and negative effects; a single
    list is one of positive effects. None if there is neither."""
    shown = visible(text)
    parts = {part.lower(): after for part, after in zip(*[iter(_HEADINGS.split(shown)[1:])] * 2, strict=False)}
    if set(parts) == {"positive", "negative"}:
        return _propositions(parts["positive"]), _propositions(parts["negative"])
    lists = _LIST.findall(shown)
    return (_propositions(lists[0]), _propositions(" ".join(lists[1:2]))) if lists else None
