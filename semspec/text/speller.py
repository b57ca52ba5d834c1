"""One tokenizer as it is used inside a text: from a part of a text to tokens, and from tokens to bytes.

A text that grows is tokenized piece by piece. Pieces end before a space that follows a word, where no tokenizer in use
has a token that goes across, so the tokens of a piece stay what they are whatever follows. Where a text has no such
place for long, as in Chinese, a piece ends after 64 characters at the latest; that may give other tokens than the
whole text would, but never another text.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from semspec.text.token_bytes import TokenBytes

LONGEST = 64  # characters of a piece
CACHED = 1 << 16  # pieces, most of them words
# Text before a piece, so that a tokenizer that treats the start of a text specially does no harm. The first that
# changes nothing is taken: some tokenizers merge a line end or a letter with what follows.
ANCHORS = ("", "\n", "a", " a", ".", "0")


def cut(text: str) -> tuple[list[str], str]:
    """The whole pieces of a text, which no further text changes, and the rest."""
    pieces, start = list[str](), 0
    end = text.find(" ", 1)
    while end > 0 or len(text) - start > LONGEST:
        if end < 0 or end > start + LONGEST:
            pieces.append(text[start : start + LONGEST])
            start += LONGEST
            continue
        if end > start and not text[end - 1].isspace():
            pieces.append(text[start:end])
            start = end
        end = text.find(" ", end + 1)
    return pieces, text[start:]


class Speller:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab: int | None = None) -> None:
        """`vocab`: leave out tokens from this id on, which a tokenizer may have and its model has not."""
        self.tokenizer, self.vocab_size = tokenizer, vocab
        self.bytes_of = lru_cache(None)(TokenBytes(tokenizer).of)  # what a token adds to a text
        self._piece = lru_cache(CACHED)(self._known)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        # Its own copy: others, on other threads, read control tokens as such.
        self._backend = copy.deepcopy(backend) if hasattr(backend, "encode") else None
        if self._backend is not None:  # several times faster than the tokenizer around it
            self._backend.encode_special_tokens = True

    def __deepcopy__(self, memo: dict[int, object]) -> Speller:
        return Speller(copy.deepcopy(self.tokenizer, memo), self.vocab_size)  # without what it has cached

    def spelled(self, tokens: Iterable[int]) -> bytes:
        return b"".join(map(self.bytes_of, tokens))

    def tokens(self, text: str) -> list[int]:
        """Tokens of a text that goes on from another."""
        pieces, rest = cut(text)
        return [token for piece in (*pieces, rest) if piece for token in self._piece(piece)]

    def _encode(self, text: str) -> list[int]:
        """A text that spells a control token is text all the same."""
        if self._backend is None:
            return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _known(self, piece: str) -> tuple[int, ...]:
        found = self._tokenize(piece)
        return found if self.vocab_size is None else tuple(token for token in found if token < self.vocab_size)

    def _tokenize(self, piece: str) -> tuple[int, ...]:
        wanted, fallback = piece.encode(), None
        for anchor in ANCHORS:
            head, whole = self._encode(anchor) if anchor else [], self._encode(anchor + piece)
            if whole[: len(head)] != head:
                continue
            found = tuple(whole[len(head) :])
            if self.spelled(found) == wanted:
                return found
            fallback = found if fallback is None else fallback
        # A tokenizer that changes texts (small letters only, say) reads its own version of the piece.
        return tuple(self._encode(piece)) if fallback is None else fallback
