"""The folder of a collection, which is also its memory: a stage that was killed goes on where it stopped.

run.json       the configuration, the fingerprints of both models, and by what rule traces were written, if by one
traces.jsonl   whole answers, from which prefixes are cut
prefixes.jsonl the text before every prefix's end, by its id
samples/       shards: NNNNN.jsonl has a line for each sampled step, NNNNN.safetensors the pooled states of the same
               rows, "MODEL.LAYER.POOLING" [rows, d], "MODEL.evidence" and "draft.confidence": how each model sees every
               step, whoever wrote it; if asked for, also "MODEL.LAYER.tokens", the states of all tokens of all rows
labels/        NNNNN.jsonl for the shard of that number: its rows with their clusters and counts
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from semspec.errors import BadRequest
from semspec.probe.former import current

MODELS = ("target", "draft")
BEFORE = {"first_steps": False, "delimiters": "all", "poolings": ["mean", "last"]}  # from before there was a choice
EVIDENCE, CONFIDENCE, TOKENS = "evidence", "confidence", "tokens"


class Drafted(NamedTuple):
    """A step that the draft wrote while a rule answered, accepted or not."""

    step_start: int  # tokens of the answer before the step
    at: int  # and before what the draft wrote of it: the target may have started it
    tokens: list[int]  # the draft's


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole answer to a problem, in tokens."""

    problem: str
    prompt: list[int]
    tokens: list[int]
    drafts: list[Drafted] | None = None  # if a rule wrote it: the steps that it verified on the way
    draft_prompt: list[int] | None = None  # the prompt in the draft model's tokens, where these are others


@dataclass(frozen=True, slots=True)
class Prefix:
    """A trace up to the end of one of its steps, or the prompt alone; or up to where a draft began to write."""

    id: str
    problem: str
    step: int  # steps before the one that is sampled
    tokens: list[int]  # prompt and trace so far
    history: str  # the trace so far, as text, in whole steps
    step_prefix: tuple[int, ...] = ()  # the last of the tokens, if they are of the step that is sampled
    drafted: tuple[int, ...] = ()  # how the draft went on, if that is not to be sampled
    prompt: int = 0  # how many of the tokens are the prompt's
    draft_prompt: list[int] | None = None  # which is this to a draft model with other tokens


@dataclass(frozen=True, slots=True)
class Sample:
    """One step that a model wrote after a prefix."""

    prefix: str
    problem: str
    step: int
    model: str  # that wrote it
    number: int
    tokens: list[int]
    text: str
    end: str  # why it ended, see steps.py
    logprob: dict[str, float]  # model -> mean log-probability of its tokens, temperature 1


@dataclass(frozen=True, slots=True)
class Label:
    """How often the meaning of a sample occurs among all samples of its prefix."""

    prefix: str
    model: str
    number: int
    cluster: int
    counts: dict[str, int]  # model -> its samples of the same meaning, this one included
    samples: dict[str, int]  # model -> its samples
    valid: bool | None = None  # whether the step is right, where the task can tell
    operation: str | None = None  # what kind of step it is, where the task can tell
    own: int | None = None  # as counts of its own model, with that model's samples clustered by themselves


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.samples, self.labels, self.traces = path / "samples", path / "labels", path / "traces.jsonl"

    @property
    def run(self) -> dict[str, Any]:
        try:
            run = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BadRequest(
                f"{self.path} holds no collected samples ({error}); begin with `semspec probe collect`"
            ) from error
        assert isinstance(run, dict)
        return current(run)

    def open(self, run: dict[str, Any]) -> None:
        """Begin a collection, or go on with the same one."""
        self.samples.mkdir(parents=True, exist_ok=True)
        if not (self.path / "run.json").exists():
            write(self.path / "run.json", json.dumps(run, indent=1))
            return
        before = self.run
        config = BEFORE | before["config"]
        changed = [key for key in run["config"] if run["config"][key] != config.get(key)]
        changed += [key for key in MODELS if run["models"][key] != before["models"][key]]
        changed += ["what wrote its traces"] if run.get("collected_by") != before.get("collected_by") else []
        if changed:
            raise BadRequest(f"{self.path} holds another collection ({changed[0]} differs); give another --out")

    # -- traces

    def read_traces(self) -> list[Trace]:
        return [_trace(row) for row in read_lines(self.traces)] if self.traces.exists() else []

    def write_traces(self, traces: Iterable[Trace]) -> None:
        write_lines(self.traces, (plain(trace) for trace in traces))

    def read_histories(self) -> dict[str, str]:
        """Prefix -> the answer so far, as text."""
        return {row["id"]: row["history"] for row in read_lines(self.path / "prefixes.jsonl")}

    def write_histories(self, prefixes: Iterable[Prefix]) -> None:
        write_lines(self.path / "prefixes.jsonl", ({"id": p.id, "history": p.history} for p in prefixes))

    # -- samples

    def has_shard(self, number: int) -> bool:
        return (self.samples / f"{number:05}.jsonl").exists()

    def write_shard(self, number: int, samples: list[Sample], states: dict[str, Tensor]) -> None:
        part = self.samples / f"{number:05}.part"
        save_file({name: tensor.contiguous() for name, tensor in states.items()}, part)
        part.rename(part.with_suffix(".safetensors"))
        write_lines(self.samples / f"{number:05}.jsonl", (plain(s) for s in samples))  # last: its being there is a sign

    @property
    def shards(self) -> list[int]:
        """The numbers of the shards that are complete."""
        return sorted(int(path.stem) for path in self.samples.glob("*.jsonl"))

    def read_samples(self, number: int) -> list[Sample]:
        return [Sample(**row) for row in read_lines(self.samples / f"{number:05}.jsonl")]

    def read_states(self, number: int) -> dict[str, Tensor]:
        path = self.samples / f"{number:05}.safetensors"
        try:
            return dict(load_file(path))
        except (OSError, SafetensorError) as error:
            raise BadRequest(f"{path} cannot be read: {error}; delete its shard and collect again") from error

    # -- labels

    def open_labels(self, about: dict[str, Any]) -> None:
        """Begin labelling; labels that were made otherwise are dropped, since they are made again soon enough."""
        self.labels.mkdir(parents=True, exist_ok=True)
        note = self.labels / "run.json"
        if not note.exists() or json.loads(note.read_text(encoding="utf-8")) != about:
            for path in self.labels.glob("*.jsonl"):
                path.unlink()
            write(note, json.dumps(about, indent=1))

    @property
    def labelled(self) -> dict[str, Any]:
        """How the labels were made."""
        note = self.labels / "run.json"
        missing = [n for n in self.shards if not (self.labels / f"{n:05}.jsonl").exists()]
        if missing or not note.exists():
            raise BadRequest(f"{self.path} has samples without labels; run `semspec probe label` first")
        about = json.loads(note.read_text(encoding="utf-8"))
        assert isinstance(about, dict)
        return about

    @property
    def tells(self) -> bool:
        """Whether the task could tell of every step if it is right."""
        assert self.labelled
        return all(label.valid is not None for number in self.shards for label in self.read_labels(number))

    def has_labels(self, number: int) -> bool:
        return (self.labels / f"{number:05}.jsonl").exists()

    def write_labels(self, number: int, labels: list[Label]) -> None:
        write_lines(self.labels / f"{number:05}.jsonl", (plain(label) for label in labels))

    def read_labels(self, number: int) -> list[Label]:
        return [Label(**row) for row in read_lines(self.labels / f"{number:05}.jsonl")]


def _trace(row: dict[str, Any]) -> Trace:
    drafts = row.pop("drafts", None)
    return Trace(**row, drafts=None if drafts is None else [Drafted(*draft) for draft in drafts])


def plain(row: Trace | Sample | Label) -> dict[str, Any]:
    """Its fields as they are: `asdict` copies every list on the way, which takes longer than writing it."""
    return {name: getattr(row, name) for name in row.__slots__}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    write(path, "\n".join(json.dumps(row, ensure_ascii=False) for row in rows))


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(text + "\n", encoding="utf-8")
    part.rename(path)
