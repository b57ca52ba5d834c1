"""Tokenizers of every kind with random sizes, splits and training texts, and texts that are hard to read."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.text.tokenizers_of_all_kinds import BYTES, GPT, TEXTS, WORDS

SPLITS = (GPT, r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+", r"\p{N}{1,2}|\p{L}+|[^\p{L}\p{N}]+")
HEX = [f"<0x{byte:02X}>" for byte in range(256)]
SENTENCEPIECE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def texts(rng: Random) -> list[str]:
    return rng.sample(TEXTS, 40)


def wrap(core: Tokenizer, rng: Random, **more: str) -> PreTrainedTokenizerFast:
    names = rng.sample(["<eos>", "</s>", "<|end|>", "[BOT]", "<|user|>"], 3)
    core.add_special_tokens(names)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=names[0], **more)


def byte_level(rng: Random, *normalize: normalizers.Normalizer, prefix: bool = False) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    plain = prefix or rng.random() < 0.3
    cuts = [] if plain else [pre_tokenizers.Split(Regex(rng.choice(SPLITS)), behavior="isolated")]
    own = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=plain)
    core.pre_tokenizer = pre_tokenizers.Sequence([*cuts, own])
    if normalize:
        core.normalizer = normalizers.Sequence(list(normalize))
    core.decoder = decoders.ByteLevel()
    size = rng.randint(270, 520)
    core.train_from_iterator(
        texts(rng), trainers.BpeTrainer(vocab_size=size, initial_alphabet=BYTES, show_progress=False)
    )
    return wrap(core, rng)


def pieces(rng: Random, *normalize: normalizers.Normalizer) -> PreTrainedTokenizerFast:
    """SentencePiece's BPE; what it has not learnt is spelt in bytes."""
    prepend = rng.choice(["first", "always"])
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    size = rng.randint(120, 350)
    trained.train_from_iterator(texts(rng), trainers.BpeTrainer(vocab_size=size, show_progress=False))
    learnt = json.loads(trained.to_str())["model"]
    names = ["<unk>", *HEX, *sorted(learnt["vocab"], key=learnt["vocab"].get)]
    vocab, merges = {name: i for i, name in enumerate(names)}, [tuple(m) for m in learnt["merges"]]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    if normalize:
        core.normalizer = normalizers.Sequence(list(normalize))
    core.decoder = decoders.Sequence(SENTENCEPIECE)
    return wrap(core, rng, unk_token="<unk>")


def unigram(rng: Random, *normalize: normalizers.Normalizer) -> PreTrainedTokenizerFast:
    """SentencePiece's other model, as in T5 and Gemma's ancestors; with bytes for the rest."""
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    size = rng.randint(420, 480)
    core.train_from_iterator(
        texts(rng),
        trainers.UnigramTrainer(
            vocab_size=size, unk_token="<unk>", special_tokens=["<unk>", *HEX], show_progress=False
        ),
    )
    made = json.loads(core.to_str())
    made["model"]["byte_fallback"] = True
    made["added_tokens"] = [one for one in made["added_tokens"] if one["content"] not in HEX]
    core = Tokenizer.from_str(json.dumps(made))
    if normalize:
        core.normalizer = normalizers.Sequence(list(normalize))
    core.decoder = decoders.Sequence(SENTENCEPIECE)
    return wrap(core, rng, unk_token="<unk>")


def word_pieces(rng: Random) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=rng.random() < 0.5)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    size = rng.randint(300, 380)
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=["[UNK]"], show_progress=False)
    core.train_from_iterator([*texts(rng), string.printable], trainer)
    return wrap(core, rng, unk_token="[UNK]")


Maker = Callable[[Random], PreTrainedTokenizerFast]
EXACT: dict[str, Maker] = {"bytes": byte_level, "pieces": pieces, "unigram": unigram}
CHANGING: dict[str, Maker] = {
    "prefix space": lambda rng: byte_level(rng, prefix=True),
    "NFC": lambda rng: byte_level(rng, normalizers.NFC()),
    "NFKC": lambda rng: pieces(rng, normalizers.NFKC()),
    "lower case": lambda rng: byte_level(rng, normalizers.NFKC(), normalizers.Lowercase()),
    "unigram, NFKC": lambda rng: unigram(rng, normalizers.NFKC()),
    "word pieces": word_pieces,
}
ODD = [
    "e\u0301", "a\u0300\u0301", "\u0301", "👩\u200d👩\u200d👧", "\U0001f468\U0001f3fd", "\u200d", "שלום", "مرحبا",
    "\u202e", "\u2067", "\\ud83d", "�", "ﬁ", "ＡＢ", "ß", "İ", "\u00a0", "안녕", "ก็", "\ufeff", "\x00", "\t", "  ",
    "\r\n", "\n\n\n", "<eos>", "▁", "Ġ", "<0x41>", "日本語" * 25,
]  # fmt: skip


def odd_text(rng: Random) -> str:
    return "".join(rng.choice([*WORDS, *ODD, " ", " ", " "]) for _ in range(rng.randint(1, 14)))
