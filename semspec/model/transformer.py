"""A decoder-only transformer over a ragged batch of sequences, each with its own cache slot: the readable forward pass,
which runs on any device, for prompts of any length. `fused_forward.py` and `numpy_decoder.py` are faster special cases.

All tokens of a pass lie in one packed row of N; projections and norms see only that. Attention is the one place where
sequences matter: each attends to its own slot. What differs between families is read from `Shape`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from semspec.model.attention_metadata import AttentionMetadata, SequenceChunk
from semspec.model.cache import Cache
from semspec.model.config import Shape
from semspec.model.int4 import Int4Linear
from semspec.model.int8 import Int8Linear
from semspec.model.layer_ops import DENSE, LayerOps
from semspec.model.layers import LayerMath, LayerReader
from semspec.model.limited_head import LimitedHead
from semspec.model.placement import Precision, Weights
from semspec.model.weight_loader import Tensors, WeightLoader


class Transformer(LayerMath):
    def __init__(
        self, shape: Shape, checkpoint: Tensors, device: torch.device, dtype: torch.dtype, weights: Weights = "plain"
    ) -> None:
        super().__init__(shape, device, dtype)
        precision, self.weights = Precision(dtype, weights), weights
        self.attention_dtype = precision.attention(device, shape.mixture is not None)
        loader = WeightLoader(checkpoint, device, precision, shape.parameters)
        reader = LayerReader(shape, loader)
        self.embedding = loader.read("model.embed_tokens.weight", shape.vocab_size, shape.width)
        scale = torch.tensor(shape.width**0.5, dtype=dtype, device=device)
        self.embedding_scale = scale if shape.family.scaled_embedding else None
        self.layers = [reader.layer(i, f"model.layers.{i}") for i in range(shape.num_layers)]
        self.final_norm = reader.norm("model.norm")
        self.head = loader.head(self.embedding if shape.tied else None, shape.vocab_size, shape.width)

    @property
    def integers(self) -> bool:
        """Whether a difference in a float's last bit may become a larger one: a CPU's integer weights round what they
        are multiplied with."""
        return isinstance(self.layers[0].qkv, Int8Linear | Int4Linear)

    def with_head(self, ids: Sequence[int]) -> Transformer:
        """The same model, on the same memory, with a head for some tokens only."""
        other = copy(self)
        other.head = LimitedHead.picked(
            self.head, self.embedding if self.shape.tied else None, ids, self.shape.vocab_size
        )
        return other

    def forward(
        self,
        tokens: Tensor,
        chunks: list[SequenceChunk],
        cache: Cache,
        wanted: Tensor,
        layers: Iterable[int] = (),
        layer_ops: LayerOps = DENSE,
        observed: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run packed tokens [N] through the model.

        Returns logits of the rows `wanted` [M] of N as [M, V], and the hidden states [M, width] of the given layers:
        0 is the embedding, i the residual stream after layer i, and the last the one after the final norm. States are
        those of the rows `observed`, if these are others.
        """
        hidden: dict[int, Tensor] = {}
        want = set(layers)
        metadata = AttentionMetadata(
            chunks, self.device, self.rotary_tables, flash=self.device.type == "cuda" and self.dtype.itemsize == 2
        )
        x = F.embedding(tokens, self.embedding)  # [N, width]
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        for i, layer in enumerate(self.layers):
            if i in want:
                hidden[i] = x[wanted if observed is None else observed]
            normed = self.norm(x, layer.attention_norm)
            added = layer.out(self.attend(layer, i, normed, metadata, cache, layer_ops))
            x = x + (added if layer.attention_out_norm is None else self.norm(added, layer.attention_out_norm))
            added = layer_ops.feed(i, layer.ffn, self.norm(x, layer.ffn_norm))
            x = x + (added if layer.ffn_out_norm is None else self.norm(added, layer.ffn_out_norm))
        if len(self.layers) in want and observed is not None:
            hidden[len(self.layers)] = self.norm(x[observed], self.final_norm)
        x = self.norm(x[wanted], self.final_norm)
        if len(self.layers) in want and observed is None:
            hidden[len(self.layers)] = x
        return self.head(x), hidden
