"""Tokens by themselves must add up, byte for byte, to the text they make together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from semspec.text.token_bytes import TokenBytes, byte_alphabet
from tests.text.test_stream import make_fallback_tokenizer

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581<>"), max_size=20)


def test_the_alphabet_is_that_of_the_tokenizers_library() -> None:
    assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("aé \n", "日本🙂", "\x00\x7f\xad"):
        ((entry, _),) = split.pre_tokenize_str(text)
        assert bytes(byte_alphabet()[c] for c in entry) == text.encode()


def byte_level() -> PreTrainedTokenizerFast:
    vocabulary = {entry: i for i, entry in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@given(texts)
def test_byte_level_tokens_add_up(text: str) -> None:
    tokenizer, found = byte_level(), TokenBytes(byte_level())
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(found.of(token) for token in tokens) == text.encode()


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2 and Gemma have it: a space before words is part of the token."""
    vocabulary = {"<unk>": 0, "\u2581the": 1, "the": 2, "\u2581cat": 3, "cat": 4, "\u2581": 5, "</s>": 6}
    vocabulary |= {f"<0x{byte:02X}>": 7 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def test_a_space_before_a_word_is_the_tokens_own() -> None:
    tokenizer = sentencepiece()
    found = TokenBytes(tokenizer)
    assert tokenizer.decode([1]) == tokenizer.decode([2]) == "the", "why tokens are not decoded one by one"
    assert [found.of(token) for token in (1, 3, 2, 4, 5, 6)] == [b" the", b" cat", b"the", b"cat", b" ", b"</s>"]
    assert b"".join(found.of(7 + byte) for byte in "é".encode()).decode() == "é"


@pytest.mark.parametrize("text", ["one two", " the cat", "héllo\n"])
def test_tokens_of_a_fallback_tokenizer_add_up(text: str) -> None:
    tokenizer = make_fallback_tokenizer()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    whole = b"".join(TokenBytes(tokenizer).of(token) for token in tokens).decode()
    assert whole.strip() == tokenizer.decode(tokens).strip()
