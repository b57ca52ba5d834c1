"""A one-pass block head (DFlash): a few layers that fill in a block of masked tokens at once.

The target's states are its context: every layer makes keys and values of them. The block is the last token of the text
and masks after it; its tokens see the context and each other. The output at a mask is a guess at the token in its
place. The embedding is the target's, and mostly the output projection, too.
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
from semspec.model.heads.eagle import TargetParts, head_folder, output_head
from semspec.model.layers import KeysAndValues, LayerMath, LayerReader
from semspec.model.placement import Precision
from semspec.model.weight_loader import WeightLoader
from semspec.model.weights import Checkpoint
from semspec.types import Runner

MOST = 256  # tokens of a block
KNOWN = ("fc.", "hidden_norm.", "layers.", "norm.", "mask_embedding", "embed_tokens.", "lm_head.", "d2t", "t2d")
COPIES = ("verifier_norm.", "verifier_lm_head.")  # of the target's tensors, which are taken from the target
MASK_FILE = "mask_embedding.pt"


@dataclass(frozen=True, slots=True)
class BlockConfig:
    shape: Shape
    layers: tuple[int, ...]  # of the target, whose states it reads
    block: int  # tokens of a block, the known first one included
    mask: int  # the token that stands for those to be filled in
    offsets: tuple[int, int]  # what ids may count from, as configs have it and otherwise
    own_head: bool = False  # over fewer tokens than the target has
    fused: bool = True

    @staticmethod
    def read(tensors: HeadTensors, target: TargetParts) -> BlockConfig:
        """Of DFlash's own config, or of one by speculators, which counts layers from the embedding on."""
        config, folder, width = read_json(tensors.folder), tensors.folder, target.embedding.shape[1]
        kind = config.get("speculators_model_type")
        own, layer = config.get("dflash_config"), config.get("transformer_layer_config")
        if kind is None and not isinstance(own, dict):
            raise ModelError(f"{folder}: the config has no dflash_config, so it is no block head; EAGLE-3: eagle:PATH")
        if kind not in (None, "dflash"):
            hint = "; EAGLE-3: eagle:PATH" if kind == "eagle3" else ""
            raise ModelError(f"{folder}: a draft head of type {kind!r}, where dflash:PATH takes 'dflash'{hint}")
        places = [config, *(place for place in (own, layer) if isinstance(place, dict))]

        def option(key: str) -> Any:
            return next((place[key] for place in places if place.get(key) is not None), None)

        block, mask = option("block_size"), option("mask_token_id")
        if type(block) is not int or not 2 <= block <= MOST:
            raise ModelError(f"{folder}: block_size is {block!r}; it should be a number of 2 to {MOST} tokens")
        if type(mask) is not int or not 0 <= mask < len(target.embedding):
            raise ModelError(f"{folder}: mask_token_id is {mask!r}; the target has {len(target.embedding)} tokens")
        odd = [name for name in tensors if not name.startswith((*KNOWN, *COPIES))]
        odd += [key for key in ("sample_from_anchor", "shift_label") if option(key)]
        if option("projector_type") not in (None, "dflash"):
            odd.append(f"projector_type {option('projector_type')}")
        if odd:
            raise ModelError(f"{folder}: the head has {odd[0]}; block heads of this kind are not supported")
        if any(kind != "full_attention" for kind in option("layer_types") or ()):
            raise ModelError(f"{folder}: layers with a sliding window are not supported in block heads")
        if kind is None:  # id i is the state after layer i
            ids = layer_ids(option("target_layer_ids"), target.num_layers - 1)
            ids = ids and tuple(i + 1 for i in ids)
        else:
            ids = layer_ids(option("aux_hidden_state_layer_ids"), target.num_layers)
        inputs = tensors.size("fc.weight")[-1]
        if ids is None or inputs != len(ids) * width:
            raise ModelError(
                f"{folder}: fc reads {inputs} numbers, and the config names {len(ids or ())} layers of this target's "
                f"width {width}; the head is for another target"
            )
        shape = head_shape(option, tensors)
        if shape.width != width:
            raise ModelError(f"{folder}: its width is {shape.width}; with the target's embedding it has to be {width}")
        own_head = "d2t" in tensors or (kind is not None and "lm_head.weight" in tensors)
        return BlockConfig(shape, ids, block, mask, (0, -1) if kind is None else (0, 1), own_head)


def mask_embedding(folder: Path, width: int, mask: int) -> Tensor | None:
    """Of the file that some trainers put beside the weights: a tensor, or a table with it and the token it stands for.
    It is a pickle, read so that it can make tensors and plain containers only."""
    file = folder / MASK_FILE
    if not file.exists():
        return None
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may fail in any way
        reason = str(error).partition("\n")[0]
        raise ModelError(f"{file} cannot be read as a tensor and nothing else: {reason:.200}") from error
    if isinstance(found, dict):
        token = found.get("mask_token_id", mask)
        if type(token) is not int or token != mask:
            raise ModelError(f"{file} is of mask token {token!r:.40}, and the config's is {mask}")
        found = found.get("embedding", found.get("mask_embedding"))
    if not isinstance(found, Tensor) or not found.is_floating_point():
        raise ModelError(f"{file} holds no tensor of numbers; it should be the embedding of the mask, of {width}")
    if found.numel() != width or not found.isfinite().all():
        raise ModelError(f"{file} has the shape {tuple(found.shape)}; it should be {width} finite numbers")
    return found.reshape(width)


class AllOfIt(AttentionMetadata):
    """Every token attends to all of its sequence, to later tokens as well."""

    def masks(self, spec: AttentionSpec) -> list[tuple[int, Tensor | None]]:
        return [(0, None)] * len(self.chunks)


class BlockHead(LayerMath):
    def __init__(self, config: BlockConfig, tensors: HeadTensors, target: TargetParts, device: torch.device) -> None:
        shape = config.shape
        super().__init__(shape, device, target.dtype)
        self.config = config
        self.embedding = self.shared_embedding = target.embedding
        loader = WeightLoader(tensors, device, Precision(target.dtype), shape.parameters)
        reader = LayerReader(shape, loader)
        self.fc = loader.linear(["fc"], [shape.width], len(config.layers) * shape.width, "fc.bias" in tensors)
        self.hidden_norm, self.final_norm = reader.norm("hidden_norm"), reader.norm("norm")
        self.layers = [reader.layer(i, f"layers.{i}") for i in range(shape.num_layers)]
        self.head = output_head(tensors, loader, target, shape.width) if config.own_head else target.head
        self.mask = F.embedding(torch.tensor(config.mask, device=device), self.embedding).to(self.dtype)
        if "mask_embedding" in tensors:
            self.mask = loader.read("mask_embedding", *tensors.size("mask_embedding")).view(shape.width)
        elif (stored := mask_embedding(tensors.folder, shape.width, config.mask)) is not None:
            self.mask = stored.to(device, self.dtype)

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
