"""From what dense checks show to a plan; what a plan costs; the commands."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import semspec
from semspec.errors import BadRequest
from semspec.model import ModelRunner
from semspec.model.experts import num_skipped
from semspec.probe import fingerprint
from semspec.sparse import AttentionPlan, ExpertsPlan, FfnPlan, SparsePlan
from semspec.sparse_fit.calibrate import CalibrationConfig, anchors, build_plan, calibrate, room
from semspec.sparse_fit.observe import Observations, Observer, overlap
from semspec.sparse_fit.quality import Tally, measure, merge, select, variants
from semspec.sparse_fit.table import in_markdown
from semspec.tasks import Problem, Task
from tests.checkpoints import make_model, save
from tests.fakes import FakeRunner
from tests.sparse.runners import course, load

SMALL = AttentionPlan(block=4, dense_below=16, rho=0.2, sinks=1, recent=1)


@dataclass(frozen=True)
class Stories(Task):
    name = "stories"
    max_new_tokens = 30
    fitting: bool = False

    def problems(self, n: int | None, seed: int) -> list[Problem]:
        words = "the quick brown fox jumps over one lazy dog because light scatters"
        start = "fit" if self.fitting else "test"
        return [Problem(f"{start}/{i}", f"{start} {i} " + words[i:] * 3, None) for i in range(n or 1)]

    def score(self, problem: Problem, text: str) -> bool:
        return len(text) % 2 == 0

    def for_fitting(self) -> Task:
        return replace(self, fitting=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> semspec.Pair:
    folder = save(make_model("llama3.1", num_hidden_layers=4), tmp_path_factory.mktemp("model"))
    return semspec.load(folder, device="cpu", slots=2, context=512)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> semspec.Pair:
    folder = save(make_model("qwen3-moe", num_experts_per_tok=3), tmp_path_factory.mktemp("mixture"))
    return semspec.load(folder, device="cpu", slots=2, context=512)


# -- what is seen


def test_watching_changes_nothing(pair: semspec.Pair, mixture: semspec.Pair) -> None:
    for one in (pair.target, mixture.target):
        assert isinstance(one, ModelRunner)
        watched = ModelRunner(one.transformer, 2, one.max_seq_len)
        watched.sparsity = Observer(watched, SMALL)
        for ours, dense in zip(course(watched), course(one), strict=True):
            assert torch.equal(ours, dense)
        assert watched.sparsity.observations.rounds == 5


def test_overlap_is_jaccards() -> None:
    one, other = torch.tensor([[1, 1, 0, 0]]).bool(), torch.tensor([[0, 1, 1, 1]]).bool()
    assert float(overlap(one, other)) == 0.25
    assert float(overlap(one, one)) == float(overlap(one & False, one & False)) == 1.0


def test_a_model_whose_layers_are_alike_is_seen_to_be(tmp_path: Path) -> None:
    """Planted: the same queries and keys in every layer, from a residual stream that nothing is added to."""
    model = make_model("llama3", num_hidden_layers=4)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.load_state_dict(model.model.layers[0].self_attn.state_dict())
            layer.input_layernorm.load_state_dict(model.model.layers[0].input_layernorm.state_dict())
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    alike = load(save(model, tmp_path))
    alike.sparsity = Observer(alike, SMALL)
    course(alike)
    seen = alike.sparsity.observations.layer_overlap()
    assert torch.allclose(seen, torch.ones(4, 4))
    assert anchors(seen, [0, 1, 2, 3], 0.7, shallow=1) == (0,)


# -- what follows


def test_anchors_open_where_blocks_become_unlike() -> None:
    seen = torch.tensor([[1, 0.9, 0.9, 0.5, 0.5], [0.9, 1, 0.8, 0.5, 0.5], [0.9, 0.8, 1, 0.6, 0.5],
                         [0.5, 0.5, 0.6, 1, 0.75], [0.5, 0.5, 0.5, 0.75, 1]])  # fmt: skip
    every = [0, 1, 2, 3, 4]
    assert anchors(seen, every, 0.7, shallow=0) == (0, 3)
    assert anchors(seen, every, 0.7, shallow=2) == (0, 1, 3)
    assert anchors(seen, every, 0.8, shallow=0) == (0, 3, 4)
    assert anchors(seen, every, 0.0, shallow=1) == (0,)
    assert anchors(seen, [1, 4], 0.7, shallow=0) == (1, 4), "layers with a window are nobody's anchors"


def test_thresholds_leave_out_the_wished_share(pair: semspec.Pair) -> None:
    plan = calibrate(pair, Stories(), 3, CalibrationConfig(SMALL, ffn=0.4), k=4, max_new_tokens=30)
    assert plan.model == fingerprint(pair.target) and plan.attention is not None and plan.ffn is not None
    runner = pair.target
    assert isinstance(runner, ModelRunner) and runner.sparsity is None and runner.free == 2
    runner.sparsity = observer = Observer(runner, SMALL)
    course(runner, rounds=3)
    runner.sparsity = None
    for layer, threshold in enumerate(plan.ffn.thresholds):
        below = torch.cat([g.flatten() for g in observer.observations.gates[layer]]) < threshold
        assert float(below.float().mean()) == pytest.approx(0.4, abs=0.1)
    union = plan.seen["union_share"]
    assert ((union > 0) & (union < 0.4)).all(), "several tokens together need more channels than one"
    assert plan.seen["token_overlap"].shape == (4, 4) and plan.made["rounds"] > 10


def test_betas_are_what_a_share_of_tokens_stays_below(mixture: semspec.Pair) -> None:
    for share in (0.5, 0.1):
        plan = calibrate(
            mixture, Stories(), 3, CalibrationConfig(None, experts=2, quantile=share), k=4, max_new_tokens=30
        )
        assert plan.attention is None and plan.experts is not None
        betas = plan.experts.betas
        assert betas.shape == (3, 2) and (betas[1] == 0).all(), "layer 1 has no experts"
        assert ((betas[0] > 0) & (betas[0] < 2)).all()
    observations = Observations(2)
    observations.ratios[1] = [torch.tensor([[0.1, 0.4], [0.2, 0.5]]), torch.tensor([[0.9, 0.6]])]
    experts = build_plan(observations, CalibrationConfig(None, experts=1), [0, 1]).experts
    assert experts is not None and experts.most == 1
    torch.testing.assert_close(experts.betas, torch.tensor([[0.0, 0.0], [0.2, 0.5]]))


def test_calibration_takes_problems_that_are_never_tested_on(pair: semspec.Pair) -> None:
    asked: list[str] = []

    @dataclass(frozen=True)
    class Noted(Stories):
        def problems(self, n: int | None, seed: int) -> list[Problem]:
            found = super().problems(n, seed)
            asked.extend(p.id for p in found)
            return found

    calibrate(pair, Noted(), 1, CalibrationConfig(SMALL), k=4)
    assert asked == ["fit/0"]


def test_what_cannot_be_calibrated_is_refused(pair: semspec.Pair) -> None:
    with pytest.raises(BadRequest, match="smaller --dense-below"):
        calibrate(pair, Stories(), 1, CalibrationConfig(AttentionPlan(dense_below=4096)))
    with pytest.raises(BadRequest, match="uses 0 for a token"):
        calibrate(pair, Stories(), 1, CalibrationConfig(SMALL, experts=1))
    for wrong in ({"reuse": 2.0}, {"ffn": -0.1}, {"quantile": 7.0}, {"shallow": -1}):
        with pytest.raises(BadRequest):
            CalibrationConfig(**wrong)
    assert isinstance(pair.target, ModelRunner) and pair.target.sparsity is None
    with pytest.raises(BadRequest, match="long enough"):
        build_plan(Observations(2), CalibrationConfig(SMALL), [0, 1])


# -- what it costs


def test_a_plan_is_taken_apart_as_the_paper_does() -> None:
    whole = SparsePlan(
        attention=replace(SMALL, anchors=(0, 2)), ffn=FfnPlan(torch.zeros(3), "union", 0.5),
        experts=ExpertsPlan(torch.zeros(3, 7), 2),
    )  # fmt: skip
    found = variants(whole, 3, [0.1, 0.5], [1, 2, 3])
    assert list(found) == [
        "dense", "attention, rho 0.1", "attention*, rho 0.1", "attention, rho 0.5", "attention*, rho 0.5",
        "ffn 50% by token", "ffn 50% by union", "up to 1 experts fewer", "up to 2 experts fewer",
        "up to 3 experts fewer", "all of the plan",
    ]  # fmt: skip
    one = found["attention*, rho 0.5"]
    assert one is not None and one.ffn is None and one.attention == replace(SMALL, rho=0.5, anchors=(0, 2))


def test_a_full_budget_costs_nothing_and_a_small_one_something(pair: semspec.Pair) -> None:
    plans = {
        "dense": None,
        "full": SparsePlan(attention=replace(SMALL, rho=1.0)),
        "little": SparsePlan(attention=replace(SMALL, rho=0.0), refresh=1),
    }
    *_, (dense, full, little) = measure(pair, Stories(), 3, plans, k=4)
    for same in (dense, full):
        assert (
            same["kl"]["value"] == 0.0 and same["top1_agreement"]["share"] == 1.0 and same["same_text"]["share"] == 1.0
        )
        assert same["tau_against_dense"]["value"] == 1.0 and same["right_against_dense"]["value"] == 0.0
    assert little["kl"]["value"] > 0.01 and little["top1_agreement"]["share"] < 1.0 and little["drift"] > 0


def test_problems_together_are_measured_as_one_by_one(pair: semspec.Pair) -> None:
    """A planted fault that this catches: logits of a group compared with those of other problems."""
    plans = {"dense": None, "little": SparsePlan(attention=replace(SMALL, rho=0.0), refresh=2)}
    runner = pair.target
    assert isinstance(runner, ModelRunner)

    def figures(slots: int) -> list[dict[str, Any]]:
        alone = semspec.Pair(ModelRunner(runner.transformer, slots, 512), pair.tokenizer, None, pair.eos)
        *first, last = measure(alone, Stories(), 5, plans, k=4)
        assert [rows[0]["same_text"]["total"] for rows in first] == list(range(slots, 5, slots))
        return last

    one_by_one, together = figures(1), figures(3)
    assert one_by_one[1]["kl"]["value"] > 0.01
    for one, other in zip(one_by_one, together, strict=True):
        assert one.keys() == other.keys()
        for name in ("kl", "top1_agreement", "right", "right_against_dense", "tau_against_dense", "same_text"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
        assert one["tau"] == pytest.approx(other["tau"])
    assert one_by_one[1]["drift"] == pytest.approx(together[1]["drift"], rel=1e-4)


def test_some_variants_can_be_picked(pair: semspec.Pair) -> None:
    plans = variants(SparsePlan(attention=SMALL, ffn=FfnPlan(torch.ones(3), sparsity=0.5)), 3, [0.1, 0.5], [])
    assert list(select(plans, ["rho 0.5", "union"])) == ["dense", "attention, rho 0.5", "ffn 50% by union"]
    assert select(plans, []) == plans
    with pytest.raises(BadRequest, match="no variant of the plan has experts in its name; there are: dense, attention"):
        select(plans, ["experts"])


def test_experts_left_out_of_every_token(mixture: semspec.Pair) -> None:
    runner = mixture.target
    assert isinstance(runner, ModelRunner) and runner.shape.mixture is not None
    plan = SparsePlan(experts=ExpertsPlan(torch.zeros(runner.num_layers, 2), 1))
    always = variants(plan, runner.num_layers, [], [], [2])["always 2 experts fewer"]
    assert always is not None and always.experts is not None
    weights = torch.tensor([[0.34, 0.33, 0.33], [0.9, 0.09, 0.01]])
    assert num_skipped(weights, always.experts.betas[0], always.experts.most).tolist() == [2, 2]


def test_runs_on_the_same_problems_are_one_table(tmp_path: Path) -> None:
    share = {"share": 0.5, "low": 0.4, "high": 0.6}
    loss = {"value": -0.01, "low": -0.02, "high": 0.0}
    row = {"plan": "dense", "kl": {"value": 0.0, "low": 0.0, "high": 0.0}, "top1_agreement": share, "right": share}
    row |= {"right_against_dense": loss, "tau": 3.0, "tau_against_dense": {"value": 1.0, "low": 0.99, "high": 1.01}}
    other = row | {"plan": "attention, rho 0.1", "kl": {"value": 0.0123, "low": 0.01, "high": 0.02}}
    unscored = other | {"right": None, "right_against_dense": None}
    text = in_markdown([{"label": "first", "rows": [row, other]}, {"rows": [row, unscored]}])
    lines = text.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| dense", "| first: attention, rho 0.1", "| attention, rho 0.1",
    ]  # fmt: skip
    assert "| 0.012 [0.01, 0.02] | 50.0 [40.0, 60.0] | 50.0 [40.0, 60.0] | -1.0 [-2.0, +0.0] | 3.00 | 1.000" in lines[3]
    assert " | – | – | 3.00 | " in lines[4]


def test_runs_on_parts_of_the_problems_are_joined_to_the_run_on_all() -> None:
    whole = Tally([0.1, 0.2, 0.4], [(3, 4), (4, 4), (1, 5)], [True, False, True], [5, 6, 9], [2, 3, 3], [True] * 3)
    dense = Tally([0.0] * 3, [(4, 4), (4, 4), (5, 5)], [True, True, True], [6, 6, 9], [2, 2, 3], [True] * 3)

    def document(part: slice, ids: list[str]) -> dict[str, Any]:
        some = [Tally(*(values[part] for values in asdict(t).values())) for t in (dense, whole)]
        rows = [t.figures(name, some[0]) for t, name in zip(some, ("dense", "rho"), strict=True)]
        return {"label": "a", "task": "t", "seed": len(ids), "ids": ids, "problems": len(ids), "rows": rows}

    parts = [document(slice(0, 1), ["1"]), document(slice(1, 3), ["2", "3"])]
    both = merge(json.loads(json.dumps(parts)))
    assert json.dumps(both["rows"]) == json.dumps(document(slice(0, 3), ["1", "2", "3"])["rows"])
    assert both["ids"] == ["1", "2", "3"] and both["seed"] == [1, 2] and both["problems"] == 3
    for other, message in (
        ({"label": "b"}, "label differ"),
        ({"rows": parts[1]["rows"][:1]}, "their plans differ"),
        ({"ids": ["1", "3"]}, "1 problems are in two"),
        ({"rows": [{"plan": "dense"}, {"plan": "rho"}]}, "no figures by problem"),
    ):
        with pytest.raises(BadRequest, match=message):
            merge([parts[0], parts[1] | other])


def test_the_commands(semspec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from semspec import tasks

    folder = save(make_model("llama3.1"), tmp_path / "model")
    monkeypatch.setitem(tasks.REGISTRY, "stories", Stories)
    plan, figures = tmp_path / "plan", tmp_path / "figures.json"
    common = ["--task", "stories", "--problems", "2", "-k", "4", "--device", "cpu", "--context", "512"]
    done = semspec(
        "sparse",
        "calibrate",
        folder,
        "--out",
        plan,
        *common,
        "--block",
        4,
        "--dense-below",
        16,
        "--ffn",
        0.3,
        "--rest",
        "mean",
    )
    assert done.returncode == 0, done.stderr
    told, attention = json.loads(done.stdout), SparsePlan.load(plan).attention
    assert attention is not None and attention.rest == "mean" and "others by their mean" in done.stderr
    refused = semspec("sparse", "calibrate", folder, "--out", plan, *common, "--rest", "some")
    assert refused.returncode == 2 and "give nothing or mean" in refused.stderr
    assert told["anchors"][0] == 0 and len(told["thresholds"]) == 3 and told["made"]["task"] == "stories"
    done = semspec("sparse", "quality", folder, "--sparse", plan, *common, "--rho", 0.1, "--out", figures)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    written = json.loads(figures.read_text())["rows"]
    assert [row["each"].keys() >= {"kl", "right"} for row in written] == [True] * len(rows)
    assert [{k: v for k, v in row.items() if k != "each"} for row in written] == rows
    assert rows[0]["plan"] == "dense" and len(rows) >= 4
    done = semspec("sparse", "table", figures)
    assert done.returncode == 0 and done.stdout.startswith("| plan |") and "attention, rho 0.1" in done.stdout
    again = semspec("sparse", "join", figures, figures, "--out", tmp_path / "both.json")
    assert again.returncode == 2 and "2 problems are in two of the files" in again.stderr
    pytest.importorskip("matplotlib")
    done = semspec("sparse", "plot", plan, "--out", tmp_path / "plots", "--figures", figures)
    assert done.returncode == 0 and len(list((tmp_path / "plots").glob("*.png"))) == 3
    refused = semspec("sparse", "plot", plan, "--out", tmp_path / "plots", "--figures", plan / "plan.json")
    assert refused.returncode == 2


def test_a_problem_that_does_not_fit_is_refused_by_its_length():
    runner = FakeRunner(lambda held: [0.0], 1, max_seq_len=20)
    assert room(runner, 12, 5) == 5 and room(runner, 18, 5) == 2
    with pytest.raises(BadRequest, match="a problem has 20 tokens and the context is 20; give a larger --context"):
        room(runner, 20, 5)
