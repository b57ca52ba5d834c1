"""What a pass on a GPU is made of besides matrix products: Triton kernels, and the same in PyTorch (`reference`).

A set of kernels is a `Kernels`. Triton is imported only when its own are asked for: without a GPU there may be none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

TOKEN, SLOT, START, COUNT, LEFT, SEED, STREAM, STOPS, STEP = range(9)  # rows of the state that `note` keeps
FIELDS = 9


@dataclass(frozen=True, slots=True)
class Kernels:
    """What each does is said where it is written: attention.py, small.py."""

    attend: Callable[..., Tensor]
    add_norm: Callable[..., Tensor]
    turn_and_keep: Callable[..., Tensor]
    gated: Callable[..., Tensor]
    note: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    product: Callable[[Tensor, Tensor, Tensor | None, bool], Tensor]  # few rows; True: may come in parts


def triton_kernels() -> Kernels:
    from semspec.model.kernels import attention, products, small

    def product(x: Tensor, weight: Tensor, bias: Tensor | None, parts: bool) -> Tensor:
        outputs, inputs = weight.shape
        return products.product(x, weight, bias, products.Skinny.of((outputs, inputs), x.device, parts))

    return Kernels(attention.attend, small.add_norm, small.turn_and_keep, small.gated, small.note, product)


def reference_kernels() -> Kernels:
    from semspec.model.kernels import reference as r

    def product(x: Tensor, weight: Tensor, bias: Tensor | None, parts: bool) -> Tensor:
        return r.product(x, weight, bias, 3 if parts else 1)

    return Kernels(r.attend, r.add_norm, r.turn_and_keep, r.gated, r.note, product)
