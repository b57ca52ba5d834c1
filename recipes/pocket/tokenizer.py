"""The pair's tokenizer: byte-level BPE, one token per digit, and entries that end in a blank line.

A step ends in a token such as ".\\n\\n", as in the vocabularies of real reasoning models, so step-wise methods meet
the same boundary problem here. The think markers are single tokens that stay visible when decoding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from semspec.pocket.chat import CHAT_TEMPLATE, END, MARKER_TOKENS, PAD, SPECIAL_TOKENS

# A possessive, a word, one digit, punctuation with the line ends after it, or white space.
_PIECES = r"'s| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+\n*|\n+|\s+"
_CONTEXT = 8192
PIECES = re.compile(r"<\|\w+\|>|</?think>|'s| ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+?(?=<|[\sA-Za-z0-9]|$)\n*|\n+|\s+")


def train_tokenizer(texts: Iterable[str], entries: int = 3072) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `entries` entries learnt from plain texts (without the special tokens)."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries - len(MARKER_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKER_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in (END, PAD)],
        model_max_length=_CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, the chat template inside the latter."""
    tokenizer.save_pretrained(str(folder), save_jinja_files=False)


class QuickEncoder:
    """The same tokens as the tokenizer gives for plain English text, several times faster: nearly every piece of the
    pocket world has been seen before, so a dictionary answers. Only for making training data."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        known = self._known
        out: list[int] = []
        for piece in PIECES.findall(text):
            ids = known.get(piece)
            out += self._learn(piece) if ids is None else ids
        return out

    def marked(self, text: str, places: list[int], mark: int) -> list[int]:
        """The same, with `mark` on the token at each of these letters (in rising order)."""
        known = self._known
        out: list[int] = []
        waiting = iter(places)
        next_place, end = next(waiting, -1), 0
        for piece in PIECES.findall(text):
            ids = known.get(piece)
            out += self._learn(piece) if ids is None else ids
            end += len(piece)
            if 0 <= next_place < end:
                out[-1] |= mark
                while 0 <= next_place < end:
                    next_place = next(waiting, -1)
        return out

    def _learn(self, piece: str) -> list[int]:
        ids = self._known[piece] = self._tokenizer.encode(piece, add_special_tokens=False)
        return ids
