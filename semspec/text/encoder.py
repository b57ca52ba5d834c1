"""Networks that read texts and write none: how they are loaded and fed, and the vectors of a sentence encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from semspec.errors import ModelError
from semspec.model.placement import choose_device
from semspec.model.weights import locate

# Texts that any tokenizer tells apart, but not one that knows no word: they have equally many.
PROBES = ("Adding 12 and 30 gives 42 apples.", "There are 7 boats on the lake.")
BATCH = 64
PIECE = 180  # words that an encoder of 256 tokens reads at once


def load_network(model: str, kind: Any, device: str, user: str) -> tuple[Any, Any]:
    """A Hugging Face model of this kind with its tokenizer, from a folder or a hub id; `user` needs it."""
    folder = locate(model)
    try:
        network = kind.from_pretrained(folder, use_safetensors=True)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        read = [tokenizer(text)["input_ids"] for text in PROBES]
    except Exception as error:  # transformers raises many kinds here
        raise ModelError(f"{model} cannot be used by {user}: {error}{_hint(folder)}") from error
    if read[0] == read[1]:
        raise ModelError(f"the tokenizer of {model} reads every sentence alike; are its files complete?")
    return network.eval().to(choose_device(device)), tokenizer


def _hint(folder: Path) -> str:
    """What is likely missing."""
    if not any(folder.glob("*.safetensors")):
        return ". It has no safetensors: convert it once (docs/reproduce-papers.md says how) and give that folder"
    if any(folder.glob("*.model")) and not (folder / "tokenizer.json").exists():
        return ". Its tokenizer is a SentencePiece model: pip install 'semspec[fit]'"
    return ""


@torch.inference_mode()
def in_batches(
    network: Any, tokenizer: Any, inputs: Sequence[Any], use: Callable[[Any, Any], Tensor], batch: int = BATCH
) -> Tensor:
    """`use(network's output, its inputs)` for all inputs, batch by batch, on the host."""
    done = []
    for begin in range(0, len(inputs), batch):
        some = list(inputs[begin : begin + batch])
        fed = tokenizer(some, padding=True, truncation=True, return_tensors="pt").to(network.device)
        done.append(use(network(**fed), fed).float().cpu())
    return torch.cat(done)


class Encoder:
    """A sentence model, such as all-MiniLM-L6-v2: a folder or a hub id, loaded when first needed."""

    def __init__(self, model: str, device: str = "auto", batch: int = BATCH, user: str = "an encoder") -> None:
        self.model, self.device, self.batch, self.user = model, device, batch, user

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        return load_network(self.model, AutoModel, self.device, self.user)

    def embed(self, texts: Sequence[str]) -> Tensor:
        """[texts, d], of length 1: the mean of the last states of all tokens that are no padding"""

        def mean(output: Any, fed: Any) -> Tensor:
            mask = fed["attention_mask"][:, :, None]
            return (output.last_hidden_state * mask).sum(1) / mask.sum(1)

        return torch.nn.functional.normalize(in_batches(*self._loaded, texts, mean, self.batch), dim=-1)

    def embed_long(self, texts: Sequence[str]) -> Tensor:
        """The same for texts of any length: the mean of their pieces' vectors, each piece as long as is read at once.
        Sorted by length, so that short ones are not padded to the longest."""
        pieces = [(i, piece) for i, text in enumerate(texts) for piece in _pieces(text)]
        pieces.sort(key=lambda one: len(one[1]))
        vectors = self.embed([piece for _, piece in pieces])
        whole = torch.zeros(len(texts), vectors.shape[1])
        whole.index_add_(0, torch.tensor([i for i, _ in pieces]), vectors)
        return torch.nn.functional.normalize(whole, dim=-1)


def _pieces(text: str) -> list[str]:
    words = text.split()
    return [" ".join(words[i : i + PIECE]) for i in range(0, max(1, len(words)), PIECE)]
