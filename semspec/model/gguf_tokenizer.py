"""The tokenizer that a GGUF file carries, with its chat template."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from semspec.model.gguf_header import Header

ADD_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3")  # byte-level vocabularies that add a BOS token


def read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Built by transformers, which does not read from the file whether a text begins with a BOS token."""
    metadata = Header.read(path).metadata
    default = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in ADD_BOS
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", default))
    return PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name, add_bos_token=add_bos)
