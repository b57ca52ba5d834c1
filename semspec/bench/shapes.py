"""Named shapes of target and draft, as models whose weights are noise: for replays and benchmarks of speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from semspec.model import ModelRunner
from semspec.model.config import Shape
from semspec.model.heads.config import HeadConfig, usual_layers
from semspec.model.heads.eagle import EagleHead, TargetParts
from semspec.model.heads.runner import HeadRunner
from semspec.model.memory_plan import MemoryPlan
from semspec.model.placement import Precision
from semspec.model.transformer import Transformer


def _shape(
    kind: type[PreTrainedConfig], width: int, depth: int, heads: int, kv: int, ffn: int, vocab: int, **more: Any
) -> PreTrainedConfig:
    more = {"tie_word_embeddings": False, "max_position_embeddings": 131072} | more
    return kind(
        hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads, num_key_value_heads=kv,
        intermediate_size=ffn, vocab_size=vocab, **more,
    )  # fmt: skip


TIED = {"tie_word_embeddings": True}
HEAD_TOKENS = 32000  # of a published EAGLE-3 head
TINY = _shape(LlamaConfig, 32, 1, 2, 1, 64, 256, **TIED)
SHAPES: dict[str, tuple[PreTrainedConfig, PreTrainedConfig]] = {
    "32B/1.5B": (
        _shape(Qwen2Config, 5120, 64, 40, 8, 27648, 152064),
        _shape(Qwen2Config, 1536, 28, 12, 2, 8960, 151936, **TIED),
    ),
    "8B/1B": (
        _shape(LlamaConfig, 4096, 32, 32, 8, 14336, 128256),
        _shape(LlamaConfig, 2048, 16, 32, 8, 8192, 128256, **TIED),
    ),
    "70B/8B": (
        _shape(LlamaConfig, 8192, 80, 64, 8, 28672, 128256),
        _shape(LlamaConfig, 4096, 32, 32, 8, 14336, 128256),
    ),
    "30B-A3B/0.6B": (
        _shape(
            Qwen3MoeConfig, 2048, 48, 32, 4, 6144, 151936, head_dim=128, moe_intermediate_size=768, num_experts=128,
            num_experts_per_tok=8, norm_topk_prob=True, max_position_embeddings=40960,
        ),
        _shape(Qwen3Config, 1024, 28, 16, 8, 3072, 151936, head_dim=128, max_position_embeddings=40960, **TIED),
    ),
    "tiny-moe": (
        _shape(
            Qwen3MoeConfig, 64, 3, 4, 2, 128, 256, head_dim=16, moe_intermediate_size=32, num_experts=16,
            num_experts_per_tok=8, norm_topk_prob=True, max_position_embeddings=4096,
        ),
        TINY,
    ),
    "tiny": (_shape(LlamaConfig, 64, 2, 4, 2, 128, 256), TINY),
}  # fmt: skip


class RandomWeights:
    """In place of a checkpoint: tensors of noise."""

    def read(self, name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device=device, dtype=dtype)
        return torch.empty(shape, device=device, dtype=dtype).normal_(std=0.02)


def random_runner(
    config: PreTrainedConfig, slots: int, capacity: int, device: torch.device, dtype: torch.dtype
) -> ModelRunner:
    return ModelRunner(Transformer(Shape.of(config), RandomWeights(), device, dtype), slots, capacity)


class RandomHead(RandomWeights):
    """In place of a head's checkpoint: noise, under the names that a head has."""

    folder = Path("noise")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __contains__(self, name: str) -> bool:
        return name == "lm_head.weight"

    def size(self, name: str) -> tuple[int, ...]:
        return (self.tokens,)


def random_head(target: ModelRunner, weights: RandomHead | None = None) -> HeadRunner:
    """An EAGLE-3 head of one layer of the target's sizes, with its own tokens."""
    s, weights = target.shape, weights or RandomHead(min(HEAD_TOKENS, target.vocab_size))
    config = LlamaConfig(
        hidden_size=s.width, num_hidden_layers=1, num_attention_heads=s.heads, num_key_value_heads=s.kv_heads,
        intermediate_size=s.ffn, vocab_size=weights.tokens, head_dim=s.head_dim,
        max_position_embeddings=target.max_seq_len,
    )  # fmt: skip
    how = HeadConfig(Shape.of(config), usual_layers(target.num_layers), True, True, False, False)
    head = EagleHead(how, weights, TargetParts.of(target), target.device)  # type: ignore[arg-type]
    return HeadRunner(head, target.vocab_size, target.max_seq_len)


def planned(
    name: str, config: PreTrainedConfig, slots: int, capacity: int, device: torch.device, dtype: torch.dtype
) -> MemoryPlan:
    """The memory that such a runner takes."""
    return MemoryPlan.of(name, Shape.of(config), device, Precision(dtype), slots, capacity)
