"""The bytes of single tokens, as they are inside a text.

A tokenizer that decodes one token treats it as the beginning of a text: SentencePiece drops its space, and a token that
is part of a character becomes a replacement sign. What a token adds to a text is read from its vocabulary entry
instead: byte-level BPE spells bytes as characters, SentencePiece a space as U+2581 and bytes as <0x0A>.
"""

from __future__ import annotations

import json
import re
from functools import cached_property

from transformers import PreTrainedTokenizerBase

SPACE = "\u2581"  # how SentencePiece writes a space
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE writes bytes: printable ones are themselves, others follow U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class TokenBytes:
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added = set(tokenizer.get_added_vocab().values())

    @cached_property
    def _kind(self) -> str:
        """How vocabulary entries spell text, from the kinds of decoder there are."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        decoder = json.dumps(json.loads(backend.to_str()).get("decoder")) if backend is not None else ""
        if '"ByteLevel"' in decoder:
            return "bytes"
        return "spaces" if SPACE in decoder or r"\u2581" in decoder or '"Metaspace"' in decoder else "other"

    @cached_property
    def _alphabet(self) -> dict[str, int]:
        return byte_alphabet()

    def of(self, token: int) -> bytes:
        entry = self._tokenizer.convert_ids_to_tokens(token)
        if token in self._added or not isinstance(entry, str):
            return (entry if isinstance(entry, str) else "").encode()
        if self._kind == "bytes" and all(c in self._alphabet for c in entry):
            return bytes(self._alphabet[c] for c in entry)
        if self._kind == "spaces":
            byte = BYTE.fullmatch(entry)
            return bytes([int(byte[1], 16)]) if byte else entry.replace(SPACE, " ").encode()
        return self._after_another(token).encode()

    def _after_another(self, token: int) -> str:
        """What a decoder adds for a token that is not the first, such as WordPiece's ##ing."""
        alone, both = (
            str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))
            for ids in (self._first, [*self._first, token])
        )
        return both[len(alone) :] if both.startswith(alone) else str(self._tokenizer.decode([token]))

    @cached_property
    def _first(self) -> list[int]:
        return list(self._tokenizer.encode("a", add_special_tokens=False))
