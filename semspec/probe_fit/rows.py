"""From a labelled collection to what a probe is trained on: features and labels, row by row, split by problem."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from semspec.errors import BadRequest
from semspec.probe.evidence import select
from semspec.probe.features import Features
from semspec.probe_fit.data import CONFIDENCE, EVIDENCE, TOKENS, Folder, Label, Sample
from semspec.probe_fit.label import combined_share, own_share, share

JUDGED = ("written", "valid")  # what judges learn
KINDS = ("own", "cross", "combined", *JUDGED)
PARTS = ("train", "validation", "test")


@dataclass
class Tokens:
    """The states of every token of N steps, one step after the other; for pooling that has something to learn."""

    states: Tensor  # [T, layers, d]
    counts: Tensor  # [N]

    @property
    def first(self) -> Tensor:
        """[N] where each step begins"""
        return self.counts.cumsum(0) - self.counts

    def take(self, at: Tensor) -> Tokens:
        """Those of some steps [n], in that order."""
        counts = self.counts[at]
        shift = self.first[at] - (counts.cumsum(0) - counts)  # from a row's index here to its index there
        rows = torch.arange(int(counts.sum()), device=at.device) + shift.repeat_interleave(counts)
        return Tokens(self.states[rows], counts)

    def to(self, device: torch.device) -> Tokens:
        return Tokens(self.states.to(device), self.counts.to(device))


@dataclass
class Rows:
    """N steps as one model sees them."""

    features: Tensor  # [N, F] float32, all that training does not change; with attention, evidence alone
    labels: Tensor  # [N]
    problems: list[str]
    prefixes: list[str]
    cross: Tensor  # [N] bool: the other model wrote it
    logprob: Tensor  # [N] mean log-probability of its tokens
    surface: Tensor  # [N, 2 + O] its length in tokens, its number among the steps, which of O operations it is
    valid: Tensor | None  # [N] bool: it is right; None: not known
    tokens: Tokens | None = None

    def __len__(self) -> int:
        return len(self.problems)

    def where(self, mask: Tensor) -> Rows:
        at = mask.nonzero()[:, 0]
        return Rows(
            self.features[mask],
            self.labels[mask],
            [self.problems[i] for i in at.tolist()],
            [self.prefixes[i] for i in at.tolist()],
            self.cross[mask],
            self.logprob[mask],
            self.surface[mask],
            None if self.valid is None else self.valid[mask],
            None if self.tokens is None else self.tokens.take(at),
        )


def load_rows(
    folder: Folder, model: str, features: Features, kind: str, leave_one_out: bool = False, endings: bool = False
) -> Rows:
    """The steps that a model's probe learns from.

    kind  own: the model's own steps, each with its share of that model's samples, clustered by themselves, as in the
          paper
          cross: also the other model's steps, each with its share of this model's samples
          combined: own steps, with shares of both models' samples together
          written: both models' steps, 1 where the model has another sample of the same meaning, else 0
          valid: both models' steps, 1 where the task calls the step right, else 0
    Steps that end the thinking or the text are left out: at run time the target writes those itself. With `endings`
    they are not, as in the released code."""
    if kind not in KINDS:
        raise BadRequest(f"there are no labels {kind!r}; give one of: {', '.join(KINDS)}")
    parts: list[Tensor] = []
    tokens: list[Tokens] = []
    found: list[tuple[Sample, Label]] = []
    for shard in folder.shards:
        samples, labels = folder.read_samples(shard), folder.read_labels(shard)
        states = _States(folder.read_states(shard), model)
        at = [i for i, sample in enumerate(samples) if _counts(sample, model, kind, endings)]
        found += [(samples[i], labels[i]) for i in at]
        parts.append(states.fixed(features, len(samples))[at])
        if features.attends:
            lengths = torch.tensor([len(sample.tokens) for sample in samples])
            tokens.append(Tokens(states.tokens(features), lengths).take(torch.tensor(at, dtype=torch.long)))
    if not found:
        raise BadRequest(f"{folder.path} has no steps to learn from; collect more prefixes")
    valid = [label.valid for _, label in found]
    return Rows(
        torch.cat(parts).float(),
        torch.tensor([_label(label, model, kind, leave_one_out) for _, label in found]),
        [sample.problem for sample, _ in found],
        [sample.prefix for sample, _ in found],
        torch.tensor([sample.model != model for sample, _ in found]),
        torch.tensor([sample.logprob[model] for sample, _ in found]),
        _surface(found),
        None if None in valid else torch.tensor([bool(v) for v in valid]),
        Tokens(torch.cat([t.states for t in tokens]), torch.cat([t.counts for t in tokens])) if tokens else None,
    )


@dataclass
class _States:
    """A shard's tensors; those that are not there are named."""

    all: dict[str, Tensor]
    model: str

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.all:
            hint = "; collect with --token-states" if name.endswith(TOKENS) else ""
            raise BadRequest(f"the states {name} were not collected; there are: {', '.join(sorted(self.all))}{hint}")
        return self.all[name]

    def fixed(self, features: Features, n: int) -> Tensor:
        """[n, F] what needs no learning: pooled states, evidence"""
        layers = () if features.attends else features.layers
        parts = [self[f"{self.model}.{layer}.{features.pooling}"] for layer in layers]
        if features.evidence:
            seen = [self[f"{self.model}.{EVIDENCE}"]]
            seen += [self[f"draft.{CONFIDENCE}"]] if "draft" in features.evidence else []
            parts.append(select(torch.cat(seen, -1), features.evidence))
        return torch.cat(parts, -1) if parts else torch.empty(n, 0)

    def tokens(self, features: Features) -> Tensor:
        """[tokens, layers, d]"""
        return torch.stack([self[f"{self.model}.{layer}.{TOKENS}"] for layer in features.layers], 1)


def _counts(sample: Sample, model: str, kind: str, endings: bool) -> bool:
    """Whether a step is one to learn from."""
    whole = endings or sample.end in ("blank line", "length")
    return whole and (sample.model == model or kind in ("cross", "written", "valid"))


def _surface(found: list[tuple[Sample, Label]]) -> Tensor:
    """The surface of a step: length, number, and the kind of step, where the task knows kinds. [N, 2 + O]"""
    kinds = sorted({label.operation for _, label in found if label.operation is not None})
    return torch.tensor(
        [
            [float(len(sample.tokens)), float(sample.step), *(float(label.operation == kind) for kind in kinds)]
            for sample, label in found
        ]
    )


def _label(label: Label, model: str, kind: str, leave_one_out: bool) -> float:
    if kind == "combined":
        return combined_share(label)
    if kind == "written":
        return float(share(label, model, leave_one_out=True) > 0)
    if kind == "valid":
        if label.valid is None:
            raise BadRequest("this task cannot tell whether a step is right, so there are no labels 'valid'")
        return float(label.valid)
    return own_share(label, leave_one_out) if kind == "own" else share(label, model, leave_one_out)


def split(rows: Rows, seed: int, by: str = "problem", shares: tuple[float, float] = (0.7, 0.2)) -> dict[str, Rows]:
    """Train, validation and test rows. No problem is in two of them: steps of one problem are too much alike. By
    "sample", as in the released code of the paper, each step goes where chance puts it."""
    places = rows.problems if by == "problem" else [str(i) for i in range(len(rows))]
    problems = sorted(set(places))
    if len(problems) < 3:
        raise BadRequest(f"samples come from {len(problems)} {by}s; training, validating and testing need 3 or more")
    Random(seed).shuffle(problems)
    n = len(problems)
    train = min(max(1, round(shares[0] * n)), n - 2)
    validation = min(max(1, round(shares[1] * n)), n - train - 1)
    part_of = {p: 0 if i < train else 1 if i < train + validation else 2 for i, p in enumerate(problems)}
    part = torch.tensor([part_of[p] for p in places])
    return {name: rows.where(part == i) for i, name in enumerate(PARTS)}
