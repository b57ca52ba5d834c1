"""Operations and bytes of a pass: against PyTorch's own counts, against masks, and by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import semspec
from semspec.errors import BadRequest
from semspec.model import ModelRunner
from semspec.sparse import AttentionPlan, ExpertsPlan, FfnPlan, SparsePlan
from semspec.sparse import layer_ops as ops
from semspec.sparse_fit.calibrate import calibrate
from semspec.sparse_fit.cost import cost
from semspec.sparse_fit.presets import config
from tests.checkpoints import make_model, save
from tests.sparse.runners import check, load, read, text, with_plan
from tests.sparse.test_calibrate import Stories

START, TOKENS = 100, 5
BLOCKS = AttentionPlan(block=8, dense_below=16, rho=0.2, recent=1, score="first")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(save(make_model("llama3.1"), tmp_path_factory.mktemp("dense")))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(save(make_model("qwen3-moe", num_experts_per_tok=3), tmp_path_factory.mktemp("mixture")))


def products(runner: ModelRunner) -> int:
    """Operations in matrix products of one pass, as PyTorch counts them; attention is not among them on a CPU."""
    slot = runner.acquire()
    read(runner, slot, text(1, START))
    with FlopCounterMode(display=False) as counted:
        check(runner, slot, text(2, TOKENS))
    runner.release(slot)
    return counted.get_total_flops()


def counted(runner: ModelRunner, plan: SparsePlan | None) -> float:
    found = cost(runner.shape, plan, START, TOKENS).flops
    return sum(found[part] for part in ("projections", "ffn", "head"))


def test_products_are_those_that_pytorch_counts(runner: ModelRunner, mixture: ModelRunner) -> None:
    for one in (runner, mixture):
        assert counted(one, None) == products(one)


@pytest.mark.parametrize("threshold", [0.3, 0.6])
def test_channels_of_a_union(runner: ModelRunner, threshold: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share that no token needs, seen layer by layer, accounts for every product that is not made."""
    shares: list[float] = []
    original = ops.sparse_ffn

    def watched(ffn, x, limit, sequences):
        active = ffn.activate(ffn.gate_up.halves[0](x)).abs() >= limit
        shares.append(1 - float(active.any(0).float().mean()))
        return original(ffn, x, limit, sequences)

    monkeypatch.setattr(ops, "sparse_ffn", watched)
    plan = FfnPlan(torch.full((3,), threshold), "union", 0.5)
    made = products(with_plan(runner, ffn=plan)) - 3 * 2 * TOKENS * runner.shape.width * runner.shape.ffn
    seen = SparsePlan(ffn=plan, seen={"union_share": torch.tensor(shares)})
    assert counted(runner, seen) == pytest.approx(made), "less the gates that the test itself computes"
    assert min(shares) > 0 and counted(runner, seen) < counted(runner, None)


def test_attention_is_what_masks_show(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[int] = []
    original = ops.attention_mask

    def watched(*given):
        mask = original(*given)
        pairs.append(int(mask.sum()))
        return mask

    monkeypatch.setattr(ops, "attention_mask", watched)
    products(with_plan(runner, attention=BLOCKS))
    assert len(pairs) == 3
    found = cost(runner.shape, SparsePlan(attention=BLOCKS), START, TOKENS)
    assert found.flops["attention"] == sum(4 * runner.shape.head_dim * one for one in pairs)
    shape = runner.shape
    assert found.flops["selection"] == 3 * 2 * shape.kv_heads * shape.head_dim * (START // 8), "one query a head"
    anchors = SparsePlan(attention=replace(BLOCKS, anchors=(0, 2)))
    assert cost(shape, anchors, START, TOKENS).flops["selection"] == found.flops["selection"] * 2 / 3
    every = SparsePlan(attention=replace(BLOCKS, score="share"))
    assert cost(shape, every, START, TOKENS).flops["selection"] == found.flops["selection"] * TOKENS * shape.heads / 2
    means = SparsePlan(attention=replace(BLOCKS, rest="mean"))
    whole, budget = START // 8, BLOCKS.pairs(START, 2) / 2
    extra = 3 * 4 * TOKENS * shape.heads * shape.head_dim * (whole - budget)
    assert cost(shape, means, START, TOKENS).flops["attention"] == pytest.approx(found.flops["attention"] + extra)
    short = cost(shape, SparsePlan(attention=BLOCKS), 12, TOKENS)
    assert short == cost(shape, None, 12, TOKENS), "below L0 nothing is skipped"


def test_bytes_are_weights_and_cache(runner: ModelRunner, mixture: ModelRunner) -> None:
    shape = runner.shape
    found = cost(shape, None, START, TOKENS, 4).bytes
    matrices = (
        shape.parameters - shape.vocab_size * shape.width * (not shape.tied) - shape.width * (2 * shape.num_layers + 1)
    )
    assert found["projections"] + found["ffn"] + found["head"] == 4 * matrices
    assert found["attention"] == 4 * 2 * shape.num_layers * shape.kv_heads * shape.head_dim * START
    experts = mixture.shape.mixture
    assert experts is not None
    one, many = (cost(mixture.shape, None, START, n).bytes["ffn"] for n in (1, 10_000))
    layers = mixture.shape.num_layers - len(experts.dense_layers)
    expert = 2 * 3 * mixture.shape.width * experts.ffn
    assert many - one == pytest.approx(layers * expert * (experts.experts - experts.chosen))


def test_experts_by_what_calibration_saw(mixture: ModelRunner) -> None:
    betas = torch.zeros(3, 2)
    seen = {"token_experts": torch.tensor([[3, 2.5, 2.0]] * 3), "pass_experts": torch.tensor([[4, 3.5, 3.0]] * 3)}
    plan = SparsePlan(experts=ExpertsPlan(betas, 2), seen=seen, made={"k": TOKENS - 1})
    experts, shape = mixture.shape.mixture, mixture.shape
    assert experts is not None
    layers = shape.num_layers - len(experts.dense_layers)
    less = cost(shape, None, START, TOKENS).flops["ffn"] - cost(shape, plan, START, TOKENS).flops["ffn"]
    assert less == pytest.approx(layers * 2 * TOKENS * shape.width * experts.ffn * 3 * 1.0)
    weights = cost(shape, plan, START, TOKENS, 1).bytes["ffn"]
    dense = len(experts.dense_layers) * 3 * shape.width * shape.ffn
    assert weights == pytest.approx(dense + layers * shape.width * (3 * 3.0 * experts.ffn + experts.experts))
    always = SparsePlan(experts=ExpertsPlan(torch.full((3, 2), float("inf")), 1))
    assert cost(shape, always, START, TOKENS).flops["ffn"] < cost(shape, None, START, TOKENS).flops["ffn"]
    for blind in (SparsePlan(experts=ExpertsPlan(betas, 1)), SparsePlan(ffn=FfnPlan(torch.ones(3), absolute=0.1))):
        with pytest.raises(BadRequest, match="calibrate it"):
            cost(shape, blind, START, TOKENS)


def test_a_plan_that_was_saved_is_counted_the_same(tmp_path: Path) -> None:
    pair = semspec.load(save(make_model("llama3.1"), tmp_path / "model"), device="cpu", slots=1, context=512)
    plan = calibrate(pair, Stories(), 2, config("paper", block=4, dense_below=16), k=4, max_new_tokens=20)
    plan.save(tmp_path / "plan")
    assert isinstance(pair.target, ModelRunner)
    shape = pair.target.shape
    assert cost(shape, plan, 200, 5) == cost(shape, SparsePlan.load(tmp_path / "plan"), 200, 5)
    assert cost(shape, plan, 200, 5).over(cost(shape, None, 200, 5))["flops"] < 1


def test_the_command(semspec, tmp_path: Path) -> None:
    folder = save(make_model("llama3.1"), tmp_path / "model")
    SparsePlan(attention=BLOCKS).save(tmp_path / "plan")
    done = semspec("sparse", "cost", folder, "--sparse", tmp_path / "plan", "--at", 64, "--at", 128, "-k", 4)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["context"], row["plan"]) for row in rows] == [
        (64, "dense"), (64, "attention, rho 0.2"), (128, "dense"), (128, "attention, rho 0.2"),
    ]  # fmt: skip
    assert rows[0]["flops_ratio"] == 1 > rows[1]["flops_ratio"] > rows[3]["flops_ratio"]
    assert rows[3]["time_ratio"] is None
    assert semspec("sparse", "cost", "pocket", "--sparse", tmp_path / "plan", "--at", 64).returncode == 0
    done = semspec("sparse", "cost", folder, "--sparse", tmp_path / "plan", "--at", 64, "--time", "--device", "cpu")
    assert done.returncode == 0 and json.loads(done.stdout)[1]["time_ratio"] > 0, done.stderr
