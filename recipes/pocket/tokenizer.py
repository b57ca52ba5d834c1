"""The pair's tokenizer: byte-level BPE, one token per digit, and entries that end in a blank line.

A step ends in a token such as ".\\n\\n", as in the vocabularies of real reasoning models, so step-wise methods meet
the same boundary problem here. The think markers are single tokens that stay visible when decoding.

`OTHER` is for a draft that shares nothing with the target but the language: fewer entries, so that many words are in
pieces, line ends apart from punctuation, other special tokens and other ids for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from semspec.pocket.chat import (
    ASSISTANT,
    CHAT_TEMPLATE,
    END,
    END_THINK,
    MARKER_TOKENS,
    PAD,
    SPECIAL_TOKENS,
    THINK,
    USER,
)

# A possessive, a word, one digit, punctuation with the line ends after it, or white space.
_PIECES = r"'s| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+\n*|\n+|\s+"
_CONTEXT = 8192
PIECES = re.compile(r"<\|\w+\|>|</?think>|'s| ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+?(?=<|[\sA-Za-z0-9]|$)\n*|\n+|\s+")


@dataclass(frozen=True)
class Style:
    """A kind of tokenizer for the same texts."""

    entries: int = 3072  # at most
    pieces: str = _PIECES
    markers: dict[str, str] = field(default_factory=lambda: {m: m for m in (*SPECIAL_TOKENS, *MARKER_TOKENS)})  # by ids

    def spell(self, text: str) -> str:
        """A text with this style's markers instead of the world's."""
        for ours, own in self.markers.items():
            text = text.replace(ours, own)
        return text

    def unspell(self, text: str) -> str:
        for ours, own in self.markers.items():
            text = text.replace(own, ours)
        return text


COMMON = Style()
OTHER = Style(
    entries=1024,
    pieces=r"'s| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\n+|\s+",
    markers={
        PAD: "<pad>", USER: "[INST]", ASSISTANT: "[/INST]", END: "</s>", THINK: "<thinking>", END_THINK: "</thinking>"
    },
)  # fmt: skip


def style_of(tokenizer: PreTrainedTokenizerFast) -> Style:
    return OTHER if OTHER.markers[USER] in tokenizer.get_vocab() else COMMON


def train_tokenizer(texts: Iterable[str], style: Style = COMMON) -> PreTrainedTokenizerFast:
    """A tokenizer of this style learnt from plain texts (without the special tokens)."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(style.pieces), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    special = [own for ours, own in style.markers.items() if ours in SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=style.entries - len(MARKER_TOKENS),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens([AddedToken(style.markers[text], special=False, normalized=False) for text in MARKER_TOKENS])
    end, pad = style.markers[END], style.markers[PAD]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=end,
        pad_token=pad,
        additional_special_tokens=[token for token in special if token not in (end, pad)],
        model_max_length=_CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = style.spell(CHAT_TEMPLATE)
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, the chat template inside the latter."""
    tokenizer.save_pretrained(str(folder), save_jinja_files=False)


class QuickEncoder:
    """The same tokens as the tokenizer gives for plain English text, several times faster: nearly every piece of the
    pocket world has been seen before, so a dictionary answers. Only for making training data."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer, self._style = tokenizer, style_of(tokenizer)
        self._known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        known = self._known
        out: list[int] = []
        for piece in PIECES.findall(text):
            ids = known.get(piece)
            out += self._learn(piece) if ids is None else ids
        return out

    def marked(self, text: str, places: list[int], mark: int) -> list[int]:
        """The same, with `mark` on the token at each of these letters (in rising order).

        The token that begins there, not the piece's last: a choice of words shows in the first token that differs, and
        its options must weigh alike, or the model learns another habit than the text's."""
        known = self._known
        out: list[int] = []
        waiting = iter(places)
        next_place, end = next(waiting, -1), 0
        for piece in PIECES.findall(text):
            ids = known.get(piece)
            out += self._learn(piece) if ids is None else ids
            begin, end = end, end + len(piece)
            if 0 <= next_place < end:
                ids = known[piece]
                out[len(out) - len(ids) + self._token_at(ids, next_place - begin)] |= mark
                while 0 <= next_place < end:
                    next_place = next(waiting, -1)
        return out

    def _token_at(self, ids: list[int], letter: int) -> int:
        """Which of a piece's tokens has its letter of this number."""
        if len(ids) == 1:
            return 0
        ends = accumulate(len(token) for token in self._tokenizer.convert_ids_to_tokens(ids))  # a letter a byte here
        return next(number for number, end in enumerate(ends) if end > letter)

    def _learn(self, piece: str) -> list[int]:
        ids = self._known[piece] = self._tokenizer.encode(self._style.spell(piece), add_special_tokens=False)
        return ids
