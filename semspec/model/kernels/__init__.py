"""What a pass on a GPU is made of besides matrix products: Triton kernels, and the same in PyTorch (`reference`).

A set of kernels is a `Kernels`. Triton is imported only when its own are asked for: without a GPU there may be none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

TOKEN, SLOT, START, COUNT, LEFT, SEED, STREAM, STOPS, STEP = range(9)  # rows of the state that `note` keeps
FIELDS = 9

# Which blocks of a cache are chosen by how far their keys reach (semspec.sparse.attention):
REACH = 2.0  # deviations above the mean
ROOM = 16.0  # queries are divided by it before they are squared, which half precision has no room for otherwise


@dataclass(frozen=True, slots=True)
class KernelFlags:
    """What can be done in more than one way. The defaults were measured to be fastest (docs/lab-notes.md);
    `bench/gpu.py --only arms` measures them against the others, in turns."""

    small: int = 128_000_000  # bytes of a layer's weights up to which products of few rows are ours and not cuBLAS's
    gate: bool = True  # the activation inside our gate-up product
    turn: bool = True  # norms of heads, rotation and cache write inside the attention of single tokens


DEFAULT_FLAGS = KernelFlags()


class BlockMeans(NamedTuple):
    """What is seen of blocks that are not listed: each is one place that counts as often as a block has places."""

    marks: Tensor  # [B, kv heads, M], whole numbers of 8 bits; not 0: this block is listed
    keys: Tensor  # [slots, kv heads, M, d], means of whole blocks
    values: Tensor


class SelectedBlocks(NamedTuple):
    """Blocks of the cache that a pass sees, of all that are whole before the first new token. Lists and counts are
    whole numbers of 32 bits."""

    lists: Tensor  # [B, kv heads, W]
    counts: Tensor  # [B, kv heads]; of each list so many are real
    block: int  # places in one
    rest: BlockMeans | None = None  # None: nothing is seen of others


@dataclass(frozen=True, slots=True)
class Kernels:
    """What each does is said where it is written: attention.py, elementwise.py, gemm.py, moe.py, sparse_mlp.py,
    blocks.py, sample.py."""

    attend: Callable[..., Tensor]
    add_norm: Callable[..., Tensor]
    rope_and_cache: Callable[..., Tensor]
    rope_cache_attend: Callable[..., Tensor]
    act_and_mul: Callable[..., Tensor]
    advance: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    product: Callable[..., Tensor]  # (x, weight, bias, parts, activation); of few rows; parts: may come in several
    fused_moe: Callable[..., Tensor]  # each token's experts, in parts
    sparse_mlp: Callable[..., Tensor]  # a feed-forward network without channels that nobody needs, in parts
    # Which blocks of the cache a draft is checked against; None: whoever chooses does it one operation at a time.
    choose_blocks: Callable[..., tuple[Tensor, Tensor]] | None = None
    # Draws of tokens without top-k and top-p; None: as semspec.sampling.draw does it.
    sample: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] | None = None


def triton_kernels() -> Kernels:
    from semspec.model.kernels import attention, blocks, elementwise, gemm, moe, sample, sparse_mlp, tiles

    def product(
        x: Tensor, weight: Tensor, bias: Tensor | None, parts: bool = False, activation: str | None = None
    ) -> Tensor:
        outputs, inputs = weight.shape
        card, gated = tiles.card_of(x.device), activation is not None
        cut = gemm.SkinnyGemmConfig.of((outputs, inputs), card, parts, gated, weight.element_size())
        return gemm.product(x, weight, bias, cut, activation)

    return Kernels(
        attention.attend,
        elementwise.add_norm,
        elementwise.rope_and_cache,
        attention.rope_cache_attend,
        elementwise.act_and_mul,
        elementwise.advance,
        product,
        moe.fused_moe,
        sparse_mlp.sparse_mlp,
        blocks.choose_blocks,
        sample.sample,
    )


def reference_kernels() -> Kernels:
    from semspec.model.kernels import reference as r

    def product(
        x: Tensor, weight: Tensor, bias: Tensor | None, parts: bool = False, activation: str | None = None
    ) -> Tensor:
        made = r.product(x, weight, bias, 3 if parts else 1)
        return made if activation is None else r.act_and_mul(made, activation)

    return Kernels(
        r.attend,
        r.add_norm,
        r.rope_and_cache,
        r.rope_cache_attend,
        r.act_and_mul,
        r.advance,
        product,
        r.fused_moe,
        r.sparse_mlp,
    )
