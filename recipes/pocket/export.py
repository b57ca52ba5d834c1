"""Trained weights as a Hugging Face folder, and back into the recipe's own decoder.

Dense models are written as LlamaForCausalLM, mixtures as MixtralForCausalLM. Large files can be split, so that they
fit through narrow doors, and joined again:  python3 -m recipes.pocket.export join FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipes.pocket.model import Decoder, Size

_INDEX = "model.safetensors.index.json"


def config_of(size: Size, entries: int, end: int, pad: int) -> dict[str, object]:
    """The config.json of a model of this size."""
    config: dict[str, object] = {
        "architectures": ["MixtralForCausalLM" if size.experts else "LlamaForCausalLM"],
        "model_type": "mixtral" if size.experts else "llama",
        "vocab_size": entries,
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "intermediate_size": size.hidden,
        "hidden_act": "silu",
        "max_position_embeddings": size.context,
        "rms_norm_eps": size.epsilon,
        "rope_theta": size.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": size.theta},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "eos_token_id": end,
        "pad_token_id": pad,
        "bos_token_id": None,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    if size.experts:
        config |= {
            "num_local_experts": size.experts,
            "num_experts_per_tok": size.chosen,
            "sliding_window": None,
        }
        del config["mlp_bias"]
    return config


def size_of(config: dict[str, object]) -> Size:
    """The size a config.json describes."""
    number = {key: value for key, value in config.items() if isinstance(value, int)}
    theta, epsilon = config["rope_theta"], config["rms_norm_eps"]
    assert isinstance(theta, int | float) and isinstance(epsilon, int | float)
    return Size(
        width=number["hidden_size"],
        layers=number["num_hidden_layers"],
        heads=number["num_attention_heads"],
        kv_heads=number["num_key_value_heads"],
        hidden=number["intermediate_size"],
        experts=number.get("num_local_experts", 0),
        chosen=number.get("num_experts_per_tok", Size.chosen),
        head_dim=number["head_dim"],
        theta=theta,
        context=number["max_position_embeddings"],
        epsilon=epsilon,
    )


def _to_checkpoint(model: Decoder) -> dict[str, Tensor]:
    """Our parameters under the names and shapes of the published layouts, in bf16."""
    out: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        value = weight.detach().to("cpu", torch.bfloat16)
        if ".mlp.w" in name:
            stem, matrix = name.rsplit(".", 1)
            stem = stem.replace(".mlp", ".block_sparse_moe.experts")
            for expert, part in enumerate(value):
                out[f"{stem}.{expert}.{matrix}.weight"] = part.t().contiguous()
        else:
            out[name.replace(".mlp.gate.", ".block_sparse_moe.gate.")] = value.contiguous()
    return out


def _from_checkpoint(weights: dict[str, Tensor], size: Size) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, value in weights.items():
        if ".experts." not in name:
            out[name.replace(".block_sparse_moe.gate.", ".mlp.gate.")] = value
    for layer in range(size.layers if size.experts else 0):
        for matrix in ("w1", "w2", "w3"):
            stem = f"model.layers.{layer}.block_sparse_moe.experts"
            parts = [weights[f"{stem}.{expert}.{matrix}.weight"].t() for expert in range(size.experts)]
            out[f"model.layers.{layer}.mlp.{matrix}"] = torch.stack(parts)
    return out


def save(model: Decoder, folder: Path, end: int, pad: int, shard_mb: float = 0) -> None:
    """Write config.json and the weights: one file, or several of at most `shard_mb` with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = model.model.embed_tokens.weight.shape[0]
    (folder / "config.json").write_text(json.dumps(config_of(model.size, entries, end, pad), indent=2) + "\n")
    generation = {"eos_token_id": end, "pad_token_id": pad, "do_sample": True, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    weights = _to_checkpoint(model)
    shards: list[dict[str, Tensor]] = [{}]
    free = shard_mb * 2**20
    for name, value in weights.items():
        if shard_mb and shards[-1] and value.nbytes > free:
            shards.append({})
            free = shard_mb * 2**20
        shards[-1][name] = value
        free -= value.nbytes
    if len(shards) == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    where = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(shard, file))
    total = sum(value.nbytes for value in weights.values())
    (folder / _INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1))


def _weights(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def load(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder of an exported folder."""
    config = json.loads((folder / "config.json").read_text())
    size = size_of(config)
    model = Decoder(size, config["vocab_size"])
    model.load_state_dict(_from_checkpoint(_weights(folder), size))
    return model.to(device, dtype).eval()


def join(folder: Path) -> None:
    """Make one weights file of several."""
    files = sorted(folder.glob("model-*.safetensors"))
    weights = _weights(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for file in files:
        file.unlink()
    (folder / _INDEX).unlink(missing_ok=True)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "join":
        sys.exit("usage: python3 -m recipes.pocket.export join FOLDER")
    join(Path(sys.argv[2]))
