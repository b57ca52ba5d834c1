"""The graph runner's sparse checks against the plain ones, on a CPU; see tests/model/test_graph_runner.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from semspec.errors import ModelError
from semspec.model import ModelRunner
from semspec.model.config import Shape
from semspec.model.experts import FeedForward
from semspec.model.graph_runner import GraphRunner
from semspec.model.graphs import NoGraphs
from semspec.model.kernels import Kernels, reference_kernels
from semspec.model.transformer import Transformer
from semspec.model.weights import Checkpoint
from semspec.sparse import AttentionPlan, ExpertsPlan, FfnPlan
from semspec.types import Decode, Sampling, Score
from tests.checkpoints import make_model, save
from tests.model.test_graph_runner import Rehearsed, close
from tests.quantised_checkpoints import FORMATS, rewritten, write
from tests.sparse.runners import course, load, read, text, with_plan

PLAN = AttentionPlan(block=8, dense_below=32, rho=0.2, sinks=1, recent=1, anchors=(0, 2))


def quick(runner: ModelRunner, kernels: Kernels | None = None, **parts: object) -> ModelRunner:
    twin = with_plan(runner, **parts)
    twin.use(GraphRunner(runner.transformer, twin.cache, kernels or reference_kernels(), Rehearsed()))
    return twin


@pytest.mark.parametrize(("score", "spread"), [("share", "pairs"), ("first", "heads"), ("reach", "pairs")])
@pytest.mark.parametrize("family", ["llama3.1", "qwen3", "gemma3"])
def test_checks_are_the_same_either_way(family: str, score: str, spread: str, tmp_path: Path) -> None:
    model = load(save(make_model(family), tmp_path / family))
    plan = AttentionPlan(block=8, dense_below=32, rho=0.2, score=score, spread=spread)
    for refresh in (0, 2):
        plain, fused = with_plan(model, attention=plan, refresh=refresh), quick(model, attention=plan, refresh=refresh)
        for ours, theirs in zip(course(fused), course(plain), strict=True):
            close(ours, theirs)
        assert len(fused.sparsity.refresh.errors) == len(plain.sparsity.refresh.errors) == (1 if refresh else 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(save(make_model("llama3.1", num_hidden_layers=4), tmp_path_factory.mktemp("model")))


def test_a_batch_of_all_kinds_is_the_same_either_way(model: ModelRunner) -> None:
    lengths = [200, 20, 97, 60]
    feeds = [(text(10, 6), 6), (text(11, 3), 3), (text(12, 30), 9), (text(14, 1), 1)]
    both = []
    for one in (with_plan(model, attention=PLAN), quick(model, attention=PLAN)):
        slots = [one.acquire() for _ in lengths]
        for i, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            read(one, slot, text(i, length))
        both.append(one.score([Score(one, s, *f) for s, f in zip(slots, feeds, strict=True)]))
    for ours, theirs in zip(*both, strict=True):
        close(ours.logits, theirs.logits)


def test_where_nothing_is_left_out_the_dense_graph_serves(model: ModelRunner) -> None:
    fused = quick(model, attention=PLAN)
    slot = fused.acquire()
    read(fused, slot, text(1, 20))
    fused.score([Score(fused, slot, text(2, 5), 5)])
    fused.decode([Decode(fused, slot, [3], 4, Sampling(), 0)])
    read(fused, slot, text(3, 100))
    fused.score([Score(fused, slot, [4], 1)])
    keys = [key for key in fused.graph_runner.launcher.keys if key[0] == "score"]
    assert {key[-1] for key in keys} == {None}
    fused.score([Score(fused, slot, text(2, 5), 5)])
    assert fused.graph_runner.launcher.keys[-1][-1] is not None


def test_layers_that_are_no_anchors_launch_nothing(model: ModelRunner) -> None:
    calls: list[tuple[int, ...]] = []

    def all_blocks(
        q: torch.Tensor, means: torch.Tensor, *rest: object, marks: None, variances: None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(means.shape)
        heads, most = means.shape[1:3]
        lists = torch.arange(most, dtype=torch.int32).expand(len(q), heads, most)
        full = rest[1] // PLAN.block  # type: ignore[operator]
        return lists.contiguous(), full[:, None].expand(-1, heads).int()

    fused = quick(model, replace(reference_kernels(), choose_blocks=all_blocks), attention=PLAN)
    fused.graph_runner.launcher = NoGraphs()
    ours = course(fused, rounds=3)
    assert len(calls) == 3 * len(PLAN.anchors or ()), "one choice an anchor and pass"
    for one, dense in zip(ours, course(with_plan(model), rounds=3), strict=True):
        close(one, dense)


@pytest.mark.parametrize(("by", "fused"), [("union", True), ("token", False)])
def test_channels_are_left_out_either_way(model: ModelRunner, by: str, fused: bool) -> None:
    parts = {"ffn": FfnPlan(torch.tensor([0.2, 0.0, 0.3, 0.3]), by), "attention": PLAN}
    ours = quick(model, **parts)
    for one, other in zip(course(ours), course(with_plan(model, **parts)), strict=True):
        close(one, other)
    assert any(key[-1] is not None for key in ours.graph_runner.launcher.keys) == fused
    dense = course(with_plan(model, attention=PLAN))
    assert not all(torch.allclose(one, other, atol=1e-3) for one, other in zip(course(ours), dense, strict=True))


def test_down_projections_are_transposed_once_and_where_needed(model: ModelRunner) -> None:
    ours = quick(model, ffn=FfnPlan(torch.tensor([0.02, 0.0, 0.05, 0.02])))
    columns = ours.sparsity.columns
    assert [c is not None for c in columns] == [True, False, True, True]
    assert torch.equal(columns[2], model.transformer.layers[2].ffn.down.weight.t())
    again = quick(model, ffn=FfnPlan(torch.full((4,), 0.1))).sparsity.columns
    assert again[2] is columns[2] and again[1] is not None, "plans of one model share them"
    assert quick(model, attention=PLAN).sparsity.columns == []


def test_no_memory_for_transposed_projections_is_an_error_that_says_so(
    model: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparsity = quick(model, ffn=FfnPlan(torch.full((4,), 0.1))).sparsity

    def transposed_down(self: FeedForward) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(FeedForward, "transposed_down", transposed_down)
    with pytest.raises(ModelError, match="a plan without channels"):
        _ = sparsity.columns


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_experts_are_left_out_either_way(family: str, tmp_path: Path) -> None:
    mixture = load(save(make_model(family, num_experts_per_tok=4), tmp_path))
    depth = mixture.shape.num_layers
    for betas in (torch.full((depth, 3), 0.35), torch.tensor([0.3, 0.6, 2.0]).expand(depth, 3).contiguous()):
        parts = {"experts": ExpertsPlan(betas, 3), "attention": PLAN}
        ours, plain = quick(mixture, **parts), with_plan(mixture, **parts)
        sparse, dense = course(ours), course(with_plan(mixture, attention=PLAN))
        for one, other in zip(sparse, course(plain), strict=True):
            close(one, other)
        assert not all(torch.allclose(one, other, atol=1e-3) for one, other in zip(sparse, dense, strict=True))
        batches = []
        for runner in (ours, plain):  # two checks, a prompt and a single token: only checks leave out experts
            slots = [runner.acquire() for _ in range(4)]
            feeds = [(text(10, 6), 6), (text(11, 4), 4), (text(12, 30), 1), (text(13, 1), 1)]
            batches.append(runner.score([Score(runner, s, *f) for s, f in zip(slots, feeds, strict=True)]))
        for one, other in zip(*batches, strict=True):
            close(one.logits, other.logits)


def test_decoded_tokens_are_recorded_for_the_refresh(model: ModelRunner) -> None:
    """What a fused roll wrote between two checks is fed again with them."""
    fused, dense = quick(model, attention=PLAN, refresh=1), with_plan(model)
    for one in (fused, dense):
        slot = one.acquire()
        read(one, slot, text(1, 100))
        one.score([Score(one, slot, text(2, 5), 5)])
    written = fused.decode([Decode(fused, slot, [9], 4, Sampling(), 0)])[0].tokens
    read(dense, slot, [9, *written[:-1]])
    ours, theirs = (one.score([Score(one, slot, text(3, 5), 5)])[0].logits for one in (fused, dense))
    close(ours, theirs)
    assert fused.sparsity.refresh.errors[0].tokens == 5 + 4


def test_tritons_kernels_give_the_same(model: ModelRunner, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")
    from semspec.model.kernels import triton_kernels
    from tests.interpreter import allow_new_numpy

    allow_new_numpy()
    mixture = load(save(make_model("qwen3-moe"), tmp_path))
    for one, parts in (
        (model, {"attention": PLAN, "ffn": FfnPlan(torch.full((4,), 0.2))}),
        (mixture, {"experts": ExpertsPlan(torch.full((mixture.num_layers, 1), 0.5), 1)}),
    ):
        ours = quick(one, triton_kernels(), **parts)
        ours.graph_runner.launcher = NoGraphs()
        exact = course(quick(one, **parts), prompt=60, rounds=2)
        for mine, theirs in zip(course(ours, prompt=60, rounds=2), exact, strict=True):
            close(mine, theirs)


def test_channels_of_quantised_networks_beside_plain_attention_are_skipped(tmp_path: Path) -> None:
    """No kernel skips them, so such checks are made one operation at a time; files often leave attention plain."""
    source = save(make_model("llama3"), tmp_path / "source")
    quantise, config = FORMATS["fp8 block, bf16"]
    folder = write(source, tmp_path / "made", quantise, config | {"modules_to_not_convert": ["self_attn", "lm_head"]})
    plain = load_file(source / "model.safetensors")

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in plain if "self_attn" in n and n.endswith("_proj.weight")]:
            del tensors[f"{name}_scale_inv"]
            tensors[name] = plain[name]

    rewritten(folder / "quantised", change)
    with Checkpoint(folder / "quantised") as checkpoint:
        shape = Shape.read(folder / "quantised")
        model = ModelRunner(Transformer(shape, checkpoint, torch.device("cpu"), torch.float32, "stored"), 4, 512)
    parts = {"ffn": FfnPlan(torch.tensor([0.2, 0.1, 0.3]), "union")}
    for ours, theirs in zip(course(quick(model, **parts)), course(with_plan(model, **parts)), strict=True):
        close(ours, theirs)
