"""A draft head's passes as on a GPU, against those without graphs: buffers, a pool that grows, trees, batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.gpu_checks_trees import begun, drafts_of
from bench.gpu_checks_trees import drafts_of_heads_chosen_on_the_device as check
from semspec import tree
from semspec.draft.tree import TreeOptions
from semspec.model.heads import levels
from semspec.model.heads.config import HeadConfig, HeadTensors
from semspec.model.heads.eagle import EagleHead, TargetParts
from semspec.model.heads.graphs import FIRST_ROWS, HeadGraphs
from semspec.model.heads.runner import HeadRunner
from semspec.model.kernels import reference_kernels
from semspec.model.linear import DenseLinear
from semspec.model.weights import Checkpoint
from semspec.types import Decode, DraftRequest, Sampling, Score
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
    fused.use(on_a_cpu(head, CAPACITY))
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


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> tuple[HeadRunner, HeadRunner]:
    return both(tmp_path_factory.mktemp("head"))


def rounds(heads: tuple[HeadRunner, HeadRunner], texts: list[list[int]], draft: Any) -> list[list[Any]]:
    """What a draft function says with single operations and with graphs, and how long slots are then; twice, as rounds
    follow each other."""
    said = []
    for runner in heads:
        slots, found = begun(runner, texts), []
        for _ in range(2):
            found.append(draft(runner, slots))
            found.append([runner.length(slot) for slot in slots])
            for slot, text in zip(slots, texts, strict=True):
                runner.truncate(slot, len(text) - 1)
        for slot in slots:
            runner.release(slot)
        said.append(found)
    return said


TEXTS = [numbers(1, 30), numbers(2, 3), numbers(3, 90)]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    waits, on_host = list[Tensor](), levels.on_host

    def counting(best: Tensor) -> Any:
        waits.append(best)
        return on_host(best)

    monkeypatch.setattr("semspec.model.heads.runner.on_host", counting)
    return waits


@given(
    st.integers(2, 40),
    st.integers(1, 8),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.002, 0.05]),
    st.frozensets(st.integers(0, VOCAB - 1), max_size=12),
    st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_a_tree_is_that_of_the_host(
    heads: tuple[HeadRunner, HeadRunner],
    size: int,
    depth: int,
    top: int,
    least: float,
    stop: frozenset[int],
    count: int,
) -> None:
    texts, options = TEXTS[:count], TreeOptions(size, top=top)
    asked = DraftRequest(depth, Sampling(), 0, stop=stop, threshold=least)

    def draft(runner: HeadRunner, slots: list[int]) -> Any:
        return drafts_of(runner, slots, texts, asked, options)

    plain, fused = rounds(heads, texts, draft)
    assert plain == fused


def test_a_tree_waits_once_for_all_its_levels(
    heads: tuple[HeadRunner, HeadRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, slots = counted(monkeypatch), begun(heads[1], TEXTS)
    asked = DraftRequest(6, Sampling(), 0)
    drafts = drafts_of(heads[1], slots, TEXTS, asked, TreeOptions(30))
    assert len(waits) == 1 and all(len(tokens) == 30 and max(tree.depths(parents)) > 1 for tokens, parents in drafts)
    for slot in slots:
        heads[1].release(slot)


def on_a_cpu(head: EagleHead, capacity: int) -> HeadGraphs:
    return HeadGraphs(head, capacity, reference_kernels(), Rehearsed)


@pytest.mark.parametrize("fault", ["", "lineages", "depths", "starts"])
def test_the_check_for_a_card_finds_levels_that_stand_still(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = levels.Numbers.of

    def faulty(*args: Any) -> levels.Numbers:
        made = of(*args)
        return made._replace(**{fault: getattr(made, fault).clone()}) if fault else made

    monkeypatch.setattr(HeadGraphs, "of", staticmethod(on_a_cpu))
    monkeypatch.setattr(levels.Numbers, "of", staticmethod(faulty))
    if not fault:
        return check(torch.device("cpu"))
    with pytest.raises(AssertionError, match="other drafts"):
        check(torch.device("cpu"))
