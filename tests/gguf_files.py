"""GGUF files made on the spot from the tiny checkpoints, written the way llama.cpp writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from semspec.model.config import Shape

ARCHITECTURES = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe", "mixtral": "llama"}
CONTROL, NORMAL = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL


def write(
    model: PreTrainedModel,
    path: Path,
    tokenizer: PreTrainedTokenizerFast | None = None,
    kind: Kind | Callable[[str], Kind] = Kind.F32,
) -> Path:
    """`kind`: of all matrices, or of each by its name in the file."""
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(model.model.rotary_emb.attention_scaling)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, config.vocab_size)
    for name, array in tensors(model, architecture, head).items():
        wanted = Kind.F32 if array.ndim == 1 else kind if isinstance(kind, Kind) else kind(name)
        raw = q4_k(array) if wanted == Kind.Q4_K else gguf.quants.quantize(array, wanted)
        writer.add_tensor(name, raw, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def q4_k(array: np.ndarray) -> np.ndarray:
    """Rows of floats as Q4_K blocks, which the package only reads: ranges of groups, rounded twice; no search."""
    groups = array.reshape(-1, 8, 32)
    low, high = np.minimum(groups.min(-1), 0), groups.max(-1)
    factors = np.stack([(high - low).max(1) / 15 / 63, (-low).max(1) / 63], 1).astype(np.float16)
    d, dmin = np.maximum(factors.astype(np.float32), 1e-8).T
    scales = np.clip(np.ceil((high - low) / 15 / d[:, None]), 0, 63).astype(np.uint8)
    minima = np.clip(np.round(-low / dmin[:, None]), 0, 63).astype(np.uint8)
    step = np.maximum(d[:, None] * scales, 1e-8)[..., None]
    codes = np.clip(np.round((groups + (dmin[:, None] * minima)[..., None]) / step), 0, 15).astype(np.uint8)
    packed = np.concatenate(
        [
            (scales[:, :4] & 63) | (scales[:, 4:] >> 4 << 6),
            (minima[:, :4] & 63) | (minima[:, 4:] >> 4 << 6),
            (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4),
        ],
        1,
    )
    nibbles = (codes[:, ::2] | codes[:, 1::2] << 4).reshape(len(codes), -1)
    blocks = np.concatenate([factors.view(np.uint8), packed, nibbles], 1)
    return blocks.reshape(*array.shape[:-1], -1)


def tensors(model: PreTrainedModel, architecture: str, head: int) -> dict[str, np.ndarray]:
    config = model.config
    arch = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    out: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith(
            "experts.gate_up_proj"
        ):  # transformers keeps all experts of a layer in one tensor, gate and up
            layer = re.search(r"layers\.(\d+)\.", name)[1]  # type: ignore[index]
            gate, up = np.split(array, 2, axis=1)
            out |= {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
            continue
        if name.endswith("experts.down_proj"):
            layer = re.search(r"layers\.(\d+)\.", name)[1]  # type: ignore[index]
            out[f"blk.{layer}.ffn_down_exps.weight"] = array
            continue
        stem, suffix = name.rsplit(".", 1)
        if architecture in ("llama", "mistral3", "smollm3") and stem.endswith(
            ("q_proj", "k_proj")
        ):  # halves become pairs
            halves = array.reshape(-1, 2, head // 2, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if architecture == "gemma3" and "norm" in stem:
            array = array + 1
        stored = names.get_name(stem)
        assert stored, f"{name} has no place in a GGUF file"
        out[f"{stored}.{suffix}"] = np.ascontiguousarray(array)
    return out | factors(model)


def factors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Scaled rotary frequencies are stored as factors on the unscaled ones."""
    config = model.config
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        plain = Shape.of(type(config).from_dict(config.to_dict() | {"rope_parameters": {"rope_theta": 10000.0}}))
        assert plain.attention_specs[0].rotary
        ratio = torch.tensor(plain.attention_specs[0].rotary.inv_freq) / model.model.rotary_emb.inv_freq
        return {"rope_freqs.weight": ratio.numpy()}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{k}.weight": np.float32(rope[f"{k}_factor"]) for k in ("short", "long")}
    return {}


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast, size: int) -> None:
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    names = {i: token for token, i in tokenizer.get_vocab().items()}
    special = set(tokenizer.all_special_ids)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types([CONTROL if i in special else NORMAL for i in range(size)])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)
