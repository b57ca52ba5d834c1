"""The draft model's tokens of a text that grows by the target's tokens, at a cost that does not depend on its length.

All but the last piece of the text is firm: its tokens stay what they are. The last piece is tokenized again whenever
text is added. Bytes that are no character yet wait until they are one.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from semspec.text.exchange import Exchange
from semspec.text.speller import cut


class Checkpoint(NamedTuple):
    """A state that a reader can return to."""

    read: int
    firm: int
    tail: str
    pending: bytes


class Reader:
    def __init__(self, exchange: Exchange, prompt: Sequence[int], read: int) -> None:
        self.exchange = exchange
        self.ids = list(prompt)  # the draft's tokens of all that was read; in its own words for the prompt
        self.read = read  # tokens of the target, the prompt's included
        self.firm = len(self.ids)
        self.tail, self.pending = "", b""

    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.read, self.firm, self.tail, self.pending)

    def rewind(self, checkpoint: Checkpoint) -> None:
        """Forget what was read after a checkpoint."""
        self.read, self.firm, self.tail, self.pending = checkpoint
        del self.ids[self.firm :]
        self.ids += self.exchange.draft_speller.tokens(self.tail)

    def extend(self, tokens: Sequence[int]) -> None:
        del self.ids[self.firm :]
        spell, mapped = self.exchange.target_speller.bytes_of, self.exchange.to_draft
        self.read += len(tokens)
        data = self.pending
        for token in tokens:
            if token not in mapped:
                data += spell(token)
                continue
            self._add(data, final=True)
            other, data = mapped[token], b""
            if other is not None:
                self.ids.append(other)
            self.firm = len(self.ids)
        self._add(data)
        self.ids += self.exchange.draft_speller.tokens(self.tail)

    def _add(self, data: bytes, final: bool = False) -> None:
        """Add text. Bytes that never become a character are read as a replacement sign."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text = self.tail + decoder.decode(data, final)
        self.pending = decoder.getstate()[0]
        pieces, self.tail = cut(text)
        if final and self.tail:
            pieces, self.tail = [*pieces, self.tail], ""
        for piece in pieces:
            self.ids += self.exchange.draft_speller.tokens(piece)
        self.firm = len(self.ids)
