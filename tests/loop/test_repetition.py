"""Finding loops: against a plain search, and on the cases that are no loops."""

from __future__ import annotations

from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semspec.errors import BadRequest
from semspec.loop.repetition import Repetition, find_repetition


def plain_search(tokens: list[int], min_repeats: int, min_tokens: int, max_period: int) -> tuple[int, int, int] | None:
    """The definition: every start, every period, every count."""
    best, most = None, 0
    for period in range(1, max_period + 1):
        for start in range(len(tokens)):
            block, repeats = tokens[start : start + period], 0
            while len(block) == period and tokens[start + repeats * period :][:period] == block:
                repeats += 1
            covered = repeats * period
            if repeats >= min_repeats and covered >= min_tokens and covered > most:
                best, most = (start, period, repeats), covered
    return best


pieces = st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 6)), max_size=5)


@given(pieces, st.integers(2, 5), st.integers(1, 14), st.integers(1, 7))
def test_agrees_with_a_plain_search(
    pieces: list[tuple[list[int], int]], min_repeats: int, min_tokens: int, max_period: int
) -> None:
    tokens = [token for block, times in pieces for token in block * times]
    found = find_repetition(tokens, min_repeats, min_tokens, max_period)
    expected = plain_search(tokens, min_repeats, min_tokens, max_period)
    assert (found and (found.start, found.period, found.repeats)) == expected
    if found:
        assert list(found.block) * found.repeats == tokens[found.start : found.end]


def test_a_loop_at_the_end_is_reported_with_its_block() -> None:
    tokens = list(range(100, 150)) + [7, 8, 9, 10] * 8 + [7, 8]
    loop = find_repetition(tokens)
    assert loop == Repetition(start=50, period=4, repeats=8, block=(7, 8, 9, 10))
    assert loop.end == 82


def test_a_loop_inside_the_text_is_found() -> None:
    assert find_repetition([1, 2, 3] + [5] * 40 + [4, 9, 6]) == Repetition(3, 1, 40, (5,))


def test_the_longest_of_two_loops_is_reported() -> None:
    assert find_repetition([5] * 40 + [1, 2] * 30) == Repetition(40, 2, 30, (1, 2))


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        [1],
        list(range(500)),
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 3,  # long, but three copies only
        [5] * 31,  # many copies, but short
        [token for i in range(50) for token in (1, 2, 3, 4, 5, 6, 7, 100 + i)],  # copies with something between them
        [token for i in range(50) for token in (1, 2, 3, 4, 5, 6, 7, 100 + i % 20)],  # a table of rows that differ
    ],
)
def test_normal_repetition_is_no_loop(tokens: list[int]) -> None:
    assert find_repetition(tokens) is None


def test_a_block_longer_than_max_period_is_no_loop() -> None:
    tokens = list(range(129)) * 4
    assert find_repetition(tokens) is None
    assert find_repetition(tokens, max_period=129) == Repetition(0, 129, 4, tuple(range(129)))


def test_less_than_two_copies_is_refused() -> None:
    with pytest.raises(BadRequest, match="two copies"):
        find_repetition([1, 2, 3], min_repeats=1)


def test_long_texts_take_no_time() -> None:
    normal = [i * i % 997 for i in range(32_000)]
    begin = process_time()
    find_repetition(normal, max_period=128)
    find_repetition([1] * 32_000)
    assert process_time() - begin < 4.0
