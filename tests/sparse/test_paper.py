"""The paper's rules (arXiv 2512.21911), written out in plain Python, against the preset of that name at work."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median

import pytest
import torch

import semspec
from semspec.errors import BadRequest
from semspec.model import ModelRunner
from semspec.model.attention_metadata import SequenceChunk
from semspec.sparse import AttentionPlan, FfnPlan, SparsePlan
from semspec.sparse.layer_ops import SparseLayerOps
from semspec.sparse_fit.calibrate import build_plan, calibrate
from semspec.sparse_fit.observe import Observations
from semspec.sparse_fit.presets import PRESETS, config
from semspec.sparse_fit.quality import variants
from semspec.types import Score
from tests.checkpoints import make_model, save
from tests.sparse.runners import load, with_plan
from tests.sparse.test_calibrate import Stories

Vectors = list[list[list[float]]]  # [heads][positions][channels]


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def papers_blocks(q: Vectors, keys: Vectors, start: int, plan: AttentionPlan) -> set[tuple[int, int]]:
    """(KV head, block) pairs that a draft reads in a layer that selects: the N best by the first token's query."""
    heads, group, whole = len(keys), len(q) // len(keys), start // plan.block
    if start < plan.dense_below:
        return {(h, b) for h in range(heads) for b in range(whole)}
    n = math.floor((start - plan.dense_below) * plan.rho + plan.dense_below) * heads // plan.block
    score = {}
    for h in range(heads):
        for b in range(whole):
            inside = keys[h][b * plan.block : (b + 1) * plan.block]
            of_queries = [sum(dot(q[h * group + g][0], k) for k in inside) / plan.block for g in range(group)]
            fixed = b < plan.sinks or b >= whole - plan.recent
            score[h, b] = math.inf if fixed else sum(of_queries) / group
    return set(sorted(score, key=lambda pair: -score[pair])[:n])


def papers_attention(
    q: Vectors, keys: Vectors, values: Vectors, start: int, blocks: set[tuple[int, int]], block: int, scale: float
) -> Vectors:
    """Every draft token attends to these blocks, to what is after the last whole block, and to nothing else."""
    group, out = len(q) // len(keys), []
    for head, queries in enumerate(q):
        rows = []
        for i, one in enumerate(queries):
            tail = start // block * block
            sees = [p for p in range(start + i + 1) if p >= tail or (head // group, p // block) in blocks]
            weights = [math.exp(scale * dot(one, keys[head // group][p])) for p in sees]
            whole = math.fsum(weights)
            mixed = [0.0] * len(one)
            for w, p in zip(weights, sees, strict=True):
                mixed = [m + w / whole * v for m, v in zip(mixed, values[head // group][p], strict=True)]
            rows.append(mixed)
        out.append(rows)
    return out


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(save(make_model("llama3.1", num_hidden_layers=4), tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(("start", "anchors"), [(61, None), (77, (0, 2)), (40, (0, 3)), (21, None)])
def test_attention_is_the_papers(runner: ModelRunner, start: int, anchors: tuple[int, ...] | None) -> None:
    """Four layers: each selects, or reuses what the last anchor selected. The last case is shorter than L0."""
    made = config("paper", block=8, dense_below=24, rho=0.25, recent=1).attention
    assert made is not None and (made.score, made.rest, made.spread) == ("first", "nothing", "pairs")
    plan = AttentionPlan(**{**{f: getattr(made, f) for f in made.__slots__}, "anchors": anchors})
    sparse = with_plan(runner, attention=plan)
    slot, n = sparse.acquire(), 5
    sparse.cache.extend([(slot, start)])
    torch.manual_seed(start)
    keys, values = torch.randn(2, 4, 2, start + n, 16)
    sparse.cache.keys[:, slot, :, :start] = keys[:, :, :start]
    ops = sparse.sparsity.layer_ops([Score(sparse, slot, [1] * n, n)], [SequenceChunk(slot, start, n)])
    assert isinstance(ops, SparseLayerOps) == (start >= 24)
    blocks: set[tuple[int, int]] = set()
    for layer in range(4):
        q = torch.randn(4, n, 16)
        if start < 24:
            mask = torch.ones(n, start + n).tril(start).bool()[None, None]
            ours = ops.attend(layer, 0, q, keys[layer], values[layer], mask, 0.3)
        else:
            ours = ops.attend(layer, 0, q, keys[layer], values[layer], None, 0.3)
        if anchors is None or layer in anchors:
            blocks = papers_blocks(q.tolist(), keys[layer].tolist(), start, plan)
        exact = papers_attention(q.tolist(), keys[layer].tolist(), values[layer].tolist(), start, blocks, 8, 0.3)
        torch.testing.assert_close(ours, torch.tensor(exact), atol=1e-5, rtol=1e-4)
    assert (len(blocks) < start // 8 * 2) == (start >= 24)


def test_betas_are_medians_of_ratios() -> None:
    """For each m: the m smallest routing weights over the others, token by token, then the median; odd and even."""
    for count in (7, 10):
        weights = torch.rand(count, 4, generator=torch.Generator().manual_seed(count)).sort(descending=True).values
        observations = Observations(1)
        small = [[sum(row[4 - m :]) / sum(row[: 4 - m]) for m in (1, 2, 3)] for row in weights.tolist()]
        observations.ratios[0] = [torch.tensor(small[:3]), torch.tensor(small[3:])]
        observations.routes[0] = [torch.arange(4).expand(3, 4), torch.arange(4).expand(count - 3, 4)]
        experts = build_plan(observations, config("paper", rho=1.0, experts=3, ffn_threshold=0.0), [0]).experts
        assert experts is not None and experts.most == 3
        exact = [median(row[m] for row in small) for m in range(3)]
        assert experts.betas[0].tolist() == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("threshold", [0.01, 0.05, 0.1])
def test_thresholds_are_absolute_and_their_share_is_counted(threshold: float) -> None:
    observations = Observations(2)
    gates = [torch.rand(3, 40, generator=torch.Generator().manual_seed(i)) * 0.2 for i in range(2)]
    observations.gates[0], observations.gates[1] = [gates[0]], [gates[1], gates[0]]
    plan = build_plan(observations, config("paper", rho=1.0, experts=0, ffn_threshold=threshold), [0, 1])
    assert plan.ffn is not None and plan.ffn.thresholds.tolist() == pytest.approx([threshold] * 2)
    assert plan.ffn.by == "token" and plan.ffn.absolute == threshold
    shares = []
    for passes in ([gates[0]], [gates[1], gates[0]]):
        values = [x for g in passes for row in g.tolist() for x in row]
        shares.append(sum(x < threshold for x in values) / len(values))
    assert plan.seen["token_share"].tolist() == pytest.approx(shares)
    assert plan.ffn.sparsity == pytest.approx(sum(shares) / 2)


def test_experts_of_tokens_and_of_passes_are_counted() -> None:
    observations = Observations(1)
    observations.ratios[0] = [torch.tensor([[0.1, 0.3], [0.4, 0.9]]), torch.tensor([[0.1, 0.2]])]
    observations.routes[0] = [torch.tensor([[4, 1, 3], [1, 0, 2]]), torch.tensor([[5, 6, 7]])]
    tokens, passes = observations.experts_used(torch.tensor([[0.2, 0.25]]))
    assert tokens[0].tolist() == pytest.approx([3, (2 + 3 + 2) / 3, (2 + 3 + 1) / 3])
    assert passes[0].tolist() == pytest.approx([(5 + 3) / 2, (4 + 2) / 2, (4 + 1) / 2])  # 4, 1 and 1, 0, 2 share one


def test_a_preset_is_changed_by_what_is_given() -> None:
    assert set(PRESETS) == {"default", "paper"}
    ours, papers = config("default"), config("paper")
    assert ours.attention is not None and (ours.attention.score, ours.attention.rest) == ("reach", "mean")
    assert (ours.attention.block, ours.attention.dense_below, ours.attention.rho) == (16, 1024, 0.1)
    assert (ours.ffn, ours.ffn_threshold, ours.experts) == (0.0, 0.0, 0)
    assert (papers.ffn_threshold, papers.experts, papers.quantile) == (0.05, None, 0.5)
    mixed = config("paper", score="share", ffn=0.3, experts=0, reuse=0.5)
    assert mixed.attention is not None and mixed.attention.score == "share" and mixed.attention.rest == "nothing"
    assert (mixed.ffn, mixed.ffn_threshold, mixed.experts, mixed.reuse) == (0.3, 0.0, 0, 0.5)
    assert config("paper", rho=1.0).attention is None
    assert (papers.ffn_by, ours.ffn_by, config("paper", ffn_by="union").ffn_by) == ("token", "union", "union")
    for wrong, message in (
        ({"preset": "strict"}, "there is no preset 'strict'; give default or paper"),
        ({"preset": "paper", "ffn": 0.3, "ffn_threshold": 0.1}, "not both"),
        ({"preset": "default", "ffn_threshold": -0.1}, "no negative numbers"),
        ({"preset": "paper", "score": "last"}, "give first or share or reach"),
    ):
        with pytest.raises(BadRequest, match=message):
            config(**wrong)


def test_its_experts_are_three_where_there_are_so_many(tmp_path: Path) -> None:
    small = {"block": 4, "dense_below": 16, "recent": 1}
    dense = semspec.load(save(make_model("llama3.1"), tmp_path / "dense"), device="cpu", slots=1, context=512)
    plan = calibrate(dense, Stories(), 2, config("paper", **small), k=4, max_new_tokens=20)
    assert plan.experts is None and plan.ffn is not None and plan.attention is not None
    folder = save(make_model("qwen3-moe", num_experts_per_tok=3), tmp_path / "mixture")
    mixture = semspec.load(folder, device="cpu", slots=1, context=512)
    plan = calibrate(mixture, Stories(), 2, config("paper", **small), k=4, max_new_tokens=20)
    assert plan.experts is not None and plan.experts.most == 2, "one of three must remain"
    assert plan.seen["token_experts"][0, 0] == 3 and (plan.seen["pass_experts"][0].diff() <= 0).all()


def test_the_papers_series_are_variants() -> None:
    whole = SparsePlan(attention=AttentionPlan(score="first"), ffn=FfnPlan(torch.ones(2), "token", 0.3, 0.05))
    found = variants(whole, 2, dense_below=[4096, 1024], thresholds=[0.01, 0.1])
    assert list(found) == [
        "dense", "attention, rho 0.1 above 4096", "attention, rho 0.1 above 1024", "ffn below 0.01 by token",
        "ffn below 0.01 by union", "ffn below 0.1 by token", "ffn below 0.1 by union", "all of the plan",
    ]  # fmt: skip
    one = found["ffn below 0.1 by token"]
    assert one is not None and one.ffn is not None and one.ffn.thresholds.tolist() == pytest.approx([0.1, 0.1])


def test_the_command(semspec, tmp_path: Path) -> None:
    folder, plan = save(make_model("llama3.1"), tmp_path / "model"), tmp_path / "plan"
    common = ["--task", "pocket", "--problems", 1, "-k", 4, "--device", "cpu", "--context", 1024]
    common += ["--max-new-tokens", 20]
    done = semspec(
        "sparse", "calibrate", folder, "--out", plan, *common, "--preset", "paper", "--block", 4, "--dense-below", 16
    )
    assert done.returncode == 0, done.stderr
    saved = SparsePlan.load(plan)
    assert saved.attention is not None and saved.ffn is not None and "ffn below 0.05 by token" in done.stderr
    assert (saved.attention.score, saved.attention.rest, saved.ffn.absolute) == ("first", "nothing", 0.05)
    assert json.loads(done.stdout)["made"]["preset"] == "paper"
    refused = semspec("sparse", "calibrate", folder, "--out", plan, *common, "--preset", "papers")
    assert refused.returncode == 2 and "there is no preset 'papers'" in refused.stderr
