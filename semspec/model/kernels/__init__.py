"""What a pass on a GPU is made of besides matrix products: Triton kernels, and the same in PyTorch (`reference`).

A set of kernels is a `Kernels`. Triton is imported only when its own are asked for: without a GPU there may be none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

TOKEN, SLOT, START, COUNT, LEFT, SEED, STREAM, STOPS, STEP = range(9)  # rows of the state that `note` keeps
FIELDS = 9


@dataclass(frozen=True, slots=True)
class Choices:
    """What can be done in more than one way. What is on by default was measured to be faster (docs/lab-notes.md);
    `bench/gpu.py --only arms` measures all of them in turns."""

    small: int = 128_000_000  # bytes of a layer's weights up to which products of few rows are ours and not cuBLAS's
    norm: bool = False  # residual and norm inside the products that read them, for single tokens
    gate: bool = False  # the activation inside our gate-up product
    turn: bool = False  # norms of heads, rotation and cache write inside the attention of single tokens
    early: bool = False  # kernels are launched before their predecessors end, and wait for them inside
    ahead: bool = False  # while they wait, our products fetch their first weights
    crowded: bool = False  # attention of several tokens with two programs a processor


MEASURED = Choices()


@dataclass(frozen=True, slots=True)
class Kernels:
    """What each does is said where it is written: attention.py, small.py, products.py, experts.py, channels.py."""

    attend: Callable[..., Tensor]
    add_norm: Callable[..., Tensor]
    turn_and_keep: Callable[..., Tensor]
    turn_and_attend: Callable[..., Tensor]
    gated: Callable[..., Tensor]
    note: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    product: Callable[..., Tensor]  # (x, weight, bias, parts, activation); of few rows; parts: may come in several
    norm_product: Callable[..., tuple[Tensor, Tensor]]  # the stream after what was added to it, and its product
    mix: Callable[..., Tensor]  # each token's experts, in parts
    some_channels: Callable[..., Tensor]  # a feed-forward network without channels that nobody needs, in parts


def triton_kernels(choices: Choices) -> Kernels:
    from semspec.model.kernels import attention, channels, experts, products, small, tiles

    early = choices.early

    def product(
        x: Tensor, weight: Tensor, bias: Tensor | None, parts: bool = False, activation: str | None = None
    ) -> Tensor:
        outputs, inputs = weight.shape
        card, gated = tiles.card_of(x.device), activation is not None
        cut = products.Skinny.of((outputs, inputs), card, parts, gated, weight.element_size())
        return products.product(x, weight, bias, cut, activation, early, choices.ahead)

    def norm_product(
        x: Tensor, added: Tensor | None, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None,
        activation: str | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        outputs, inputs = weight.shape
        card, gated = tiles.card_of(x.device), activation is not None
        cut = products.Skinny.of((outputs, inputs), card, False, gated, weight.element_size())
        stream = x if added is None else torch.empty_like(x)
        before = products.Norm(added if added is None or added.dim() == 3 else added[None], norm, eps, stream)
        return stream, products.product(x, weight, bias, cut, activation, early, choices.ahead, before)

    return Kernels(
        partial(attention.attend, early=early, crowded=choices.crowded),
        partial(small.add_norm, early=early),
        partial(small.turn_and_keep, early=early),
        partial(attention.turn_and_attend, early=early),
        partial(small.gated, early=early),
        small.note,
        product,
        norm_product,
        partial(experts.mix, early=early),
        partial(channels.some_channels, early=early),
    )


def reference_kernels() -> Kernels:
    from semspec.model.kernels import reference as r

    def product(
        x: Tensor, weight: Tensor, bias: Tensor | None, parts: bool = False, activation: str | None = None
    ) -> Tensor:
        made = r.product(x, weight, bias, 3 if parts else 1)
        return made if activation is None else r.gated(made, activation)

    def norm_product(
        x: Tensor, added: Tensor | None, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None,
        activation: str | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        stream = x.clone()
        return stream, product(r.add_norm(stream, added, norm, eps), weight, bias, False, activation)

    return Kernels(
        r.attend, r.add_norm, r.turn_and_keep, r.turn_and_attend, r.gated, r.note, product, norm_product,
        r.mix, r.some_channels,
    )  # fmt: skip
