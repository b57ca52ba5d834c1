"""From a labelled collection to what a probe is trained on: features and labels, row by row, split by problem."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from semspec.errors import BadRequest
from semspec.fit.data import EVIDENCE, Folder, Label
from semspec.fit.label import combined_share, share

KINDS = ("own", "cross", "combined", "written")
PARTS = ("train", "validation", "test")


@dataclass
class Rows:
    """N steps as one model sees them."""

    features: Tensor  # [N, F] float32
    labels: Tensor  # [N]
    problems: list[str]
    prefixes: list[str]
    cross: Tensor  # [N] bool: the other model wrote it
    logprob: Tensor  # [N] mean log-probability of its tokens
    surface: Tensor  # [N, 2] its length in tokens and its place among the steps
    valid: Tensor | None  # [N] bool: it is right; None: nobody knows

    def __len__(self) -> int:
        return len(self.problems)

    def where(self, mask: Tensor) -> Rows:
        at = mask.nonzero()[:, 0].tolist()
        return Rows(
            self.features[mask],
            self.labels[mask],
            [self.problems[i] for i in at],
            [self.prefixes[i] for i in at],
            self.cross[mask],
            self.logprob[mask],
            self.surface[mask],
            None if self.valid is None else self.valid[mask],
        )


def load_rows(
    folder: Folder,
    model: str,
    layers: tuple[int, ...],
    pooling: str,
    kind: str,
    leave_one_out: bool,
    evidence: bool = False,
) -> Rows:
    """The steps that a model's probe learns from.

    kind  own: the model's own steps, each with its share of that model's samples, as in the paper
          cross: also the other model's steps, each with its share of this model's samples
          combined: own steps, with shares of both models' samples together
          written: both models' steps, 1 where the model has another sample of the same meaning, else 0
    Steps that end the thinking or the text are left out: at run time the target writes those itself."""
    if kind not in KINDS:
        raise BadRequest(f"there are no labels {kind!r}; give one of: {', '.join(KINDS)}")
    parts, labels, problems, prefixes, cross, logprob, surface, valid = [], [], [], [], [], [], [], []
    for shard in folder.shards:
        samples, states = folder.read_samples(shard), folder.read_states(shard)
        names = [f"{model}.{layer}.{pooling}" for layer in layers] + [f"{model}.{EVIDENCE}"] * evidence
        missing = [name for name in names if name not in states]
        if missing:
            raise BadRequest(f"the states {missing[0]} were not collected; there are: {', '.join(sorted(states))}")
        at = []
        for i, (sample, label) in enumerate(zip(samples, folder.read_labels(shard), strict=True)):
            foreign = sample.model != model
            if sample.end not in ("blank line", "length") or (foreign and kind not in ("cross", "written")):
                continue
            at.append(i)
            labels.append(_label(label, model, kind, leave_one_out))
            problems.append(sample.problem)
            prefixes.append(sample.prefix)
            cross.append(foreign)
            logprob.append(sample.logprob[model])
            surface.append([float(len(sample.tokens)), float(sample.step)])
            valid.append(label.valid)
        parts.append(torch.cat([states[name][at] for name in names], dim=-1))
    if not labels:
        raise BadRequest(f"{folder.path} has no steps to learn from; collect more prefixes")
    return Rows(
        torch.cat(parts).float(),
        torch.tensor(labels),
        problems,
        prefixes,
        torch.tensor(cross),
        torch.tensor(logprob),
        torch.tensor(surface),
        None if None in valid else torch.tensor([bool(v) for v in valid]),
    )


def _label(label: Label, model: str, kind: str, leave_one_out: bool) -> float:
    if kind == "combined":
        return combined_share(label)
    if kind == "written":
        return float(share(label, model, leave_one_out=True) > 0)
    return share(label, model, leave_one_out)


def split(rows: Rows, seed: int, shares: tuple[float, float] = (0.7, 0.2)) -> dict[str, Rows]:
    """Train, validation and test rows. No problem is in two of them: steps of one problem are too much alike."""
    problems = sorted(set(rows.problems))
    if len(problems) < 3:
        raise BadRequest(f"samples come from {len(problems)} problems; training, validating and testing need 3 or more")
    Random(seed).shuffle(problems)
    n = len(problems)
    train = min(max(1, round(shares[0] * n)), n - 2)
    validation = min(max(1, round(shares[1] * n)), n - train - 1)
    place = {p: 0 if i < train else 1 if i < train + validation else 2 for i, p in enumerate(problems)}
    part = torch.tensor([place[p] for p in rows.problems])
    return {name: rows.where(part == i) for i, name in enumerate(PARTS)}
