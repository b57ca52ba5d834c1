"""Random EAGLE-3 heads in every published layout, and the published computation in plain torch.

The reference recomputes everything from the first token for every guess: no cache, no batch, no packed rows.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

EPS = 1e-5
THETA = 10000.0


@dataclass
class Head:
    """One that was written to a folder: its tensors by the names of the `layers.0` layout, and its switches."""

    folder: Path
    tensors: dict[str, Tensor]
    heads: int
    kv_heads: int
    head_dim: int
    residual: bool  # norm_before_residual
    norm_output: bool
    aux: bool

    @property
    def ids(self) -> Tensor:
        """The target's token of each output."""
        count = len(self.tensors["lm_head.weight"])
        return torch.arange(count) + self.tensors.get("d2t", torch.zeros(count, dtype=torch.long))


def make_head(
    folder: Path,
    width: int = 64,
    target_width: int = 64,
    target_vocab: int = 320,
    vocab: int | None = None,
    layout: str = "midlayer",
    speculators: bool = False,
    layers: list[int] | None = None,
    aux: int = 3,
    depth: int = 1,
    own_embedding: bool = True,
    own_head: bool = True,
    norms: tuple[str, ...] = (),
    residual: bool | None = None,
    qk_norm: bool = False,
    biases: bool = False,
    seed: int = 0,
    prefix: str = "",
    head_dim: int = 16,
    **config: Any,
) -> Head:
    """`norms`: of norm_before_fc, fc_norm, aux_norm (the legacy name of fc_norm), norm_output."""
    g = torch.Generator().manual_seed(seed)
    heads, kv_heads, ffn = 4, 2, 48

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=g) * 1.2 / math.sqrt(columns)

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=g)

    t: dict[str, Tensor] = {}
    for i in range(depth):
        at, inputs = f"layers.{i}", 2 * width if i == 0 else width
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            t[f"{at}.self_attn.{name}_proj.weight"] = matrix(rows * head_dim, inputs)
            if biases:
                t[f"{at}.self_attn.{name}_proj.bias"] = torch.randn(rows * head_dim, generator=g)
            if qk_norm and name != "v":
                t[f"{at}.self_attn.{name}_norm.weight"] = norm(head_dim)
        t[f"{at}.self_attn.o_proj.weight"] = matrix(width, heads * head_dim)
        t[f"{at}.mlp.gate_proj.weight"], t[f"{at}.mlp.up_proj.weight"] = matrix(ffn, width), matrix(ffn, width)
        t[f"{at}.mlp.down_proj.weight"] = matrix(width, ffn)
        t[f"{at}.input_layernorm.weight"], t[f"{at}.post_attention_layernorm.weight"] = norm(width), norm(width)
    t["layers.0.hidden_norm.weight"], t["norm.weight"] = norm(width), norm(width)
    if aux:
        t["fc.weight"] = matrix(width, aux * target_width)
    if "norm_before_fc" in norms:
        t["input_norm.weight"] = norm(aux * target_width)
    if "fc_norm" in norms or "aux_norm" in norms:
        t |= {f"fc_norm.{i}.weight": norm(target_width) for i in range(aux)}
    if own_embedding:
        t["embed_tokens.weight"] = torch.randn(target_vocab, width, generator=g)
    count = vocab or target_vocab
    if own_head:
        t["lm_head.weight"] = 2 * matrix(count, width)
        if count < target_vocab:
            ids = torch.randperm(target_vocab, generator=g)[:count].sort().values
            t["d2t"] = ids - torch.arange(count)
            t["t2d"] = torch.zeros(target_vocab, dtype=torch.bool).index_fill_(0, ids, True)
    own = {
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "num_hidden_layers": 40,  # of the target, as some exporters write it
        "vocab_size": target_vocab,
        "model_type": "llama",
    }
    flags: dict[str, Any] = {} if residual is None else {"norm_before_residual": residual}
    flags |= {name: True for name in norms if name != "aux_norm"} | ({} if aux else {"use_aux_hidden_state": False})
    if layers is not None:
        flags["eagle_aux_hidden_state_layer_ids"] = layers
    if speculators:
        whole = {"speculators_model_type": "eagle3", "transformer_layer_config": own, "draft_vocab_size": count} | flags
    else:
        whole = own | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": count, "eagle_config": flags}
    names = {name: prefix + name for name in t}
    if layout == "midlayer":
        names = {name: full.replace("layers.0.", "midlayer.") for name, full in names.items()}
    if "aux_norm" in norms:
        for i, which in enumerate(("low", "mid", "high")):
            names[f"fc_norm.{i}.weight"] = f"aux_norm_{which}.weight"
    folder.mkdir(parents=True, exist_ok=True)
    save_file({names[name]: tensor.contiguous() for name, tensor in t.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(whole | config))
    default = speculators if residual is None else residual
    return Head(folder, t, heads, kv_heads, head_dim, default, "norm_output" in norms, bool(aux))


def close(ours: Tensor, theirs: Tensor) -> None:
    """Logits by us in float32 and by the reference in float64, where the head has tokens, within 1e-5 of their standard
    deviation. (Absolutely, where that is 2.5: found were at most 5.4e-6 with one layer, 1.4e-5 with three.)"""
    there = theirs > -1e3
    assert (ours[~there] < -1e3).all()
    worst = float((ours[there].double() - theirs[there]).abs().max() / theirs[there].std())
    assert worst <= 1e-5, f"{worst:.1e} of the standard deviation"


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def rope(x: Tensor, position: int) -> Tensor:
    """One head at one position."""
    half = len(x) // 2
    angle = position * THETA ** -(torch.arange(half, dtype=x.dtype) / half)
    a, b = x[:half], x[half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def outputs(
    head: Head, tokens: list[int], states: list[Tensor], embedding: Tensor, shared: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """For pairs of states and the tokens after them: logits of the target's tokens at the last, and the next state."""
    t = {name: x.double() if x.is_floating_point() else x for name, x in head.tensors.items()}
    x = torch.stack(states)
    normed = rms(x, t["layers.0.hidden_norm.weight"])
    embedded = rms(embedding[tokens].double(), t["layers.0.input_layernorm.weight"])
    x = normed if head.residual else x
    inputs = torch.cat([embedded, normed], -1)
    i = 0
    while f"layers.{i}.mlp.up_proj.weight" in t:
        at = f"layers.{i}."
        inputs = inputs if i == 0 else rms(x, t[at + "input_layernorm.weight"])
        x = x + attention(head, t, at, inputs) @ t[at + "self_attn.o_proj.weight"].T
        fed = rms(x, t[at + "post_attention_layernorm.weight"])
        gate, up = fed @ t[at + "mlp.gate_proj.weight"].T, fed @ t[at + "mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ t[at + "mlp.down_proj.weight"].T
        i += 1
    last = rms(x[-1], t["norm.weight"])
    after = last if head.norm_output else x[-1]
    if shared is not None:
        return shared.double() @ last, after
    logits = torch.full((len(embedding),), -1e4, dtype=torch.float64)
    logits[head.ids] = t["lm_head.weight"] @ last
    return logits, after


def attention(head: Head, t: dict[str, Tensor], at: str, inputs: Tensor) -> Tensor:
    rows = []
    parts = {}
    for name, count in (("q", head.heads), ("k", head.kv_heads), ("v", head.kv_heads)):
        made = inputs @ t[f"{at}self_attn.{name}_proj.weight"].T + t.get(f"{at}self_attn.{name}_proj.bias", 0)
        made = made.view(len(inputs), count, head.head_dim)
        if f"{at}self_attn.{name}_norm.weight" in t:
            made = rms(made, t[f"{at}self_attn.{name}_norm.weight"])
        parts[name] = made
    for i in range(len(inputs)):
        whole = []
        for h in range(head.heads):
            g = h // (head.heads // head.kv_heads)
            q = rope(parts["q"][i, h], i)
            scores = torch.stack([q @ rope(parts["k"][j, g], j) for j in range(i + 1)]) / math.sqrt(head.head_dim)
            whole.append(scores.softmax(0) @ parts["v"][: i + 1, g])
        rows.append(torch.cat(whole))
    return torch.stack(rows)


def combined(head: Head, states: list[Tensor]) -> list[Tensor]:
    """States of the target by layer, [N, its width] each, as the head reads them."""
    t = {name: x.double() for name, x in head.tensors.items() if x.is_floating_point()}
    states = [state.double() for state in states]
    if not head.aux:
        return list(states[0])
    if "fc_norm.0.weight" in t:
        states = [rms(state, t[f"fc_norm.{i}.weight"]) for i, state in enumerate(states)]
    whole = torch.cat(states, -1)
    if "input_norm.weight" in t:
        whole = rms(whole, t["input_norm.weight"])
    return list(whole @ t["fc.weight"].T)


def drafted(
    head: Head, text: list[int], states: list[Tensor], n: int, embedding: Tensor, shared: Tensor | None = None
) -> tuple[list[int], Tensor]:
    """n greedy guesses after a text, whose states but the last token's the target has given; with their logits."""
    own, tokens, rows = combined(head, states)[: len(text) - 1], list(text[1:]), []
    for _ in range(n):
        logits, state = outputs(head, tokens, own, embedding, shared)
        rows.append(logits)
        tokens.append(int(logits.argmax()))
        own.append(state)
    return tokens[len(tokens) - n :], torch.stack(rows)


def make_block_head(
    folder: Path, width: int = 64, depth: int = 2, block: int = 5, layers: tuple[int, ...] = (0, 1), seed: int = 0,
    mask_embedding: bool = False, target_vocab: int = 320, speculators: bool = False, vocab: int | None = None,
    mask_file: str = "", **config: Any,
) -> Head:  # fmt: skip
    """A random block head in the layout of DFlash; `layers` as its config names them, `mask_file` what the file with
    the mask's embedding holds: a tensor, a row, or a table."""
    g = torch.Generator().manual_seed(seed)
    heads, kv_heads, head_dim, ffn, t = 4, 2, 16, 48, dict[str, Tensor]()

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=g) * 1.2 / math.sqrt(columns)

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=g)

    for i in range(depth):
        at = f"layers.{i}."
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            t[f"{at}self_attn.{name}_proj.weight"] = matrix(rows * head_dim, width)
            if name != "v":
                t[f"{at}self_attn.{name}_norm.weight"] = norm(head_dim)
        t[f"{at}self_attn.o_proj.weight"] = matrix(width, heads * head_dim)
        t[f"{at}mlp.gate_proj.weight"], t[f"{at}mlp.up_proj.weight"] = matrix(ffn, width), matrix(ffn, width)
        t[f"{at}mlp.down_proj.weight"] = matrix(width, ffn)
        t[f"{at}input_layernorm.weight"], t[f"{at}post_attention_layernorm.weight"] = norm(width), norm(width)
    t["fc.weight"] = matrix(width, len(layers) * width)
    t["hidden_norm.weight"], t["norm.weight"] = norm(width), norm(width)
    if mask_embedding or mask_file:
        t["mask_embedding"] = torch.randn(width, generator=g)
    if vocab:
        ids = torch.randperm(target_vocab, generator=g)[:vocab].sort().values
        t["lm_head.weight"], t["d2t"] = matrix(vocab, width), ids - torch.arange(vocab)
        t["t2d"] = torch.zeros(target_vocab, dtype=torch.bool).index_fill_(0, ids, True)
    whole: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "num_hidden_layers": depth,
        "vocab_size": target_vocab,
    }
    if speculators:
        named = {"block_size": block, "mask_token_id": 9, "aux_hidden_state_layer_ids": list(layers)}
        proposed = [{"proposal_type": "greedy", "speculative_tokens": block - 1}]
        named["speculators_config"] = {"algorithm": "dflash", "proposal_methods": proposed}  # type: ignore[assignment]
        whole = {"speculators_model_type": "dflash", "transformer_layer_config": whole} | named
    else:
        whole |= {"block_size": block, "dflash_config": {"mask_token_id": 9, "target_layer_ids": list(layers)}}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: x for name, x in t.items() if not mask_file or name != "mask_embedding"}, folder / "model.safetensors"
    )
    if mask_file:
        own = t["mask_embedding"]
        held = {"tensor": own, "row": own[None].bfloat16(), "table": {"mask_token_id": 9, "embedding": own}}[mask_file]
        torch.save(held, folder / "mask_embedding.pt")
        t["mask_embedding"] = own.bfloat16().float() if mask_file == "row" else own
    (folder / "config.json").write_text(json.dumps(whole | config))
    return Head(folder, t, heads, kv_heads, head_dim, False, False, True)


def filled(head: Head, last: int, block: int, states: list[Tensor], embedding: Tensor, shared: Tensor) -> Tensor:
    """Logits of the block - 1 tokens after `last`, whose predecessors have these states of the target, by layer."""
    t = {name: x.double() if x.is_floating_point() else x for name, x in head.tensors.items()}
    context = rms(torch.cat([s.double() for s in states], -1) @ t["fc.weight"].T, t["hidden_norm.weight"])
    mask = t.get("mask_embedding", embedding[9].double())
    x = torch.stack([embedding[last].double(), *[mask] * (block - 1)])
    i = 0
    while f"layers.{i}.mlp.up_proj.weight" in t:
        at = f"layers.{i}."
        normed = rms(x, t[at + "input_layernorm.weight"])
        both, made = torch.cat([context, normed]), dict[str, Tensor]()
        for name, count in (("q", head.heads), ("k", head.kv_heads), ("v", head.kv_heads)):
            made[name] = (both @ t[f"{at}self_attn.{name}_proj.weight"].T).view(len(both), count, head.head_dim)
            if name != "v":
                made[name] = rms(made[name], t[f"{at}self_attn.{name}_norm.weight"])
        rows = []
        for p in range(len(context), len(both)):
            whole = []
            for h in range(head.heads):
                kv = h // (head.heads // head.kv_heads)
                q = rope(made["q"][p, h], p)
                scores = torch.stack([q @ rope(made["k"][j, kv], j) for j in range(len(both))])
                whole.append((scores / math.sqrt(head.head_dim)).softmax(0) @ made["v"][:, kv])
            rows.append(torch.cat(whole))
        x = x + torch.stack(rows) @ t[at + "self_attn.o_proj.weight"].T
        fed = rms(x, t[at + "post_attention_layernorm.weight"])
        gate, up = fed @ t[at + "mlp.gate_proj.weight"].T, fed @ t[at + "mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ t[at + "mlp.down_proj.weight"].T
        i += 1
    last = rms(x[1:], t["norm.weight"])
    if "lm_head.weight" not in t:
        return last @ shared.double().T
    logits = torch.full((len(last), len(embedding)), -1e4, dtype=torch.float64)
    logits[:, head.ids] = last @ t["lm_head.weight"].T
    return logits
