"""The language of synthetic models: a tokenizer with a word for each id of any vocabulary, and meanings."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from semspec.probe_fit.cluster import Clusterer

EVERY = 20  # one word in so many ends a step
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def spelling(number: int) -> str:
    """The word of an id. The first ten are digits, since rules look at numbers."""
    word = str(number) if number < 10 else "".join(LETTERS[number // 26**digit % 26] for digit in (3, 2, 1, 0))
    return f" {word}.\n\n" if number % EVERY == EVERY - 1 else f" {word}"


def make_tokenizer(vocab: int) -> PreTrainedTokenizerBase:
    """A word for each id, none of them special."""
    tokenizer = Tokenizer(models.WordLevel({spelling(i): i for i in range(vocab)}, unk_token=spelling(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" [a-z0-9]+(?:\.\n\n)?"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@dataclass
class FirstWord(Clusterer):
    """A step means what its first word is sorted under: as good as any other way to sort noise."""

    name = "first-word"

    meanings: int

    def cluster(self, texts: Sequence[str]) -> list[int]:
        numbers: dict[int, int] = {}
        firsts = [next(iter(text.split()), "") for text in texts]
        return [numbers.setdefault(zlib.crc32(w.encode()) % self.meanings, len(numbers)) for w in firsts]
