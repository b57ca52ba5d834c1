"""Write many texts in lock step: one pass a token over a thousand sequences, with a static key-value memory.

Built for measuring, where the number of sequences hides the cost of launching; the package's own runners are for
speed on few. Works the same on CPU and GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.pocket.model import Decoder, rotary

_PREFILL_TOKENS = 1 << 17  # how many prompt tokens are read at once, which bounds the memory of attention


class Memory:
    """Keys and values of every layer for a batch of sequences, each with its own length."""

    def __init__(self, model: Decoder, rows: int, length: int) -> None:
        size, like = model.size, model.model.norm.weight
        shape = (size.layers, rows, size.kv_heads, length, size.head_dim)
        self.keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.values = torch.zeros(shape, dtype=like.dtype, device=like.device)


def _read(model: Decoder, tokens: Tensor, memory: Memory, rows: slice) -> Tensor:
    """Prompts padded on the right, [B, T] -> final hidden states [B, T, W]; fills the memory."""
    cos_sin = rotary(torch.arange(tokens.shape[1], device=tokens.device), model.size)
    group = model.size.heads // model.size.kv_heads
    x = model.model.embed_tokens(tokens)
    for number, layer in enumerate(model.blocks()):
        q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos_sin)
        memory.keys[number, rows, :, : tokens.shape[1]] = k
        memory.values[number, rows, :, : tokens.shape[1]] = v
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + layer.self_attn.o_proj(y.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return x


def _advance(model: Decoder, tokens: Tensor, positions: Tensor, memory: Memory, length: int) -> Tensor:
    """One token a sequence at its own position: tokens [B], positions [B] -> logits [B, V]."""
    size, rows = model.size, torch.arange(len(tokens), device=tokens.device)
    cosines, sines = rotary(positions[:, None], size)  # [B, 1, D]
    cos_sin = (cosines[:, None], sines[:, None])
    seen = (torch.arange(length, device=tokens.device) <= positions[:, None])[:, None, None]  # [B, 1, 1, L]
    x = model.model.embed_tokens(tokens[:, None])
    for number, layer in enumerate(model.blocks()):
        q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos_sin)
        memory.keys[number, rows, :, positions] = k[:, :, 0]
        memory.values[number, rows, :, positions] = v[:, :, 0]
        # The query heads that share a key head become its queries: no copy of the memory.
        q = q.view(len(tokens), size.kv_heads, -1, size.head_dim)
        y = F.scaled_dot_product_attention(
            q, memory.keys[number, :, :, :length], memory.values[number, :, :, :length], attn_mask=seen
        )
        x = x + layer.self_attn.o_proj(y.reshape(len(tokens), 1, -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return F.linear(model.model.norm(x), model.model.embed_tokens.weight)[:, 0]


def padded(prompts: Sequence[Sequence[int]], device: torch.device, pad: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts as [B, T], padded on the right, and their lengths [B]."""
    lengths = torch.tensor([len(one) for one in prompts])
    tokens = torch.full((len(prompts), int(lengths.max())), pad)
    for row, one in enumerate(prompts):
        tokens[row, : len(one)] = torch.tensor(list(one))
    return tokens.to(device), lengths.to(device)


@torch.inference_mode()
def write(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    most: int,
    temperature: float,
    stop: Collection[int],
    seed: int = 0,
    batch: int = 1024,
) -> list[list[int]]:
    """Continue each prompt by up to `most` tokens, ending after any token of `stop`; temperature 0 is greedy.

    Prompts are handled shortest first, so that a batch has little padding; results come in the order given."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    out: list[list[int]] = [[] for _ in prompts]
    for low in range(0, len(order), batch):
        indices = order[low : low + batch]
        texts = _write_batch(model, [prompts[index] for index in indices], most, temperature, stop, seed + low)
        for index, text in zip(indices, texts, strict=True):
            out[index] = text
    return out


def _write_batch(
    model: Decoder,
    prompts: list[Sequence[int]],
    most: int,
    temperature: float,
    stop: Collection[int],
    seed: int,
) -> list[list[int]]:
    device = model.model.norm.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    tokens, lengths = padded(prompts, device)
    width = tokens.shape[1]
    memory = Memory(model, len(prompts), width + most)
    last = []
    chunk = max(1, _PREFILL_TOKENS // width)
    for low in range(0, len(prompts), chunk):
        rows = slice(low, low + chunk)
        hidden = _read(model, tokens[rows], memory, rows)
        last.append(hidden[torch.arange(len(hidden), device=device), lengths[rows] - 1])
    logits = F.linear(model.model.norm(torch.cat(last)), model.model.embed_tokens.weight)
    stops = torch.tensor(sorted(stop), device=device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    written = []
    for number in range(most):
        token = _draw(logits.float(), temperature, generator)
        token = torch.where(ended, -1, token)
        written.append(token)
        ended = ended | torch.isin(token, stops)
        if number + 1 == most or (number % 8 == 7 and bool(ended.all())):
            break
        length = min(width + most, -(-(width + number + 1) // 64) * 64)
        logits = _advance(model, token.clamp(min=0), lengths + number, memory, length)
    table = torch.stack(written, 1).tolist()
    return [[token for token in row if token >= 0] for row in table]


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]


@torch.inference_mode()
def score(
    model: Decoder, texts: Sequence[Sequence[int]], reduce: str, temperature: float = 1.0, batch: int = 64
) -> list[Tensor]:
    """What the model thinks of given texts, one tensor a text, on the CPU.

    reduce "favourite": the likeliest next token at each position [T]; "chance": the probability, at this temperature,
    of the token that does follow [T - 1]."""
    device = model.model.norm.weight.device
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    out: list[Tensor] = [torch.empty(0)] * len(texts)
    for low in range(0, len(order), batch):
        indices = order[low : low + batch]
        tokens, lengths = padded([texts[index] for index in indices], device)
        logits = model(tokens).float()
        if reduce == "favourite":
            values = logits.argmax(-1)
        else:
            values = (logits[:, :-1] / temperature).log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0].exp()
            lengths = lengths - 1
        for row, (index, length) in enumerate(zip(indices, lengths.tolist(), strict=True)):
            out[index] = values[row, :length].cpu()
    return out
