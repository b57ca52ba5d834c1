"""The tokenizer that a GGUF file carries, with its chat template."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from semspec.model.gguf_header import Header

BEGINS = ("llama-bpe", "llama3", "llama-v3", "falcon3")  # byte-level vocabularies that begin a text with a token


def read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """transformers builds it. Whether a text begins with a special token it does not ask the file, so we do."""
    metadata = Header.read(path).metadata
    usual = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in BEGINS
    begins = bool(metadata.get("tokenizer.ggml.add_bos_token", usual))
    return PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name, add_bos_token=begins)
