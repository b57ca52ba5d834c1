"""Products of a few rows with weights of four bits, whose codes are in the order of fragments.py (int4_kernel.py).

Weights have one order, so this serves every pass that quantised.py would, up to QUANTISED_ROWS; prompts read it through
dequantise.py. Matrices that do not fit keep the other order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from types import ModuleType

import torch
import triton
from torch import Tensor

from semspec.model.kernels import QUANTISED_ROWS
from semspec.model.kernels.early_launch import AHEAD, early
from semspec.model.kernels.tiles import Card, card_of
from semspec.model.quantised import QuantisedLinear

UNIT = 128  # inputs at a time
NO_ZEROS, WORDS, ANY_ZEROS = range(3)  # as in the kernel
MOST_ROWS = 32  # of a program
LOADS = 20  # of 2 KB, on their way to a multiprocessor: so many hide what memory takes
KNOWN = ("3.6.",)  # versions of Triton whose Gluon was seen to compile it; weights are put in this order only for those


@dataclass(frozen=True, slots=True)
class Int4Config:
    """How a product is cut; `bench/gpu_int4.py` measures."""

    tiles: int  # of eight rows: 1, 2 or 4
    pairs: int  # of fragments (32 outputs) in a warp: 1 or 2; with an activation gates and their ups
    across: int  # warps of a program with outputs of their own
    inward: int  # warps that share outputs and take turns with the inputs
    splits: int = 1  # of the sum, in programs
    registers: int = 0  # of a thread, at most; 0: as many as it likes
    ahead: bool = True  # codes on their way into the second-level cache while the kernel before still runs
    ordered: bool = True  # loads stay where they are written

    @staticmethod
    def of(size: tuple[int, int], rows: int, card: Card, split: bool, gated: bool, group: int = UNIT) -> Int4Config:
        """For weights (outputs, inputs), so many of which share a scale."""
        return min(Int4Config.all(size, rows, split, gated, group), key=lambda cut: cut.cost(size, card))

    @staticmethod
    def all(size: tuple[int, int], rows: int, split: bool, gated: bool, group: int = UNIT) -> Iterator[Int4Config]:
        tiles = 1 if rows <= 8 else 2 if rows <= MOST_ROWS // 2 else MOST_ROWS // 8
        for pairs, across, inward in product((2,) if gated else (1, 2), (1, 2, 4), (1, 2, 4, 8)):
            for splits in (1, 2, 4, 8) if split else (1,):
                if across * inward <= 8 and splits * inward * UNIT <= size[1] and 64 * across <= size[0]:
                    # What the assembler needs with little or no spilling; scales of small groups take many more.
                    most = {(1, 2): 128, (2, 1): 128, (2, 2): 168}.get((tiles, pairs), 0) if group >= UNIT else 0
                    yield Int4Config(tiles, pairs, across, inward, splits, most)

    @property
    def warps(self) -> int:
        return self.across * self.inward

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor has room for, by their registers."""
        taken = {(1, 1): 80, (1, 2): 168, (2, 1): 128, (2, 2): 176, (4, 1): 184, (4, 2): 255}[self.tiles, self.pairs]
        return max(1, 65536 // (32 * self.warps * -(-min(taken, self.registers or 255) // 8) * 8))

    def cost(self, size: tuple[int, int], card: Card) -> float:
        """By a rule of thumb, without a unit: a multiprocessor runs as many programs at a time as it has room for, and
        the last ones, with too few loads on their way to hide what memory takes, as slowly as that is; how unevenly
        warps share the inputs; what begins and ends a program. Of a dozen measured for each matrix of 32B at 1 and
        9 rows it takes the best for gates and ups of 9 rows, else one within 9 % of the best that load ahead."""
        programs = size[0] / (32 * self.pairs * self.across) * self.splits
        units, each = size[1] / UNIT / self.splits, programs / card.processors
        steps = -(-units // self.inward)

        def together(number: int) -> float:
            return number / min(1.0, number * self.warps * self.pairs / LOADS) if number else 0.0

        rounds, rest = divmod(-int(-each // 1), self.resident)
        uneven = (rounds * together(self.resident) + together(rest)) / each * steps * self.inward / units
        return uneven * (steps + 2) / steps * (1 + 0.02 * self.splits)


@cache
def kernel() -> ModuleType | None:
    """Gluon is experimental: it may be missing or have other names."""
    if not triton.__version__.startswith(KNOWN):
        return None
    try:
        from semspec.model.kernels import int4_kernel
    except (ImportError, AttributeError, TypeError):
        return None
    return int4_kernel


def on_a_gpu(codes: Tensor) -> bool:
    return codes.is_cuda


def fits(linear: QuantisedLinear) -> bool:
    """Whether a matrix on a GPU can be put in this order. 128 outputs, so that gates and ups end with a block."""
    (outputs, inputs), (rows, group), codes = linear.size, linear.block, linear.codes
    return (
        (linear.kind, linear.run, linear.fragments, rows, codes.dim()) == ("int4", 2, False, 1, 2)
        and on_a_gpu(codes) and codes.is_contiguous()
        and card_of(codes.device).capability >= 80
        and outputs % 128 == 0 and inputs % UNIT == 0
        and (group >= inputs or group in (32, 64) or group % UNIT == 0)
        and linear.scales.element_size() > 1
        and kernel() is not None
    )  # fmt: skip


def int4_product(
    x: Tensor,
    linear: QuantisedLinear,
    parts: bool = False,
    activation: str | None = None,
    out: Tensor | None = None,
    cut: Int4Config | None = None,
) -> Tensor | None:
    """As `quantised_product`; None: not of float32."""
    made = kernel()
    if made is None or x.dtype not in (torch.bfloat16, torch.float16):
        return None
    (rows, inputs), outputs, gated = x.shape, linear.size[0], activation is not None
    if cut is None:
        cut = Int4Config.of((outputs, inputs), rows, card_of(x.device), parts, gated, linear.block[1])
    assert rows <= QUANTISED_ROWS and x.is_contiguous() and linear.codes.is_contiguous()
    assert not gated or (cut.splits, cut.pairs) == (1, 2)
    outputs //= 2 if gated else 1
    form, dtype = ((rows, outputs), x.dtype) if cut.splits == 1 else ((cut.splits, rows, outputs), torch.float32)
    out = x.new_empty(form, dtype=dtype) if out is None else out
    arguments, constants, grid = launched(x, linear, activation, out, cut)
    early_or_not = early(x.device)
    constants["AHEAD"] = _ahead(cut, linear) if early_or_not["PDL"] else 0
    limit = {"maxnreg": cut.registers} if cut.registers else {}
    made.int4_product[grid](*arguments.values(), **constants, num_warps=cut.warps, **limit, **early_or_not)
    return out


def launched(
    x: Tensor, linear: QuantisedLinear, activation: str | None, out: Tensor, cut: Int4Config
) -> tuple[dict[str, Tensor | int], dict[str, object], tuple[int, int, int]]:
    """The kernel's arguments, what it is compiled for, and how many programs."""
    (rows, inputs), gated, outputs = x.shape, activation is not None, out.shape[-1]
    scales, zeros, words, gain, bias = linear.scales, linear.zeros, linear.words, linear.gain, linear.bias
    kind = NO_ZEROS if zeros is None else ANY_ZEROS if words is None else WORDS
    stride = scales.stride()[::-1] if words is None else words.stride()  # (groups, outputs)
    assert stride[1] == 1 and (zeros is None or words is not None or zeros.stride() == scales.stride())
    arguments: dict[str, Tensor | int] = {
        "x": x, "codes": linear.codes.view(torch.int32), "scales": scales,
        "zeros": scales if zeros is None else zeros if words is None else words,
        "gain": scales if gain is None else gain, "bias": x if bias is None else bias, "out": out,
        "rows": rows, "outputs": outputs, "out_stride": out.stride(-2), "scale_group": stride[0],
    }  # fmt: skip
    constants: dict[str, object] = {
        "INPUTS": inputs, "GROUP": linear.block[1] if linear.block[1] < inputs else 0, "ZEROS": kind,
        "GAIN": gain is not None, "BIASED": bias is not None, "GATED": gated, "SILU": activation == "silu",
        "SPLITS": cut.splits, "ACROSS": cut.across, "INWARD": cut.inward, "PAIRS": cut.pairs, "TILES": cut.tiles,
        "ORDERED": cut.ordered,
    }  # fmt: skip
    own = 32 * (1 if gated else cut.pairs)
    return arguments, constants, (-(-outputs // (own * cut.across)), cut.splits, -(-rows // (8 * cut.tiles)))


def _ahead(cut: Int4Config, linear: QuantisedLinear) -> int:
    """Times that a warp asks for its next two units, of 2 KB for each pair, so that not too much is on its way."""
    outputs, inputs = linear.size
    warps = outputs // (32 * cut.pairs) * cut.inward * cut.splits
    most = min(AHEAD // (warps * 4096 * cut.pairs), inputs // (2 * UNIT * cut.splits * cut.inward))
    return 1 << (min(most, 4).bit_length() - 1) if cut.ahead and most > 0 else 0
