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
    router: str = ""  # where in a layer the router of its experts lies
    expert: tuple[str, str, str] = ("", "", "")  # and gate, up and down projection of expert {e}


QWEN_EXPERT = ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj", "mlp.experts.{e}.down_proj")
MIXTRAL_EXPERT = tuple(f"block_sparse_moe.experts.{{e}}.{w}" for w in ("w1", "w3", "w2"))
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, router="mlp.gate", expert=QWEN_EXPERT),
    "mixtral": Family(router="block_sparse_moe.gate", expert=MIXTRAL_EXPERT),  # type: ignore[arg-type]
}


@dataclass(frozen=True, slots=True)
class Mixture:
    """How the experts of a mixture are made up."""

    experts: int
    chosen: int  # for each token
    ffn: int  # of one expert
    renormalise: bool
    dense_layers: frozenset[int]  # layers that have one feed-forward network all the same

    @staticmethod
    def of(config: PreTrainedConfig) -> Mixture:
        experts = getattr(config, "num_experts", None) or config.num_local_experts
        every, dense = getattr(config, "decoder_sparse_step", 1), set(getattr(config, "mlp_only_layers", None) or [])
        dense |= {i for i in range(config.num_hidden_layers) if (i + 1) % every}
        return Mixture(
            experts=experts,
            chosen=config.num_experts_per_tok,
            ffn=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
            renormalise=bool(getattr(config, "norm_topk_prob", True)),  # Mixtral always does
            dense_layers=frozenset(dense),
        )


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
    mixture: Mixture | None  # None: every layer is dense
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
        # Qwen names a window and switches it on elsewhere; for Mixtral naming it is using it.
        window = getattr(config, "use_sliding_window", getattr(config, "sliding_window", None) is not None)
        if window:
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
            mixture=Mixture.of(config) if family.router else None,
            dtype=_dtype(config),
            stop=frozenset([] if stop is None else [stop] if isinstance(stop, int) else stop),
        )

    @property
    def parameters(self) -> int:
        attention = (
            self.width * self.head_dim * (self.heads + 2 * self.kv_heads) + self.heads * self.head_dim * self.width
        )
        norms, embeddings = 2 * self.width, self.vocab * self.width * (1 if self.tied else 2)
        ffn = self.depth * 3 * self.width * self.ffn
        if self.mixture:
            dense = len(self.mixture.dense_layers)
            expert = 3 * self.width * self.mixture.ffn + self.width  # with its row of the router
            ffn = dense * 3 * self.width * self.ffn + (self.depth - dense) * self.mixture.experts * expert
        return self.depth * (attention + norms) + ffn + self.width + embeddings


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
