"""A GGUF file's metadata as a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gguf import GGMLQuantizationType as Kind
from transformers import AutoConfig, PreTrainedConfig

from semspec.errors import ModelError, in_a_line
from semspec.model.gguf_header import Header

MAX_SIZE = 1 << 20  # of all sizes but the context; more is a damaged file


@dataclass(frozen=True, slots=True)
class Dialect:
    """How llama.cpp writes an architecture, where that differs from the Hugging Face checkpoint."""

    model_type: str
    interleaved: bool = False  # rows of query and key weights are in rotated pairs, not in halves
    norm_offset: float = 0.0  # what was added to the weights of norms
    extra: Mapping[str, Any] = field(default_factory=dict)  # what the file does not contain


DIALECTS: dict[str, Dialect] = {
    "llama": Dialect("llama", interleaved=True),
    "qwen2": Dialect("qwen2"),
    "qwen3": Dialect("qwen3"),
    "mistral3": Dialect("llama", interleaved=True),
    "qwen2vl": Dialect("qwen2"),  # the text of what also reads pictures, by a file beside it
    "qwen3vl": Dialect("qwen3"),
    "qwen3moe": Dialect("qwen3_moe", extra={"norm_topk_prob": True}),
    "smollm3": Dialect("smollm3", interleaved=True),
    "gemma3": Dialect("gemma3_text", norm_offset=1.0),
    "phi3": Dialect("phi3"),
}
SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "attention.sliding_window": "sliding_window",
}
WINDOWED = ("gemma3_text", "phi3")  # llama.cpp ignores the window of the others
ENDS = {
    "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>",
    "<end_of_utterance>", "<｜end▁of▁sentence｜>",
}  # fmt: skip
NEEDED = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")


def dialect_of(header: Header) -> Dialect:
    architecture = header.metadata.get("general.architecture")
    if architecture not in DIALECTS:
        known = ", ".join(sorted(DIALECTS))
        raise ModelError(f"{header.path}: GGUF architecture {architecture!r} is not supported; supported are: {known}")
    return DIALECTS[architecture]


def config_of(header: Header) -> PreTrainedConfig:
    dialect = dialect_of(header)
    if (parts := header.metadata.get("split.count", 1)) != 1:
        raise ModelError(
            f"{header.path} is one of {parts} parts of a model; join them with llama-gguf-split --merge, and give "
            "the whole"
        )
    prefix = header.metadata["general.architecture"]
    own = {k.removeprefix(f"{prefix}."): v for k, v in header.metadata.items() if k.startswith(f"{prefix}.")}
    sizes = _sizes(header, own)
    if own.get("attention.temperature_scale"):
        raise ModelError(
            f"{header.path}: its queries grow with their position (attention.temperature_scale), which is not "
            "supported; take the checkpoint in safetensors, which transformers runs"
        )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{header.path} has no tensor token_embd.weight; it is not a whole language model")
    settings = {
        **sizes,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": _number(header, own, "context_length", int),
        "rms_norm_eps": _number(header, own, "attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_output.bias" in header.tensors,
        "eos_token_id": _ends(header),
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": None,
        "dtype": {Kind.F32: "float32", Kind.F16: "float16"}.get(embedding.kind, "bfloat16"),
        **dialect.extra,
    }
    head = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    model_type = dialect.model_type
    if model_type == "llama" and sizes.get("num_experts"):  # llama.cpp has no architecture of its own for Mixtral
        model_type = "mixtral"
        settings["num_local_experts"] = sizes["num_experts"]
    if model_type not in WINDOWED:
        settings["sliding_window"] = None
    if model_type == "gemma3_text":  # its largest model alone scales queries by something else than the head's size
        settings["query_pre_attn_scalar"] = (
            sizes["hidden_size"] // sizes["num_attention_heads"] if sizes["num_hidden_layers"] == 62 else head
        )
        if "attention.sliding_window_pattern" in own:
            every = _number(header, own, "attention.sliding_window_pattern", int)
            settings["sliding_window_pattern"] = every or len(header.tensors)  # 0: no layer sees all
    if model_type != "phi3" or sizes.get("head_dim"):
        settings["head_dim"] = head
    settings |= _rotary(header, own, head, settings, model_type)
    try:
        return AutoConfig.for_model(model_type, **settings)
    except Exception as error:  # transformers raises many kinds here
        raise ModelError(f"{header.path}: its metadata make no {model_type} model: {in_a_line(error)}") from error


def _ends(header: Header) -> list[int] | None:
    """Tokens that end a text. A file names one, and maybe one that ends a turn; of many chat models it names the one of
    texts only, and turns end with another, which is known by its name."""
    found = {header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    found |= {i for i, token in enumerate(tokens if isinstance(tokens, list) else ()) if token in ENDS}
    return sorted(i for i in found if isinstance(i, int)) or None


def _sizes(header: Header, own: dict[str, Any]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for key, name in SIZES.items():
        if key not in own and key not in NEEDED:
            continue
        value = _number(header, own, key, int)
        if not 0 <= value < MAX_SIZE or (value == 0 and key in NEEDED):
            raise ModelError(f"{header.path}: its metadata say that {key} is {value}, which cannot be")
        if value:
            sizes[name] = value
    if sizes["num_hidden_layers"] > len(header.tensors):
        raise ModelError(
            f"{header.path}: its metadata speak of {sizes['num_hidden_layers']} layers, but it has only "
            f"{len(header.tensors)} tensors"
        )
    sizes.setdefault("num_key_value_heads", sizes["num_attention_heads"])
    return sizes


def _number(header: Header, own: dict[str, Any], key: str, kind: type) -> Any:
    value = own.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or (kind is int and not isinstance(value, int)):
        found = "is missing" if value is None else f"is {value!r:.60}, not one number"
        raise ModelError(f"{header.path}: the metadata field {key} {found}")
    return kind(value)


def _rotary(
    header: Header, own: dict[str, Any], head: int, settings: dict[str, Any], model_type: str
) -> dict[str, Any]:
    """Rotary settings. Factors on single frequencies (llama 3.1, phi 3) lie in tensors, not in the metadata."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if "rope.freq_base" in own:
        rope["rope_theta"] = _number(header, own, "rope.freq_base", float)
    rotated = own.get("rope.dimension_count", head)
    if rotated != head:
        rope["partial_rotary_factor"] = rotated / head
    context = settings["max_position_embeddings"]
    scaling = own.get("rope.scaling.type", "linear" if "rope.scale_linear" in own else "none")  # as old files say it
    tables = [name for name in ("rope_freqs.weight", "rope_factors_short.weight") if name in header.tensors]
    if tables and scaling not in ("none", "longrope"):
        raise ModelError(f"{header.path}: {tables[0]} beside rope.scaling.type {scaling!r:.60} is not supported")
    if "rope_freqs.weight" in header.tensors:
        factors = _factors(header, "rope_freqs.weight")
        rope |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        rope["original_max_position_embeddings"] = context
    elif "rope_factors_short.weight" in header.tensors:
        rope |= {"rope_type": "longrope", "short_factor": _factors(header, "rope_factors_short.weight")}
        rope["long_factor"] = _factors(header, "rope_factors_long.weight")
        rope["original_max_position_embeddings"] = own.get("rope.scaling.original_context_length", context)
        if "rope.scaling.attn_factor" in own:
            rope["attention_factor"] = _number(header, own, "rope.scaling.attn_factor", float)
    elif scaling != "none":
        factor = "rope.scaling.factor" if "rope.scaling.type" in own else "rope.scale_linear"
        rope |= {"rope_type": scaling, "factor": _number(header, own, factor, float)}
        if "rope.scaling.original_context_length" in own:
            rope["original_max_position_embeddings"] = own["rope.scaling.original_context_length"]
        _yarn(header, own, rope)
    if model_type == "gemma3_text":  # scaling is for global layers; those with a window have a base of their own
        local: dict[str, Any] = {"rope_type": "default"}
        if "rope.freq_base_swa" in own:
            local["rope_theta"] = _number(header, own, "rope.freq_base_swa", float)
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    if rope["rope_type"] == "longrope" and model_type == "phi3":
        return {"rope_parameters": rope, "original_max_position_embeddings": rope["original_max_position_embeddings"]}
    return {"rope_parameters": rope}


def _yarn(header: Header, own: dict[str, Any], rope: dict[str, Any]) -> None:
    for name in ("beta_fast", "beta_slow"):
        if f"rope.scaling.yarn_{name}" in own:
            rope[name] = _number(header, own, f"rope.scaling.yarn_{name}", float)
    for name, usual in (
        ("yarn_ext_factor", 1),
        ("yarn_attn_factor", 1),
        ("yarn_log_multiplier", 0),
        ("attn_factor", 1),
    ):
        if (value := own.get(f"rope.scaling.{name}", usual)) != usual:
            raise ModelError(f"{header.path}: rope.scaling.{name} is {value!r:.60}, which is not supported")


def _factors(header: Header, name: str) -> list[float]:
    if name not in header.tensors:
        raise ModelError(f"{header.path} has no tensor {name}, which its rotary scaling needs")
    return [float(x) for x in header.values(header.tensors[name]).ravel()]
