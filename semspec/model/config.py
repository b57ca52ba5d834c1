"""A checkpoint's shape, and the few ways in which families of models differ, as data.

`Shape.read` takes a Hugging Face config.json or a GGUF file. A family that needs more than these switches gets a new
field here and one line in transformer.py that reads it, never a branch on its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from semspec.errors import ModelError, in_a_line
from semspec.model.gguf_config import config_of
from semspec.model.gguf_header import Header
from semspec.model.quantisation import Quantisation


@dataclass(frozen=True, slots=True)
class Family:
    """How a family differs from the common decoder layer, and the names of its tensors within a layer."""

    qkv_bias: bool = False  # biases on the query, key and value projections
    qk_norm: bool = False  # queries and keys are normalised per head before the rotation
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one that holds all three
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # or one that holds both
    attention_norm: str = "input_layernorm"  # before attention
    attention_out_norm: str = ""  # on what attention adds to the residual stream
    ffn_norm: str = "post_attention_layernorm"  # before the feed-forward network
    ffn_out_norm: str = ""
    norm_offset: float = 0.0  # norms multiply by their weight and this
    scaled_embedding: bool = False  # embeddings are multiplied by the root of the width
    windowed: bool = False  # a sliding window in the config is all layers'; others name its layers, or ignore it
    router: str = ""  # the router of a mixture of experts
    expert: tuple[str, str, str] = ("", "", "")  # and gate, up and down projection of expert {e}


QWEN2, QWEN3 = Family(qkv_bias=True), Family(qk_norm=True)
QWEN_EXPERT = ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj", "mlp.experts.{e}.down_proj")
MIXTRAL_EXPERT = tuple(f"block_sparse_moe.experts.{{e}}.{w}" for w in ("w1", "w3", "w2"))
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(windowed=True),
    "smollm3": Family(),
    "qwen2": QWEN2,
    "qwen2_vl_text": QWEN2,  # in a text, each part of a position is the same number
    "qwen2_5_vl_text": QWEN2,
    "qwen3": QWEN3,
    "qwen3_vl_text": QWEN3,
    "phi3": Family(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",), windowed=True),
    "gemma3_text": Family(
        qk_norm=True,
        attention_out_norm="post_attention_layernorm",
        ffn_norm="pre_feedforward_layernorm",
        ffn_out_norm="post_feedforward_layernorm",
        norm_offset=1.0,
        scaled_embedding=True,
    ),
    "qwen3_moe": Family(qk_norm=True, router="mlp.gate", expert=QWEN_EXPERT, windowed=True),
    "mixtral": Family(router="block_sparse_moe.gate", expert=MIXTRAL_EXPERT, windowed=True),  # type: ignore[arg-type]
}
# Models that also read pictures, whose text is written by one of these families and nothing else.
WITH_PICTURES = (
    "gemma3", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "mistral3", "qwen2_5_vl", "qwen2_vl",
    "qwen3_vl", "smolvlm",
)  # fmt: skip
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
ROPE_SCALINGS = ("linear", "llama3", "longrope", "yarn")
DEFAULT_CONTEXT = 2048  # for models whose config has no longest sequence
MAX_SIZE, MAX_HEAD_DIM = 1 << 28, 1 << 13
MAX_DEPTH = 10_000  # layers; more is a mistake in the config


class NotNative(ModelError):
    """A model that the native transformer does not describe; transformers may run it."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """RoPE: how queries and keys are rotated by position."""

    # Scaling applied; one for each pair of rotated dimensions. The rest of a head is not rotated.
    inv_freq: tuple[float, ...]
    gain: float = 1.0  # factor on the rotation (yarn, longrope)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer attends to. Most models have one kind for all layers, some have two."""

    window: int | None = None  # sliding window, the token itself included; None: all
    rotary: Rotary | None = None  # None: no positions (NoPE)


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts."""

    experts: int
    chosen: int  # for each token
    ffn: int  # of one expert
    renormalise: bool
    dense_layers: frozenset[int]  # layers that have one feed-forward network instead

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
    vocab_size: int
    width: int  # of the residual stream
    num_layers: int  # layers
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    norm_eps: float
    tied: bool  # the embedding is also the output projection
    context: int  # longest sequence the checkpoint was made for
    attention_specs: tuple[AttentionSpec, ...]  # by layer
    attention_scale: float  # on the products of queries and keys
    activation: str  # of the feed-forward networks, one of ACTIVATIONS
    qkv_bias: bool
    out_bias: bool
    ffn_bias: bool
    mixture: Mixture | None  # None: every layer is dense
    dtype: torch.dtype
    stop: frozenset[int]  # end-of-text tokens

    @staticmethod
    def read(path: Path) -> Shape:
        return Shape.of(read_config(path), str(path))

    @staticmethod
    def of(config: PreTrainedConfig, name: str = "config") -> Shape:
        try:
            return Shape._of(config, name)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:  # of odd types or sizes
            raise ModelError(f"{name}: the config.json makes no model: {in_a_line(error)}") from error

    @staticmethod
    def _of(config: PreTrainedConfig, name: str) -> Shape:
        config = text_of(config) if config.model_type in WITH_PICTURES else config
        family = FAMILIES.get(config.model_type)
        if family is None:
            known = ", ".join(sorted(FAMILIES))
            raise NotNative(f"{name}: model type {config.model_type!r} is not supported; supported are: {known}")
        activation = getattr(config, "hidden_activation", None) or config.hidden_act
        _refuse(name, "hidden_act", activation, ACTIVATIONS)
        for cap in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if getattr(config, cap, None):
                raise NotNative(f"{name}: {cap} is {getattr(config, cap)}, which is not supported")
        _check(config, name)
        attention_bias = bool(getattr(config, "attention_bias", False))
        return Shape(
            model_type=config.model_type,
            family=family,
            vocab_size=config.vocab_size,
            width=config.hidden_size,
            num_layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=_head_dim(config),
            ffn=config.intermediate_size,
            norm_eps=config.rms_norm_eps,
            tied=bool(config.tie_word_embeddings),
            context=context_of(config),
            attention_specs=_attention_specs(config, name),
            attention_scale=getattr(config, "query_pre_attn_scalar", _head_dim(config)) ** -0.5,
            activation=activation,
            qkv_bias=family.qkv_bias or attention_bias,
            out_bias=attention_bias,
            ffn_bias=bool(getattr(config, "mlp_bias", False)),
            mixture=Mixture.of(config) if family.router else None,
            dtype=dtype_of(config),
            stop=stop_of(config),
        )

    @property
    def parameters(self) -> int:
        attention = (
            self.width * self.head_dim * (self.heads + 2 * self.kv_heads) + self.heads * self.head_dim * self.width
        )
        norms = self.width * (2 + bool(self.family.attention_out_norm) + bool(self.family.ffn_out_norm))
        embeddings = self.vocab_size * self.width * (1 if self.tied else 2)
        ffn = self.num_layers * 3 * self.width * self.ffn
        if self.mixture:
            dense = len(self.mixture.dense_layers)
            expert = 3 * self.width * self.mixture.ffn + self.width  # with its row of the router
            ffn = dense * 3 * self.width * self.ffn + (self.num_layers - dense) * self.mixture.experts * expert
        return self.num_layers * (attention + norms) + ffn + self.width + embeddings


def read_config(path: Path) -> PreTrainedConfig:
    """The config of a checkpoint folder or of a GGUF file."""
    if path.suffix == ".gguf":
        return config_of(Header.read(path))
    Quantisation.read(path)  # what is not supported is refused here
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds here
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{path}: transformers does not know this model's type, and the checkpoint's own code, another way "
                "to load it, is never run; take a release of transformers that knows it, or a model that it knows"
            ) from error
        if "does not recognize this architecture" in str(error):
            raise ModelError(
                f"{path}: the config.json cannot be read: transformers {transformers.__version__} does not know this "
                "model's type; a newer release may (pip install --upgrade transformers)"
            ) from error
        raise ModelError(f"{path}: the config.json cannot be read: {in_a_line(error)}") from error


def context_of(config: PreTrainedConfig) -> int:
    """The longest sequence. Beyond their original length, models with longrope change the frequencies of all tokens,
    which would invalidate the cache; so that length is the limit."""
    longest = getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT
    rope = getattr(config, "rope_parameters", None) or {}
    first = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
    return min(longest, first or longest)


def text_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a model's text part, with what its config says once for all parts."""
    text = config.get_text_config(decoder=True)
    if text is not config:
        text.dtype = text.dtype or config.dtype
        text.eos_token_id = sorted(stop_of(config) | stop_of(text)) or None
        text.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
    return text


def stop_of(config: PreTrainedConfig) -> frozenset[int]:
    stop = getattr(config, "eos_token_id", None)
    return frozenset([] if stop is None else [stop] if isinstance(stop, int) else stop)


def dtype_of(config: PreTrainedConfig) -> torch.dtype:
    dtype = config.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."))
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _check(config: PreTrainedConfig, name: str) -> None:
    """Refuse sizes that no model has, before anything is made of them."""
    depth, heads, kv_heads = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads
    if not 0 < depth <= MAX_DEPTH:
        raise ModelError(f"{name}: a model cannot have {depth} layers; its config is damaged")
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ModelError(f"{name}: {heads} query heads cannot share {kv_heads} key heads; its config is damaged")
    sizes = (config.vocab_size, config.hidden_size, config.intermediate_size, _head_dim(config), context_of(config))
    if min(sizes) < 1 or max(sizes) > MAX_SIZE or _head_dim(config) > MAX_HEAD_DIM or _head_dim(config) % 2:
        raise ModelError(
            f"{name}: vocabulary, width, ffn, head and context of {sizes} cannot be; its config is damaged"
        )


def _refuse(name: str, field: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise NotNative(f"{name}: {field} {value!r} is not supported; supported: {', '.join(sorted(known))}")


def _head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _attention_specs(config: PreTrainedConfig, name: str) -> tuple[AttentionSpec, ...]:
    """By layer. Configs have a window for all layers, a kind for each, or layers without rotation; rotary parameters
    are given once, or for each kind of layer."""
    windowed = ["sliding_attention", *([None] if FAMILIES[config.model_type].windowed else [])]
    depth = config.num_hidden_layers
    kinds: list[str | None] = list(getattr(config, "layer_types", None) or [None] * depth)
    window = getattr(config, "sliding_window", None)
    rotated = getattr(config, "no_rope_layers", None) or [1] * depth
    parameters = config.rope_parameters or {}
    rotary = {kind: _rotary(config, name, kind if kind in parameters else None) for kind in set(kinds)}
    specs = {
        (kind, rope): AttentionSpec(window if kind in windowed else None, rotary[kind] if rope else None)
        for kind in rotary
        for rope in (True, False)
    }
    return tuple(specs[kinds[i], bool(rotated[i])] for i in range(depth))


def _rotary(config: PreTrainedConfig, name: str, layer_type: str | None) -> Rotary:
    """Rotary frequencies and gain, with the checkpoint's own scaling."""
    rope = (config.rope_parameters or {})[layer_type] if layer_type else config.rope_parameters or {}
    kind = rope.get("rope_type", "default")
    if kind == "default":
        factor = rope.get("partial_rotary_factor", 1.0)
        if not 0 < factor <= 1:
            raise ModelError(f"{name}: a partial_rotary_factor of {factor} cannot be; its config is damaged")
        size = int(_head_dim(config) * factor)
        half = torch.arange(0, size, 2, dtype=torch.float32) / size
        return Rotary(tuple((1.0 / (rope.get("rope_theta", 10000.0) ** half)).tolist()))
    _refuse(name, "rope scaling", kind, ROPE_SCALINGS)
    inv_freq, gain = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), layer_type=layer_type)
    return Rotary(tuple(inv_freq.tolist()), float(gain))
