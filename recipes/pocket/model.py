"""The decoder that is trained: the Llama layout (or Mixtral's, with experts), in plain PyTorch with static shapes.

Modules carry the names that Hugging Face checkpoints use, so exporting is saving the state dict. Not the runner of
the package: this one knows how to learn and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """The shape of a model. With `experts` > 0 the feed-forward layers are mixtures, `chosen` experts a token."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    experts: int = 0
    chosen: int = 2
    head_dim: int = 64
    theta: float = 10_000.0
    context: int = 8192
    epsilon: float = 1e-5


SIZES: dict[str, Size] = {
    "target": Size(width=384, layers=8, heads=6, kv_heads=2, hidden=1024),
    "draft": Size(width=192, layers=4, heads=6, kv_heads=6, hidden=448, head_dim=32),
    # Four experts a token, so that there are one to three to leave out (docs/sparse.md).
    "moe": Size(width=320, layers=6, heads=5, kv_heads=1, hidden=192, experts=16, chosen=4),
    "tiny": Size(width=64, layers=2, heads=2, kv_heads=1, hidden=128, head_dim=32),
    "tiny_moe": Size(width=64, layers=2, heads=2, kv_heads=1, hidden=64, experts=8, chosen=4, head_dim=32),
}


class Norm(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.epsilon).to(x.dtype)


def rotary(positions: Tensor, size: Size) -> tuple[Tensor, Tensor]:
    """Cosines and sines for these positions. positions [..., T] -> two of [..., T, head_dim]."""
    steps = torch.arange(0, size.head_dim, 2, device=positions.device, dtype=torch.float32) / size.head_dim
    angles = positions[..., None].float() * size.theta**-steps
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """x [B, H, T, D]; cosines and sines [T, D] or [B, 1, T, D]."""
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos_sin[0] + torch.cat([-second, first], dim=-1) * cos_sin[1]).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.q_proj = nn.Linear(size.width, size.heads * size.head_dim, bias=False)
        self.k_proj = nn.Linear(size.width, size.kv_heads * size.head_dim, bias=False)
        self.v_proj = nn.Linear(size.width, size.kv_heads * size.head_dim, bias=False)
        self.o_proj = nn.Linear(size.heads * size.head_dim, size.width, bias=False)

    def project(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, H, T, D], keys and values [B, KV, T, D]."""
        rows, length, _ = x.shape
        q = self.q_proj(x).view(rows, length, self.size.heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(rows, length, self.size.kv_heads, -1).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, self.size.kv_heads, -1).transpose(1, 2)
        return rotate(q, cos_sin), rotate(k, cos_sin), v

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        q, k, v = self.project(x, cos_sin)
        group = self.size.heads // self.size.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.width, size.hidden, bias=False)
        self.up_proj = nn.Linear(size.width, size.hidden, bias=False)
        self.down_proj = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Mixture(nn.Module):
    """A few of several experts a token. All experts are computed and those not chosen get weight 0: more arithmetic
    than needed, but static shapes, few launches and no sorting, which at this size is the faster bargain."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.chosen = size.chosen
        self.gate = nn.Linear(size.width, size.experts, bias=False)
        scale = size.width**-0.5
        self.w1 = nn.Parameter(torch.randn(size.experts, size.width, size.hidden) * scale)
        self.w3 = nn.Parameter(torch.randn(size.experts, size.width, size.hidden) * scale)
        self.w2 = nn.Parameter(torch.randn(size.experts, size.hidden, size.width) * size.hidden**-0.5)
        self.balance = torch.zeros(())  # of the last pass: how unevenly experts were used (1 is even)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)  # [N, W]
        shares = self.gate(flat).float().softmax(-1)  # [N, E]
        best, chosen = shares.topk(self.chosen, dim=-1)
        weights = torch.zeros_like(shares).scatter(1, chosen, best / best.sum(-1, keepdim=True))
        if torch.is_grad_enabled():
            used = (weights > 0).float().mean(0) / self.chosen
            self.balance = shares.shape[1] * (used * shares.mean(0)).sum()
        inner = F.silu(torch.einsum("nw,ewh->enh", flat, self.w1)) * torch.einsum("nw,ewh->enh", flat, self.w3)
        inner = inner * weights.t()[:, :, None].to(inner.dtype)
        return torch.einsum("enh,ehw->nw", inner, self.w2).view_as(x)


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.self_attn = Attention(size)
        self.mlp: nn.Module = Mixture(size) if size.experts else FeedForward(size)
        self.input_layernorm = Norm(size.width, size.epsilon)
        self.post_attention_layernorm = Norm(size.width, size.epsilon)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, size: Size, entries: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(entries, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = Norm(size.width, size.epsilon)


class Decoder(nn.Module):
    """Tokens to logits. The embedding is also the output matrix."""

    def __init__(self, size: Size, entries: int) -> None:
        super().__init__()
        self.size = size
        self.model = Body(size, entries)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02 if "embed" in name else weight.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight", "w2")):
                with torch.no_grad():
                    weight.mul_((2 * size.layers) ** -0.5)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """tokens [B, T], mask [B, 1, T, T] (True where a token may look) or None for plain causal -> [B, T, V]."""
        cos_sin = rotary(torch.arange(tokens.shape[1], device=tokens.device), self.size)
        x = self.model.embed_tokens(tokens)
        for layer in self.blocks():
            x = layer(x, cos_sin, mask)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def blocks(self) -> list[Layer]:
        """The layers, first to last."""
        return cast("list[Layer]", list(self.model.layers))

    def balance(self) -> Tensor:
        """Mean unevenness of expert use in the last pass; 0 for a dense model."""
        terms = [layer.mlp.balance for layer in self.blocks() if isinstance(layer.mlp, Mixture)]
        return torch.stack(terms).mean() if terms else torch.zeros((), device=self.model.norm.weight.device)


def document_mask(tokens: Tensor, starts_with: int) -> Tensor:
    """Causal within a document only, so that packed neighbours cannot be seen. tokens [B, T] -> [B, 1, T, T]."""
    document = (tokens == starts_with).cumsum(1)
    same = document[:, :, None] == document[:, None, :]
    length = tokens.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
    return (same & causal)[:, None]
