"""How probable a step's meaning is: the share of a model's samples, after the same prefix, that mean the same.

A prefix's samples of both models are clustered together, so every step has two shares: of the model that wrote it, and
of the other (its cross-label, which may be 0). The target's probe has to judge the draft's steps, so that is what it
should be trained on, too. Each model's samples are also clustered by themselves, which gives the paper's own label:
where meaning is decided pair by pair, samples of one model may join what those of the other keep apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType
from typing import Any

from semspec.errors import BadRequest
from semspec.probe_fit.cluster import Clusterer
from semspec.probe_fit.data import MODELS, Folder, Label, Sample

Truth = Callable[[Sample, str], bool | None]
"""Whether a sampled step is right after the answer so far; None: not known."""


def label(
    folder: Folder,
    clusterer: Clusterer,
    about: dict[str, Any],
    truth: Truth | None = None,
    operation: Callable[[str], str] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Label every shard that has no labels made in the way that `about` describes."""
    shards = folder.shards
    if not shards:
        raise BadRequest(f"{folder.path} holds no samples to label; run `semspec probe collect` first")
    folder.open_labels(about)
    histories = folder.read_histories() if truth else {}
    for i, shard in enumerate(shards):
        progress(i, len(shards))
        if not folder.has_labels(shard):
            folder.write_labels(
                shard, label_samples(folder.read_samples(shard), clusterer, truth, histories, operation)
            )
    progress(len(shards), len(shards))


def label_samples(
    samples: list[Sample],
    clusterer: Clusterer,
    truth: Truth | None = None,
    histories: Mapping[str, str] = MappingProxyType({}),
    operation: Callable[[str], str] | None = None,
) -> list[Label]:
    """A label for each sample; the samples of a prefix lie together."""
    labels = []
    for _, group in groupby(samples, key=lambda s: s.prefix):
        rows = list(group)
        clusters = clusterer.cluster([s.text for s in rows])
        own = _own_counts(rows, clusterer)
        of_model = Counter(s.model for s in rows)
        found = Counter((s.model, c) for s, c in zip(rows, clusters, strict=True))
        labels += [
            Label(
                s.prefix, s.model, s.number, c,
                counts={m: found[m, c] for m in MODELS}, samples={m: of_model[m] for m in MODELS},
                valid=None if truth is None else truth(s, histories[s.prefix]),
                operation=None if operation is None else operation(s.text), own=own[s.model, s.number],
            )
            for s, c in zip(rows, clusters, strict=True)
        ]  # fmt: skip
    return labels


def _own_counts(rows: list[Sample], clusterer: Clusterer) -> dict[tuple[str, int], int]:
    """Of each sample, by model and number: how many of its model's have its meaning, if only those are clustered."""
    found: dict[tuple[str, int], int] = {}
    for model in MODELS:
        mine = [s for s in rows if s.model == model]
        clusters = clusterer.cluster([s.text for s in mine]) if mine else []
        sizes = Counter(clusters)
        found |= {(model, s.number): sizes[c] for s, c in zip(mine, clusters, strict=True)}
    return found


def own_share(label: Label, leave_one_out: bool = False) -> float:
    """The share of its own model's samples that mean what this one means, with only those clustered, as in the paper.

    Labels of older versions have no such count; they were made with the samples of both models together."""
    if label.own is not None:
        label = replace(label, counts=label.counts | {label.model: label.own})
    return share(label, label.model, leave_one_out)


def share(label: Label, model: str, leave_one_out: bool = False) -> float:
    """The share of a model's samples that mean what this one means, with both models' clustered together.

    A step among the samples counts itself, as in the paper: its share is never 0, and is too high on average. Leaving
    it out gives what a step that is not among them would get."""
    count, total = label.counts[model], label.samples[model]
    if leave_one_out and label.model == model:
        count, total = count - 1, total - 1
    if total < 1:
        raise BadRequest(f"{total} samples of the {model} say nothing about shares; collect more")
    return count / total


def combined_share(label: Label) -> float:
    """The share among the samples of both models, the other way to label of the paper's released code."""
    return sum(label.counts.values()) / sum(label.samples.values())
