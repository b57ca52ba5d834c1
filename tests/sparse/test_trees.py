"""Sparse checks of tree drafts: blocks are chosen for the whole tree, and each token sees its own line of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from semspec import tree
from semspec.model import ModelRunner
from semspec.model.attention_metadata import SequenceChunk
from semspec.sparse import AttentionPlan, FfnPlan
from semspec.sparse.attention import block_scores, select_blocks
from semspec.types import Score
from tests.checkpoints import make_model, save
from tests.model.test_graph_runner import close
from tests.sparse.runners import load, read, text, with_plan
from tests.sparse.test_graph_runner import quick

PARENTS = (-1, 0, 0, 2, -1, 4, 5)
PLAN = AttentionPlan(block=8, dense_below=32, rho=0.2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(save(make_model("llama3.1"), tmp_path_factory.mktemp("model")))


def course(runner: ModelRunner, rounds: int = 5) -> list[Tensor]:
    """Trees after a prompt, of which one path or another is kept."""
    slot, found, paths = runner.acquire(), [], [*tree.paths(PARENTS), (), (0,)]
    words = text(0, 150)
    read(runner, slot, words[:-1])
    for i in range(rounds):
        tokens, path, start = text(i + 1, len(PARENTS)), paths[i % len(paths)], runner.length(slot) + 1
        feed = [words[-1], *tokens]
        found.append(runner.score([Score(runner, slot, feed, len(feed), parents=PARENTS)])[0].logits)
        runner.compact(slot, start, path)
        words += [*(tokens[j] for j in path), 7]
        assert runner.length(slot) == len(words) - 1
    runner.release(slot)
    return found


@pytest.mark.parametrize("refresh", [0, 2])
def test_as_on_a_gpu(model: ModelRunner, refresh: int) -> None:
    plain, fused = (make(model, attention=PLAN, refresh=refresh) for make in (with_plan, quick))
    for ours, theirs in zip(course(fused), course(plain), strict=True):
        close(ours, theirs)
    assert len(fused.sparsity.refresh.errors) == len(plain.sparsity.refresh.errors) == (1 if refresh else 0)


def test_what_a_refresh_reads_again_is_the_accepted_path(model: ModelRunner) -> None:
    """Refreshed at every second round, rounds are dense over a dense cache: the same as without a plan."""
    refreshed = course(with_plan(model, attention=PLAN, refresh=1))
    dense = course(ModelRunner(model.transformer, 2, model.max_seq_len))
    assert not torch.allclose(refreshed[0], dense[0], atol=1e-3), "the plan leaves something out"
    for ours, theirs in zip(refreshed[1::2], dense[1::2], strict=True):
        close(ours, theirs)


def test_a_plan_that_leaves_nothing_out_is_dense(model: ModelRunner) -> None:
    everything = AttentionPlan(block=8, dense_below=0, rho=1.0)
    for ours, theirs in zip(course(with_plan(model, attention=everything)), course(with_plan(model)), strict=True):
        close(ours, theirs)


def test_channels_are_chosen_for_the_whole_tree(model: ModelRunner) -> None:
    plan = FfnPlan(torch.full((model.num_layers,), 0.05), "union")
    for ours, theirs in zip(course(quick(model, ffn=plan)), course(with_plan(model, ffn=plan)), strict=True):
        close(ours, theirs)


def test_one_layer_against_attention_written_out(model: ModelRunner) -> None:
    plan = AttentionPlan(block=8, dense_below=0, rho=0.3, sinks=1, recent=0)
    sparse = with_plan(model, attention=plan)
    slot, start, n = sparse.acquire(), 61, len(PARENTS)
    sparse.cache.extend([(slot, start)])
    keys, values = torch.randn(2, 2, start + n, 16)
    sparse.cache.keys[1, slot, :, :start] = keys[:, :start]
    q = torch.randn(4, n, 16)
    span = SequenceChunk(slot, start, n, PARENTS)
    ours = sparse.sparsity.layer_ops([Score(sparse, slot, [1] * n, n, parents=PARENTS)], [span]).attend(
        1, 0, q, keys, values, None, 0.3
    )
    means = keys[None, :, :56].unflatten(2, (7, 8)).mean(3)
    scores = block_scores(q.transpose(0, 1)[None], means, torch.tensor([7]), plan, sparse.shape.attention_scale)
    chosen = select_blocks(scores, torch.tensor([7]), torch.tensor([plan.pairs(start, 2)]), plan)[0]
    for head in range(4):
        kv = head // 2
        for i in range(n):
            line = {start + j for j in tree.path(PARENTS, i)}
            sees = [p for p in range(start + n) if (p in line if p >= start else p >= 56 or chosen[kv, p // 8])]
            weights = F.softmax(torch.tensor([float(q[head, i] @ keys[kv, p]) * 0.3 for p in sees]), 0)
            exact = sum(w * values[kv, p] for w, p in zip(weights, sees, strict=True))
            torch.testing.assert_close(ours[head, i], exact, atol=1e-5, rtol=1e-4)
