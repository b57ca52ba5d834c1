from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from semspec.errors import BadRequest
from semspec.text.steps import StepDelimiters, StepTracker
from tests.checkpoints import make_tokenizer

PIECES = ["a", " b", ".", "\n", "\n\n", ".\n\n", ":\n", " \n\n", " ", "  \n", "\n\nc", "\n ", "\n \n", "\n\n\n"]
END, THINK, END_THINK = 20, 21, 22


def byte_level() -> PreTrainedTokenizerFast:
    """A vocabulary of PIECES as byte-level BPE spells them, special tokens after it."""
    spelled = [p.replace("\n", "Ċ").replace(" ", "Ġ") for p in PIECES]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(spelled)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return finish(tokenizer)


def sentence_piece() -> PreTrainedTokenizerFast:
    """The same as SentencePiece with byte fallback spells it, whose newline is a byte."""
    spelled = ["<0x0A>" if p == "\n" else p.replace(" ", "▁") for p in PIECES]
    vocabulary = {piece: i for i, piece in enumerate(spelled)} | {"<unk>": len(spelled)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return finish(tokenizer)


def finish(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    padding = [f"<pad{i}>" for i in range(tokenizer.get_vocab_size(), END)]
    tokenizer.add_special_tokens([*padding, "<end>", "<think>", "</think>"])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    assert made.convert_tokens_to_ids(["<end>", "<think>", "</think>"]) == [END, THINK, END_THINK]
    return made


SPELLINGS = {"byte-level": StepDelimiters.of(byte_level()), "sentence-piece": StepDelimiters.of(sentence_piece())}


def by_text(tokens: list[int], limit: int) -> int | None:
    """The rule read off the text: the first token after which visible text ends in a blank line."""
    text = ""
    for i, token in enumerate(tokens):
        if token in (END, END_THINK):
            return i + 1
        text += "" if token == THINK else PIECES[token]
        if text.strip() and re.search(r"\n[ \t]*\n\Z", text):
            return i + 1
        if i + 1 == limit:
            return i + 1
    return None


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_delimiters_are_the_tokens_that_end_in_a_blank_line(spelling: str) -> None:
    steps = SPELLINGS[spelling]
    assert {PIECES[i] for i in steps.delimiters} == {"\n\n", ".\n\n", " \n\n", "\n \n", "\n\n\n"}
    assert {PIECES[i] for i in steps.openers - steps.delimiters} == {"\n", ":\n", "  \n", "\n "}
    assert {PIECES[i] for i in steps.closers} == {"\n", "\n\n", " \n\n", "  \n", "\n \n", "\n\n\n"}
    assert (steps.end_of_thinking, steps.end_of_text) == (END_THINK, {END})


@pytest.mark.parametrize("spelling", SPELLINGS)
@settings(max_examples=1000)
@example([PIECES.index("a"), PIECES.index("\n "), PIECES.index("\n")])
@given(st.lists(st.sampled_from([*range(len(PIECES)), END, THINK, END_THINK]), max_size=12))
def test_a_step_ends_where_its_text_has_a_blank_line(spelling: str, tokens: list[int]) -> None:
    steps = SPELLINGS[spelling]
    assert steps.step_end(tokens) == by_text(tokens, 500)


@given(st.lists(st.sampled_from([*range(len(PIECES)), END, END_THINK]), max_size=40), st.integers(1, 9))
def test_cuts_are_the_ends_of_one_step_after_the_other(tokens: list[int], limit: int) -> None:
    steps = StepDelimiters.of(byte_level(), max_step_tokens=limit)
    expected, begin = [], 0
    while (length := by_text(tokens[begin:], limit)) is not None:
        begin += length
        expected.append(begin)
    assert steps.cuts(tokens) == expected


@given(st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=30), st.data())
def test_pieces_of_any_size_give_the_same_end(tokens: list[int], data: st.DataObject) -> None:
    steps = SPELLINGS["byte-level"]
    step, fed = StepTracker(steps), 0
    while fed < len(tokens) and step.end is None:
        size = data.draw(st.integers(1, len(tokens) - fed))
        end = step.feed(tokens[fed : fed + size])
        fed += size if end is None else end
    assert (fed if step.end else None) == steps.step_end(tokens)


@given(st.lists(st.sampled_from([*range(len(PIECES)), END, END_THINK]), max_size=30))
def test_no_step_ends_between_two_stops(tokens: list[int]) -> None:
    """Decoding that pauses only at `stops` never misses the end of a step."""
    steps = SPELLINGS["byte-level"]
    end = steps.step_end(tokens)
    assert end is None or tokens[end - 1] in steps.stops


def test_the_kind_of_end() -> None:
    steps = StepDelimiters.of(byte_level(), max_step_tokens=3)
    for tokens, reason in [([0, 4], "blank line"), ([0, 0, 0], "length"), ([0, END], "end of text"), ([0, END_THINK], "end of thinking")]:  # fmt: skip # noqa: E501
        step = StepTracker(steps)
        assert step.feed(tokens) == len(tokens) and step.end == reason and step.tokens_left == 0


def test_a_vocabulary_without_blank_lines_leaves_them_to_two_newlines() -> None:
    tokenizer = make_tokenizer()
    steps = StepDelimiters.of(tokenizer, end_of_text=[7])
    assert not steps.delimiters and steps.end_of_text == {7, tokenizer.eos_token_id}
    tokens = tokenizer.encode("the fox\n\nthe dog\n\n")
    end = steps.step_end(tokens)
    assert end is not None and tokenizer.decode(tokens[:end]) == "the fox\n\n"


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(BadRequest, match="max_step_tokens"):
        StepDelimiters.of(make_tokenizer(), max_step_tokens=0)


def test_the_released_delimiters_end_a_step_wherever_they_stand() -> None:
    """As the released code of SemanticSpec: stop at one of eight tokens, whatever is before it, and nowhere else."""
    steps = SPELLINGS["byte-level"].by("released")
    delimiters = {PIECES.index(piece) for piece in ("\n\n", ".\n\n", " \n\n")}
    assert steps.delimiters == delimiters == steps.stops - {END, END_THINK}
    tokens = [PIECES.index(piece) for piece in ("\n\n", "a", "\n", "\n", " b", "\n \n", ":\n", ".\n\n", " \n\n", "a")]
    assert steps.cuts(tokens) == [i + 1 for i, token in enumerate(tokens) if token in delimiters] == [1, 8, 9]
    assert SPELLINGS["byte-level"].cuts(tokens) == [4, 6, 8]
    assert SPELLINGS["byte-level"].by("all") is SPELLINGS["byte-level"]


def test_a_tokenizer_without_them_is_told_so() -> None:
    without = StepDelimiters(frozenset([1]), frozenset(), frozenset(), frozenset())
    with pytest.raises(BadRequest, match="none of the eight delimiters"):
        without.by("released")
