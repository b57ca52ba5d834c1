"""A draft head's passes as on a GPU, against those without graphs: buffers, a pool that grows, trees, batches."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from semspec import tree
from semspec.model.heads.config import HeadConfig, HeadTensors
from semspec.model.heads.eagle import EagleHead, TargetParts
from semspec.model.heads.graphs import FIRST_ROWS, HeadGraphs
from semspec.model.heads.runner import HeadRunner
from semspec.model.kernels import reference_kernels
from semspec.model.linear import DenseLinear
from semspec.model.weights import Checkpoint
from semspec.types import Decode, Sampling, Score
from tests.heads import make_head
from tests.model.test_graph_runner import Rehearsed

VOCAB, WIDTH = 50, 64
CAPACITY = 400


def head_in(folder: Path, **options: object) -> EagleHead:
    make_head(folder, width=WIDTH, target_width=WIDTH, target_vocab=VOCAB, vocab=40, layers=[0, 1, 2], **options)  # type: ignore[arg-type]
    parts = TargetParts(torch.randn(VOCAB, WIDTH), DenseLinear(torch.randn(VOCAB, WIDTH)), 3, VOCAB, torch.float32)
    with Checkpoint(folder) as checkpoint:
        tensors = HeadTensors(checkpoint)
        return EagleHead(HeadConfig.read(tensors, 3, WIDTH), tensors, parts, torch.device("cpu"))


def both(folder: Path, **options: object) -> tuple[HeadRunner, HeadRunner]:
    head = head_in(folder, **options)
    plain, fused = HeadRunner(head, VOCAB, CAPACITY), HeadRunner(head, VOCAB, CAPACITY)
    fused.graphs = HeadGraphs(head, CAPACITY, reference_kernels(), Rehearsed)
    return plain, fused


def numbers(seed: int, count: int) -> list[int]:
    return torch.randint(VOCAB, [count], generator=torch.Generator().manual_seed(seed)).tolist()


def course(runner: HeadRunner) -> list[Tensor]:
    """Several sequences: prompts longer than a graph takes, short feeds together, rolls, trees, truncations."""
    said, slots = list[Tensor](), [runner.acquire() for _ in range(FIRST_ROWS + 2)]
    for i, slot in enumerate(slots):
        states = torch.randn(3, 90 + i, WIDTH, generator=torch.Generator().manual_seed(i))
        runner.observe(slot, dict(enumerate(states)))
    said += [rows.logits for rows in runner.score([Score(runner, s, numbers(s, 88), 2) for s in slots])]
    for size in (1, 2, 1):
        more = runner.score([Score(runner, s, numbers(s + 9, min(size, 1 + i % 2)), 1) for i, s in enumerate(slots)])
        said += [rows.logits for rows in more]
        for slot in slots[::2]:
            runner.truncate(slot, runner.length(slot) - 1)
    for slot in slots:
        runner.truncate(slot, 80)
        runner.score([Score(runner, slot, numbers(5, 11), 1)])
    out = runner.decode([Decode(runner, slots[0], [3], 5, Sampling(), 0, keep_logits=True)])[0]
    assert out.logits is not None
    said.append(out.logits)
    parents = (-1, -1, 0, 1, 1, 3, 2)
    for slot in slots[1:3]:
        runner.truncate(slot, 80)
        runner.score([Score(runner, slot, numbers(4, 4), 1)])
    for begin, end in ((0, 2), (2, 5), (5, 7)):
        requests = [Score(runner, s, numbers(6, 7)[begin:end], end - begin, parents=parents[:end]) for s in slots[1:3]]
        said += [rows.logits for rows in runner.score(requests)]
    assert tree.depths(parents)[-1] == 2
    for slot in slots:
        runner.release(slot)
    return said


def test_graphs_say_what_single_operations_say(tmp_path: Path) -> None:
    plain, fused = both(tmp_path)
    for ours, theirs in zip(course(fused), course(plain), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(course(fused), course(plain), strict=True):  # in rows that others have used
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_pool_grows_and_keeps_what_it_has(tmp_path: Path) -> None:
    _, fused = both(tmp_path)
    assert fused.graphs is not None
    pool = fused.graphs.pool
    rows = [pool.take() for _ in range(FIRST_ROWS)]
    pool.keys[:, rows[1], :, 5] = 7.0
    assert pool.take() == FIRST_ROWS and len(pool.keys[0]) == 2 * FIRST_ROWS
    pool.reserve(pool.keys.shape[3] + 1)
    assert (pool.keys[:, rows[1], :, 5] == 7.0).all() and pool.keys.shape == pool.values.shape
    pool.give_back(rows[0])
    assert {pool.take(), pool.take()} == {rows[0], FIRST_ROWS + 1}
