"""Two tokenizers: no byte is lost, doubled or moved between them, whatever the text and wherever it is cut."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Event

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from semspec.errors import ModelError
from semspec.text import exchange as exchange_module
from semspec.text import reader as reader_module
from semspec.text.exchange import Exchange, Side
from semspec.text.prompts import PairPrompt, encode_for_pair
from semspec.text.reader import Reader
from semspec.text.speller import LONGEST, Speller, cut
from semspec.text.steps import StepDelimiters
from semspec.text.tokenizer import difference
from tests.text.tokenizers_of_all_kinds import CHANGING, EXACT, WORDS, byte_level, letters, with_markers

ODD = [
    "\u200d",
    "e\u0301",
    "ﬁ",
    "\u202e",
    "👩‍👩‍👧",
    "\t",
    "  ",
    "\r\n",
    "ß",
    "İ",
    "\u00a0",
    "안녕",
    "a\u0300\u0301",
    "\x00",
    "<eos>",
]
texts = st.lists(st.one_of(st.sampled_from([*WORDS, *ODD, " "]), st.text(max_size=6)), min_size=1, max_size=14).map(
    "".join
)
seeds = st.integers(0, 10**6)
PAIRS = [(a, b) for a in EXACT for b in EXACT if a != b and not (a[:8] == b[:8] == "sentence")]


def side(tokenizer: PreTrainedTokenizerFast) -> Side:
    return Side(tokenizer, len(tokenizer), frozenset([tokenizer.eos_token_id]))


def exchange(target: PreTrainedTokenizerFast, draft: PreTrainedTokenizerFast) -> Exchange:
    return Exchange(side(target), side(draft))


def test_spelling_does_not_change_how_others_read_the_same_tokenizer() -> None:
    """A server tokenizes prompts, whose control tokens are no text, while rounds on another thread spell drafts."""
    tokenizer = byte_level(300)
    speller, eos = Speller(tokenizer), tokenizer.eos_token_id
    text, done = "some words " * 200 + tokenizer.eos_token, Event()

    def spell() -> None:
        while not done.is_set():
            assert eos not in speller._encode(text)

    with ThreadPoolExecutor(1) as threads:
        spelling = threads.submit(spell)
        try:
            assert all(tokenizer(text)["input_ids"][-1] == eos for _ in range(300))
        finally:
            done.set()
        spelling.result()


KNOWN: dict[tuple[str, str], Exchange] = {}


def exchange_of(names: tuple[str, str]) -> Exchange:
    if names not in KNOWN:
        every = EXACT | CHANGING
        KNOWN[names] = exchange(every[names[0]](), every[names[1]]())
    return KNOWN[names]


def read_in_parts(found: Exchange, tokens: list[int], rng: Random) -> Reader:
    """Feed the tokens in parts of any size, now and then too many, which are taken back."""
    reader, at = Reader(found, [], 0), 0
    while at < len(tokens):
        n = rng.randint(1, 4)
        if rng.random() < 0.3:
            mark = reader.checkpoint()
            reader.extend([rng.choice(tokens) for _ in range(rng.randint(1, 5))])
            reader.rewind(mark)
        reader.extend(tokens[at : at + n])
        at += n
        assert reader.read == min(at, len(tokens))
    return reader


def check(found: Exchange, text: str, seed: int) -> None:
    """The bytes that the target writes are those that the draft reads, and come back as they are."""
    tokens = found.target_speller.tokens(text)
    assert found.target_speller.spelled(tokens) == text.encode(), "the target spells it"
    reader = read_in_parts(found, tokens, Random(seed))
    assert found.draft_speller.spelled(reader.ids) + reader.pending == text.encode(), "the draft reads it"
    back, ends = found.translate(reader.ids)
    assert found.target_speller.spelled(back) == text.encode(), "the target gets it back"
    assert back == tokens and ends == sorted(ends) and ends[-1:] == [len(reader.ids)] * bool(tokens)
    for i, end in enumerate(ends):  # so many own tokens cover so many tokens, and one less would not
        covered = len(found.target_speller.spelled(back[: i + 1]))
        assert len(found.draft_speller.spelled(reader.ids[:end])) >= covered
        assert len(found.draft_speller.spelled(reader.ids[: end - 1])) < covered


@pytest.mark.parametrize("names", PAIRS, ids="/".join)
@given(texts, seeds)
@settings(max_examples=40)
def test_no_byte_is_lost_doubled_or_moved(names: tuple[str, str], text: str, seed: int) -> None:
    check(exchange_of(names), text, seed)


@given(st.lists(st.integers(0, 255), max_size=20), st.sampled_from(["bytes, many merges", "sentencepiece, first"]))
def test_any_bytes_are_read_as_a_decoder_reads_them(data: list[int], draft: str) -> None:
    """Even those that are no characters; what may still become one waits."""
    found = exchange_of(("bytes, few merges", draft))
    tokens = [found._by_bytes[bytes([b])] for b in data]
    reader = read_in_parts(found, tokens, Random(sum(data)))
    whole = bytes(data)[: len(data) - len(reader.pending)]
    assert len(reader.pending) < 4
    assert found.draft_speller.spelled(reader.ids) == whole.decode(errors="replace").encode()


@given(texts, seeds)
@settings(max_examples=40)
def test_a_tokenizer_that_changes_texts_reads_its_own_version(text: str, seed: int) -> None:
    found = exchange_of(("bytes, many merges", "composing"))
    reader = read_in_parts(found, found.target_speller.tokens(text), Random(seed))
    spelled = found.draft_speller.spelled(reader.ids).decode()
    assert unicodedata.normalize("NFC", spelled) == unicodedata.normalize("NFC", text)


def test_words_in_pieces_are_read_and_written() -> None:
    found = exchange_of(("bytes, many merges", "wordpiece"))
    reader = Reader(found, [], 0)
    reader.extend(found.target_speller.tokens("The  BLUE fox.\n\nThere"))
    assert found.draft.tokenizer.convert_ids_to_tokens(reader.ids)[:3] == ["the", "blue", "fox"]
    tokens, _ = found.translate(reader.ids)
    assert found.target_speller.spelled(tokens).decode().split() == ["the", "blue", "fox", ".", "there"]


@pytest.mark.parametrize("names", PAIRS, ids="/".join)
def test_a_character_that_the_target_has_begun_is_completed(names: tuple[str, str]) -> None:
    found, whole = exchange_of(names), " 日😀 fox".encode()
    own = found.draft_speller.tokens("日😀 fox")
    for begun in (1, 2):
        tokens, ends = found.translate(own, pending=whole[1 : 1 + begun])
        assert found.target_speller.spelled(tokens) == whole[1 + begun :]
        assert len(ends) == len(tokens) and ends[-1] == len(own)
    assert found.translate(own, pending="語".encode()[:2]) == ([], []), "the draft guessed another character"


def double_pending(self: Reader, data: bytes, final: bool = False) -> None:
    ORIGINAL_ADD(self, data, final)
    self.tail += self.pending.decode(errors="replace")


def forget_tail(self: Reader, data: bytes, final: bool = False) -> None:
    ORIGINAL_ADD(self, data, final)
    self.tail = self.tail if len(self.tail) < 3 else self.tail[:-1]


def keep_unfirm(self: Reader, mark: reader_module.Checkpoint) -> None:
    self.read, self.firm, self.tail, self.pending = mark


def overlapping(text: str) -> tuple[list[str], str]:
    pieces, rest = cut(text)
    return pieces, (pieces[-1][-1:] if pieces else "") + rest


ORIGINAL_ADD = Reader._add


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (Reader, "_add", double_pending),
        (Reader, "_add", forget_tail),
        (Reader, "rewind", lambda self, mark: None),
        (reader_module, "cut", overlapping),
        (exchange_module, "bisect_left", lambda at, written: len(at)),
    ],
)
def test_a_wrong_alignment_is_caught(
    monkeypatch: pytest.MonkeyPatch, place: object, name: str, fault: Callable[..., object]
) -> None:
    found = exchange_of(("bytes, few merges", "bytes, many merges"))
    rng = Random(1)
    samples = ["".join(rng.choices([*WORDS, " ", "日", "e\u0301"], k=10)) for _ in range(20)]

    def check_all() -> None:
        for i, text in enumerate(samples):
            check(found, text, i)

    check_all()
    monkeypatch.setattr(place, name, fault)
    with pytest.raises(AssertionError):
        check_all()


@given(texts, texts)
def test_whole_pieces_stay_what_they_are_whatever_follows(text: str, more: str) -> None:
    pieces, rest = cut(text)
    assert "".join(pieces) + rest == text and all(0 < len(piece) <= LONGEST for piece in pieces)
    assert cut(text + more)[0][: len(pieces)] == pieces and len(rest) <= LONGEST


@pytest.mark.parametrize("name", EXACT)
def test_pieces_give_the_tokens_of_the_whole_text(name: str) -> None:
    """Words, numbers, punctuation, code: whatever is cut only before spaces."""
    tokenizer, text = EXACT[name](), "there foo_bar(x)  the 12345 fox!\n\n  naïve blue . été\n"
    whole = tokenizer.encode("\n" + text, add_special_tokens=False)
    head = tokenizer.encode("\n", add_special_tokens=False)
    assert whole == [*head, *Speller(tokenizer).tokens(text)]


# -- special tokens


def test_special_tokens_are_mapped_by_what_they_mean() -> None:
    ours = with_markers(byte_level(300, special=("<|end|>", "<|user|>", "<|same|>")), "<think>", "</think>", "<tool>")
    theirs = with_markers(byte_level(380, special=("</s>", "[USER]", "<|same|>")), "[THINK]", "[/THINK]")
    found, names = exchange(ours, theirs), ours.get_vocab()
    mapped = {t: theirs.convert_ids_to_tokens(d) if d is not None else None for t, d in found.to_draft.items()}
    assert mapped == {
        names["<|end|>"]: "</s>", names["<|user|>"]: None, names["<|same|>"]: "<|same|>",
        names["<think>"]: "[THINK]", names["</think>"]: "[/THINK]",
    }  # fmt: skip
    reader = Reader(found, [], 0)
    reader.extend(ours.encode("<|user|><think>fox</think> blue<tool><|end|>", add_special_tokens=False))
    assert theirs.decode(reader.ids) == "[THINK]fox[/THINK] blue<tool></s>"
    tokens, ends = found.translate(theirs.encode("fox[/THINK]\nblue</s> the", add_special_tokens=False))
    assert ours.decode(tokens) == "fox</think>\nblue<|end|>" and len(ends) == len(tokens), "nothing follows an end"
    assert found.translate(theirs.encode("fox[USER]the"))[0] == found.target_speller.tokens("fox")
    facts = found.facts()
    assert facts["exchange"] == "text" and facts["mapped"]["<|end|>"] == "</s>"
    assert facts["not_read_by_draft"] == ["<|user|>"] and facts["never_proposed"] == ["[USER]"]


def test_where_only_special_tokens_differ_ids_are_exchanged() -> None:
    """As between QwQ-32B and a distilled R1: plain tokens are the same, the rest is not, and heads are padded."""
    ours = with_markers(byte_level(480, special=("<|im_end|>", "<|im_start|>")), "<think>", "</think>")
    theirs = with_markers(byte_level(480, special=("<|eos|>", "<|User|>")), "<extra>", "<think>", "</think>")
    found = Exchange(Side(ours, len(ours) + 20, frozenset([ours.eos_token_id])), side(theirs))
    assert found.kind == "ids" and Exchange.of(found.target, found.draft) is not None
    text = ours.encode("<think>\nthe naïve fox</think> 12<|im_end|>", add_special_tokens=False)
    reader = Reader(found, [7], 0)
    reader.extend(text)
    assert theirs.decode(reader.ids[1:]) == "<think>\nthe naïve fox</think> 12<|eos|>"
    assert len(reader.ids) == 1 + len(text) and found.translate(reader.ids[1:])[0] == text
    plain = [t for t in text if t not in found.target.added]
    assert [i for i in reader.ids[1:] if i in plain] == plain, "plain ids are the same"
    assert found.shared_share > 0.99


def test_the_same_tokens_need_no_exchange() -> None:
    one, other = byte_level(300), byte_level(300)
    assert Exchange.of(side(one), Side(other, 512, frozenset())) is None
    assert difference(one, other, 301, 512) == ""


def test_both_have_the_tokens_that_spell_the_same_bytes() -> None:
    found = exchange_of(("bytes, many merges", "sentencepiece, first"))
    ours, theirs = found.shared
    assert len(ours) == len(set(ours.tolist())) == len(set(theirs.tolist())) > 100
    for t, d in zip(ours.tolist(), theirs.tolist(), strict=True):
        same = found.target_speller.bytes_of(t) == found.draft_speller.bytes_of(d)
        assert same or found.to_target.get(d) == t


def test_a_draft_stops_where_a_step_of_the_target_may_end() -> None:
    found = exchange_of(("bytes, many merges", "sentencepiece, first"))
    stops = found.stops(StepDelimiters.of(found.target.tokenizer, found.target.eos).stops)
    own = StepDelimiters.of(found.draft.tokenizer, found.draft.eos).stops
    assert own <= stops and found.draft.tokenizer.eos_token_id in stops
    assert all(b"\n" in found.draft_speller.bytes_of(d) or d in found.draft.added for d in stops)


# -- prompts

TURN = [{"role": "user", "content": "the fox"}]
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|bot|>{{ 'END' }}"


def chat_pair(ours: str, theirs: str | None) -> Exchange:
    """Tokenizers whose templates end as given; None: no template."""
    one = with_markers(byte_level(300, special=("<|end|>", "<|user|>", "<|bot|>")), "<think>", "</think>")
    other = with_markers(byte_level(380, special=("</s>", "[USER]", "[BOT]")), "[THINK]", "[/THINK]")
    one.chat_template = TEMPLATE.replace("END", ours)
    if theirs is not None:
        other.chat_template = TEMPLATE.replace("END", theirs).replace("<|user|>", "[USER]").replace("<|bot|>", "[BOT]")
    return exchange(one, other)


@pytest.mark.parametrize(
    ("ours", "theirs", "read"),
    [
        ("", "", "[USER]the fox[BOT]"),
        ("<think>\n", "[THINK]\n", "[USER]the fox[BOT][THINK]\n"),
        ("<think>\n", "", "[USER]the fox[BOT][THINK]\n"),
        ("", "[THINK]\n", "[USER]the fox[BOT]"),
        ("<think>\n", None, "the fox[THINK]\n"),
    ],
)
def test_each_model_reads_a_chat_through_its_own_template(ours: str, theirs: str | None, read: str) -> None:
    """And both begin inside the thinking, or neither."""
    found = chat_pair(ours, theirs)
    prompt = encode_for_pair(found, TURN)
    assert isinstance(prompt, PairPrompt)
    assert found.target.tokenizer.decode(list(prompt)) == f"<|user|>the fox<|bot|>{ours}"
    assert found.draft.tokenizer.decode(prompt.draft) == read


def test_text_and_tokens_are_read_as_they_are() -> None:
    found = chat_pair("", "")
    assert found.draft.tokenizer.decode(encode_for_pair(found, "blue fox").draft) == "blue fox"
    tokens = found.target.tokenizer.encode("<|user|>blue fox<|end|>", add_special_tokens=False)
    assert found.draft.tokenizer.decode(encode_for_pair(found, tokens).draft) == "blue fox</s>"


# -- refusals


def test_a_tokenizer_that_cannot_spell_the_other_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"too little in common: \d+ of \d+ tokens of the target, such as .* cannot be"
    ):
        exchange(EXACT["bytes, many merges"](), letters("xyz"))
    with pytest.raises(ModelError, match=r"tokens of the draft, such as .* cannot be spelled"):
        exchange(letters("the"), letters("the quick brown fox jumps"))


@pytest.mark.parametrize("less", [(1, 0), (0, 1), (0, 9)])
def test_tokens_that_a_model_has_no_row_for_are_neither_fed_nor_proposed(less: tuple[int, int]) -> None:
    tokenizers = byte_level(300, special=("<end 0>",)), byte_level(380, special=("<end 1>",))
    assert all(t.eos_token_id == len(t) - 1 for t in tokenizers)
    sides = [Side(t, len(t) - n, frozenset([t.eos_token_id])) for t, n in zip(tokenizers, less, strict=True)]
    found = Exchange(sides[0], sides[1])
    for mapped, side in ((found.to_draft, sides[1]), (found.to_target, sides[0])):
        assert all(token is None or token < side.vocab_size for token in mapped.values())
    assert found.rows_for_target(torch.zeros(1, sides[1].vocab_size)).shape == (1, sides[0].vocab_size)
    text = tokenizers[1].decode(range(sides[1].vocab_size - 20, sides[1].vocab_size + less[1])) + "<end 1>"
    pair = encode_for_pair(found, text)
    reader = Reader(found, pair.draft, 0)
    reader.extend(pair)
    assert reader.ids and max(reader.ids) < sides[1].vocab_size
