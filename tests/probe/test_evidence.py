"""What logits say about a step, in numbers; against plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from semspec.probe.evidence import CONFIDENCE, GROUPS, NAMES, at_one, confidence, select, width_of
from semspec.sampling.draw import SamplingRows, process
from semspec.types import Sampling


def plain_confidence(rows: list[list[float]], ids: list[int]) -> list[float]:
    logp = [[x - math.log(sum(math.exp(y) for y in row)) for x in row] for row in rows]
    own = [row[i] for row, i in zip(logp, ids, strict=True)]
    entropy = [-sum(math.exp(x) * x for x in row if x > -math.inf) for row in logp]
    return [min(own), sum(own) / len(own), sum(entropy) / len(ids), max(entropy)]


def test_confidence_is_what_plain_python_finds() -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 6) * 2
    logits[2, 4] = -torch.inf  # left out by a filter
    counts = [4, 1, 3]
    first = [0, 4, 6]  # row 5 is nobody's
    ids = [[0, 1, 2, 3], [5, 0, 0, 0], [1, 1, 4, 0]]
    rows = torch.tensor([[f + min(k, c - 1) for k in range(4)] for f, c in zip(first, counts, strict=True)])
    exists = torch.tensor([[k < c for k in range(4)] for c in counts])
    found = confidence(logits, rows, torch.tensor(ids), exists)
    for b, (f, c) in enumerate(zip(first, counts, strict=True)):
        expected = plain_confidence(logits[f : f + c].tolist(), ids[b][:c])
        assert found[b].tolist() == pytest.approx(expected, abs=1e-4)


def test_a_temperature_is_undone_and_what_was_left_out_stays_out() -> None:
    torch.manual_seed(0)
    raw = torch.randn(3, 8) * 2
    options = [Sampling(0.6, top_p=0.9), Sampling(), Sampling(1.5)]
    rows = SamplingRows.of(options, [1, 1, 1], torch.device("cpu"))
    processed = process(raw, rows)
    kept = torch.where((rows.temperature == 0)[:, None], raw, processed)  # as a roll keeps them
    back = at_one(kept, rows.temperature)
    inside = processed[0].isfinite()
    assert 1 < inside.sum() < 8 and not back[0, ~inside].isfinite().any()
    torch.testing.assert_close(back[0, inside].log_softmax(-1), raw[0, inside].log_softmax(-1))
    torch.testing.assert_close(back[1:].log_softmax(-1), raw[1:].log_softmax(-1))


def test_groups_share_out_all_numbers() -> None:
    every = [name for group in GROUPS.values() for name in group]
    assert sorted(every) == sorted((*NAMES, *CONFIDENCE)) and width_of(GROUPS) == len(every)
    seen = torch.arange(float(len(NAMES)))[None]
    assert sorted(select(seen, [group for group in GROUPS if group != "draft"])[0].tolist()) == seen[0].tolist()
    for group in [group for group in GROUPS if group != "draft"]:
        assert [NAMES[int(i)] for i in select(seen, [group])[0]] == list(GROUPS[group])
