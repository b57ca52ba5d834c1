"""Lookup drafting against its definition: search the context for the longest suffix, from scratch, every time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semspec.draft import REGISTRY, NgramDrafter, NoDrafter
from semspec.draft.kinds import Cascade
from semspec.errors import BadRequest
from semspec.types import Drafter, Sampling
from semspec.verify.exact import Exact

texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)  # few tokens, many repetitions


def propose(drafter: Drafter, context: list[int], n: int) -> list[int]:
    asking = drafter.propose(context, Exact().request(n, Sampling(), 0))
    with pytest.raises(StopIteration) as done:  # it yields no request
        next(asking)
    draft = done.value.value
    assert draft.logits is None, "a lookup is certain"
    return draft.tokens


def brute_force(context: list[int], n: int, longest: int, shortest: int, earliest: bool) -> list[int]:
    """By the definition: try every length at every position."""
    for size in range(longest, shortest - 1, -1):
        if size >= len(context):
            continue
        suffix = context[-size:]
        matches = [i for i in range(len(context) - size) if context[i : i + size] == suffix]
        if matches:
            match = min(matches) if earliest else max(matches)
            text = list(context)
            for i in range(n):
                text.append(text[match + size + i])  # what has just been copied may be copied again
            return text[len(context) :]
    return []


@given(texts, st.integers(0, 12), st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_it_proposes_what_a_search_through_the_context_finds(
    context: list[int], n: int, one: int, other: int, earliest: bool
) -> None:
    shortest, longest = sorted((one, other))
    drafter = NgramDrafter(longest, shortest, earliest)
    drafter.begin([])
    assert propose(drafter, context, n) == brute_force(context, n, longest, shortest, earliest)


@given(texts, st.lists(st.integers(1, 5), max_size=10), st.booleans())
def test_an_index_that_grows_with_the_text_equals_one_built_anew(
    context: list[int], growths: list[int], earliest: bool
) -> None:
    growing = NgramDrafter(earliest=earliest)
    growing.begin([])
    length = 1
    for growth in [*growths, len(context)]:
        text = context[:length]
        fresh = NgramDrafter(earliest=earliest)
        assert propose(growing, text, 6) == propose(fresh, text, 6) == brute_force(text, 6, 4, 1, earliest)
        growing.accept(length)
        length = min(length + growth, len(context))


def released(context: list[int], overlapping: bool = False) -> list[int]:
    """The lookup of FLy's released code: the first window that equals the last tokens and lies before them, and what
    followed it, up to six tokens of the text."""
    for size in range(4, 0, -1):
        windows = [context[i : i + size] for i in range(len(context) - (size if overlapping else 2 * size - 1))]
        if context[-size:] in windows:
            begin = windows.index(context[-size:]) + size
            return context[begin : begin + 6]
    return []


@given(texts)
def test_earliest_is_the_lookup_of_flys_released_code(context: list[int]) -> None:
    """Ours also finds windows that overlap the last tokens, and goes on where the text ends: more for the draft model
    to accept, which alone decides on the tokens."""
    kind, wanted = Cascade(earliest=True), released(context)
    if wanted == released(context, overlapping=True):
        assert propose(kind.lookup(), context, kind.ahead)[: len(wanted)] == wanted


def drafted(context: list[int], n: int = 3, **options: int) -> list[int]:
    return propose(NgramDrafter(**options), context, n)  # type: ignore[arg-type]


def test_the_longest_match_wins_over_a_later_shorter_one() -> None:
    assert drafted([1, 2, 7, 7, 9, 2, 8, 8, 1, 2]) == [7, 7, 9]
    assert drafted([1, 2, 7, 7, 9, 2, 8, 8, 1, 2], longest=1) == [8, 8, 1]


def test_the_latest_occurrence_wins_unless_the_earliest_is_asked_for() -> None:
    context = [1, 2, 7, 7, 7, 1, 2, 8, 8, 8, 1, 2]
    assert drafted(context) == [8, 8, 8]
    assert drafted(context, earliest=True) == [7, 7, 7]


def test_a_match_at_the_end_repeats_itself() -> None:
    assert drafted([5, 6, 5], n=5) == [6, 5, 6, 5, 6]
    assert drafted([4, 4], n=3) == [4, 4, 4]


def test_nothing_is_proposed_where_nothing_repeats() -> None:
    assert drafted([1, 2, 3, 4]) == []
    assert drafted([1]) == []
    assert drafted([1, 2, 9, 2], shortest=2) == []


def test_an_end_of_the_text_that_has_no_follower_is_no_match() -> None:
    """The suffix itself must not be found: it is the question, not an answer."""
    assert drafted([3, 1, 2]) == []


def test_begin_forgets_the_last_sequence() -> None:
    drafter = NgramDrafter()
    drafter.begin([])
    assert propose(drafter, [1, 2, 1], 2) == [2, 1]
    drafter.begin([])
    assert propose(drafter, [3, 1], 2) == []
    assert drafter.runners == []


@pytest.mark.parametrize(("longest", "shortest"), [(4, 0), (1, 2), (0, 0)])
def test_impossible_lengths_are_refused(longest: int, shortest: int) -> None:
    with pytest.raises(BadRequest, match=r"ngram's (shortest is [02]|longest is 0); give 1"):
        REGISTRY.make(f"ngram:longest={longest},shortest={shortest}")


def test_the_drafter_that_never_proposes_never_proposes() -> None:
    drafter = NoDrafter()
    drafter.begin([])
    assert propose(drafter, [1, 1, 1, 1], 5) == []
    drafter.accept(4)
    drafter.close()
    assert drafter.runners == []
