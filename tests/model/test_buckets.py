"""Which sequences share a pass: a plain search over all ways to split them finds nothing cheaper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec.model.buckets import BATCHES, MAX_QUERIES, MAX_ROWS, QUERIES, READ, bucket, passes


def rows(lengths: Sequence[int]) -> int:
    """Of one pass over these sequences, padded."""
    return bucket(max(lengths), QUERIES) * bucket(len(lengths), BATCHES)


def cost(lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> int:
    return sum(READ + rows([lengths[i] for i in group]) for group in groups)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for found in partitions(items[1:]):
        yield [[items[0]], *found]
        for i, group in enumerate(found):
            yield [*found[:i], [items[0], *group], *found[i + 1 :]]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([1] * 7 + [60], [[7], [0, 1, 2, 3, 4, 5, 6]]),  # 72 rows in place of 512
        ([9] * 33, [list(range(32)), [32]]),
        ([9] * 64, [list(range(64))]),
        ([9] * 8, [list(range(8))]),
        ([9, 1, 9], [[0, 1, 2]]),  # a few rows of padding are cheaper than the weights once more
        ([64] * 17, [list(range(16)), [16]]),  # no more than MAX_ROWS
        ([1] * 70, [list(range(64)), list(range(64, 70))]),
    ],
)
def test_examples(lengths: list[int], expected: list[list[int]]) -> None:
    assert passes(lengths) == expected


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(st.integers(1, MAX_QUERIES), min_size=1, max_size=150))
def test_every_sequence_is_in_one_pass_that_fits(lengths: list[int]) -> None:
    groups = passes(lengths)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(group == sorted(group) and rows([lengths[i] for i in group]) <= MAX_ROWS for group in groups)
    whole = len(lengths) <= BATCHES[-1] and rows(lengths) <= MAX_ROWS
    assert not whole or cost(lengths, groups) <= cost(lengths, [range(len(lengths))])


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.lists(st.sampled_from([1, 2, 9, 17, 33, 60, 64]), min_size=1, max_size=7))
def test_nothing_is_cheaper(lengths: list[int]) -> None:
    best = min(cost(lengths, groups) for groups in partitions(list(range(len(lengths)))))
    assert cost(lengths, passes(lengths)) == best
