"""Processors against references in plain Python, on random histories that grow and are cut back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semspec.errors import BadRequest
from semspec.sampling.logit_options import LogitOptions
from semspec.sampling.processors import BadWords, LogitsProcessor, Penalties, Processors
from semspec.types import TokenLogprob

VOCAB, STOP = 6, frozenset({5})
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)
SPELLING = {"a": [0], " a": [1], "ab": [0, 1], " ab": [1, 1], "aba": [0, 1, 0], " aba": [2, 1, 0]}


def reference(row: list[float], o: LogitOptions, prompt: list[int], new: list[int]) -> list[float]:
    """One row by the definitions, in plain Python."""
    out = list(row)
    forbidden = set() if o.allowed_token_ids is None else set(range(VOCAB)) - set(o.allowed_token_ids)
    for word in o.bad_words:
        for tokens in (SPELLING[word], SPELLING[" " + word]):
            before = tokens[:-1]
            if len(new) >= len(before) and new[len(new) - len(before) :] == before:
                forbidden.add(tokens[-1])
    if len(new) < o.min_tokens:
        forbidden |= STOP
    for token in range(VOCAB):
        x = out[token] + o.logit_bias.get(token, 0.0)
        if token in prompt or token in new:
            x = x / o.repetition_penalty if x > 0 else x * o.repetition_penalty
        x -= o.frequency_penalty * new.count(token) + o.presence_penalty * (token in new)
        out[token] = -math.inf if token in forbidden else x
    return [math.nan] * VOCAB if all(x == -math.inf for x in out) else out


OPTIONS = st.builds(
    LogitOptions,
    presence_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=3),
    min_tokens=st.integers(0, 5),
    bad_words=st.lists(st.sampled_from(["a", "ab", "aba"]), max_size=2),
    allowed_token_ids=st.none() | st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
)


def processors(o: LogitOptions, prompt: list[int]) -> Processors:
    return Processors(len(prompt), o.processors(prompt, VOCAB, STOP, lambda text: SPELLING[text]))


@given(o=OPTIONS, prompt=TOKENS.filter(bool), rounds=st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=3))
def test_rows_are_processed_as_defined_whatever_was_drafted_before(o, prompt, rounds):
    each = processors(o, prompt)
    generator = torch.Generator().manual_seed(len(prompt))
    for new, draft in rounds:
        logits = torch.randn(len(draft) + 2, VOCAB, generator=generator)  # the last row is no row of the draft
        before = logits.clone()
        out = each.after(prompt + new).apply(logits, draft)
        assert torch.equal(logits, before), "what logprobs are of stays as it is"
        expected = [reference(row, o, prompt, new + draft[:i]) for i, row in enumerate(before[:-1].tolist())]
        assert torch.allclose(out[:-1], torch.tensor(expected), atol=1e-5, equal_nan=True)
        assert torch.equal(out[-1], before[-1]), "rows of a layout are not processed"
        legal = 0
        while legal < len(draft) and expected[legal][draft[legal]] > -math.inf:
            legal += 1
        if not any(math.isnan(row[0]) for row in expected):
            assert each.legal(prompt + new, draft) == legal


def test_a_draft_goes_on_where_nothing_is_allowed_and_the_target_does_not():
    each = processors(LogitOptions(allowed_token_ids=(5,), min_tokens=3), [1])
    logits = torch.zeros(1, VOCAB)
    assert each.after([1]).apply(logits).isnan().all()
    assert torch.equal(each.after([1]).apply(logits, drafting=True), logits)


def test_rows_of_decodes_and_of_rules_are_processed_by_turns():
    """A runner draws in inference mode, and a rule verifies outside of it."""
    o = LogitOptions(1.0, 0.5, 1.2, {1: 2.0}, 3, ("ab",), (0, 1, 2, 5))
    each = processors(o, [1])
    for i in range(4):
        with torch.inference_mode(i % 2 == 0):
            row = torch.zeros(1, VOCAB)
            out = each.after([1, *[0, 2, 0][:i]]).apply(row)[0].tolist()
        assert out == pytest.approx(reference([0.0] * VOCAB, o, [1], [0, 2, 0][:i]))


def test_a_processor_that_forgets_to_follow_a_rejection_is_caught():
    class Forgetful(LogitsProcessor):
        def __init__(self) -> None:
            self.seen: set[int] = set()

        def process(self, logits, tokens, draft) -> None:
            self.seen |= {*tokens, *draft}
            logits[:, list(self.seen)] -= 1

    for kind, same in ((Forgetful(), False), (processors(LogitOptions(presence_penalty=1.0), [1]).each[0], True)):
        each, logits = Processors(1, [kind]), torch.zeros(1, VOCAB)
        each.after([1]).apply(torch.zeros(2, VOCAB), [3])  # a draft that is rejected
        assert (each.after([1]).apply(logits)[0, 3] == 0) == same


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": True}, "repetition_penalty"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(2000), 1.0)}, "2000 entries"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": ["x" * 500]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids"),
    ],
)
def test_what_cannot_be_is_refused_by_name(wrong: dict, named: str):
    with pytest.raises(BadRequest, match=named):
        LogitOptions(**wrong)


def test_ids_beyond_the_vocabulary_are_refused():
    for wrong in ({"logit_bias": {"99": 1.0}}, {"allowed_token_ids": [99]}):
        with pytest.raises(BadRequest, match="99"):
            processors(LogitOptions(**wrong), [1])


def test_options_that_ask_for_nothing_make_no_processor():
    assert not LogitOptions().processors([1], VOCAB, STOP, lambda text: [])
    assert TokenLogprob(1, 0.0).rank == 1


class Insists(LogitsProcessor):
    def process(self, logits: torch.Tensor, tokens: list[int], draft: Sequence[int]) -> None:
        pass

    def forced(self, tokens: list[int], most: int) -> list[int]:
        return [3, 1, 4][:most]


def test_what_others_forbid_is_not_forced() -> None:
    each = [Insists(), BadWords([[3, 1]])]
    assert Processors(1, each).forced([2], 5) == [3]
    assert Processors(1, each[:1]).forced([2], 5) == [3, 1, 4]


def test_penalties_follow_the_models_to_their_devices() -> None:
    one = Penalties([1, 2], 0.5, 0.5, 1.2)
    for device in ("cpu", "meta", "meta"):
        one.process(torch.zeros(2, VOCAB, device=device), [1, 3], [4])
