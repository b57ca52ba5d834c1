"""Text from tokens, however they arrive: never half a character, never past a stop string, origins kept straight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from semspec.errors import BadRequest, ModelError
from semspec.text.stream import UNFINISHED, TextStream
from semspec.text.tokenizer import difference, encode, load_tokenizer, thinking_markers
from semspec.types import Origin
from tests.checkpoints import make_tokenizer

TOKENIZER = make_tokenizer()
SIZE = len(TOKENIZER)
PROMPT = TOKENIZER.encode("the quick")
ORIGINS: list[Origin] = ["draft", "relaxed", "target"]  # token i of a test has origin i modulo 3
Spans = list[tuple[str, Origin]]

# Texts that are hard to cut: emoji of several code points, accents, CJK, and words the tokenizer knows whole.
fragments = st.sampled_from(["the", " quick", "👩‍👩‍👧", "🙂", "é", "漢字", "\n\n", "e\u0301"])
whole_texts = (
    st.lists(st.one_of(st.text(max_size=4), fragments), max_size=12)
    .map("".join)
    .filter(lambda text: UNFINISHED not in text)
)
any_tokens = st.lists(st.integers(0, SIZE - 1), max_size=40)  # mostly bytes that make no character at all
sizes = st.lists(st.integers(1, 6), max_size=40)
lags = st.integers(0, 3)


def decode(tokens: list[int]) -> str:
    text = TOKENIZER.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def pieces(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    """The tokens in feeds of the given sizes, and the rest in one more."""
    feeds, at = [], 0
    for size in sizes:
        if at + size < len(tokens):
            feeds.append(tokens[at : at + size])
            at += size
    return [*feeds, tokens[at:]]


def stream(feeds: list[list[int]], stop: tuple[str, ...] = (), lag: int = 0) -> tuple[list[Spans], int | None]:
    """Feed and take in turns, as the loop and its reader do; the reader may lag some feeds behind.

    Returns the spans that each take gave, and how many tokens belong to the text if a stop string ended it.
    """
    text = TextStream(TOKENIZER, PROMPT, stop)
    unread: list[list[Origin]] = []
    taken, fed, end = [], 0, None
    for feed in feeds:
        while len(unread) > lag:
            taken.append(text.take(unread.pop(0)))
        kept = text.feed(feed)
        count = len(feed) if kept is None else kept
        unread.append([ORIGINS[i % 3] for i in range(fed, fed + count)])
        fed += count
        if kept is not None:
            end = fed
            break
    while unread:
        taken.append(text.take(unread.pop(0), final=not unread))
    return taken, end


def joined(taken: list[Spans]) -> str:
    return "".join(text for spans in taken for text, _ in spans)


def first_stop(text: str, stop: tuple[str, ...]) -> str:
    """Read a text character by character and cut it when a stop string is complete; of several, the longest."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))]
    return text


# -- text


@given(any_tokens, sizes, lags)
def test_the_pieces_add_up_to_what_the_tokenizer_decodes(tokens: list[int], sizes: list[int], lag: int) -> None:
    taken, end = stream(pieces(tokens, sizes), lag=lag)
    assert joined(taken) == decode(tokens) and end is None


@given(whole_texts, sizes, lags)
def test_no_character_is_ever_split(text: str, sizes: list[int], lag: int) -> None:
    taken, _ = stream(pieces(TOKENIZER.encode(text), sizes), lag=lag)
    assert joined(taken) == text
    assert not any(UNFINISHED in piece for spans in taken for piece, _ in spans)


@given(whole_texts, st.integers(1, 30))
def test_an_answer_cut_within_a_character_shows_that_one_only_and_only_at_the_end(text: str, n: int) -> None:
    tokens = TOKENIZER.encode(text)[:n]
    taken, _ = stream([[token] for token in tokens] or [[]])
    assert joined(taken) == decode(tokens)
    assert UNFINISHED not in joined(taken[:-1])


def test_an_emoji_appears_when_its_last_byte_arrives() -> None:
    tokens = TOKENIZER.encode("🙂")
    assert len(tokens) == 4
    text = TextStream(TOKENIZER, PROMPT)
    for token in tokens[:3]:
        assert text.feed([token]) is None and text.take(["draft"]) == []
    text.feed(tokens[3:])
    assert text.take(["target"]) == [("🙂", "target")]


def test_special_tokens_are_not_text() -> None:
    eos = TOKENIZER.eos_token_id
    taken, _ = stream([[eos, *TOKENIZER.encode("the"), eos], [eos] * 12, [*TOKENIZER.encode("é"), eos]])
    assert joined(taken) == "theé"


@pytest.mark.parametrize("prompt", ["", "é🙂", "the quick brown fox jumps over the"])
def test_the_prompt_is_not_part_of_the_text(prompt: str) -> None:
    text = TextStream(TOKENIZER, TOKENIZER.encode(prompt))
    text.feed(TOKENIZER.encode(" lazy dog"))
    assert text.text == " lazy dog"


# -- origins


@given(whole_texts, sizes, lags)
def test_every_character_has_the_origin_of_the_token_that_finished_it(text: str, sizes: list[int], lag: int) -> None:
    tokens = TOKENIZER.encode(text)
    expected: Spans = []
    for i in range(len(tokens)):
        so_far = decode(tokens[: i + 1])
        if not so_far.endswith(UNFINISHED):
            expected += [(character, ORIGINS[i % 3]) for character in so_far[len(expected) :]]
    taken, _ = stream(pieces(tokens, sizes), lag=lag)
    assert [(character, origin) for spans in taken for text, origin in spans for character in text] == expected


@given(whole_texts, sizes)
def test_a_reader_who_lags_behind_gets_what_a_prompt_one_gets(text: str, sizes: list[int]) -> None:
    """With several streams open, one sequence's tokens are fed while the events of another are being read."""
    feeds = pieces(TOKENIZER.encode(text), sizes)
    assert stream(feeds, lag=len(feeds)) == stream(feeds)


# -- stop strings

stops = st.lists(st.sampled_from(["the", "h", "he q", "qu", "ck b", "🙂", "é\n", "xy", " "]), max_size=3).map(tuple)
stoppable = st.lists(st.sampled_from(["the", " quick", " brown", "🙂", "é", "\n", "x", "y", "h", "q"]), max_size=10)


@given(stoppable.map("".join), stops, sizes, lags)
@settings(max_examples=300)
def test_text_is_cut_where_the_first_stop_string_begins(
    text: str, stop: tuple[str, ...], sizes: list[int], lag: int
) -> None:
    tokens = TOKENIZER.encode(text)
    taken, end = stream(pieces(tokens, sizes), stop, lag)
    assert joined(taken) == first_stop(text, stop)
    if end is None:
        assert not any(s in text for s in stop)
    else:
        assert any(s in decode(tokens[:end]) for s in stop)
        assert not any(s in decode(tokens[: end - 1]) for s in stop), "an earlier token completed it"


def test_the_stop_string_that_is_complete_first_wins_whatever_their_order() -> None:
    (the,) = TOKENIZER.encode("the")  # one token, so that both stop strings arrive together
    for stop in (("h", "the"), ("the", "h"), ("he", "h"), ("h", "he")):
        assert joined(stream([[the]], stop)[0]) == "t"
    for stop in (("th", "he"), ("he", "th"), ("h", "th"), ("th", "h")):
        assert stream([[the]], stop) == ([[]], 1)
        text = TextStream(TOKENIZER, PROMPT, stop)
        text.feed([the])
        assert text.stopped_by == "th"


def test_a_stop_string_across_tokens_is_cut_exactly() -> None:
    tokens = TOKENIZER.encode("the quick brown")
    taken, end = stream([[token] for token in tokens], stop=("ck br",))
    assert joined(taken) == "the qui"
    assert end is not None and "ck br" in decode(tokens[:end]) and "ck br" not in decode(tokens[: end - 1])


def test_what_may_become_a_stop_string_is_held_back_and_given_when_it_does_not() -> None:
    text = TextStream(TOKENIZER, PROMPT, ("xyz",))
    text.feed(TOKENIZER.encode("ax"))
    assert text.take(["draft"] * 2) == [("a", "draft")]
    text.feed(TOKENIZER.encode("y"))
    assert text.take(["relaxed"]) == []
    text.feed(TOKENIZER.encode("x"))
    assert text.take(["target"]) == [("x", "draft"), ("y", "relaxed")]
    text.feed(TOKENIZER.encode("b"))
    assert text.take(["draft"], final=True) == [("x", "target"), ("b", "draft")]


def test_what_is_held_back_is_given_at_the_end() -> None:
    taken, end = stream([TOKENIZER.encode("ax"), TOKENIZER.encode("y")], stop=("xyz",))
    assert joined(taken) == "axy" and end is None


@pytest.mark.parametrize("stop", ["quick", "ck b"])
def test_a_stop_string_in_the_prompt_does_not_stop(stop: str) -> None:
    assert stream([TOKENIZER.encode(" brown")], stop=(stop,))[1] is None


# -- prompts


def test_text_is_encoded_as_it_is_and_messages_through_the_chat_template() -> None:
    assert encode(TOKENIZER, "the quick") == TOKENIZER.encode("the quick")
    assert decode(encode(TOKENIZER, [{"role": "user", "content": "hi"}])) == "user: hi\nassistant: "


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(BadRequest, match="the prompt is empty; give at least one token"):
        encode(TOKENIZER, "")


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "hi"}, "hi"])
def test_a_message_without_role_or_content_is_refused(message: object) -> None:
    with pytest.raises(BadRequest, match="a chat message needs a role and a content, both text; this one is"):
        encode(TOKENIZER, [message])  # type: ignore[list-item]


def test_messages_without_a_chat_template_are_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(BadRequest, match="this model has no chat template; give the prompt as text"):
        encode(tokenizer, [{"role": "user", "content": "hi"}])


def test_messages_that_the_chat_template_refuses_are_refused_with_its_reason() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(BadRequest, match="the model's chat template refuses these messages: roles must alternate"):
        encode(tokenizer, [{"role": "user", "content": "hi"}])


def test_a_chat_template_that_is_broken_is_told_from_messages_that_do_not_suit_it() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}\n{{ m['content'] "
    with pytest.raises(BadRequest, match=r"chat template is broken, line 2: .* or send texts in place of messages"):
        encode(tokenizer, [{"role": "user", "content": "hi"}])
    tokenizer.chat_template = "{{ messages[0].nothing.at_all }}"
    with pytest.raises(BadRequest, match="chat template fails on these messages"):
        encode(tokenizer, [{"role": "user", "content": "hi"}])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has weights but no tokenizer; copy tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)


def test_only_we_say_that_a_text_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 4
    tokenizer.save_pretrained(tmp_path)
    loaded, told = load_tokenizer(tmp_path), list[object]()
    monkeypatch.setattr("transformers.tokenization_utils_base.logger.warning", lambda *given, **_: told.append(given))
    assert len(encode(loaded, "the quick brown fox jumps over")) > loaded.model_max_length == 4
    assert not told, "its limit is not that of the slots"


# -- two tokenizers


def vocabulary(**ids: int) -> PreTrainedTokenizerFast:
    """A tokenizer with exactly these tokens."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(ids, unk_token="a")))


def test_equal_tokenizers_share_everything() -> None:
    assert difference(make_tokenizer(), make_tokenizer(), SIZE, SIZE) == ""


def test_vocabularies_may_differ_in_padding() -> None:
    one, other = vocabulary(a=0, b=1, c=2), vocabulary(a=0, b=1, c=2)
    assert [difference(one, other, *sizes) for sizes in ((128, 64), (64, 128), (3, 128))] == ["", "", ""]


def test_swapped_tokens_are_found() -> None:
    swapped = difference(vocabulary(a=0, b=1, c=2), vocabulary(a=0, c=1, b=2), 3, 3)
    assert swapped == "id 1 is 'b' to the target and 'c' to the draft"


def test_a_real_token_beyond_what_both_models_have_is_a_difference() -> None:
    short, long = vocabulary(a=0, b=1), vocabulary(a=0, b=1, c=2)
    assert difference(short, long, 2, 3) == "the draft has a token 'c' with id 2, but the models share only 2 ids"
    assert difference(long, short, 3, 2) == "the target has a token 'c' with id 2, but the models share only 2 ids"


def test_a_token_that_not_even_its_own_model_can_write_does_not_matter() -> None:
    """Such as a padding token that a tokenizer adds behind the model's vocabulary."""
    one, other = vocabulary(a=0, b=1, pad=2), vocabulary(a=0, b=1, pad=2)
    assert difference(one, other, 2, 2) == ""


def test_a_gap_in_one_vocabulary_is_found() -> None:
    whole, gap = vocabulary(a=0, b=1, c=2), vocabulary(a=0, c=2)
    assert difference(whole, gap, 3, 3) == "only the target has a token with id 1, 'b'"
    assert difference(gap, whole, 3, 3) == "only the draft has a token with id 1, 'b'"


def test_further_tokens_in_the_padding_of_the_other_pass() -> None:
    """As between the base and the chat version of a family; both models have room for them."""
    assert difference(vocabulary(a=0, b=1), vocabulary(a=0, b=1, c=2), 8, 8) == ""


def make_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """In the manner of Llama 2: what is not in the vocabulary is spelt in bytes, and a run of them decodes as one."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "▁b"]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [("▁", "a"), ("▁", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


FALLBACK = make_fallback_tokenizer()


@given(
    st.lists(
        st.sampled_from(["a", " a", "b", " ", "日本語文字", "é", "😀😀😀", "語a", "é é"]), min_size=1, max_size=10
    ),
    sizes,
)
def test_text_spelt_in_bytes_streams_whole(parts: list[str], sizes: list[int]):
    prompt = FALLBACK.encode("a 語b", add_special_tokens=False)
    whole = FALLBACK.encode("a 語b" + "".join(parts), add_special_tokens=False)
    assert whole[: len(prompt)] == prompt
    stream, spans = TextStream(FALLBACK, prompt), []
    for feed in pieces(whole[len(prompt) :], sizes):
        stream.feed(feed)
        spans += stream.take(["target"] * len(feed))
    spans += stream.take([], final=True)
    assert "".join(text for text, _ in spans) == "".join(parts)


def test_a_stop_string_before_an_unfinished_character_still_counts():
    stop, half = TOKENIZER.encode("the"), TOKENIZER.encode("漢")[:1]
    stream = TextStream(TOKENIZER, PROMPT, ("he",))
    assert stream.feed([*stop, *half]) == len(stop)
    late = TextStream(TOKENIZER, PROMPT, (". ",))
    assert late.feed([*TOKENIZER.encode(". "), *half]) is not None


def test_endless_garbage_stays_cheap():
    garbage = TOKENIZER.encode("漢")[:1] * 600
    stream = TextStream(TOKENIZER, PROMPT)
    stream.feed(garbage)
    assert len(stream._window) < 200


@pytest.mark.parametrize(
    ("added", "template", "markers"),
    [
        (["<think>", "</think>"], None, ("<think>", "</think>")),
        (["[THINK]", "[/THINK]"], "", ("[THINK]", "[/THINK]")),
        (["<reasoning>", "</reasoning>"], "{{ '<reasoning>' + r + '</reasoning>' }}", ("<reasoning>", "</reasoning>")),
        (["[my_thoughts]", "[/my_thoughts]"], "a [/my_thoughts] b", ("[my_thoughts]", "[/my_thoughts]")),
        (["<think>", "</think>", "<reason>", "</reason>"], "</reason>", ("<think>", "</think>")),
        (["<reasoning>", "</reasoning>"], "nothing of the kind", None),
        ([], "{{ '<reasoning>' + r + '</reasoning>' }}", None),  # several tokens each
        (["<b>", "</b>"], "<b>bold</b>", None),
        (["<reasoning>", "</reasoning>"], {"default": "", "tools": "</reasoning>"}, ("<reasoning>", "</reasoning>")),
    ],
)
def test_a_models_thinking_is_found_by_its_markers(
    added: list[str], template: str | dict[str, str] | None, markers: tuple[str, str] | None
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(added)
    tokenizer.chat_template = template
    found = thinking_markers(tokenizer)
    assert (found and tuple(tokenizer.convert_ids_to_tokens(found))) == markers


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_prompt_that_ends_inside_a_character_leaves_it_to_the_answer(cut: int) -> None:
    tokens = FALLBACK.encode("😀😀", add_special_tokens=False)[-4:]
    prompt = [*FALLBACK.encode("b", add_special_tokens=False), *tokens[:cut]]
    stream = TextStream(FALLBACK, prompt)
    answer = [*tokens[cut:], *FALLBACK.encode("ab", add_special_tokens=False)[1:]]
    stream.feed(answer)
    text = "".join(text for text, _ in stream.take(["target"] * len(answer), final=True))
    assert text.startswith("😀") and "\ufffd" not in text


@pytest.mark.parametrize("prompt", ["a \ud800", [{"role": "user", "content": "\udfff"}]])
def test_half_a_character_is_refused_in_one_line(prompt: Any) -> None:
    tokenizer = make_fallback_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(BadRequest, match=r"half a character in it, the lone surrogate U\+D[8F]"):
        encode(tokenizer, prompt)
