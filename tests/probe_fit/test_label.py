from __future__ import annotations

from pathlib import Path

import pytest
import torch

from semspec.errors import BadRequest
from semspec.probe_fit.cluster import Source, make
from semspec.probe_fit.data import Folder, Sample
from semspec.probe_fit.label import combined_share, label, label_samples, share

CLUSTERER = make("canonical", Source(parse=lambda text: text[0]))


def samples(prefix: str = "0/1") -> list[Sample]:
    """Five of the target, three of the draft; what they mean is their first letter."""
    texts = {"target": ["a1", "a2", "b1", "a3", "c"], "draft": ["a4", "d", "b2"]}
    return [
        Sample(prefix, "p", 1, model, i, [i], text, "blank line", {})
        for model, written in texts.items()
        for i, text in enumerate(written)
    ]


def test_shares_by_hand() -> None:
    labels = label_samples(samples(), CLUSTERER)
    assert [label.cluster for label in labels] == [0, 0, 1, 0, 2, 0, 3, 1]
    assert [share(label, "target") for label in labels] == [0.6, 0.6, 0.2, 0.6, 0.2, 0.6, 0.0, 0.2]
    assert [share(label, "draft") for label in labels] == pytest.approx([1 / 3] * 4 + [0] + [1 / 3] * 3)
    assert [combined_share(label) for label in labels] == [0.5, 0.5, 0.25, 0.5, 0.125, 0.5, 0.125, 0.25]


def test_leaving_a_step_out_changes_only_shares_of_its_own_writer() -> None:
    labels = label_samples(samples(), CLUSTERER)
    assert [share(label, "target", leave_one_out=True) for label in labels] == [0.5, 0.5, 0, 0.5, 0, 0.6, 0, 0.2]


def test_leaving_out_makes_the_share_unbiased() -> None:
    """Over many draws of steps from known meanings, the mean share of a sample is the chance that two agree."""
    torch.manual_seed(0)
    probs, total, n = torch.tensor([0.7, 0.2, 0.1]), 0.0, 0
    for _ in range(300):
        drawn = torch.multinomial(probs, 4, replacement=True).tolist()
        rows = [Sample("0/1", "p", 1, "target", i, [], str(d), "blank line", {}) for i, d in enumerate(drawn)]
        for one in label_samples(rows, CLUSTERER):
            total, n = total + share(one, "target", leave_one_out=True), n + 1
    assert total / n == pytest.approx((probs**2).sum().item(), abs=0.04)


def test_a_single_sample_says_nothing_about_itself() -> None:
    (one,) = label_samples(samples()[:1], CLUSTERER)
    with pytest.raises(BadRequest, match="collect more"):
        share(one, "target", leave_one_out=True)
    with pytest.raises(BadRequest, match="collect more"):
        share(one, "draft")


def test_prefixes_do_not_mix_and_truth_is_asked() -> None:
    labels = label_samples(
        samples("0/1") + samples("0/2"), CLUSTERER, lambda s, h: s.text == h, {"0/1": "a4", "0/2": "d"}
    )
    assert [label.counts for label in labels[:8]] == [label.counts for label in labels[8:]]
    assert [label.valid for label in labels[:8]] == [False] * 5 + [True, False, False]
    assert [label.valid for label in labels[8:]] == [False] * 6 + [True, False]


def test_the_operation_is_asked_for_where_a_task_knows_it() -> None:
    assert {label.operation for label in label_samples(samples(), CLUSTERER)} == {None}
    labels = label_samples(samples(), CLUSTERER, operation=lambda text: text[:1])
    assert [label.operation for label in labels] == [s.text[:1] for s in samples()]


def test_labels_are_made_once_and_again_when_made_otherwise(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.samples.mkdir()
    with pytest.raises(BadRequest, match="probe collect"):
        label(folder, CLUSTERER, {"clusters": "canonical"})
    for shard in range(2):
        folder.write_shard(shard, samples(f"{shard}/1"), {"target.1.mean": torch.zeros(8, 1)})
    with pytest.raises(BadRequest, match="probe label"):
        _ = folder.labelled
    label(folder, CLUSTERER, {"clusters": "canonical"})
    assert folder.labelled == {"clusters": "canonical"} and len(folder.read_labels(1)) == 8
    (folder.labels / "00001.jsonl").unlink()
    before = (folder.labels / "00000.jsonl").stat().st_mtime_ns
    label(folder, CLUSTERER, {"clusters": "canonical"})
    assert (folder.labels / "00000.jsonl").stat().st_mtime_ns == before and folder.has_labels(1)
    apart = make("canonical", Source(parse=lambda text: text))
    label(folder, apart, {"clusters": "other"})
    assert {row.cluster for row in folder.read_labels(0)} == set(range(8))
