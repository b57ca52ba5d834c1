"""Every causal language model that the installed transformers knows, made tiny with random weights: which of them run
natively, through transformers, or not, and whether the text is transformers' own.

    python -m bench.families --out results/families.json        # all of them: some ten minutes of one core
    python -m bench.families --only gemma --only qwen3_5        # those whose names have this in them

Each model is made, saved and loaded in a process of its own, with bounds on its time and memory. `none`, `exact` with
drafts that are looked up, `exact` with the model itself as its draft, and `exact` for three prompts at a time have to
write what `generate` of transformers writes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import multiprocessing
import operator
import resource
import tempfile
import traceback
import warnings
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import semspec
from semspec.errors import SemspecError
from semspec.model.hf_runner import TransformersRunner

VOCAB, TOKENS, SECONDS, BYTES = 512, 40, 240, 6 << 30
PROMPTS = [
    "the quick brown fox jumps over the lazy dog and the quick brown fox",
    "one two three",
    "the sky is blue " * 6,
]
SIZES: dict[str, Any] = (
    dict.fromkeys(["hidden_size", "d_model", "n_embd", "embedding_dim", "embedding_size", "word_embed_proj_dim"], 64)
    | dict.fromkeys(["input_embedding_size", "output_embedding_size", "attention_hidden_size", "lru_width"], 64)
    | dict.fromkeys(["intermediate_size", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim"], 96)
    | dict.fromkeys(["n_inner", "dff", "dim_ff", "d_inner", "intermediate_size_mlp", "dense_intermediate_size"], 96)
    | dict.fromkeys(["feed_forward_size"], 96)
    | dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"], 4)
    | dict.fromkeys(["num_encoder_layers", "num_decoder_layers", "num_blocks", "depth"], 4)
    | dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"], 4)
    | dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads", "linear_num_heads"], 4)
    | dict.fromkeys(["num_encoder_attention_heads", "num_decoder_attention_heads", "swa_num_attention_heads"], 4)
    | dict.fromkeys(["num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "linear_num_key_heads"], 2)
    | dict.fromkeys(["linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"], 4)
    | dict.fromkeys(["head_dim", "global_head_dim", "swa_head_dim", "dim_head", "d_head", "kv_channels"], 16)
    | dict.fromkeys(["v_head_dim", "qk_nope_head_dim", "attention_head_size", "linear_head_dim", "state_size"], 16)
    | dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "index_head_dim", "mamba_d_state"], 16)
    | dict.fromkeys(["ssm_state_size", "kv_lora_rank", "mamba_chunk_size", "chunk_size", "mamba_dt_rank"], 16)
    | dict.fromkeys(["time_step_rank", "router_hidden_size", "laurel_rank", "adapter_rank", "o_lora_rank"], 16)
    | dict.fromkeys(["hidden_size_per_layer_input"], 16)
    | dict.fromkeys(["qk_rope_head_dim", "rotary_dim", "index_topk"], 8)
    | dict.fromkeys(["qk_head_dim"], 24)
    | dict.fromkeys(["q_lora_rank", "shared_expert_intermediate_size", "moe_intermediate_size"], 32)
    | dict.fromkeys(["expert_ffn_hidden_size", "moe_shared_expert_intermediate_size", "mamba_head_dim"], 32)
    | dict.fromkeys(["mamba_d_head", "shared_intermediate_size"], 32)
    | dict.fromkeys(["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "n_group"], 8)
    | dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"], 2)
    | {
        "index_n_heads": 32,
        "n_group": 2,
        "topk_group": 1,
        "num_expert_group": 2,
        "first_k_dense_replace": 1,
        "zero_expert_num": 2,
    }
    | dict.fromkeys(["vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size"], VOCAB)
    | dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"], 256)
    | dict.fromkeys(["max_target_positions", "model_max_length"], 256)
    | dict.fromkeys(["sliding_window", "window_size", "attention_window_size", "sliding_window_size"], 16)
    | {"attention_chunk_size": 32, "local_attention": 16, "moe_layer_end_index": 3, "num_kv_shared_layers": 0}
    | {"mamba_d_ssm": 128, "hc_count": 2, "ple_embed_dim": 32, "ngram_vocab_size_base": 100, "split_ngram_parts": 4}
    | {"embed_dim": 64, "image_size": 32, "patch_size": 8, "out_hidden_size": 64, "eos_token_id": 0}
    | {"bos_token_id": 1, "pad_token_id": 0}
)
LOCAL = ["sliding_attention", "full_attention"] * 2
LINEAR = ["linear_attention", "full_attention"] * 2
FREE = {"tie_word_embeddings": False}  # tied, scaled embeddings of random weights only ever repeat themselves
HEADS = {"num_key_value_heads": 4}
PARTS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
HALF_PARTS = {"rope_parameters": PARTS["rope_parameters"] | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}}
GLOBAL = {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
OWN: dict[str, dict[str, Any]] = {  # what a family needs besides, or what would else not be seen at so few layers
    "axk2": {"layer_types": ["indexed_attention"] * 4},
    "bailing_hybrid": {"layer_types": LINEAR},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 16},
    "cohere_compass_text": {"rope_parameters": GLOBAL},
    "dots1": {"n_shared_experts": 1},
    "exaone4": {"layer_types": LOCAL},
    "gemma": FREE,
    "gemma2": FREE | {"query_pre_attn_scalar": 16, "layer_types": LOCAL},
    "gemma3": FREE,
    "gemma3_text": FREE | {"query_pre_attn_scalar": 20, "layer_types": LOCAL},
    "gemma3n_text": FREE
    | {"num_kv_shared_layers": 2, "layer_types": LOCAL, "altup_num_inputs": 2}
    | {"activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": FREE | {"global_head_dim": 32, "layer_types": LOCAL, "num_kv_shared_layers": 2},
    "gemma4_unified_text": FREE | {"global_head_dim": 32, "layer_types": LOCAL},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": LINEAR, "mamba_d_head": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": LINEAR},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "tie_word_embeddings": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "tie_word_embeddings": False},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "n_groups": 2}
    | {"mamba_num_heads": 4, "mamba_head_dim": 32},
    "olmo_hybrid": {"layer_types": LINEAR},
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32]},
    "qwen4_exp_text": {"layer_types": LINEAR},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"layer_types": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32]},
    "glm5_next_text": HEADS,
    "prophetnet": {},
} | dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"), PARTS) | dict.fromkeys(
    ("glm4v_text", "glm4v_moe_text", "glm46v_text", "glm_ocr_text"), HALF_PARTS
) | {kind: {"is_decoder": True} for kind in (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
)}  # fmt: skip


def tiny(kind: str, **changes: Any) -> PreTrainedConfig:
    """The default config of a family with all its sizes made small."""
    cls = CONFIG_MAPPING[kind]
    return _tiny(cls, OWN.get(kind, {}) | changes)


def _tiny(cls: type[PreTrainedConfig], own: dict[str, Any]) -> PreTrainedConfig:
    fields = {field.name for field in dataclasses.fields(cls)} - {
        "num_hidden_layers" * (cls.model_type == "prophetnet")
    }
    settings: dict[str, Any] = {name: value for name, value in SIZES.items() if name in fields}
    if "qk_rope_head_dim" in settings:  # these have as many heads of keys as of queries
        settings.pop("head_dim", None)
        settings["num_key_value_heads"] = 4
    for name, sub in getattr(cls, "sub_configs", {}).items():
        inner = sub if sub is not AutoConfig else type(getattr(cls(), name))
        if name in fields and "hidden_size" in {field.name for field in dataclasses.fields(inner)}:
            settings[name] = _tiny(inner, OWN.get(inner.model_type, {})).to_dict()
    return cls(**settings | own)


def opinionated(model: PreTrainedModel) -> PreTrainedModel:
    """Random weights so wide that the text is not constant; norms and biases too, since mistakes with ones and zeros
    would not show."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and parameter.is_floating_point():
                fan = parameter.shape[-1] if parameter.ndim == 2 else parameter[0].numel() // parameter.shape[1]
                parameter.normal_(0, 1.0 if "embed" in name else 1.5 * max(fan, 4) ** -0.5)
            elif name.endswith(("norm.weight", "bias")) and parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(PROMPTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


def check(kind: str, folder: Path) -> dict[str, Any]:
    pictures = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    auto = AutoModelForImageTextToText if pictures else AutoModelForCausalLM
    try:
        model = opinionated(auto.from_config(tiny(kind), dtype=torch.float32))
    except Exception as error:  # of other sizes than the usual ones, or needs another package
        return {"found": "not made", "why": f"{type(error).__name__}: {error}"[:200]}
    model.generation_config = GenerationConfig()
    model.save_pretrained(folder)
    words = tokenizer()
    words.save_pretrained(folder)
    made = {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}
    try:
        pair = semspec.load(folder, slots=3, context=160)
    except SemspecError as error:
        return made | {"found": "refused", "why": str(error).replace(str(folder), "PATH")}
    made["runs"] = "through transformers" if isinstance(pair.target, TransformersRunner) else "natively"
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    own = semspec.load(folder, draft=folder, slots=3, context=160)
    common: dict[str, Any] = {"max_new_tokens": TOKENS, "ignore_eos": True, "num_draft_tokens": 4}
    texts = {
        "none": pair.generate(PROMPTS, verifier="none", **common),
        "exact, lookup": [pair.generate(PROMPTS[0], verifier="exact", drafter="ngram", **common)],
        "exact, itself": [own.generate(PROMPTS[0], verifier="exact", drafter="model", **common)],
        "exact, batch": own.generate(PROMPTS, verifier="exact", drafter="model", **common),
        "exact, batch lookup": pair.generate(PROMPTS, verifier="exact", drafter="ngram", **common),
    }
    wanted = []
    for prompt, text in zip(PROMPTS, texts["none"], strict=True):
        ids = torch.tensor([words.encode(prompt)])
        rules = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=rules)
        wanted.append(out[0, ids.shape[1] :].tolist())
        if list(text.tokens) != wanted[-1] and whole_passes(model, ids[0].tolist()) == list(text.tokens):
            wanted[-1] = list(text.tokens)
            made["generate"] = "gives another text than passes without a cache, which give ours"
    made["words"] = len({*wanted[0]})
    wrong = {
        name: [[*map(operator.eq, r.tokens, w), False].index(False) for r, w in zip(found, wanted, strict=False)]
        for name, found in texts.items()
        if any(list(r.tokens) != w for r, w in zip(found, wanted, strict=False))
    }
    made["tau"] = round(texts["exact, itself"][0].stats.tau, 2)
    return made | ({"found": "wrong", "where": wrong} if wrong else {"found": "equal"})


def whole_passes(model: PreTrainedModel, ids: list[int]) -> list[int]:
    """Greedy text without a cache, by passes that give a model nothing but tokens: `generate` gives some of them other
    positions than they number themselves."""
    start = len(ids)
    with torch.inference_mode():
        for _ in range(TOKENS):
            ids = [*ids, int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())]
    return ids[start:]


def _child(kind: str, pipe: Any, seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            pipe.send(check(kind, Path(folder)))
        except BaseException as error:
            what = f"{type(error).__name__}: {error}"[:300]
            pipe.send({"found": "traceback", "why": what, "trace": traceback.format_exc()})


def run(kind: str, seconds: int = SECONDS) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(kind, theirs, seconds))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(2 * seconds) else {"found": "no end"}
    except EOFError:
        return {"found": "killed"}
    finally:
        process.kill()
        process.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trace", action="store_true")
    given = parser.parse_args()
    kinds = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    kinds += [k for k in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if k not in kinds]
    found = {}
    for kind in kinds:
        if given.only and not any(part in kind for part in given.only):
            continue
        one = found[kind] = run(kind)
        where = one.get("where") or one.get("why", "")
        print(f"{kind:28} {one['found']:10} {one.get('runs', ''):21} {where}"[:200], flush=True)
        if given.trace and "trace" in one:
            print(one["trace"])
    if given.out:
        about = {"date": f"{date.today()}", "transformers": transformers.__version__, "torch": torch.__version__}
        given.out.write_text(json.dumps(about | {"models": found}, indent=1) + "\n")
    print(Counter(one["found"] for one in found.values()))
