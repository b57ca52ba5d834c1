"""A one-pass block head (DFlash): a few layers that fill in a block of masked tokens at once.

The target's states are its context: every layer makes keys and values of them. The block is the last token of the text
and masks after it; its tokens see the context and each other. The output at a mask is a guess at the token in its
place. Embedding and output projection are the target's.
Source: DFlash (arXiv 2602.06036).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from semspec.errors import ModelError
from semspec.model.attention_metadata import AttentionMetadata, SequenceChunk
from semspec.model.config import AttentionSpec, Shape
from semspec.model.heads.config import HeadTensors, head_shape, layer_ids, read_json
from semspec.model.heads.eagle import TargetParts, head_folder
from semspec.model.layers import KeysAndValues, LayerMath, LayerReader
from semspec.model.placement import Precision
from semspec.model.weight_loader import WeightLoader
from semspec.model.weights import Checkpoint
from semspec.types import Runner

MOST = 256  # tokens of a block
KNOWN = ("fc.", "hidden_norm.", "layers.", "norm.", "mask_embedding", "embed_tokens.", "lm_head.")


@dataclass(frozen=True, slots=True)
class BlockConfig:
    shape: Shape
    layers: tuple[int, ...]  # of the target, whose states it reads
    block: int  # tokens of a block, the known first one included
    mask: int  # the token that stands for those to be filled in
    fused: bool = True

    @staticmethod
    def read(tensors: HeadTensors, target: TargetParts) -> BlockConfig:
        config, folder, width = read_json(tensors.folder), tensors.folder, target.embedding.shape[1]
        own = config.get("dflash_config")
        if not isinstance(own, dict):
            raise ModelError(f"{folder}: the config has no dflash_config, so it is no block head; EAGLE-3: eagle:PATH")
        block, mask = config.get("block_size", own.get("block_size")), own.get("mask_token_id")
        if type(block) is not int or not 2 <= block <= MOST:
            raise ModelError(f"{folder}: block_size is {block!r}; it should be a number of 2 to {MOST} tokens")
        if type(mask) is not int or not 0 <= mask < len(target.embedding):
            raise ModelError(f"{folder}: mask_token_id is {mask!r}; the target has {len(target.embedding)} tokens")
        odd = [name for name in tensors if not name.startswith(KNOWN)]
        if odd or (folder / "mask_embedding.pt").exists():
            what = odd[0] if odd else "mask_embedding.pt, a pickle, which is not opened"
            raise ModelError(f"{folder}: the head has {what}; block heads of this kind are not supported")
        if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
            raise ModelError(f"{folder}: layers with a sliding window are not supported in block heads")
        ids = layer_ids(own.get("target_layer_ids"), target.depth - 1)
        inputs = tensors.size("fc.weight")[-1]
        if ids is None or inputs != len(ids) * width:
            raise ModelError(
                f"{folder}: fc reads {inputs} numbers, and the config names {len(ids or ())} layers of this target's "
                f"width {width}; the head is for another target"
            )
        shape = head_shape(lambda key: config.get(key), tensors)
        if shape.width != width:
            raise ModelError(f"{folder}: its width is {shape.width}; with the target's embedding it has to be {width}")
        return BlockConfig(shape, tuple(i + 1 for i in ids), block, mask)  # id i is the state after layer i


class AllOfIt(AttentionMetadata):
    """Every token attends to all of its sequence, to later tokens as well."""

    def masks(self, spec: AttentionSpec) -> list[tuple[int, Tensor | None]]:
        return [(0, None)] * len(self.chunks)


class BlockHead(LayerMath):
    def __init__(self, config: BlockConfig, tensors: HeadTensors, target: TargetParts, device: torch.device) -> None:
        shape = config.shape
        super().__init__(shape, device, target.dtype)
        self.config, self.head = config, target.head
        self.embedding = self.shared_embedding = target.embedding
        loader = WeightLoader(tensors, device, Precision(target.dtype), shape.parameters)
        reader = LayerReader(shape, loader)
        self.fc = loader.linear(["fc"], [shape.width], len(config.layers) * shape.width, "fc.bias" in tensors)
        self.hidden_norm, self.final_norm = reader.norm("hidden_norm"), reader.norm("norm")
        self.layers = [reader.layer(i, f"layers.{i}") for i in range(shape.depth)]
        self.mask = F.embedding(torch.tensor(config.mask, device=device), self.embedding).to(self.dtype)
        if "mask_embedding" in tensors:
            self.mask = loader.read("mask_embedding", *tensors.size("mask_embedding")).view(shape.width)

    @staticmethod
    def load(path: str | Path, target: Runner) -> BlockHead:
        parts = TargetParts.of(target)
        with Checkpoint(head_folder(path)) as checkpoint:
            tensors = HeadTensors(checkpoint)
            return BlockHead(BlockConfig.read(tensors, parts), tensors, parts, target.device)

    def combine(self, states: list[Tensor]) -> Tensor:
        """The target's states of some tokens, [N, width] for each layer -> [N, width]"""
        return self.norm(self.fc(torch.cat([state.to(self.dtype) for state in states], -1)), self.hidden_norm)

    def read(self, states: Tensor, chunks: list[SequenceChunk], cache: KeysAndValues) -> None:
        """Store the keys and values of further states [N, width]."""
        metadata = AttentionMetadata(chunks, self.device, self.rotary_tables)
        for i, layer in enumerate(self.layers):
            _, k, v = self.project(layer, states, metadata)
            row = 0
            for chunk in chunks:
                rows = slice(row, row := row + chunk.count)
                cache.write(i, chunk, k[rows], v[rows], chunk.start)

    def fill(self, tokens: Tensor, chunks: list[SequenceChunk], cache: KeysAndValues) -> Tensor:
        """Blocks after the tokens [B] that begin them -> logits of the target's tokens [B, block - 1, V]"""
        metadata: Any = AllOfIt(chunks, self.device, self.rotary_tables)
        first = F.embedding(tokens, self.embedding).to(self.dtype)[:, None]
        x = torch.cat([first, self.mask.expand(len(tokens), self.config.block - 1, -1)], 1).flatten(0, 1)
        for i, layer in enumerate(self.layers):
            x = x + layer.out(self.attend(layer, i, self.norm(x, layer.attention_norm), metadata, cache))
            x = x + layer.ffn(self.norm(x, layer.ffn_norm))
        x = x.view(len(tokens), self.config.block, -1)[:, 1:].flatten(0, 1)
        return self.head(self.norm(x, self.final_norm)).view(len(tokens), self.config.block - 1, -1)
