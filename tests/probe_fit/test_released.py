"""Clustering and labels as SemanticSpec's released code makes them, against a transcription in plain Python, on graphs
where being the same is no equivalence; and its network, against one built from the published layer sizes."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn

from semspec.cli.probe_options import Teaching, read_count
from semspec.errors import BadRequest, ModelError
from semspec.probe.features import pool
from semspec.probe.probe import ProbeNetwork, paper_widths
from semspec.probe_fit.cluster import Pairwise, Source
from semspec.probe_fit.data import Sample
from semspec.probe_fit.imported import import_probe
from semspec.probe_fit.label import combined_share, label_samples, own_share, share
from semspec.probe_fit.train import Training, fit
from tests.fakes import FakeRunner, chain
from tests.probe_fit.test_train import CPU, known

Same = Callable[[str, str], bool]


@dataclass
class Graph(Pairwise):
    """The same are equal texts and those with an edge between them."""

    name = "graph"

    edges: frozenset[frozenset[str]] = frozenset()
    asked: list[tuple[str, str]] = field(default_factory=list)

    def same(self, text: str, others: Sequence[str]) -> list[bool]:
        self.asked += [(text, other) for other in others]
        return [frozenset((text, other)) in self.edges for other in others]


def released_ids(texts: list[str], same: Same) -> list[int]:
    """Every text that has no number yet takes the next one, and gives it to all later texts that it is the same as."""
    ids, number = [-1] * len(texts), 0
    for i in range(len(texts)):
        if ids[i] == -1:
            ids[i] = number
            for j in range(i + 1, len(texts)):
                if same(texts[i], texts[j]):
                    ids[j] = number
            number += 1
    return ids


def graph(seed: int) -> tuple[Graph, list[Sample], Same]:
    """Few texts, many edges, texts that occur twice, in one model and across them."""
    rng = Random(seed)
    names = [f"t{i}" for i in range(rng.randint(2, 9))]
    edges = frozenset(frozenset((a, b)) for a in names for b in names if a < b and rng.random() < 0.45)
    samples = [
        Sample("0/1", "p", 1, model, i, [i], rng.choice(names), "blank line", {})
        for model in ("target", "draft")
        for i in range(rng.randint(1, 12))
    ]
    return Graph(Source(), "released", edges), samples, lambda a, b: a == b or frozenset((a, b)) in edges


@pytest.mark.parametrize("seed", range(300))
def test_clusters_and_labels_in_the_released_order(seed: int) -> None:
    clusterer, samples, same = graph(seed)
    texts = [s.text for s in samples]
    ids = released_ids(texts, same)
    labels = label_samples(samples, clusterer)
    assert [label.cluster for label in labels] == ids
    sizes = Counter(ids)
    assert [combined_share(label) for label in labels] == [sizes[i] / len(ids) for i in ids], "labels of both together"
    for model in ("target", "draft"):
        own = [s.text for s in samples if s.model == model]
        own_ids = released_ids(own, same)
        wanted = [own_ids.count(i) / len(own) for i in own_ids]
        assert [own_share(label) for label in labels if label.model == model] == wanted, "labels of each by itself"
    assert len(clusterer.asked) == len(set(clusterer.asked)), "no pair is asked about twice"


def test_the_two_orders_differ_where_a_later_head_takes_over() -> None:
    edges = frozenset({frozenset("ac"), frozenset("bc")})
    assert Graph(Source(), "first", edges).cluster(list("abc")) == [0, 1, 0]
    assert Graph(Source(), "released", edges).cluster(list("abc")) == [0, 1, 1]
    with pytest.raises(BadRequest, match="give first or released"):
        Graph(Source(), "last")


def test_a_models_own_samples_are_clustered_without_the_others() -> None:
    """t ~ d1 ~ d2, but not t ~ d2: with t among them, the draft's two steps are not the same."""
    edges = frozenset({frozenset(("t", "d1")), frozenset(("d1", "d2"))})
    rows = [("target", 0, "t"), ("draft", 0, "d1"), ("draft", 1, "d2")]
    samples = [Sample("0/1", "p", 1, model, i, [i], text, "blank line", {}) for model, i, text in rows]
    labels = label_samples(samples, Graph(Source(), "first", edges))
    assert [share(label, "draft") for label in labels[1:]] == [0.5, 0.5]
    assert [own_share(label) for label in labels] == [1.0, 1.0, 1.0]
    assert [own_share(label, leave_one_out=True) for label in labels[1:]] == [1.0, 1.0]


# -- the network


class Published(nn.Module):
    """Of the published layer sizes: three hidden layers with ReLU, dropout after the first two, a sigmoid."""

    def __init__(self, inputs: int, first: int) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(inputs, first), nn.Linear(first, 512), nn.Linear(512, 256)
        self.fc4, self.dropout = nn.Linear(256, 1), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.fc1(x).relu())
        x = self.dropout(self.fc2(x).relu())
        return self.fc4(self.fc3(x).relu()).sigmoid()[..., 0]


class Wide(FakeRunner):
    """A runner whose states have a given width."""

    def __init__(self, width: int) -> None:
        super().__init__(chain(11), 11)
        self.width, self.fingerprint = width, f"wide-{width}"

    def score(self, requests):  # type: ignore[no-untyped-def]
        outputs = super().score(requests)
        for output in outputs:
            output.hidden = {layer: torch.zeros(len(h), self.width) for layer, h in output.hidden.items()}
        return outputs


@pytest.mark.parametrize(("inputs", "first"), [(5120, 2048), (1536, 1024)])
def test_an_imported_probe_gives_what_the_published_network_gives(tmp_path: Path, inputs: int, first: int) -> None:
    torch.manual_seed(inputs)
    network = Published(inputs, first).eval()
    torch.save(network.state_dict(), tmp_path / "probe.pt")
    runner = Wide(inputs)
    probe = import_probe(tmp_path / "probe.pt", runner)
    assert probe.head.widths == paper_widths(inputs) == (first, 512, 256) and runner.free == 8
    states = torch.randn(9, inputs) * 3
    starts, counts = torch.tensor([0, 4]), torch.tensor([3, 5])
    wanted = network(torch.stack([states[:3].mean(0), states[4:].mean(0)]))
    torch.testing.assert_close(
        probe({runner.num_layers: states}, starts, counts), wanted.detach(), rtol=1e-5, atol=1e-6
    )
    probe.save(tmp_path / "saved")
    assert probe.card["data"]["imported"]["file"] == "probe.pt"


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return (Path.touch, (self.path,))


def hostile(tmp_path: Path) -> dict[str, object]:
    good = Published(6, 4).state_dict()
    return {
        "cannot be read as plain weights": Bomb(tmp_path / "touched"),
        "holds a list": [good],
        "has an entry 'fc1.other'": good | {"fc1.other": torch.zeros(1)},
        "has an entry '7'": {7: torch.zeros(1)},
        "lacks some of its layers": {k: v for k, v in good.items() if k != "fc2.bias"},
        "do not follow from 4 inputs": good | {"fc2.weight": torch.zeros(512, 5)},
        "no finite numbers": good | {"fc1.bias": torch.full((4,), torch.nan)},
        "ends in 2 numbers": good | {"fc4.weight": torch.zeros(2, 256), "fc4.bias": torch.zeros(2)},
        "reads states of width 6, but this model's have 8": good,
    }


@pytest.mark.parametrize("said", list(hostile(Path())))
def test_a_hostile_or_foreign_file_is_refused(tmp_path: Path, said: str) -> None:
    torch.save(hostile(tmp_path)[said], tmp_path / "probe.pt")
    with pytest.raises(ModelError, match=said):
        import_probe(tmp_path / "probe.pt", Wide(8))
    assert not (tmp_path / "touched").exists(), "nothing of it was executed"


def test_a_plain_pickle_and_no_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "touched")))
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04short")
    for name in ("plain.pt", "cut.pt"):
        with pytest.raises(ModelError, match="cannot be read as plain weights"):
            import_probe(tmp_path / name, Wide(8))
    with pytest.raises(ModelError, match="does not exist"):
        import_probe(tmp_path / "none.pt", Wide(8))
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    "odd",
    [
        {"fc01.weight": torch.zeros(1, 8), "fc1.bias": torch.zeros(1)},
        {"fc\u0661.weight": torch.zeros(1, 8), "fc1.bias": torch.zeros(1)},
        {f"fc{'9' * 5000}.weight": torch.zeros(1, 8)},
        {"fc1.weight": torch.zeros(1).expand(1, 10**12), "fc1.bias": torch.zeros(1)},
        {"fc1.weight": torch.zeros(1, 8).to_sparse(), "fc1.bias": torch.zeros(1)},
        {"fc1.weight": torch.zeros(1, 8, device="meta"), "fc1.bias": torch.zeros(1)},
        {"fc1.weight": torch.zeros(1, 8).to(torch.float8_e4m3fn), "fc1.bias": torch.zeros(1)},
    ],
)
def test_odd_names_and_tensors_are_refused(tmp_path: Path, odd: dict[str, torch.Tensor]) -> None:
    torch.save(odd, tmp_path / "probe.pt")
    with pytest.raises(ModelError, match=r"has an entry|is no plain tensor"):
        import_probe(tmp_path / "probe.pt", Wide(8))


def test_a_damaged_file_is_refused_however_it_fails(tmp_path: Path) -> None:
    random, file = Random(0), tmp_path / "probe.pt"
    for zipped in (True, False):
        torch.save({"fc1.weight": torch.ones(1, 8)}, file, _use_new_zipfile_serialization=zipped)
        good = file.read_bytes()
        for _ in range(200):
            damaged = bytearray(good)
            damaged[random.randrange(min(len(good), 1000))] = random.randrange(256)
            file.write_bytes(damaged)
            with pytest.raises(ModelError):  # at the latest because the bias is not there
                import_probe(file, Wide(8))


# -- training


def test_paper_trains_as_released() -> None:
    (_, target), (_, draft) = Teaching(paper=True).trainings().values()
    for how in (target, draft):
        assert (how.labels, how.pooling, how.calibration, how.widths) == ("own", "mean", "none", None)
        assert (how.dropout, how.rate, how.epochs, how.seed) == (0.3, 1e-3, 100, 42)
        assert not how.standardise and how.split == "sample" and how.endings
    assert (target.batch, target.patience, draft.batch, draft.patience) == (128, 10, 64, 20)
    own = Teaching(widths="8,4", dropout=0.1, rate=0.01, batch=7, patience=3, standardise=False).trainings()["draft"][1]
    assert (own.widths, own.dropout, own.rate, own.batch, own.patience) == ((8, 4), 0.1, 0.01, 7, 3)
    assert (read_count("all"), read_count("12")) == (None, 12)
    for wrong in ({"dropout": 1.0}, {"rate": 0.0}, {"widths": (0,)}, {"split": "hand"}):
        with pytest.raises(BadRequest, match="give"):
            Training(**wrong)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="or all"):
        read_count("many")


def test_without_standardisation_the_head_sees_states_as_they_are(tmp_path: Path) -> None:
    folder = known(tmp_path, problems=4, per_problem=1)
    quick = Training(labels="own", layers=(2,), widths=(4,), epochs=1, standardise=False, split="sample")
    probe = fit(folder, "target", quick, CPU).probe
    assert not probe.head.shift.any() and (probe.head.scale == 1).all()
    assert probe.data["training"]["split"] == "sample" and probe.data["training"]["standardise"] is False
    assert sum(probe.data["rows"].values()) == 40 and probe.data["problems"]["train"] == 4, "problems in several parts"
    assert fit(folder, "target", Training(labels="own", layers=(2,), widths=(4,), epochs=1), CPU).probe.head.shift.any()


def test_the_released_poolings_are_rows_of_a_steps_states() -> None:
    states = torch.arange(7.0)[:, None].expand(7, 2)  # steps of 4, 1 and 2 tokens
    first, counts = torch.tensor([0, 4, 5]), torch.tensor([4, 1, 2])
    found = {how: pool(states, first, counts, how)[:, 0].tolist() for how in ("last", "second-last", "last-prompt")}
    assert found == {"last": [3, 4, 6], "second-last": [2, 4, 5], "last-prompt": [0, 4, 5]}


def test_a_head_without_hidden_layers_is_possible_too() -> None:
    assert ProbeNetwork(3, ()).layers[0].in_features == 3  # the older forms of the released code are shallower
