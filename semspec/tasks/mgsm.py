"""`mgsm`: grade-school word problems in eleven languages."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

from semspec.errors import BadRequest
from semspec.tasks.answers import number, same_number
from semspec.tasks.base import STYLES, Problem, Row, ask, choose, read_rows
from semspec.tasks.number import NumberTask

# What a question and an answer in steps begin with, as the benchmark's own examples have it.
LABELS = {
    "en": ("Question:", "Step-by-Step Answer:"),
    "de": ("Frage:", "Schritt-für-Schritt-Antwort:"),
    "es": ("Pregunta:", "Respuesta paso a paso:"),
    "fr": ("Question :", "Réponse étape par étape :"),
    "ru": ("Задача:", "Пошаговое решение:"),
    "zh": ("问题:", "逐步解答:"),
    "ja": ("問題:", "ステップごとの答え:"),
    "th": ("โจทย์:", "คำตอบทีละขั้นตอน:"),
    "sw": ("Swali:", "Jibu la Hatua kwa Hatua:"),
    "bn": ("প্রশ্ন:", "ধাপে ধাপে উত্তর:"),
    "te": ("ప్రశ్న:", "దశలవారీగా సమాధానం:"),
}
_THOUSANDS = re.compile(r"(?<=\d)[.,\u00a0\u202f，](?=\d{3}(?!\d))")
_DECIMALS = re.compile(r"(?<=\d),(?=\d)")
_GLUED = re.compile(r"(?<=[^\W\d_a-zA-Z])(?=-?\d)")  # in scripts without spaces a number follows a letter


@dataclass(frozen=True)
class Mgsm(NumberTask):
    """The 250 problems of MGSM (Shi et al. 2022) in each of eleven languages; a group is the language."""

    name = "mgsm"
    filename = "mgsm/mgsm_{}.tsv"

    language: str = field(default="all", metadata={"label": "language codes with + between them"})
    style: str = field(
        default="own", metadata={"label": "own: asked in English; harness: in the language", "choices": STYLES}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := [code for code in self.languages if code not in LABELS]:
            raise BadRequest(f"mgsm has no language {unknown[0]!r}; give some of {'+'.join(LABELS)}, or all")

    @property
    def languages(self) -> list[str]:
        return list(LABELS) if self.language == "all" else list(dict.fromkeys(self.language.split("+")))

    def find(self) -> Path:
        return self.file(self.filename.format(self.languages[0]))

    def problems(self, n: int | None, seed: int) -> list[Problem]:
        files = {code: self.file(self.filename.format(code)) for code in self.languages}
        found = [self._problem(code, row) for code, path in files.items() for row in read_rows(path)]
        return choose(found, n, seed, self.name)

    def problem(self, row: Row) -> Problem:
        return self._problem(self.languages[0], row)

    def _problem(self, code: str, row: Row) -> Problem:
        question, (asked, answered) = row["question"], LABELS[code]
        if number(row["answer"]) is None:
            raise row.error(f"has the answer {row['answer']!r}; give a number")
        prompt = ask(f"{asked} {question}\n{answered}") if self.style == "harness" else self.prompt(question)
        return Problem(f"mgsm/{code}/{row.index}", prompt, row["answer"], code)

    def score(self, problem: Problem, text: str) -> bool:
        return same_number(text if problem.group == "en" else in_english(text), problem.answer)


def in_english(text: str) -> str:
    """Numbers as English writes them: 1.200,50 and 1 200,50 become 1200.50. Answers are whole, so three digits after a
    point are thousands."""
    plain = unicodedata.normalize("NFKC", _THOUSANDS.sub("", text))
    return _GLUED.sub(" ", _DECIMALS.sub(".", plain))
