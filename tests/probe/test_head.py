from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import semspec
from semspec.bench.record import Recorder
from semspec.errors import ModelError
from semspec.model import ModelRunner
from semspec.probe import Features, Probe, evidence, fingerprint
from semspec.probe.calibrate import Calibrator
from semspec.probe.probe import CARD, WEIGHTS, ProbeNetwork, head_for, paper_widths
from tests.fakes import FakeRunner, chain


def made(kind: str = "isotonic") -> Probe:
    torch.manual_seed(0)
    head = ProbeNetwork(6, (8, 4))
    head.standardise(torch.randn(50, 6) * 3 + 1)
    logits = torch.randn(40)
    calibrator = Calibrator.fit(kind, logits, (2 * logits).sigmoid())
    return Probe(head, Features((2, 4), "mean"), "model-a", calibrator, {"prefixes": 7}, {"r2": 0.5})


def steps() -> tuple[dict[int, torch.Tensor], torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    states = {2: torch.randn(9, 3), 4: torch.randn(9, 3)}
    return states, torch.tensor([0, 4]), torch.tensor([3, 5])


def test_the_network_is_the_papers() -> None:
    assert (paper_widths(5120), paper_widths(1536)) == ((2048, 512, 256), (1024, 512, 256))
    kinds = [type(layer).__name__ for layer in ProbeNetwork(1536).layers]
    assert kinds == ["Linear", "ReLU", "Dropout", "Linear", "ReLU", "Dropout", "Linear", "ReLU", "Linear"]


def test_a_batch_equals_its_steps_one_by_one() -> None:
    probe, (states, first, counts) = made(), steps()
    together = probe(states, first, counts)
    assert together.shape == (2,) and ((together >= 0) & (together <= 1)).all()
    for i, (f, c) in enumerate(zip(first.tolist(), counts.tolist(), strict=True)):
        alone = {layer: s[f : f + c] for layer, s in states.items()}
        torch.testing.assert_close(probe(alone, torch.tensor([0]), torch.tensor([c])), together[i : i + 1])


def test_features_are_standardised() -> None:
    torch.manual_seed(0)
    features, head = torch.randn(100, 4) * 1000 + 500, ProbeNetwork(4, (3,), dropout=0.0)
    head.standardise(features)
    normal = (features - features.mean(0)) / features.std(0, correction=0)
    torch.testing.assert_close(head(features), head.layers(normal)[:, 0])


@pytest.mark.parametrize("kind", ["none", "temperature", "isotonic"])
def test_what_is_saved_is_loaded(tmp_path: Path, kind: str) -> None:
    probe = made(kind)
    probe.save(tmp_path)
    back = Probe.load(tmp_path, "model-a")
    assert torch.equal(back(*steps()), probe(*steps())) and back.card == probe.card
    assert back.layers == (2, 4) and back.data == {"prefixes": 7} and back.metrics == {"r2": 0.5}


def test_attention_is_saved_with_the_probe(tmp_path: Path) -> None:
    features = Features((2, 4), "attention", ("numbers", "length"))
    head = head_for(features, 2 * 3 + 2, (8,), 0.0)
    assert head.asked is not None and head.asked.shape == (2, 3)
    torch.manual_seed(0)
    torch.nn.init.normal_(head.asked, std=5.0)
    head.standardise_states(torch.randn(40, 2, 3) * torch.tensor([1.0, 3.0, 0.3]))
    probe, seen = Probe(head, features, "model-a"), torch.randn(2, evidence.WIDTH)
    probe.save(tmp_path)
    back = Probe.load(tmp_path, "model-a")
    assert back.card == probe.card and back.card["pooling"] == "attention"
    assert back.card["evidence"] == ["numbers", "length"]
    said = probe(*steps(), seen)
    assert torch.equal(back(*steps(), seen), said)
    plain = Probe(ProbeNetwork(8, (8,), 0.0), Features((2, 4), "mean", ("numbers", "length")), "model-a")
    plain.head.load_state_dict({k: v for k, v in head.state_dict().items() if k not in ("asked", "spread")})
    assert not torch.allclose(plain(*steps(), seen), said), "the queries count"


def test_queries_do_not_depend_on_the_scale_of_states() -> None:
    """The same states in other units, with the same question, are weighted the same."""
    states, units = torch.randn(30, 1, 3), torch.tensor([1.0, 1000, 0.001])
    one, other = (head_for(Features((1,), "attention"), 3, (4,), 0.0) for _ in range(2))
    for head, scale in ((one, 1.0), (other, units)):
        assert head.asked is not None
        head.standardise_states(states * scale)
        torch.nn.init.constant_(head.asked, 2.0)
    assert one.queries is not None and other.queries is not None
    torch.testing.assert_close(states[:, 0] @ one.queries[0], (states[:, 0] * units) @ other.queries[0])


def test_the_probe_of_another_model_is_refused(tmp_path: Path) -> None:
    made().save(tmp_path)
    with pytest.raises(ModelError, match="belongs to model model-a, but this is model-b"):
        Probe.load(tmp_path, "model-b")


def test_no_probe_damaged_probes_and_old_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no probe"):
        Probe.load(tmp_path, "model-a")
    made().save(tmp_path)
    card = json.loads((tmp_path / CARD).read_text())
    for change, said in (({"format": 0}, "not of format"), ({"widths": [8, 5]}, "do not fit each other")):
        (tmp_path / CARD).write_text(json.dumps(card | change))
        with pytest.raises(ModelError, match=said):
            Probe.load(tmp_path, "model-a")
    (tmp_path / WEIGHTS).write_bytes(b"short")
    with pytest.raises(ModelError, match="damaged"):
        Probe.load(tmp_path, "model-a")


def test_a_fingerprint_tells_models_apart_and_nothing_else(pair: semspec.Pair, target_folder: Path) -> None:
    assert pair.draft is not None
    ours = fingerprint(pair.target)
    assert ours != fingerprint(pair.draft)
    assert ours == fingerprint(Recorder(pair.target, "target", []))
    for dtype in ("bfloat16", "int8"):
        assert ours == fingerprint(ModelRunner.load(target_folder, "cpu", dtype, slots=1)), dtype


def test_a_runner_without_weights_brings_its_own() -> None:
    runner = FakeRunner(chain(5), 5)
    with pytest.raises(ModelError, match="FakeRunner"):
        fingerprint(runner)
    runner.fingerprint = "fake-1"  # type: ignore[attr-defined]
    assert fingerprint(runner) == "fake-1"
