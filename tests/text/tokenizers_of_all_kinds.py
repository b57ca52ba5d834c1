"""Tokenizers of the kinds that people have, small and made on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = [
    "the",
    "there",
    "fox",
    "blue",
    "naïve",
    "日本",
    "日本語",
    "été",
    "12",
    "345",
    ".",
    "!\n\n",
    "\n",
    "foo_bar(x)",
    "😀",
]
WORDS_ONLY = "quick brown jumps over lazy dog light scatters because question answer number between thousand window"
TEXTS = [" ".join(Random(i).choices([*WORDS, *WORDS_ONLY.split()], k=12)) for i in range(60)]
BYTES = pre_tokenizers.ByteLevel.alphabet()
GPT = r"'s| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _wrap(core: Tokenizer, special: tuple[str, ...], template: str = "", **more: str) -> PreTrainedTokenizerFast:
    core.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=special[0], chat_template=template or None, **more)


def byte_level(entries: int, split: str | None = GPT, special: tuple[str, ...] = ("<eos>",)) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    own = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    cuts = [] if split is None else [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    core.pre_tokenizer = pre_tokenizers.Sequence([*cuts, *own])
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=entries, initial_alphabet=BYTES, show_progress=False)
    )
    return _wrap(core, special)


def composing() -> PreTrainedTokenizerFast:
    """Byte-level, but NFC first, as in Qwen."""
    core = byte_level(420).backend_tokenizer
    core.normalizer = normalizers.NFC()
    return _wrap(core, ("<eos>",))


def sentencepiece(prepend: str) -> PreTrainedTokenizerFast:
    """Unknown characters are spelt in bytes; a space is put before every text, or only before the first word."""
    space = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    plain = [text.replace("日", "").replace("😀", "") for text in TEXTS]
    trained.train_from_iterator(plain, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    learnt = json.loads(trained.to_str())["model"]
    names = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *sorted(learnt["vocab"], key=learnt["vocab"].get)]
    vocab, merges = {name: i for i, name in enumerate(names)}, [tuple(m) for m in learnt["merges"]]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.pre_tokenizer = space
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    return _wrap(core, ("</s>", "<s>"), unk_token="<unk>")


def wordpiece() -> PreTrainedTokenizerFast:
    """Small letters without accents, words in pieces, nothing between words but one space."""
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    core.train_from_iterator([*TEXTS, "abcdefghijklmnopqrstuvwxyz 0123456789"], trainer)
    return _wrap(core, ("[SEP]",), unk_token="[UNK]")


def letters(alphabet: str) -> PreTrainedTokenizerFast:
    """A token for each letter, and none for anything else."""
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(["?", *alphabet])}, merges=[], unk_token="?"))
    return _wrap(core, ("<eos>",), unk_token="?")


EXACT: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bytes, few merges": cache(lambda: byte_level(300)),
    "bytes, many merges": cache(lambda: byte_level(480, special=("<end>", "<start>"))),
    "bytes, gpt-2": cache(lambda: byte_level(400, None)),
    "sentencepiece, first": cache(lambda: sentencepiece("first")),
    "sentencepiece, always": cache(lambda: sentencepiece("always")),
}
CHANGING = {"composing": cache(composing), "wordpiece": cache(wordpiece)}


def with_markers(tokenizer: PreTrainedTokenizerFast, *markers: str) -> PreTrainedTokenizerFast:
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in markers])
    return tokenizer
