from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from semspec.cli.probe_options import Teaching
from semspec.errors import BadRequest
from semspec.probe.evidence import CONFIDENCE, GROUPS, NAMES
from semspec.probe.features import Features
from semspec.probe.probe import Probe
from semspec.probe_fit.data import Folder, Label, Sample
from semspec.probe_fit.plot import draw_reliability
from semspec.probe_fit.rows import Tokens, load_rows, split
from semspec.probe_fit.train import Training, fit

CPU = torch.device("cpu")
QUICK = Training(widths=(16,), dropout=0.0, epochs=60, rate=3e-3)
N = 10  # samples of each model


def known(folder: Path, problems: int = 30, per_problem: int = 3, seed: int = 0) -> Folder:
    """A collection whose shares follow from its states: the first feature is the logit of the target's share."""
    generator = torch.Generator().manual_seed(seed)
    made = Folder(folder)
    made.open({"config": {}, "models": {"target": "model-t", "draft": "model-d"}, "depth": {"target": 5, "draft": 3}, "layers": {"target": [2, 5], "draft": [3]}})  # noqa: E501  # fmt: skip
    samples, labels, states = [], [], []
    for p in range(problems):
        for s in range(per_problem):
            for model in ("target", "draft"):
                for i in range(N):
                    own = model == "target"
                    count = int(torch.randint(int(own), N + 1, (), generator=generator))
                    samples.append(Sample(f"{p}/{s}", f"p{p}", s, model, i, [1] * (i + 1), "x", "blank line", {"target": -1.0, "draft": -2.0}))  # noqa: E501  # fmt: skip
                    counts = {"target": count, "draft": N - count + int(not own and count == N)}
                    labels.append(Label(f"{p}/{s}", model, i, 0, counts, {"target": N, "draft": N}, count > 4))
                    noise = torch.randn(3, generator=generator)
                    states.append(torch.tensor([(count - 5.0) * 100, 0, 0]) + noise * torch.tensor([30.0, 1, 1]))
    table = torch.stack(states)
    made.write_shard(0, samples, {"target.2.mean": table, "target.5.mean": torch.zeros_like(table), "target.2.last": -table, "draft.3.mean": -table})  # noqa: E501  # fmt: skip
    made.open_labels({"clusters": "known"})
    made.write_labels(0, labels)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return known(tmp_path_factory.mktemp("known"))


def test_rows_are_the_steps_that_were_asked_for(folder: Folder) -> None:
    samples, labels = folder.read_samples(0), folder.read_labels(0)
    own = load_rows(folder, "target", Features((2,)), "own")
    assert len(own) == 30 * 3 * N and not own.cross.any()
    cross = load_rows(folder, "target", Features((2, 5)), "cross")
    assert len(cross) == 2 * len(own) and cross.cross.float().mean() == 0.5 and cross.features.shape[1] == 6
    expected = [label.counts["target"] / N for label in labels]
    torch.testing.assert_close(cross.labels, torch.tensor(expected))
    assert cross.labels[cross.cross].min() == 0  # meanings that the target never has
    left_out = load_rows(folder, "target", Features((2,)), "cross", True)
    s, label, value = samples[0], labels[0], left_out.labels[0].item()
    assert s.model == "target" and value == pytest.approx((label.counts["target"] - 1) / (N - 1))
    combined = load_rows(folder, "draft", Features((3,)), "combined")
    assert combined.labels[0].item() == pytest.approx(sum(labels[N].counts.values()) / (2 * N))
    assert torch.equal(load_rows(folder, "target", Features((2,), "last"), "own").features, -own.features)


def test_steps_that_end_the_thinking_are_left_out(tmp_path: Path) -> None:
    made = known(tmp_path, problems=3, per_problem=1)
    samples = [replace(s, end="end of thinking") if s.number else s for s in made.read_samples(0)]
    made.write_shard(0, samples, made.read_states(0))
    rows = load_rows(made, "target", Features((2,)), "cross")
    assert len(rows) == 3 * 2
    assert torch.equal(rows.features, made.read_states(0)["target.2.mean"][::N])


def test_states_that_were_not_collected_are_named(folder: Folder) -> None:
    with pytest.raises(BadRequest, match=r"target\.7\.mean were not collected; there are: draft\.3\.mean"):
        load_rows(folder, "target", Features((7,)), "own")
    with pytest.raises(BadRequest, match="own, cross, combined"):
        load_rows(folder, "target", Features((2,)), "other")


def test_the_split_is_by_problem(folder: Folder, tmp_path: Path) -> None:
    rows = load_rows(folder, "target", Features((2,)), "cross")
    parts = split(rows, seed=1)
    problems = [set(part.problems) for part in parts.values()]
    assert [len(p) for p in problems] == [21, 6, 3] and len(set.union(*problems)) == 30
    assert sum(len(part) for part in parts.values()) == len(rows)
    assert set(split(rows, seed=2)["test"].problems) != problems[2]
    small = load_rows(known(tmp_path / "3", problems=3), "target", Features((2,)), "own")
    assert [len(set(part.problems)) for part in split(small, 0).values()] == [1, 1, 1]
    with pytest.raises(BadRequest, match="3 or more"):
        split(load_rows(known(tmp_path / "2", problems=2), "target", Features((2,)), "own"), 0)


@pytest.mark.parametrize(("model", "kind"), [("target", "cross"), ("target", "own"), ("draft", "cross")])
def test_what_can_be_learnt_is_learnt(tmp_path: Path, model: str, kind: str) -> None:
    folder = known(
        tmp_path / "more", problems=60
    )  # a tenth is to test by, and fewer than five problems have no interval
    fitted = fit(folder, model, replace(QUICK, labels=kind), CPU)
    figures = fitted.probe.metrics["test"]
    assert figures["r2"] > 0.8 and figures["auroc"] > 0.95 and figures["ece"] < 0.06
    rare_is_right = model == "draft"  # the draft's shares here are the reverse of the target's
    assert (
        (figures["valid_within_prefix_auroc"] < 0.05)
        if rare_is_right
        else (figures["valid_within_prefix_auroc"] > 0.95)
    )
    for name in ("logprob", "length_and_step"):
        assert figures["baselines"][name]["r2"] < 0.1
        assert figures["baselines"][name]["difference"]["r2"]["clearly_better"]
    card = fitted.probe.card
    assert card["model"] == f"model-{model[0]}" and card["layers"] == ([2, 5] if model == "target" else [3])
    assert card["data"]["training"]["labels"] == ("own" if model == "draft" else kind)
    assert ("test_other_steps" in fitted.probe.metrics) == (kind == "cross" and model == "target")
    fitted.probe.save(tmp_path)
    assert Probe.load(tmp_path, f"model-{model[0]}").card == card


def planted(folder: Path, problems: int = 40, width: int = 8) -> Folder:
    """Steps of 10 to 40 tokens, one of which is marked by its second number and says in its first whether the step is
    the target's; the first number of all others is noise, so that in a mean the one is lost."""
    generator = torch.Generator().manual_seed(0)
    made = known(folder, problems=problems, per_problem=1)
    samples, labels, states = [], [], []
    for sample, label in zip(made.read_samples(0), made.read_labels(0), strict=True):
        length, says = (int(torch.randint(*span, (), generator=generator)) for span in ((10, 41), (0, 2)))
        rows = torch.randn(length, width, generator=generator)
        rows[:, 1] = 0.0
        rows[int(torch.randint(length, (), generator=generator)), :2] = torch.tensor([3.0 * says - 1.5, 4.0])
        samples.append(replace(sample, tokens=[1] * length))
        labels.append(replace(label, counts={"target": N * says, "draft": 1}))
        states.append(rows)
    pooled = {"mean": torch.stack([s.mean(0) for s in states]), "last": torch.stack([s[-1] for s in states])}
    tensors = {f"target.5.{name}": table for name, table in pooled.items()}
    made.write_shard(0, samples, tensors | {"target.5.tokens": torch.cat(states)})
    made.write_labels(0, labels)
    return made


def test_attention_finds_the_one_token_that_a_mean_drowns(tmp_path: Path) -> None:
    made = planted(tmp_path / "collection")
    found = {}
    for pooling in ("mean", "last", "attention"):
        fitted = fit(made, "target", replace(QUICK, labels="cross", layers=(5,), pooling=pooling, patience=30), CPU)
        found[pooling] = fitted.probe.metrics["test"]["auroc"]
    assert found["attention"] > 0.95 and max(found["mean"], found["last"]) < 0.8, found
    probe = fitted.probe
    test = split(load_rows(made, "target", probe.features, "cross"), QUICK.seed)["test"]
    assert test.tokens is not None
    said = probe({5: test.tokens.states[:, 0]}, test.tokens.first, test.tokens.counts)
    torch.testing.assert_close(said, fitted.predicted)
    probe.save(tmp_path / "probe")
    assert Probe.load(tmp_path / "probe", "model-t").card == probe.card


def test_attention_needs_the_states_of_tokens(folder: Folder) -> None:
    with pytest.raises(BadRequest, match=r"target\.2\.tokens were not collected.*--token-states"):
        fit(folder, "target", replace(QUICK, pooling="attention"), CPU)


def test_tokens_stay_with_their_steps() -> None:
    tokens = Tokens(torch.arange(10.0)[:, None, None], torch.tensor([3, 1, 0, 4, 2]))
    taken = tokens.take(torch.tensor([3, 0, 2, 3]))
    assert taken.states.flatten().tolist() == [4, 5, 6, 7, 0, 1, 2, 4, 5, 6, 7]
    assert taken.counts.tolist() == [4, 3, 0, 4] and taken.first.tolist() == [0, 4, 7, 7]


def test_every_group_of_evidence_can_be_switched_off(tmp_path: Path) -> None:
    """In each world one group knows the answer and the others know nothing."""
    generator = torch.Generator().manual_seed(0)
    names = (*NAMES, *CONFIDENCE)
    judge = replace(QUICK, labels="written", states=False)
    for group, columns in GROUPS.items():
        made = known(tmp_path / group)
        answer = torch.tensor([float(label.counts["target"] > (label.model == "target")) for label in made.read_labels(0)])  # noqa: E501  # fmt: skip
        seen = torch.randn(len(answer), len(names), generator=generator)
        seen[:, names.index(columns[-1])] += 6 * answer
        states = {"target.evidence": seen[:, : len(NAMES)], "draft.confidence": seen[:, len(NAMES) :]}
        made.write_shard(0, made.read_samples(0), made.read_states(0) | states)
        others = tuple(name for name in GROUPS if name != group)
        with_it, without = (
            fit(made, "target", replace(judge, evidence=some), CPU).probe for some in (tuple(GROUPS), others)
        )
        assert with_it.metrics["test"]["auroc"] > 0.95 and without.metrics["test"]["auroc"] < 0.7, group
        assert without.card["evidence"] == list(others)
        assert without.head.inputs == with_it.head.inputs - len(columns)


def test_a_drafts_probe_has_no_evidence(folder: Folder) -> None:
    with pytest.raises(BadRequest, match="target's pass"):
        fit(folder, "draft", replace(QUICK, evidence=("length",)), CPU)


def test_the_options_name_what_each_probe_sees() -> None:
    plain = Teaching().trainings()
    assert plain["target"][1].evidence == plain["draft"][1].evidence == () and len(plain["judge"][1].evidence) == 4
    asked = Teaching(target_evidence="numbers, tokens", evidence="length").trainings()
    assert [asked[name][1].evidence for name in asked] == [("tokens", "numbers"), (), ("length",)]
    assert asked["target"][1].states and asked["target"][1].widths is None, "beside states, in the paper's head"
    alone = Teaching(target_evidence="numbers", target_states=False).trainings()
    assert [alone[name][1].states for name in alone] == [False, True, False], "the judge has its own switch"
    with pytest.raises(BadRequest, match="see nothing"):
        Teaching(target_states=False).trainings()
    with pytest.raises(BadRequest, match="no evidence 'digits'"):
        Teaching(target_evidence="digits").trainings()


def test_the_operation_is_a_baseline_where_it_is_known(tmp_path: Path) -> None:
    """Shares that follow from the operation and from nothing else."""
    made = known(tmp_path)
    labels = made.read_labels(0)
    assert "length_step_and_operation" not in fit(made, "target", QUICK, CPU).probe.metrics["test"]["baselines"]
    kinds = ["add" if i % 3 else "mul" for i in range(len(labels))]
    counts = [{"target": 9 if kind == "add" else 1, "draft": 1} for kind in kinds]
    made.write_labels(0, [replace(x, operation=k, counts=c) for x, k, c in zip(labels, kinds, counts, strict=True)])
    found = fit(made, "target", QUICK, CPU).probe.metrics["test"]["baselines"]
    assert found["length_step_and_operation"]["r2"] > 0.99 and found["length_and_step"]["r2"] < 0.1
    rows = load_rows(made, "target", Features((2,)), "cross")
    assert rows.surface.shape[1] == 4 and rows.surface[1].tolist() == [2.0, 0.0, 1.0, 0.0], "add, mul"


def test_the_probe_says_at_run_time_what_it_said_in_the_test(folder: Folder) -> None:
    fitted = fit(folder, "draft", replace(QUICK, labels="own", epochs=3), CPU)
    test = split(load_rows(folder, "draft", Features((3,)), "own"), QUICK.seed)["test"]
    n = len(test)
    said = fitted.probe({3: test.features}, torch.arange(n), torch.ones(n, dtype=torch.long))
    torch.testing.assert_close(said, fitted.predicted)


def test_training_is_repeatable_and_stops_early(folder: Folder, tmp_path: Path) -> None:
    one, other = (fit(folder, "draft", replace(QUICK, labels="own", epochs=4), CPU) for _ in range(2))
    assert torch.equal(one.predicted, other.predicted)
    shuffled = known(tmp_path, problems=12)
    states = shuffled.read_states(0)
    noise = {name: torch.randn(t.shape, generator=torch.Generator().manual_seed(1)) for name, t in states.items()}
    shuffled.write_shard(0, shuffled.read_samples(0), noise)
    fitted = fit(shuffled, "target", replace(QUICK, epochs=100, patience=4), CPU)
    assert fitted.probe.data["training"]["epochs"] < 50
    assert fitted.probe.metrics["test"]["r2"] < 0.1


def test_calibration_repairs_what_training_got_wrong(folder: Folder) -> None:
    few = fit(folder, "target", replace(QUICK, epochs=1, rate=1e-4), CPU).probe.metrics
    assert few["test"]["ece"] < 0.06 < few["test_uncalibrated"]["ece"]


def test_states_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    made = known(tmp_path, problems=4)
    made.write_shard(0, made.read_samples(0), {k: torch.full_like(v, float("nan")) for k, v in made.read_states(0).items()})  # noqa: E501  # fmt: skip
    with pytest.raises(BadRequest, match="finite"):
        fit(made, "target", QUICK, CPU)


@pytest.mark.parametrize("bad", [{"batch": 0}, {"epochs": 0}, {"calibration": "platt"}])
def test_bad_training_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(BadRequest):
        Training(**bad)  # type: ignore[arg-type]


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    said = torch.linspace(0, 1, 50)
    path = tmp_path / "deep" / "plot.png"
    draw_reliability(path, "a $ probe", said, said**2, said)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
