"""An EAGLE-3 head: one decoder layer, or a few, that drafts from states of three layers of the target.

It reads pairs: the target's state at a token, and the token after it. From a pair it predicts the token after that. To
go on beyond the target's states, it takes its own output for the state. Attention reads both halves of a pair, each
with a norm of its own; the residual stream has the state only.
Source: Li et al. 2025 (arXiv 2503.01840).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from semspec.errors import ModelError
from semspec.model.attention_metadata import AttentionMetadata, SequenceChunk
from semspec.model.heads.config import HeadConfig, HeadTensors
from semspec.model.hf_runner import TransformersRunner
from semspec.model.layers import KeysAndValues, LayerMath, LayerReader
from semspec.model.limited_head import LimitedHead
from semspec.model.linear import DenseLinear, Linear
from semspec.model.placement import Precision
from semspec.model.runner import ModelRunner
from semspec.model.weight_loader import WeightLoader
from semspec.model.weights import Checkpoint, locate
from semspec.model.wrapper import unwrap
from semspec.types import Runner


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What a head may share with its target."""

    embedding: Tensor  # [V, width]
    head: Linear
    num_layers: int
    vocab_size: int
    dtype: torch.dtype
    norm: Tensor | None = None  # before the head, where it is known

    @staticmethod
    def of(runner: Runner) -> TargetParts:
        inner = unwrap(runner)
        if isinstance(inner, ModelRunner):
            model = inner.transformer
            return TargetParts(
                model.embedding, model.head, inner.num_layers, runner.vocab_size, model.dtype, model.final_norm
            )
        if isinstance(inner, TransformersRunner):
            weight = inner.model.get_output_embeddings().weight
            embedding = inner.model.get_input_embeddings().weight
            return TargetParts(embedding, DenseLinear(weight), inner.num_layers, runner.vocab_size, weight.dtype)
        raise ModelError("a draft head needs a target with weights of its own")


def head_folder(path: str | Path) -> Path:
    folder = locate(path)
    if folder.is_file():
        raise ModelError(f"{folder} is a file; give the folder of a draft head, with its model.safetensors")
    return folder


def output_head(tensors: HeadTensors, loader: WeightLoader, target: TargetParts, width: int) -> Linear:
    """Over the target's tokens. A head's own may have fewer: output i is token i + d2t[i]."""
    if "lm_head.weight" not in tensors:
        return target.head
    count, device = tensors.size("lm_head.weight")[0], target.embedding.device
    own, ids = loader.head(None, count, width), torch.arange(count, device=device)
    if "d2t" in tensors:
        ids = ids + tensors.integers("d2t", count, device)
    known = max(target.vocab_size, target.embedding.shape[0])
    if len(ids) and (ids.min() < 0 or ids.max() >= known or len(ids.unique()) < count):
        raise ModelError(
            f"{tensors.folder}: its {count} outputs are tokens {int(ids.min())} to {int(ids.max())}, "
            f"{len(ids.unique())} of them different; the target has {known} tokens: the head is for another target"
        )
    return LimitedHead(own, ids, known)


class EagleHead(LayerMath):
    def __init__(self, config: HeadConfig, tensors: HeadTensors, target: TargetParts, device: torch.device) -> None:
        shape = config.shape
        super().__init__(shape, device, target.dtype)
        self.config = config
        loader = WeightLoader(tensors, device, Precision(target.dtype), shape.parameters)
        reader, width, target_width = LayerReader(shape, loader), shape.width, target.embedding.shape[1]
        self.fc: Linear | None = None
        self.state_norms: list[Tensor] = []  # of each layer's state by itself
        self.input_norm: Tensor | None = None  # of all of them together
        if config.fused:
            inputs = len(config.layers) * target_width
            self.fc = loader.linear(["fc"], [width], inputs, "fc.bias" in tensors)
            if "fc_norm.0.weight" in tensors:
                self.state_norms = [reader.norm(f"fc_norm.{i}", target_width) for i in range(len(config.layers))]
            if "input_norm.weight" in tensors:
                self.input_norm = reader.norm("input_norm", inputs)
        elif width != target_width:
            raise ModelError(f"{tensors.folder}: its width is {width}, and without fc it has to be {target_width}")
        self.hidden_norm = reader.norm("layers.0.hidden_norm")
        self.layers = [reader.layer(i, f"layers.{i}", 2 * width if i == 0 else None) for i in range(shape.num_layers)]
        self.final_norm = reader.norm("norm")
        self.embedding = self.shared_embedding = target.embedding
        if "embed_tokens.weight" in tensors:
            rows = tensors.size("embed_tokens.weight")[0]
            self.embedding = loader.read("embed_tokens.weight", rows, width)
            if rows < target.vocab_size:
                raise ModelError(f"{tensors.folder}: its embedding has {rows} tokens, the target {target.vocab_size}")
        elif width != target_width:
            raise ModelError(f"{tensors.folder}: a head of width {width} cannot use embeddings of {target_width}")
        self.head = output_head(tensors, loader, target, width)

    @staticmethod
    def load(path: str | Path, target: Runner) -> EagleHead:
        parts = TargetParts.of(target)
        with Checkpoint(head_folder(path)) as checkpoint:
            tensors = HeadTensors(checkpoint)
            config = HeadConfig.read(tensors, parts.num_layers, parts.embedding.shape[1])
            return EagleHead(config, tensors, parts, target.device)

    def combine(self, states: list[Tensor]) -> Tensor:
        """The target's states of some tokens, [N, target's width] for each layer -> [N, width]"""
        states = [state.to(self.dtype) for state in states]
        if self.fc is None:
            return states[0]
        if self.state_norms:
            states = [self.norm(state, weight) for state, weight in zip(states, self.state_norms, strict=True)]
        whole = torch.cat(states, -1)
        return self.fc(whole if self.input_norm is None else self.norm(whole, self.input_norm))

    def forward(
        self, tokens: Tensor, states: Tensor, chunks: list[SequenceChunk], cache: KeysAndValues, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Pairs of tokens [N] and combined states [N, width] -> for the rows `wanted` [M], logits of the target's
        tokens [M, V], and the states [M, width] to go on with."""
        metadata = AttentionMetadata(chunks, self.device, self.rotary_tables)
        embedded = F.embedding(tokens, self.embedding).to(self.dtype)
        normed = self.norm(states, self.hidden_norm)
        x = normed if self.config.norm_before_residual else states
        inputs = torch.cat([self.norm(embedded, self.layers[0].attention_norm), normed], -1)
        for i, layer in enumerate(self.layers):
            inputs = inputs if i == 0 else self.norm(x, layer.attention_norm)
            x = x + layer.out(self.attend(layer, i, inputs, metadata, cache))
            x = x + layer.ffn(self.norm(x, layer.ffn_norm))
        x = x[wanted]
        normed = self.norm(x, self.final_norm)
        return self.head(normed), normed if self.config.norm_output else x
