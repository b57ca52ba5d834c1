"""Random pairs of tokenizers, each kind as target and as draft: no byte is lost, doubled or moved between them."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from transformers import PreTrainedTokenizerFast

from semspec.text import reader as reader_module
from semspec.text.exchange import Exchange
from semspec.text.speller import cut
from tests.text.random_tokenizers import CHANGING, EXACT, odd_text
from tests.text.test_exchange import check, exchange, read_in_parts

KINDS = EXACT | CHANGING
TEXTS = 25
MADE: dict[tuple[str, int], PreTrainedTokenizerFast] = {}


def made(kind: str, seed: int) -> PreTrainedTokenizerFast:
    if (kind, seed) not in MADE:
        MADE[kind, seed] = KINDS[kind](Random(f"{kind} {seed}"))
    return MADE[kind, seed]


def pair(target: str, draft: str) -> Exchange:
    return exchange(made(target, 1), made(draft, 2))


@pytest.mark.parametrize(("target", "draft"), list(product(EXACT, EXACT)), ids=str)
def test_what_changes_nothing_gives_every_byte_back(target: str, draft: str) -> None:
    found, rng = pair(target, draft), Random(f"{target} {draft}")
    for seed in range(TEXTS):
        check(found, plain(odd_text(rng)), seed)


def plain(text: str) -> str:
    """Without what SentencePiece itself has another meaning for: its space, and its names of bytes."""
    return text.replace("▁", "").replace("<0x41>", "")


def own_version(found: Exchange, text: str) -> bytes:
    """What the draft makes of a whole text, by its pieces."""
    pieces, rest = cut(text)
    return b"".join(found.draft_speller.spelled(found.draft_speller.tokens(piece)) for piece in (*pieces, rest))


def check_changed(found: Exchange, text: str, seed: int) -> None:
    """The draft reads its own version of what the target wrote, all of it, once and in order; the target gets that
    version back, or its own of that one."""
    unknown = found.target.tokenizer.unk_token_id  # what a target cannot spell it does not write
    tokens = [token for token in found.target_speller.tokens(text) if token != unknown]
    written = found.target_speller.spelled(tokens)
    reader = read_in_parts(found, tokens, Random(seed))
    read = found.draft_speller.spelled(reader.ids)
    assert read == own_version(found, written.decode()) and not reader.pending
    back, ends = found.translate(reader.ids)
    again = found.target_speller.tokens(read.decode())
    spelled = found.target_speller.spelled(back)
    assert found.target_speller.spelled(again).startswith(spelled)
    assert len(ends) == len(back) and ends == sorted(ends) and all(end <= len(reader.ids) for end in ends)


@pytest.mark.parametrize(
    ("target", "draft"), [(a, b) for a, b in product(KINDS, KINDS) if CHANGING.keys() & {a, b}], ids=str
)
def test_what_changes_texts_reads_its_own_version_of_all_of_it(target: str, draft: str) -> None:
    found, rng = pair(target, draft), Random(f"{target} {draft}")
    for seed in range(TEXTS):
        check_changed(found, odd_text(rng), seed)


@pytest.mark.parametrize("draft", KINDS)
def test_bytes_that_are_no_characters_are_read_as_a_decoder_reads_them(draft: str) -> None:
    if draft == "word pieces":
        pytest.skip("has no way to spell what no character is")
    found = pair("bytes", draft)
    for seed in range(TEXTS):
        rng = Random(seed)
        data = bytes(rng.choice([*b"ab \n", *range(128, 256)]) for _ in range(rng.randint(1, 20)))
        reader = read_in_parts(found, [found._by_bytes[bytes([byte])] for byte in data], rng)
        whole = data[: len(data) - len(reader.pending)].decode(errors="replace")
        assert len(reader.pending) < 4 and found.draft_speller.spelled(reader.ids) == own_version(found, whole)


def lose(text: str) -> tuple[list[str], str]:
    pieces, rest = cut(text)
    return [piece[:-1] for piece in pieces], rest


def double(text: str) -> tuple[list[str], str]:
    pieces, rest = cut(text)
    return [piece + piece[-1:] for piece in pieces], rest


def move(text: str) -> tuple[list[str], str]:
    pieces, rest = cut(text)
    return [piece[:-2] + piece[:-3:-1] for piece in pieces], rest


@pytest.mark.parametrize("fault", [lose, double, move])
@pytest.mark.parametrize("draft", ["bytes", "unigram", "NFKC", "lower case"])
def test_a_wrong_alignment_is_caught(monkeypatch: pytest.MonkeyPatch, draft: str, fault: object) -> None:
    found, rng = pair("bytes", draft), Random(5)
    texts = [plain(" ".join(odd_text(rng) for _ in range(4))) for _ in range(10)]
    judge = check if draft in EXACT else check_changed
    for seed, text in enumerate(texts):
        judge(found, text, seed)
    monkeypatch.setattr(reader_module, "cut", fault)
    for seed, text in enumerate(texts):
        if cut(text)[0]:
            with pytest.raises(AssertionError):
                judge(found, text, seed)
