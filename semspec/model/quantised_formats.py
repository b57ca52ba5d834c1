"""Reading a quantised matrix in the formats of the hub; each becomes one of `QuantisedLinear`'s layouts.

docs/usage.md lists what is read. Shapes and types are checked in the header before a tensor takes memory; what does not
fit together is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semspec.errors import ModelError
from semspec.model.quantisation import Scheme
from semspec.model.quantised import QuantisedLinear, pack_nibbles

SCALES = ("F32", "BF16", "F16")
MX_GROUP = 32  # weights that share a scale
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # slot of a word -> which of its eight outputs
Shapes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Module:
    """The stored tensors of one matrix [outputs, inputs]."""

    name: str
    size: tuple[int, int]
    scheme: Scheme
    # (name, shape, kinds) -> the tensor, if it is stored as one of these kinds and in this shape, up to dimensions of
    # one; refused by name otherwise
    get: Callable[[str, Shapes, Sequence[str]], Tensor]
    has: Callable[[str], bool]

    @property
    def block(self) -> tuple[int, int]:
        """Outputs and inputs of a block, none larger than the matrix."""
        rows, columns = (min(n or size, size) for n, size in zip(self.scheme.block, self.size, strict=True))
        return rows, columns

    @property
    def blocks(self) -> tuple[int, int]:
        rows, columns = (math.ceil(size / n) for n, size in zip(self.block, self.size, strict=True))
        return rows, columns

    def part(self, name: str, shape: Shapes, *kinds: str) -> Tensor:
        return self.get(f"{self.name}.{name}", shape, kinds)

    def scales(self, name: str, *kinds: str) -> Tensor:
        return self.checked(name, _from_exponents(self.part(name, self.blocks, *kinds)))

    def checked(self, name: str, scales: Tensor) -> Tensor:
        if not bool(torch.isfinite(scales.float()).all()):
            raise self.refusal(f"{name} has entries that are no numbers")
        return scales

    def refusal(self, why: str) -> ModelError:
        return ModelError(f"{self.name}.{why}; the checkpoint is damaged")

    def need(self, multiple: int, sizes: Sequence[int]) -> None:
        if any(size % multiple for size in sizes):
            raise ModelError(f"{self.name}: {self.size} weights do not fit into words of {multiple}")


def _fp8(m: Module) -> QuantisedLinear:
    name = next((n for n in (m.scheme.scale, "weight_scale_inv") if m.has(f"{m.name}.{n}")), m.scheme.scale)
    codes = m.part("weight", m.size, "F8_E4M3")
    scales = m.scales(name, *SCALES, "F8_E8M0", "U8")
    return _whole_matrix(m, QuantisedLinear("fp8", codes, scales, m.block))


def _int8(m: Module) -> QuantisedLinear:
    codes, scales = m.part("weight", m.size, "I8"), m.scales("weight_scale", *SCALES)
    zeros = None if m.scheme.symmetric else m.part("weight_zero_point", m.blocks, "I8").bfloat16()
    return _whole_matrix(m, QuantisedLinear("int8", codes, scales, m.block, zeros))


def _packed(m: Module) -> QuantisedLinear | Tensor:
    bits = m.scheme.bits
    each, (outputs, inputs) = 32 // bits, m.size
    words = m.part("weight_packed", (outputs, math.ceil(inputs / each)), "I32")
    shape = m.part("weight_shape", (2,), "I64", "I32").tolist()
    if shape != [outputs, inputs]:
        raise m.refusal(f"weight_shape says {shape}, not {[outputs, inputs]}")
    codes, scales = _unpack(words, bits, 1)[:, :inputs], m.scales("weight_scale", *SCALES)
    zeros = None
    if not m.scheme.symmetric:
        rows, columns = m.blocks
        stored = m.part("weight_zero_point", (math.ceil(rows / each), columns), "I32")
        zeros = _unpack(stored, bits, 0)[:rows]
    return _integers(m, codes, scales, zeros, "weight_g_idx")


def _awq(m: Module) -> QuantisedLinear | Tensor:
    outputs, inputs = m.size
    m.need(8, [outputs])
    order = torch.tensor(AWQ_ORDER).argsort()

    def ordered(words: Tensor) -> Tensor:
        return _unpack(words, 4, 1).unflatten(1, (-1, 8))[..., order.to(words.device)].flatten(1)

    groups = m.blocks[1]
    codes = ordered(m.part("qweight", (inputs, outputs // 8), "I32")).t()
    scales = m.checked("scales", m.part("scales", (groups, outputs), *SCALES).t())
    stored = None if m.scheme.symmetric else ordered(m.part("qzeros", (groups, outputs // 8), "I32")).t()
    return _integers(m, codes, scales, stored)


def _gptq(m: Module) -> QuantisedLinear | Tensor:
    (outputs, inputs), bits, groups = m.size, m.scheme.bits, m.blocks[1]
    each = 32 // bits
    m.need(each, m.size)
    codes = _unpack(m.part("qweight", (inputs // each, outputs), "I32"), bits, 0).t()
    zeros = _unpack(m.part("qzeros", (groups, outputs // each), "I32"), bits, 1).t()
    if m.scheme.old_zeros:
        zeros = (zeros + 1) % (1 << bits)
    scales = m.checked("scales", m.part("scales", (groups, outputs), *SCALES).t())
    return _integers(m, codes, scales, zeros, "g_idx")


def _nvfp4(m: Module) -> QuantisedLinear:
    codes = m.part("weight_packed", _halved(m), "U8")
    gain = m.checked("weight_global_scale", m.part("weight_global_scale", (), "F32").float().reciprocal())
    return QuantisedLinear("fp4", codes, m.scales("weight_scale", "F8_E4M3"), m.block, gain=gain.repeat(m.size[0]))


def _modelopt_nvfp4(m: Module) -> QuantisedLinear:
    codes, scales = m.part("weight", _halved(m), "U8"), m.scales("weight_scale", "F8_E4M3")
    gain = m.checked("weight_scale_2", m.part("weight_scale_2", (), "F32"))
    return QuantisedLinear("fp4", codes, scales, m.block, gain=gain.repeat(m.size[0]))


def _mxfp4(m: Module) -> QuantisedLinear:
    return QuantisedLinear("fp4", m.part("weight_packed", _halved(m), "U8"), m.scales("weight_scale", "U8"), m.block)


READERS: dict[str, Callable[[Module], QuantisedLinear | Tensor]] = {
    "fp8": _fp8, "int8": _int8, "packed": _packed, "awq": _awq, "gptq": _gptq,
    "nvfp4": _nvfp4, "modelopt-nvfp4": _modelopt_nvfp4, "mxfp4": _mxfp4,
}  # fmt: skip
MAIN = {"fp8": "weight", "int8": "weight", "modelopt-nvfp4": "weight", "awq": "qweight", "gptq": "qweight"}


def codes_of(scheme: Scheme) -> str:
    """The tensor of a matrix that holds its codes."""
    return MAIN.get(scheme.layout, "weight_packed")


def size_of(scheme: Scheme, codes: tuple[int, int]) -> tuple[int, int]:
    """(outputs, inputs) of a matrix, from the shape of the tensor that holds its codes; but for packed ones, whose last
    word may not be full."""
    (rows, columns), each = codes, 32 // scheme.bits
    match scheme.layout:
        case "fp8" | "int8":
            return rows, columns
        case "awq":
            return columns * each, rows
        case "gptq":
            return columns, rows * each
    return rows, columns * 2


def mx_blocks(codes: Tensor, scales: Tensor) -> QuantisedLinear:
    """Experts in the layout of gpt-oss: codes [experts, outputs, groups, 16], scales [experts, outputs, groups]."""
    factors = _from_exponents(scales)
    if bool(factors.isnan().any()):
        raise ModelError("the scales of experts have entries that are no numbers; the checkpoint is damaged")
    return QuantisedLinear("fp4", codes.flatten(2), factors, (1, MX_GROUP))


def _halved(m: Module) -> Shapes:
    m.need(2, m.size[1:])
    return m.size[0], m.size[1] // 2


def _whole_matrix(m: Module, linear: QuantisedLinear) -> QuantisedLinear:
    """A scale of the whole matrix becomes one for each output, so that matrices can be joined."""
    if linear.block != m.size:
        return linear
    each = {"scales": linear.scales, "zeros": linear.zeros}
    wide = {name: None if t is None else t.expand(m.size[0], 1).contiguous() for name, t in each.items()}
    assert wide["scales"] is not None
    return QuantisedLinear(linear.kind, linear.codes, wide["scales"], (1, m.size[1]), wide["zeros"])


def _integers(
    m: Module, codes: Tensor, scales: Tensor, zeros: Tensor | None, index: str | None = None
) -> QuantisedLinear | Tensor:
    """Codes [out, in] and zeros [out, groups] that count from 0. Where `index` names a tensor of groups in another
    order than one after the other, the matrix is dequantised."""
    bits, inputs, group = m.scheme.bits, m.size[1], m.block[1]
    groups = torch.arange(inputs, device=codes.device) // group
    if index is not None and m.has(f"{m.name}.{index}"):
        stored = m.part(index, (inputs,), "I32", "I64").long()
        if bool(((stored < 0) | (stored >= m.blocks[1])).any()):
            raise m.refusal(f"{index} names groups that are not there")
        if not torch.equal(stored, groups):
            zero = 1 << (bits - 1) if zeros is None else zeros[:, stored].float()
            return (codes.float() - zero) * scales[:, stored].float()
    scales = scales.contiguous()
    if bits == 8:
        shifted = None if zeros is None else (zeros - 128).bfloat16().contiguous()
        return QuantisedLinear("int8", (codes - 128).to(torch.int8).contiguous(), scales, m.block, shifted)
    m.need(2, [inputs])
    exact = None if zeros is None else zeros.bfloat16().contiguous()
    return QuantisedLinear("int4", pack_nibbles(codes.to(torch.uint8)).contiguous(), scales, m.block, exact)


def _unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Whole words -> their codes, lowest bits first, along a dimension."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    if dim == 0:
        return ((words[:, None, :] >> shifts[:, None]) & ((1 << bits) - 1)).flatten(0, 1)
    return ((words[:, :, None] >> shifts) & ((1 << bits) - 1)).flatten(1)


def _from_exponents(scales: Tensor) -> Tensor:
    """Scales that are stored as exponents of two (e8m0), as floats; they are exact in bfloat16."""
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    if scales.dtype != torch.uint8:
        return scales
    powers = torch.exp2(scales.double() - 127).bfloat16()
    return torch.where(scales == 255, torch.nan, powers)


def kept_bytes(name: str, kind: str, shape: Sequence[int], itemsize: float) -> int:
    """What a stored tensor takes in memory: exponents become bfloat16, packed zeros a number each."""
    wide = {"U8": 2, "F8_E8M0": 2}.get(kind, 1) if "scale" in name else 1
    zeros = 4 if kind == "I32" and name.endswith(("qzeros", "weight_zero_point")) else 1
    return int(math.prod(shape) * itemsize * wide * zeros)
