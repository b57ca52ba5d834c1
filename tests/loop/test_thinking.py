"""A limit on thinking: its end is forced, at the same token with every rule, and the answer follows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import semspec
from semspec import Options
from semspec.loop.thinking import Thinking

BEGIN, END = 8, 9
QUESTION = (
    "Laura fills 6 boxes with a dozen beads each. Mila has 9 bags of 3 beads. Priya has as many beads as Mila and "
    "Laura together. How many beads does Priya have?"
)
MESSAGES = [{"role": "user", "content": QUESTION}]


def by_hand(tokens: list[int], is_open: bool, limit: int) -> int:
    """Tokens before the first that follows `limit` tokens of thinking and is inside it, one at a time."""
    thought = 0
    for i, token in enumerate(tokens):
        if is_open and thought == limit:
            return i
        if token == BEGIN:
            is_open = True
        elif token == END:
            is_open = False
        elif is_open:
            thought += 1
    return len(tokens)


@given(st.lists(st.sampled_from([1, 2, BEGIN, END]), max_size=12), st.booleans(), st.integers(0, 5), st.integers(1, 4))
def test_room_is_counted_across_rounds(tokens: list[int], is_open: bool, limit: int, chunk: int):
    state, taken = Thinking(BEGIN, END, is_open, limit), 0
    while taken < len(tokens) and not state.over:
        piece = tokens[taken : taken + chunk]
        room = state.room(piece)
        state.feed(piece[:room])
        taken += room
        if room < len(piece):
            break
    assert taken == by_hand(tokens, is_open, limit)
    assert state.over or taken == len(tokens)
    assert Thinking(BEGIN, END, is_open).room(tokens) == len(tokens), "without a limit there is room for all"


@pytest.fixture(scope="module")
def pocket() -> semspec.Pair:
    return semspec.load("pocket", device="cpu", slots=4, context=1024)


def whole(pair: semspec.Pair) -> tuple[list[int], int, int]:
    assert pair.resources.thinking is not None
    return pair.generate(MESSAGES, verifier="none", max_new_tokens=300).tokens, *pair.resources.thinking


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("limit", [0, 1, 7, 20])
def test_lossless_rules_write_what_the_target_alone_writes(pocket: semspec.Pair, limit: int, temperature: float):
    common = {"max_new_tokens": 120, "max_thinking_tokens": limit, "temperature": temperature, "seed": 5}
    alone = pocket.generate(MESSAGES, verifier="none", **common)
    _, begin, end = whole(pocket)
    assert alone.tokens[limit + 1] == end and alone.tokens[0] == begin and alone.thinking_cut
    assert alone.tokens.count(end) == 1 and alone.finish_reason == "stop" and alone.text.count("</think>") == 1
    assert alone.text.split("</think>")[1].strip(), "an answer follows"
    for options in ({}, {"num_draft_tokens": 3}, {"num_draft_tokens": 8, "drafter": "ngram"}, {"logprobs": 1}):
        result = pocket.generate(MESSAGES, **common, **options)
        assert result.tokens == alone.tokens and result.thinking_cut
        assert sum(map(len, (e.tokens for e in result.events))) == result.stats.tokens
        if "logprobs" in options:
            assert [lp.token for lp in result.logprobs] == result.tokens and result.logprobs[limit + 1].logprob < 0


@pytest.mark.parametrize("rule", ["sampling", "block", "fly", "semantic+", "semantic", "specreason", "accept-all"])
def test_every_rule_keeps_the_limit(pocket: semspec.Pair, rule: str):
    result = pocket.generate(MESSAGES, verifier=rule, max_thinking_tokens=25, max_new_tokens=120, seed=1)
    _, begin, end = whole(pocket)
    assert result.tokens[0] == begin and result.tokens.index(end) <= 26 and end not in result.tokens[27:]
    assert result.tokens.index(begin) < result.tokens.index(end) and result.finish_reason == "stop"


def test_a_limit_that_is_not_reached_changes_nothing(pocket: semspec.Pair):
    tokens, *_ = whole(pocket)
    result = pocket.generate(MESSAGES, max_new_tokens=300, max_thinking_tokens=290)
    assert result.tokens == tokens and not result.thinking_cut and result.finish_reason == "stop"


def test_an_answer_that_ends_inside_the_thinking_says_so(pocket: semspec.Pair):
    tokens, _, end = whole(pocket)
    at = tokens.index(end)
    for length, reason in ((1, "thinking"), (at, "thinking"), (at + 1, "length"), (at + 2, "length")):
        for rule in ("none", "exact", "semantic+"):
            result = pocket.generate(MESSAGES, verifier=rule, max_new_tokens=length)
            assert rule == "semantic+" or result.finish_reason == reason
            inside = "</think>" not in result.text
            assert result.finish_reason in ("thinking" if inside else "length", "stop")
    forced = pocket.generate(MESSAGES, max_new_tokens=10, max_thinking_tokens=8)
    assert forced.tokens[-1] == end and forced.finish_reason == "length"


def test_refusals(pair: semspec.Pair):
    with pytest.raises(semspec.BadRequest, match="max_thinking_tokens needs a model that thinks between markers"):
        pair.generate("the quick", max_thinking_tokens=3)
    for wrong in (-1, "3", True):
        with pytest.raises(semspec.BadRequest, match="max_thinking_tokens is"):
            Options(max_thinking_tokens=wrong)  # type: ignore[arg-type]
