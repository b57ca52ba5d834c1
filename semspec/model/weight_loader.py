"""From a checkpoint's tensors to the products of a model, in the precision that was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from semspec.model import cpu_gemm
from semspec.model.int4 import Int4Blocks, Int4Linear, cpu_int4
from semspec.model.int8 import Int8Linear
from semspec.model.linear import DenseLinear, Linear
from semspec.model.placement import Precision, Weights
from semspec.model.quantised import QuantisedLinear, join, quantise


class Tensors(Protocol):
    """Whatever gives a checkpoint's tensors by name."""

    def read(self, name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor: ...


@runtime_checkable
class QuantisedTensors(Protocol):
    """Tensors that may be quantised."""

    def matrix(
        self, name: str, size: tuple[int, int], device: torch.device, dtype: torch.dtype
    ) -> QuantisedLinear | Tensor:
        """A matrix by its module's name."""
        ...


@runtime_checkable
class BlockTensors(Protocol):
    """Tensors of which a CPU may multiply with some as they are stored."""

    def blocks(self, names: Sequence[str], sizes: Sequence[tuple[int, int]]) -> Int4Blocks | None:
        """Matrices by their modules' names, as one; None: they have no such blocks."""
        ...


class WeightLoader:
    def __init__(self, checkpoint: Tensors, device: torch.device, precision: Precision, parameters: int) -> None:
        self.checkpoint, self.device, self.precision, self.dtype = checkpoint, device, precision, precision.dtype
        paths = cpu_gemm.GemmPaths.of(parameters, device, precision.dtype)
        self.paths = paths if precision.weights == "plain" else cpu_gemm.GemmPaths()

    def read(self, name: str, *size: int) -> Tensor:
        return self.checkpoint.read(name, size, self.device, self.dtype)

    def linear(self, names: Sequence[str], sizes: Sequence[int], width: int, biased: bool = False) -> Linear:
        """Several projections of the same input, packed into one."""
        kind = self.precision.weights
        biases = [self.read(f"{n}.bias", size) for n, size in zip(names, sizes, strict=True)] if biased else []
        bias = torch.cat(biases) if biased else None
        if stored := self._blocks(kind):
            blocks = stored.blocks(names, [(size, width) for size in sizes])
            if blocks is not None and blocks.suits:
                return Int4Linear(blocks, bias)
        parts = [self._matrix(name, (size, width)) for name, size in zip(names, sizes, strict=True)]
        return self._joined(parts, bias, "int8" if kind == "blocks" else kind)

    def head(self, embedding: Tensor | None, vocab: int, width: int) -> Linear:
        """The output projection, which may be the embedding. By four bits it loses more than they gain, and by fp8 more
        than all layers do, where a byte of int8 loses next to nothing (docs/lab-notes.md, 2026-11-18)."""
        matrix = self._matrix("lm_head", (vocab, width)) if embedding is None else embedding
        kind = self.precision.weights
        kept = isinstance(matrix, QuantisedLinear) and self._keeps(matrix, kind)
        return self._joined([matrix], None, "int8" if kind in ("fp8", "int4", "blocks") and not kept else kind)

    def _joined(self, parts: Sequence[QuantisedLinear | Tensor], bias: Tensor | None, kind: Weights) -> Linear:
        assert kind != "blocks"
        kept = [p for p in parts if isinstance(p, QuantisedLinear) and self._keeps(p, kind)]
        if len(kept) == len(parts) and (joined := join(kept, bias)):
            return cpu_int4(joined) if kind == "int4" and self.device.type == "cpu" else joined
        floats = [p.dequantised(self.dtype) if isinstance(p, QuantisedLinear) else p for p in parts]
        weight = floats[0] if len(floats) == 1 else torch.cat(floats)
        if kind == "plain" or kind == "stored":
            packed = cpu_gemm.pack(weight) if self.paths.packed else None
            return DenseLinear(weight, bias, self.paths.transposed, packed)
        if kind == "int8" and self.device.type == "cpu":
            return Int8Linear(weight, bias)
        made = quantise(weight, kind, bias)
        return cpu_int4(made) if kind == "int4" and self.device.type == "cpu" else made

    def _matrix(self, name: str, size: tuple[int, int]) -> QuantisedLinear | Tensor:
        if isinstance(self.checkpoint, QuantisedTensors):
            return self.checkpoint.matrix(name, size, self.device, self.dtype)
        return self.read(f"{name}.weight", *size)

    def _blocks(self, kind: Weights) -> BlockTensors | None:
        """The checkpoint, if its blocks are to be kept."""
        fits = self.device.type == "cpu" and kind in ("int4", "blocks")
        return self.checkpoint if fits and isinstance(self.checkpoint, BlockTensors) else None

    def _keeps(self, part: QuantisedLinear, kind: Weights) -> bool:
        """Whether a matrix stays as it is stored. CPUs multiply with int8 only if each output has one scale."""
        return kind == "stored" or (kind == part.kind and (self.device.type != "cpu" or kind != "int8"))
