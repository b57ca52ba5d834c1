"""An EAGLE-3 head as it is trained: the tensors of the published layout, and several steps of drafting at once.

Trained on the target's states alone, a head fails at its own second token, since there it reads its own outputs. So
training drafts: step j reads, at every position, what step j - 1 gave at the position before. A position's step j
stands for the j-th token of a draft that began j positions earlier; it attends to the target's states up to there and
to the earlier steps of that draft, and to nothing else.
Source: training-time test, Li et al. 2025 (arXiv 2503.01840).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class HeadSize:
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    states: int  # layers of the target that it reads
    target_width: int
    vocab: int  # tokens that it can draft
    eps: float
    theta: float


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)  # of one type: fused


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class HeadModule(nn.Module):
    """Parameters have the names of the `midlayer` layout."""

    def __init__(self, size: HeadSize) -> None:
        super().__init__()
        s = self.size = size
        attention = {"q": s.heads, "k": s.kv_heads, "v": s.kv_heads}
        projections = {f"{name}_proj": linear(2 * s.width, n * s.head_dim) for name, n in attention.items()}
        mlp = {"gate_proj": (s.width, s.ffn), "up_proj": (s.width, s.ffn), "down_proj": (s.ffn, s.width)}
        self.fc = linear(s.states * s.target_width, s.width)
        self.midlayer = nn.ModuleDict(
            {
                "hidden_norm": Norm(s.width, s.eps),
                "input_layernorm": Norm(s.width, s.eps),
                "post_attention_layernorm": Norm(s.width, s.eps),
                "self_attn": nn.ModuleDict(projections | {"o_proj": linear(s.heads * s.head_dim, s.width)}),
                "mlp": nn.ModuleDict({name: linear(*shape) for name, shape in mlp.items()}),
            }
        )
        self.norm, self.lm_head = Norm(s.width, s.eps), linear(s.width, s.vocab)

    def forward(self, embedded: Tensor, states: Tensor, rows: Tensor, steps: int) -> list[Tensor]:
        """Pairs of embedded tokens [B, T, width] and states [B, T, states * target's width] -> logits [N, vocab] of
        each step at these rows, [N] of all B * T positions. Step j means nothing at the first j positions of a text,
        nor at rows without the j positions before them. All other positions only give keys and values."""
        attend = StepAttention(self.size, embedded.shape[1], embedded.device)
        state, logits, layer = self.fc(states), list[Tensor](), self.midlayer
        own, mlp = layer["self_attn"], layer["mlp"]
        embedded = layer["input_layernorm"](embedded)
        for step in range(steps):
            inputs = torch.cat([embedded, layer["hidden_norm"](state)], -1)
            some = picked(inputs, rows)
            q = placed(own["q_proj"](some), rows, inputs)  # type: ignore[index]
            k, v = (  # later steps need those of a draft's own tokens only
                placed(own[name](some), rows, inputs) if step else own[name](inputs)  # type: ignore[index]
                for name in ("k_proj", "v_proj")
            )
            x = picked(state, rows) + own["o_proj"](picked(attend(q, k, v), rows))  # type: ignore[index]
            fed = layer["post_attention_layernorm"](x)
            x = x + mlp["down_proj"](F.silu(mlp["gate_proj"](fed)) * mlp["up_proj"](fed))  # type: ignore[index]
            logits.append(self.lm_head(self.norm(x)))
            state = later(placed(x, rows, state), 1)
        return logits


def picked(x: Tensor, rows: Tensor) -> Tensor:
    """[B, T, n] -> [N, n]"""
    return x.flatten(0, 1)[rows]


def placed(x: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """[N, n] -> [B, T, n], zero elsewhere."""
    batch, length, _ = like.shape
    return x.new_zeros(batch * length, x.shape[1]).index_copy(0, rows, x).view(batch, length, -1)


class StepAttention:
    """Attention of one step after the other; it remembers the keys and values of earlier steps."""

    def __init__(self, size: HeadSize, length: int, device: torch.device) -> None:
        self.size = size
        half = size.head_dim // 2
        inverse = size.theta ** -(torch.arange(half, device=device, dtype=torch.float32) / half)
        angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * inverse
        self.cos, self.sin = angles.cos()[:, None], angles.sin()[:, None]  # [T, 1, half]
        self.positions = torch.arange(length, device=device)
        self.keys, self.values = list[Tensor](), list[Tensor]()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, T, heads * d] each, of the next step -> [B, T, heads * d]"""
        s, (batch, length, _) = self.size, q.shape
        q = self._rotated(q.view(batch, length, s.heads, s.head_dim)) * s.head_dim**-0.5
        k = self._rotated(k.view(batch, length, s.kv_heads, s.head_dim))
        group = s.heads // s.kv_heads
        self.keys.append(k.repeat_interleave(group, 2))
        self.values.append(v.view(batch, length, s.kv_heads, s.head_dim).repeat_interleave(group, 2))
        step = len(self.keys) - 1
        first = torch.einsum("bthd,bshd->bhts", q, self.keys[0])
        hidden = self.positions[None] > self.positions[:, None] - step
        # The draft's own earlier tokens, and this one:
        own = [(q * later(self.keys[j], step - j)).sum(-1).transpose(1, 2)[..., None] for j in range(1, step + 1)]
        weights = torch.cat([first.masked_fill(hidden, -torch.inf), *own], -1).softmax(-1)
        made = torch.einsum("bhts,bshd->bthd", weights[..., :length], self.values[0])
        for j in range(1, step + 1):
            made = made + weights[..., length + j - 1].transpose(1, 2)[..., None] * later(self.values[j], step - j)
        return made.flatten(2)

    def _rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)


def later(x: Tensor, n: int) -> Tensor:
    """Every position's entry n positions later, [B, T, ...]."""
    return torch.cat([torch.zeros_like(x[:, :n]), x[:, : x.shape[1] - n]], 1) if n else x
