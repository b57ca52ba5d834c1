"""What a checkpoint is: its shape, and the few ways in which families of models differ, as data.

`Shape.read` takes a Hugging Face config.json. A family that needs more than these switches gets a new field here
and one place in transformer.py that reads it, never a branch on its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from semspec.errors import ModelError


@dataclass(frozen=True, slots=True)
class Family:
    """How a family departs from the common decoder layer."""

    qkv_bias: bool = False  # biases on the query, key and value projections
    qk_norm: bool = False  # queries and keys are normalised per head before the rotation


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything the transformer needs to know about a checkpoint."""

    model_type: str
    family: Family
    vocab: int
    width: int  # of the residual stream
    depth: int  # layers
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    norm_eps: float
    tied: bool  # the embedding is also the output projection
    context: int  # longest sequence the checkpoint was made for
    inv_freq: tuple[float, ...]  # rotary frequencies, scaling applied
    rope_gain: float  # factor on the rotation (yarn)
    qkv_bias: bool
    out_bias: bool
    ffn_bias: bool
    dtype: torch.dtype
    stop: frozenset[int]  # end-of-text tokens

    @staticmethod
    def read(folder: Path) -> Shape:
        try:
            config = AutoConfig.from_pretrained(folder)
        except Exception as error:  # transformers raises many kinds here
            raise ModelError(f"{folder}: the config.json cannot be read: {error}") from error
        return Shape.of(config, str(folder))

    @staticmethod
    def of(config: PreTrainedConfig, name: str = "config") -> Shape:
        family = FAMILIES.get(config.model_type)
        if family is None:
            known = ", ".join(sorted(FAMILIES))
            raise ModelError(f"{name}: model type {config.model_type!r} is not supported; supported are: {known}")
        _refuse(name, "hidden_act", config.hidden_act, {"silu"})
        if getattr(config, "use_sliding_window", False):
            raise ModelError(f"{name}: it uses a sliding attention window, which is not supported yet")
        inv_freq, gain = _rotary(config, name)
        attention_bias = bool(getattr(config, "attention_bias", False))
        stop = config.eos_token_id
        return Shape(
            model_type=config.model_type,
            family=family,
            vocab=config.vocab_size,
            width=config.hidden_size,
            depth=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=_head_dim(config),
            ffn=config.intermediate_size,
            norm_eps=config.rms_norm_eps,
            tied=bool(config.tie_word_embeddings),
            context=config.max_position_embeddings,
            inv_freq=tuple(inv_freq.tolist()),
            rope_gain=gain,
            qkv_bias=family.qkv_bias or attention_bias,
            out_bias=attention_bias,
            ffn_bias=bool(getattr(config, "mlp_bias", False)),
            dtype=_dtype(config),
            stop=frozenset([] if stop is None else [stop] if isinstance(stop, int) else stop),
        )

    @property
    def parameters(self) -> int:
        attention = (
            self.width * self.head_dim * (self.heads + 2 * self.kv_heads) + self.heads * self.head_dim * self.width
        )
        layer = attention + 3 * self.width * self.ffn + 2 * self.width
        return self.depth * layer + self.width + self.vocab * self.width * (1 if self.tied else 2)

    def kv_bytes(self, slots: int, capacity: int, dtype: torch.dtype) -> int:
        """Memory for keys and values."""
        return 2 * self.depth * slots * capacity * self.kv_heads * self.head_dim * dtype.itemsize


def _refuse(name: str, field: str, value: Any, known: set[str]) -> None:
    if value not in known:
        raise ModelError(f"{name}: {field} {value!r} is not supported; supported: {', '.join(sorted(known))}")


def _head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _dtype(config: PreTrainedConfig) -> torch.dtype:
    dtype = config.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."))
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _rotary(config: PreTrainedConfig, name: str) -> tuple[Tensor, float]:
    """Rotary frequencies [head_dim / 2] and gain, with the checkpoint's own scaling (none, linear, llama3, yarn)."""
    rope = config.rope_parameters or {}
    kind = rope.get("rope_type", "default")
    if kind == "default":
        half = torch.arange(0, _head_dim(config), 2, dtype=torch.float32) / _head_dim(config)
        return 1.0 / (rope.get("rope_theta", 10000.0) ** half), 1.0
    _refuse(name, "rope scaling", kind, {"linear", "llama3", "yarn"})
    inv_freq, gain = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return inv_freq, float(gain)
