"""The kernels that select blocks against the same rule in PyTorch; without a GPU in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

from semspec.model.kernels.select_blocks import choose_blocks
from semspec.sparse import AttentionPlan
from semspec.sparse.attention import SCORES, block_lists, block_scores, select_blocks
from tests.interpreter import allow_new_numpy

allow_new_numpy()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
few = settings(max_examples=12, phases=[Phase.generate], deadline=None)
SMALL = (16, 32, 16)  # so that a few blocks are more than a program scores, holds or lists at a time


@pytest.fixture(autouse=True, scope="module")
def memory_that_was_not_written() -> Iterator[None]:
    """Is no number, or a very large one: whoever reads it is found out."""
    if DEVICE.type == "cpu":
        torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def whole(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, device=DEVICE)


def both(
    q: Tensor, means: Tensor, sequences: list[tuple[int, int, int]], plan: AttentionPlan, wanted: list[int],
    cut: tuple[int, int, int] = SMALL,
) -> tuple[list[list[list[int]]], list[list[list[int]]]]:  # fmt: skip
    """Blocks of every head of every sequence, by the kernels and by PyTorch; a sequence is (slot, start, count)."""
    slots, starts, counts = (whole([s[i] for s in sequences]) for i in range(3))
    pairs, full, scale = whole(wanted), starts // plan.block, 0.5
    for b, (_, _, count) in enumerate(sequences):
        q[b, count:] = float("nan")
    rule = (plan.block, (plan.sinks, plan.recent), scale, plan.score != "first", plan.spread == "heads")
    wide = means.square() if plan.score == "reach" else None  # any numbers that are not negative
    ours = choose_blocks(q, means, slots, starts, counts, pairs, *rule, cut=cut, variances=wide)
    own = None if wide is None else wide[slots].nan_to_num()
    scores = block_scores(q, means[slots].nan_to_num(), full, plan, scale, counts, own)
    theirs = block_lists(select_blocks(scores, full, pairs, plan))
    shown = []
    for lists, numbers in (ours, theirs):
        assert lists.dtype == numbers.dtype == torch.int32
        shown.append(
            [
                [row[:n].tolist() for row, n in zip(*one, strict=True)]
                for one in zip(lists, numbers.tolist(), strict=True)
            ]
        )
    return shown[0], shown[1]


@st.composite
def batches(draw: st.DrawFn) -> dict:
    heads, block, queries = draw(st.sampled_from([1, 2, 3])), 4, draw(st.integers(1, 9))
    lengths = draw(st.lists(st.integers(0, 160), min_size=1, max_size=3))
    counts = [draw(st.integers(1, queries)) for _ in lengths]
    plan = AttentionPlan(
        block, dense_below=draw(st.sampled_from([0, 40])), rho=draw(st.sampled_from([0.0, 0.1, 0.5])),
        sinks=draw(st.integers(0, 2)), recent=draw(st.integers(0, 2)), score=draw(st.sampled_from(SCORES)),
        spread=draw(st.sampled_from(["pairs", "heads"])),
    )  # fmt: skip
    return {
        "heads": heads, "group": draw(st.sampled_from([1, 2, 5])), "size": draw(st.sampled_from([8, 24])),
        "queries": queries, "lengths": lengths, "counts": counts, "plan": plan, "seed": draw(st.integers(0, 99)),
    }  # fmt: skip


@given(batches())
@few
def test_the_same_blocks_as_one_operation_at_a_time(some: dict) -> None:
    """Lengths of all kinds in one batch, some of them dense; what is no whole block yet is not a number."""
    generator, heads, plan = torch.Generator().manual_seed(some["seed"]), some["heads"], some["plan"]
    lengths, size = some["lengths"], some["size"]
    q = torch.randn(len(lengths), some["queries"], heads * some["group"], size, generator=generator).to(DEVICE)
    means = torch.randn(4, heads, 41, size, generator=generator).to(DEVICE)
    slots = [2, 0, 3][: len(lengths)]
    for slot, length in zip(slots, lengths, strict=True):
        means[slot, :, length // plan.block :] = float("nan")
    ours, theirs = both(
        q, means, list(zip(slots, lengths, some["counts"], strict=True)), plan,
        [plan.pairs(length, heads) for length in lengths],
    )  # fmt: skip
    assert ours == theirs


@pytest.mark.parametrize("spread", ["pairs", "heads"])
@pytest.mark.parametrize("score", ["first", "share"])
def test_of_equal_scores_the_first_is_taken(score: str, spread: str) -> None:
    """Few different mean keys, so that nearly all blocks are tied, within a head and between heads."""
    generator = torch.Generator().manual_seed(1)
    plan = AttentionPlan(4, 0, sinks=1, recent=1, score=score, spread=spread)
    kinds = torch.tensor([[0.0, 0, 0, 0, 0, 0, 0, 0], [-1.0, 2, 0, 0, 1, 0, 0, 3], [2.0, 0, -1, 0, 1, 0, 0, -2]])
    means = kinds[torch.randint(3, (1, 40), generator=generator)].expand(2, 40, 8)[None].contiguous().to(DEVICE)
    q = torch.randint(-2, 3, (1, 3, 4, 8), generator=generator).float().to(DEVICE)
    q[:, :, 2:] = q[:, :, :2]  # both heads score alike
    for wanted in (4, 5, 11, 30, 47, 79, 80):
        ours, theirs = both(q.clone(), means, [(0, 163, 3)], plan, [wanted])
        assert ours == theirs, wanted
        assert sum(map(len, ours[0])) == (wanted if spread == "pairs" else wanted // 2 * 2)


@pytest.mark.parametrize("cut", [SMALL, (128, 16384, 2048)])
def test_all_the_numbers_there_are_can_be_scores(cut: tuple[int, int, int]) -> None:
    """Large, tiny, negative and both zeros; the paper's score of one head is its first coordinate here."""
    values = [0.0, -0.0, 1e-38, -1e-38, 3e38, -3e38, 1.0, 1.0, 1.0000001, -1.0, 5e-7, -5e-7, 2.0, -2.0, 0.0, -0.0]
    means = torch.zeros(1, 1, 48, 8, device=DEVICE)
    means[0, 0, :, 0] = torch.tensor(values * 3)
    q = torch.zeros(1, 2, 1, 8, device=DEVICE)
    q[..., 0] = 1.0
    plan = AttentionPlan(4, 0, sinks=0, recent=0, score="first")
    for wanted in range(0, 49, 3):
        ours, theirs = both(q.clone(), means, [(0, 48 * 4, 2)], plan, [wanted], cut)
        assert ours == theirs and len(ours[0][0]) == wanted


def test_a_sequence_of_padding_has_no_blocks() -> None:
    q, means = torch.randn(2, 3, 4, 8, device=DEVICE), torch.randn(2, 2, 12, 8, device=DEVICE)
    ours, theirs = both(q, means, [(1, 40, 3), (0, 0, 0)], AttentionPlan(4, 0), [7, 0])
    assert ours == theirs and ours[1] == [[], []]
