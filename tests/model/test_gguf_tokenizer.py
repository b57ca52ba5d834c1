"""Tokenizers of GGUF files: the tokens of the checkpoint that a file was made from, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import PreTokenizer

from semspec.errors import ModelError
from semspec.model.config import read_config, stop_of
from semspec.text.tokenizer import encode, load_tokenizer
from tests.checkpoints import make_model
from tests.gguf_files import write

LINES = [
    "Don't you'll, the quick brown fox jumps over the lazy dog\n\n\nand it's DON'T in camelCase",
    "1. one\n\n2. two\n\n    if x == 12345:\n\n        y  =  678 / 9\n",
    "café résumé naïve; 東京 は 日本 の 首都\r\n\r\n//path/to\n",
]
TEXTS = [
    *LINES,
    "\n\n1. a\n\n2. b",
    "  12 34   5",
    "cafe\u0301 <|endoftext|></s><unk>",
    "HTTPServer/x//\n\n'LL",
    " </s> ",
]


def split(pattern: str) -> list[PreTokenizer]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]


SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
HEAD = [r"[^\r\n\p{L}\p{N}]?" + word for word in (f"{UPPER}*{LOWER}+", f"{UPPER}+{LOWER}*")]
PATHS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PLAIN = pre_tokenizers.ByteLevel(add_prefix_space=False)
# As the checkpoints of these families have them in their tokenizer.json, with some of their special tokens.
ORIGINALS: dict[str, tuple[list[PreTokenizer], tuple[str, ...]]] = {
    "gpt-2": ([PLAIN], ("<|endoftext|>",)),
    "smollm": ([pre_tokenizers.Digits(individual_digits=True), PLAIN], ("<|endoftext|>", "<|im_end|>")),
    "llama-bpe": (split(SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + TAIL), ("<|end_of_text|>", "<|eot_id|>")),
    "qwen2": (split(SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + TAIL), ("<|im_end|>", "<|endoftext|>")),
    "deepseek-r1-qwen": (
        split(SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + TAIL),
        ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    ),
    "deepseek-coder": (
        [
            *(pre_tokenizers.Split(Regex(p), "isolated") for p in (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+")),
            pre_tokenizers.Split(Regex("[一-龥ࠀ-一가-퟿]+"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ],
        ("<|EOT|>", "<｜begin▁of▁sentence｜>"),
    ),
    "tekken": (split("|".join([*HEAD, r"\p{N}"]) + PATHS), ("</s>", "[INST]", "<unk>")),
    "gpt-4o": (split("|".join([*(f"{w}{SHORT}?" for w in HEAD), r"\p{N}{1,3}"]) + PATHS), ("<|endoftext|>", "<|end|>")),
}  # fmt: skip


def original(name: str) -> Tokenizer:
    before, special = ORIGINALS[name]
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC() if name == "qwen2" else None
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence(before), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    made.add_tokens([AddedToken("<think>", normalized=False)])
    return made


def file_of(
    path: Path, tokens: dict[str, TokenType], kind: str = "gpt2", architecture: str = "llama", **more: Any
) -> Path:
    """A file without tensors. `more`: further fields of the tokenizer."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(tokens.values()))
    for name, value in more.items():
        key = f"tokenizer.{name}" if name.startswith("chat") else f"tokenizer.ggml.{name}"
        key = key.replace("template__", "template.")
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def kinds(made: Tokenizer) -> dict[str, TokenType]:
    added = {one.content: one.special for one in made.get_added_tokens_decoder().values()}
    types = {True: TokenType.CONTROL, False: TokenType.USER_DEFINED, None: TokenType.NORMAL}
    return {token: types[added.get(token)] for token, _ in sorted(made.get_vocab().items(), key=lambda one: one[1])}


def merges(made: Tokenizer) -> list[str]:
    return [" ".join(pair) for pair in json.loads(made.to_str())["model"]["merges"]]


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_byte_level_vocabulary_is_used_as_the_checkpoint_uses_it(name: str, tmp_path: Path) -> None:
    made = original(name)
    special = {token: made.token_to_id(token) for token in ORIGINALS[name][1]}
    fields = {"pre": name, "eos_token_id": special[ORIGINALS[name][1][0]], "add_bos_token": False}
    found = load_tokenizer(file_of(tmp_path / "m.gguf", kinds(made), merges=merges(made), **fields))
    assert found.get_vocab() == made.get_vocab(), "no token is added, for which a model has no embedding"
    for text in [*TEXTS, "".join(special) + "<think> x"]:
        assert found.encode(text) == made.encode(text).ids, text
    assert found.eos_token_id == fields["eos_token_id"]
    shown = made.encode("".join(special) + "a<think>").ids
    assert found.decode(shown, skip_special_tokens=True) == "a<think>"


@pytest.mark.parametrize(("name", "whole"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)])
def test_some_families_take_a_piece_that_is_a_token_whatever_the_merges_say(
    name: str, whole: bool, tmp_path: Path
) -> None:
    made = original(name)
    tokens = kinds(made) | {"zqz": TokenType.NORMAL}
    found = load_tokenizer(file_of(tmp_path / "m.gguf", tokens, merges=merges(made), pre=name, add_bos_token=False))
    assert (found.convert_ids_to_tokens(found.encode("zqz")) == ["zqz"]) == whole


@pytest.mark.parametrize(("name", "begins"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_whether_a_text_begins_with_a_token_is_known_by_the_family(name: str, begins: bool, tmp_path: Path) -> None:
    made = original(name)
    fields = {"merges": merges(made), "pre": name, "bos_token_id": 7}
    assert (load_tokenizer(file_of(tmp_path / "a.gguf", kinds(made), **fields)).encode("a")[0] == 7) == begins
    told = load_tokenizer(file_of(tmp_path / "b.gguf", kinds(made), **fields, add_bos_token=not begins))
    assert (told.encode("a")[0] == 7) != begins


@pytest.mark.parametrize(("fields", "says"), [({}, "is not said"), ({"pre": "new"}, "a name that is not known, 'new'")])
def test_a_way_of_cutting_that_is_not_known_is_told(
    fields: dict[str, str], says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = original("gpt-2")
    found = load_tokenizer(file_of(tmp_path / "m.gguf", kinds(made), merges=merges(made), **fields))
    assert says in caplog.text and found.encode(LINES[0]) == made.encode(LINES[0]).ids


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁▁", "▁a", "ab", "▁ab"]
SENTENCE_PIECE = dict.fromkeys(PIECES, TokenType.NORMAL) | {"<unk>": TokenType.UNKNOWN, "<|end|>": TokenType.CONTROL}
SENTENCE_PIECE |= dict.fromkeys(("<s>", "</s>"), TokenType.CONTROL)
SCORES = [0.0] * 259 + [-9.0, -9.0, -9.0, -3.0, -1.0, -2.0, -4.0, 0.0]


@pytest.mark.parametrize(
    ("architecture", "fields", "text", "tokens"),
    [
        ("llama", {}, "ab a", ["▁ab", "▁a"]),
        ("llama", {"add_space_prefix": False}, "ab a", ["ab", "▁a"]),
        ("llama", {}, "a\n", ["▁a", "<0x0A>"]),
        ("gemma3", {"add_space_prefix": False}, "ab  a", ["ab", "▁▁", "a"]),
        ("phi3", {}, "a<|end|>\nab", ["▁a", "<|end|>", "▁ab"]),  # white space after most special tokens is theirs
        ("phi3", {}, "a<s> b", ["▁a", "<s>", "▁▁", "b"]),
    ],
)
def test_sentence_pieces(
    architecture: str, fields: dict[str, Any], text: str, tokens: list[str], tmp_path: Path
) -> None:
    fields = fields | {"scores": SCORES, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    found = load_tokenizer(file_of(tmp_path / "m.gguf", SENTENCE_PIECE, "llama", architecture, **fields))
    assert found.convert_ids_to_tokens(found.encode(text)) == ["<s>", *tokens]
    assert len(found) == len(SENTENCE_PIECE), "no token is added, for which a model has no embedding"
    assert found.decode(found.encode("ab a  b"), skip_special_tokens=True) == "ab a  b"


def test_a_template_for_tools_is_read_too(tmp_path: Path) -> None:
    made, plain = original("gpt-2"), "{{ messages[0].content }}"
    fields = {"merges": merges(made), "pre": "gpt-2", "chat_template": plain}
    assert load_tokenizer(file_of(tmp_path / "a.gguf", kinds(made), **fields)).chat_template == plain
    fields |= {"chat_templates": ["tool_use"], "chat_template__tool_use": "{{ tools }}"}
    found = load_tokenizer(file_of(tmp_path / "b.gguf", kinds(made), **fields))
    assert found.chat_template == {"default": plain, "tool_use": "{{ tools }}"}
    assert encode(found, [{"role": "user", "content": "the fox"}]) == found.encode("the fox")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    made = original("gpt-2")
    (tmp_path / "n.gguf").write_bytes(b"GGUF" + bytes([3, *[0] * 19]))
    with pytest.raises(ModelError, match=r"n.gguf has no tokenizer in it; take a file that has one"):
        load_tokenizer(tmp_path / "n.gguf")
    with pytest.raises(ModelError, match="a tokenizer of kind 't5' is not supported; supported are gpt2"):
        load_tokenizer(file_of(tmp_path / "a.gguf", kinds(made), "t5"))
    with pytest.raises(ModelError, match=r"eos_token_id is 4096, and its vocabulary has \d+ tokens"):
        load_tokenizer(file_of(tmp_path / "b.gguf", kinds(made), merges=merges(made), pre="gpt-2", eos_token_id=4096))
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded"):
        load_tokenizer(file_of(tmp_path / "c.gguf", kinds(made), pre="gpt-2"))


@pytest.mark.parametrize(
    ("names", "fields", "ends"),
    [
        ({4: "<eos>", 9: "<end_of_turn>"}, {"eos": 4}, {4, 9}),  # Gemma 3
        ({4: "<|endoftext|>", 9: "<|end|>"}, {"eos": 4}, {4, 9}),  # Phi-3
        ({4: "<|end_of_text|>", 9: "<|eot_id|>", 8: "<|eom_id|>"}, {"eos": 9}, {4, 8, 9}),
        ({}, {"eos": 4, "eot": 5, "eom": 6}, {4, 5, 6}),
        ({}, {}, set()),
    ],
)
def test_turns_end_although_a_file_names_the_end_of_texts_only(
    names: dict[int, str], fields: dict[str, int], ends: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama3", num_hidden_layers=1)

    def add(writer: gguf.GGUFWriter, *_: object) -> None:
        writer.add_token_list([names.get(i, f"t{i}") for i in range(model.config.vocab_size)])
        for name, token in fields.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)

    monkeypatch.setattr("tests.gguf_files.add_tokenizer", add)
    assert stop_of(read_config(write(model, tmp_path / "m.gguf", object()))) == ends  # type: ignore[arg-type]
