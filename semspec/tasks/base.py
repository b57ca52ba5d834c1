"""What a task is: prompts for a model, and a scorer that says whether a text solves one.

Tasks read local files only and never download, so that a run measures what it says it measures, offline as well.
"""

from __future__ import annotations

import csv
import gzip
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import IO, Any, ClassVar

from transformers import PreTrainedTokenizerBase

from semspec.errors import BadRequest
from semspec.registry import check_limits
from semspec.text.tokenizer import Prompt


@dataclass(frozen=True, slots=True)
class Problem:
    id: str
    prompt: Prompt  # text, or chat messages
    answer: Any = None  # what the scorer compares with; can be written as JSON
    group: str = ""  # category, number of steps, level: what a report may break results down by
    turns: tuple[str, ...] = ()  # further user turns, each asked after the previous answer
    max_new_tokens: int | None = None  # where one problem needs other answers than the next; None: as the task says


MOST = 1 << 20  # problems of one seed, where they are made from it; those of the next seed begin after them


def made_numbers(name: str, n: int | None, seed: int) -> range:
    """The numbers of `n` problems of a task that makes them from a seed."""
    if n is None:
        raise BadRequest(f"{name} makes its problems from the seed and has no end; give a number with --problems")
    if not 1 <= n <= MOST or seed < 0:
        raise BadRequest(f"{n} {name} problems of seed {seed}: give 1 to {MOST} problems, and a seed of 0 or more")
    return range(seed * MOST, seed * MOST + n)


Referee = Callable[[str, str], bool]
"""Whether a reasoning step is a correct and useful next one: (text so far, the step) -> bool."""


@dataclass(frozen=True)
class Task(ABC):
    """A task's dataclass fields except `data` are its options: "pocket:steps=5" sets the field `steps`."""

    name: ClassVar[str]
    scored: ClassVar[bool] = True  # False: prompts only, for speed
    graded: ClassVar[bool] = False  # whether an answer may be right in part
    stop: ClassVar[tuple[str, ...]] = ()
    max_new_tokens: ClassVar[int]

    data: Path | None = None  # the folder that holds every task's files

    def __post_init__(self) -> None:
        check_limits(self.name, self)

    @abstractmethod
    def problems(self, n: int | None, seed: int) -> list[Problem]:
        """`n` problems chosen by `seed`, the same ones every time; None: all there are."""

    def score(self, problem: Problem, text: str) -> float:
        """Whether `text`, the model's whole output, solves the problem; of a graded task, from 0 to 1, how well."""
        raise BadRequest(f"task {self.name!r} has prompts but no right answers, so nothing can be scored with it")

    def shortened(self, problem: Problem, tokenizer: PreTrainedTokenizerBase, room: int) -> Problem:
        """The problem with a prompt of at most `room` tokens, where a task knows how to shorten one."""
        return problem

    def for_model(
        self, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, capacity: int, longest: int | None = None
    ) -> list[Problem]:
        """Problems whose prompts leave room for their answers in a context of `capacity` tokens, if they can be
        shortened."""
        return [self.shortened(p, tokenizer, capacity - self.new_tokens(p, longest)) for p in problems]

    def new_tokens(self, problem: Problem, longest: int | None = None) -> int:
        """Maximum tokens of an answer: as given, else the problem's own, else the task's."""
        return longest or problem.max_new_tokens or self.max_new_tokens

    def for_fitting(self) -> Task:
        """The same task on a training split, where it has one; for probes and other parts that learn from problems."""
        return self

    def referee(self, problem: Problem) -> Referee | None:
        """Tells right reasoning steps from wrong ones, where the task can; for the rule `oracle`."""
        return None

    def file(self, path: str) -> Path:
        """A file of the data folder; BadRequest says where it was looked for."""
        if self.data is None:
            raise BadRequest(
                f"task {self.name!r} reads {path} from a folder of data sets; "
                "say which with --data DIR (nothing is ever downloaded)"
            )
        return existing(self.data / path, self.name)


class Row(dict[str, Any]):
    """A row of a file; to read a field that it does not have is an error that names the file and the row."""

    def __init__(self, fields: dict[str, Any], path: Path, index: int) -> None:
        super().__init__(fields)
        self.path, self.index = path, index

    def __missing__(self, name: str) -> Any:
        raise self.error(f"has no field {name!r}; its fields are: {', '.join(self)}")

    def error(self, message: str) -> BadRequest:
        return BadRequest(f"row {self.index + 1} of {self.path} {message}")


class FileTask(Task):
    """A task whose problems are the rows of one file."""

    filename: ClassVar[str]  # in the data folder

    @abstractmethod
    def problem(self, row: Row) -> Problem | None:
        """The problem of a row; None: the row is no part of the task."""

    def find(self) -> Path:
        """The path of the file."""
        return self.file(self.filename)

    def load(self) -> list[Problem]:
        """All problems, in the order of the file."""
        return [problem for row in read_rows(self.find()) if (problem := self.problem(row)) is not None]

    def problems(self, n: int | None, seed: int) -> list[Problem]:
        return choose(self.load(), n, seed, self.name)


def choose(problems: Sequence[Problem], n: int | None, seed: int, task: str) -> list[Problem]:
    """`n` of the problems in an order set by the seed, so that a larger n extends a smaller one."""
    if n is None:
        return list(problems)
    if not 1 <= n <= len(problems):
        raise BadRequest(
            f"{n} problems were asked for, but task {task!r} has {len(problems)}; "
            f"give a number from 1 to {len(problems)}, or none for all"
        )
    rng = Random(seed)
    return sorted(problems, key=lambda _: rng.random())[:n]  # shuffle() differs between Pythons, random() does not


def existing(path: Path, task: str) -> Path:
    if not path.is_file():
        raise BadRequest(
            f"task {task!r} needs the file {path}, which does not exist; put it there, or name the folder "
            "that has it with --data DIR (nothing is ever downloaded)"
        )
    return path


def read_rows(path: Path) -> list[Row]:
    """The rows of a file: one JSON object per line (.jsonl, .jsonl.gz), a list of objects (.json), lines of values with
    (.csv) or without (.tsv) a line of names before them, or a question on every line (.txt). In UTF-8, with or
    without a mark at the beginning, as some editors write it."""
    read, form = READERS.get(path.suffix, (_lines, "JSON objects, one per line"))
    try:
        with gzip.open(path, "rt", encoding=UTF8) if path.suffix == ".gz" else path.open(encoding=UTF8) as file:
            rows = read(file)
    except (ValueError, OSError, EOFError, csv.Error) as error:  # bad JSON and bad UTF-8 are ValueErrors
        raise BadRequest(f"{path} cannot be read as {form}: {error}") from error
    if not isinstance(rows, list) or not rows:
        raise BadRequest(f"{path} has no rows; a task needs at least one problem")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise BadRequest(f"row {number} of {path} is not a JSON object; make each row one, with named fields")
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            code = f"\\u{ord(error.object[error.start]):04x}"
            raise BadRequest(f"row {number} of {path} has a lone surrogate, {code}, which no text has") from None
    return [Row(row, path, index) for index, row in enumerate(rows)]


def _lines(file: IO[str]) -> Any:
    return [json.loads(line) for line in file if line.strip()]


def _table(file: IO[str]) -> Any:
    return [{name: value or "" for name, value in row.items() if name} for row in csv.DictReader(file)]


def _tabs(file: IO[str]) -> Any:
    return [dict(zip(TSV_FIELDS, line.rstrip("\n").split("\t"), strict=False)) for line in file if line.strip()]


def _questions(file: IO[str]) -> Any:
    return [{"question": line.strip()} for line in file if line.strip()]


UTF8 = "utf-8-sig"
TSV_FIELDS = ("question", "answer")
READERS: dict[str, tuple[Callable[[IO[str]], Any], str]] = {
    ".json": (json.load, "a list of JSON objects"),
    ".csv": (_table, "comma-separated values"),
    ".tsv": (_tabs, "tab-separated values"),
    ".txt": (_questions, "text with one prompt a line"),
}


def ask(question: str, examples: Sequence[tuple[str, str]] = ()) -> Prompt:
    """A question as a chat of one message, after examples as turns of the chat."""
    turns = [text for example in examples for text in example] + [question]
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


STYLES = ("own", "harness")  # how a question is put: as here, or in the form of lm-evaluation-harness


def needs(task: str, module: str, package: str, what: str, extra: str = "bench") -> None:
    """Refuses a task whose scorer lacks a library, before anything is run."""
    if find_spec(module) is None:
        raise BadRequest(
            f"task {task!r} needs {package} for {what}, which is not installed; `pip install 'semspec[{extra}]'` has it"
        )
