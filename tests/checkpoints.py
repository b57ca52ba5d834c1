"""Tiny random checkpoints in Hugging Face format, made on the spot, of every family the native runner knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

VOCAB = 320
TEXTS = ["the quick brown fox jumps over the lazy dog", "the sky is blue because light scatters", "one two three four"]
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,  # wide enough that random models have opinions
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
    "original_max_position_embeddings": 600,
}
LOCAL_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention"]
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
}

FAMILIES: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama2": (LlamaForCausalLM, LlamaConfig(**SMALL | {"num_key_value_heads": 4})),
    "llama3": (LlamaForCausalLM, LlamaConfig(**SMALL, rope_theta=500000.0)),
    "llama3.1": (LlamaForCausalLM, LlamaConfig(**SMALL, rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama-linear": (LlamaForCausalLM, LlamaConfig(**SMALL, rope_parameters=LINEAR)),
    "llama-bias": (LlamaForCausalLM, LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "qwen2.5-yarn": (Qwen2ForCausalLM, Qwen2Config(**SMALL, rope_parameters=YARN)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=32)),
    "qwen2-window": (
        Qwen2ForCausalLM,
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=40, max_window_layers=1),
    ),
    "mistral": (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=32)),
    "mistral-nemo": (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=None, head_dim=32)),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config(**SMALL, no_rope_layer_interval=2)),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **SMALL,
            tie_word_embeddings=False,  # tied, scaled embeddings of random weights only ever repeat themselves
            head_dim=32,
            sliding_window=24,
            layer_types=LOCAL_GLOBAL,
            rope_parameters=TWO_ROPES,
            query_pre_attn_scalar=20,
        ),
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config(**SMALL, sliding_window=50)),
    "phi4-mini": (
        Phi3ForCausalLM,
        Phi3Config(**SMALL, rope_parameters=LONGROPE, original_max_position_embeddings=600, tie_word_embeddings=True),
    ),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **SMALL, head_dim=32, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[1]
        ),
    ),
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig(**SMALL | {"initializer_range": 0.2}, num_local_experts=4, num_experts_per_tok=2),
    ),
}
CHAT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"  # noqa: E501


def make_tokenizer(special: tuple[str, ...] = ("<eos>",)) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], chat_template=CHAT)


def make_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    cls, config = FAMILIES[family]
    config = type(config).from_dict(config.to_dict() | changes)
    torch.manual_seed(seed)
    model = cls(config)
    with torch.no_grad():  # biases and norms start at zero and one, where mistakes with them would not show
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name else 0.3))
    return model.eval()


def save(
    model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerFast | None = None, shard: str = "5GB"
) -> Path:
    model.save_pretrained(folder, max_shard_size=shard)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
