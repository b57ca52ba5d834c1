"""All layers of a model for a single token, in one launch.

A draft token of a small model is some two hundred launches, of which each waits for the one before, starts to read
when that has ended, and has a few microseconds of work. Here programs stay, one for each multiprocessor. They share out
the outputs of every product and wait for each other between the six steps of a layer (`meet`); before they wait, the
first weights of the next product are on their way into the second-level cache.

No sum is split among programs, so nothing is added up twice and the same inputs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from semspec.model.kernels import LOG2E
from semspec.model.kernels.one_token_attention import attend_parts, join_parts
from semspec.model.kernels.one_token_product import IN_BYTES, IN_WORDS, PLAIN, address, ask, meet, row_product
from semspec.model.kernels.tiles import Card, card_of

# Columns of the table of addresses: one row a layer. Scales are float32, one for each output; 0 where there is none.
(ATTENTION_NORM, QKV, QKV_SCALE, QKV_BIAS, QUERY_NORM, KEY_NORM, KEYS, VALUES,
 OUT, OUT_SCALE, FFN_NORM, GATE_UP, GATE_UP_SCALE, DOWN, DOWN_SCALE) = (tl.constexpr(i) for i in range(15))  # fmt: skip
COLUMNS = tl.constexpr(15)
KEYS_AT_A_TIME = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model whose layers are alike; `codes`: its weights are fp8, with a scale for each output."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    codes: bool
    biased: bool  # queries, keys and values
    normed: bool  # heads of queries and keys
    silu: bool


@dataclass(frozen=True, slots=True)
class OneTokenConfig:
    programs: int
    splits: int  # of the cache of a key head; a power of two
    outputs: int = 16  # of a tile; as many gates and as many ups
    depth: int = 512  # inputs of a tile, twice as many if they are codes; half as many of gates and ups
    warps: int = 8
    stages: int = 6  # tiles on their way
    lines: int = 256  # of 128 bytes, of the next matrix, that a program asks for before it waits

    @staticmethod
    def of(sizes: Sizes, card: Card) -> OneTokenConfig:
        splits = max(1, card.processors // sizes.kv_heads)
        return OneTokenConfig(card.processors, min(64, 1 << (splits.bit_length() - 1)))


class Scratch:
    """What steps of a layer hand over to each other."""

    def __init__(self, sizes: Sizes, cut: OneTokenConfig, device: torch.device, dtype: torch.dtype) -> None:
        q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.qkv = torch.empty(q + 2 * kv, device=device, dtype=dtype)
        self.parts = torch.empty(cut.splits * q, device=device)
        self.sums = torch.empty(cut.splits * sizes.heads, device=device)
        self.attended = torch.empty(q, device=device, dtype=dtype)
        self.inner = torch.empty(sizes.ffn, device=device, dtype=dtype)
        self.met = torch.zeros(2, device=device, dtype=torch.int32)  # who has arrived, who has ended


def run_layers(
    x: Tensor,
    table: Tensor,
    sizes: Sizes,
    scratch: Scratch,
    like: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
    cos_sin: tuple[Tensor, Tensor] | None,
    eps: float,
    scale: float,
    tables: Tensor | None,
    cut: OneTokenConfig,
) -> None:
    """x [1, width] is the residual stream before the layers whose addresses are in `table`, and then after them. `like`
    is one layer's keys: the strides of all. Where the sequence has ended (counts[0] is 0), nothing is done."""
    assert x.is_contiguous() and x.shape == (1, sizes.width) and table.shape[1] == COLUMNS.value
    cos, sin = cos_sin or (starts, starts)
    card = card_of(x.device)
    _run_layers[(cut.programs,)](
        x, table, scratch.met, scratch.qkv, scratch.parts, scratch.sums, scratch.attended, scratch.inner,
        slots, starts, counts, starts if tables is None else tables, cos, sin, eps, scale * LOG2E, len(table),
        0 if tables is None else tables.stride(0), *like.stride()[:3],
        WIDTH=sizes.width, HEADS=sizes.heads, KV_HEADS=sizes.kv_heads, D=sizes.head_dim, FFN=sizes.ffn,
        HALF=0 if cos_sin is None else cos.shape[1], PAGE=0 if tables is None else like.shape[2],
        BIASED=sizes.biased, NORMED=sizes.normed, SILU=sizes.silu,
        KIND=PLAIN if not sizes.codes else IN_WORDS if card.capability >= 80 else IN_BYTES,
        PROGRAMS=cut.programs, SPLITS=cut.splits, TILE=cut.outputs, DEPTH=cut.depth * (2 if sizes.codes else 1),
        KEYS_AT_ONCE=KEYS_AT_A_TIME, ROWS=max(16, triton.next_power_of_2(sizes.heads // sizes.kv_heads)),
        STAGES=cut.stages, LINES=cut.lines if x.is_cuda else 0,
        num_warps=cut.warps, num_stages=2, **({"launch_cooperative_grid": True} if x.is_cuda else {}),
    )  # fmt: skip


@triton.jit(do_not_specialize=["layers", "table_width"], do_not_specialize_on_alignment=["slots", "starts", "counts"])
def _run_layers(
    x, table, met, qkv, parts, sums, attended, inner, slots, starts, counts, tables, cos, sin, eps, scale, layers,
    table_width, page_stride, head_stride, position_stride,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, FFN: tl.constexpr,
    HALF: tl.constexpr, PAGE: tl.constexpr, BIASED: tl.constexpr, NORMED: tl.constexpr,
    SILU: tl.constexpr, KIND: tl.constexpr, PROGRAMS: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr,
    DEPTH: tl.constexpr, KEYS_AT_ONCE: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    Q: tl.constexpr = HEADS * D
    ALL: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    BYTES: tl.constexpr = 1 if KIND != PLAIN else x.dtype.element_ty.primitive_bitwidth // 8
    half: tl.constexpr = x.dtype.element_ty
    slot, start = tl.load(slots).to(tl.int64), tl.load(starts).to(tl.int32)
    goal = 0
    if tl.load(counts) > 0:
        for i in range(layers):
            row = table + i * COLUMNS
            goal += PROGRAMS
            meet(met, goal, PROGRAMS)
            row_product(
                x, address(row, ATTENTION_NORM), address(row, QKV), address(row, QKV_SCALE), address(row, QKV_BIAS),
                qkv, eps, WIDTH, ALL, True, False, False, BIASED, SILU, KIND, PROGRAMS, TILE, DEPTH, STAGES,
            )  # fmt: skip
            goal += PROGRAMS
            meet(met, goal, PROGRAMS)
            ask(address(row, OUT), WIDTH, Q * BYTES, LINES, PROGRAMS)
            attend_parts(
                qkv, address(row, KEYS).to(tl.pointer_type(half)), address(row, VALUES).to(tl.pointer_type(half)),
                address(row, QUERY_NORM).to(tl.pointer_type(half)), address(row, KEY_NORM).to(tl.pointer_type(half)),
                parts, sums, tables + slot * table_width, slot, start, cos, sin, eps, scale,
                page_stride, head_stride, position_stride,
                HEADS, KV_HEADS, D, HALF, PAGE, NORMED, PROGRAMS, SPLITS, KEYS_AT_ONCE, ROWS,
            )  # fmt: skip
            goal += PROGRAMS
            meet(met, goal, PROGRAMS)
            ask(address(row, GATE_UP), FFN, WIDTH * BYTES, LINES, PROGRAMS)
            join_parts(parts, sums, attended, HEADS, D, PROGRAMS, SPLITS, min(D, 32))
            goal += PROGRAMS
            meet(met, goal, PROGRAMS)
            ask(address(row, GATE_UP) + FFN * WIDTH * BYTES, FFN, WIDTH * BYTES, LINES, PROGRAMS)
            row_product(
                attended, table, address(row, OUT), address(row, OUT_SCALE), table, x, eps,
                Q, WIDTH, False, False, True, False, SILU, KIND, PROGRAMS, TILE, DEPTH, STAGES,
            )  # fmt: skip
            goal += PROGRAMS
            meet(met, goal, PROGRAMS)
            row_product(
                x, address(row, FFN_NORM), address(row, GATE_UP), address(row, GATE_UP_SCALE), table, inner, eps,
                WIDTH, FFN, True, True, False, False, SILU, KIND, PROGRAMS, TILE, DEPTH // 2, STAGES,
            )  # fmt: skip
            ask(address(row, DOWN), WIDTH, FFN * BYTES, LINES, PROGRAMS)
            goal += PROGRAMS
            meet(met, goal, PROGRAMS)
            row_product(
                inner, table, address(row, DOWN), address(row, DOWN_SCALE), table, x, eps,
                FFN, WIDTH, False, False, True, False, SILU, KIND, PROGRAMS, TILE, DEPTH, STAGES,
            )  # fmt: skip
            if i + 1 < layers:
                ask(address(row + COLUMNS, QKV), ALL, WIDTH * BYTES, LINES, PROGRAMS)
        if tl.atomic_add(met + 1, 1) == PROGRAMS - 1:  # nobody waits any more: ready for the next launch
            tl.store(met, 0)
            tl.store(met + 1, 0)
