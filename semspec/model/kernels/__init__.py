"""The operations of a GPU pass: Triton kernels, and the same in PyTorch (`reference`).

A set of kernels is a `Kernels`. Triton is imported only when its kernels are asked for: it may not be installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import ModuleType
from typing import NamedTuple

from torch import Tensor

TOKEN, SLOT, START, COUNT, LEFT, SEED, STREAM, STOPS, STEP = range(9)  # rows of the state that `advance` keeps
FIELDS = 9
SKINNY_ROWS = 16  # at most in a skinny product, see gemm.py
QUANTISED_ROWS = 128  # at most in a product with quantised weights, see quantised.py
LOG2E = math.log2(math.e)
LONG = 131_072  # keys from which tiles for long caches were measured to be faster; shorter ones were not measured
WIDE = 65_536  # the same of tiles of 128 keys in fp8, which a page has to hold

# Blocks of the cache are scored by an upper bound on q.k over the keys of a block (semspec.sparse.attention):
REACH = 2.0  # deviations above the mean
ROOM = 16.0  # queries are divided by it before they are squared, which would overflow in half precision


@dataclass(frozen=True, slots=True)
class KernelFlags:
    """Alternatives. The defaults were measured to be fastest (docs/lab-notes.md); `bench/gpu.py --only arms` measures
    them against the others, interleaved."""

    skinny_gemm_bytes: int = 128_000_000  # of a layer's weights, up to which skinny products use ours, not cuBLAS
    fused_activation: bool = True  # the activation fused into our gate-up product
    fused_rope: bool = True  # head norms, RoPE and the cache write fused into the attention of single tokens
    one_token: bool = True  # all layers of a small model's single token in one launch, where they allow it
    packed: bool = True  # the tokens of a pass in one row where a rectangle would have more rows
    int4_fragments: bool = True  # codes of four bits in the order of fragments.py, for kernels/int4.py
    hand_over: bool = False  # targets read drafts before the host knows them: no faster, where the device is never idle


DEFAULT_FLAGS = KernelFlags()


class BlockMeans(NamedTuple):
    """Blocks that are not selected, each as one position that counts as often as a block has positions."""

    marks: Tensor  # [B, kv heads, M], int8; not 0: this block is selected
    keys: Tensor  # [slots, kv heads, M, d], means of whole blocks
    values: Tensor


class TreeMask(NamedTuple):
    """What queries see of the trees, or chains, that their sequences end with. No window is shorter than a tree."""

    bases: Tensor  # [B] positions of the first tokens of trees, some of them perhaps written by passes before
    lineages: Tensor  # [B, Q], 64 bits; bit i: this query attends to position base + i
    depths: Tensor  # [B, Q] a query is in its own text at position base + depth


class RowTiles(NamedTuple):
    """How the rows of a packed pass belong together: a tile is some queries of one sequence. Its slot, start, count and
    base are those of a sequence that begins with it."""

    offsets: Tensor  # [tiles + 1] a tile's rows end where the next one's begin; those after its queries are zero
    queries: int  # rows of a tile, at most


class KvScales(NamedTuple):
    """Of keys and values in fp8 (`kv_fp8.py`): one for each head of each token, [pages, kv heads, positions]."""

    keys: Tensor
    values: Tensor


class SelectedBlocks(NamedTuple):
    """Blocks of the cache that a pass attends to, of all that are whole before the first new token. Lists and counts
    are int32."""

    lists: Tensor  # [B, kv heads, W]
    counts: Tensor  # [B, kv heads]; of each list so many are real
    block: int  # positions in one
    rest: BlockMeans | None = None  # None: the others are ignored


@dataclass(frozen=True, slots=True)
class Kernels:
    """Documented where they are implemented: attention.py, elementwise.py, gemm.py, moe.py, sparse_mlp.py,
    select_blocks.py, sample.py."""

    attend: Callable[..., Tensor]
    add_norm: Callable[..., Tensor]
    rope_and_cache: Callable[..., Tensor]
    rope_cache_attend: Callable[..., Tensor]
    act_and_mul: Callable[..., Tensor]
    advance: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    product: Callable[..., Tensor]  # (x, weight, bias, parts, activation); of at most SKINNY_ROWS rows
    fused_moe: Callable[..., Tensor]  # each token's experts, in parts
    sparse_mlp: Callable[..., Tensor]  # a feed-forward network without the channels that no token needs, in parts
    # (x, QuantisedLinear, parts, activation) as `product`; None: quantised weights are dequantised for every product.
    quantised_product: Callable[..., Tensor | None] | None = None
    # Puts a QuantisedLinear's codes in the order that quantised_product wants.
    prepare: Callable[..., None] | None = None
    # All layers of a single token in one launch; None: each operation by itself.
    run_layers: Callable[..., None] | None = None
    # Selects blocks of the cache for a draft; None: it is done one operation at a time.
    choose_blocks: Callable[..., tuple[Tensor, Tensor]] | None = None
    # Samples tokens; None: as semspec.sampling.draw does it.
    sample: Callable[..., Tensor] | None = None


def triton_kernels() -> Kernels:
    from semspec.model.kernels import attention, elementwise, gemm, moe, one_token, quantised, sample, sparse_mlp
    from semspec.model.kernels import select_blocks as blocks

    return _named(attention, elementwise, gemm, moe, one_token, quantised, sample, blocks, sparse_mlp)


def reference_kernels() -> Kernels:
    from semspec.model.kernels import reference

    return _named(reference)


def _named(*modules: ModuleType) -> Kernels:
    """Every kernel is the function of its name that one of the modules defines."""
    names = [field.name for field in fields(Kernels)]
    own = {name: f for m in modules for name in names if (f := vars(m).get(name)) and f.__module__ == m.__name__}
    return Kernels(**own)
