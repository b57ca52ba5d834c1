"""The header of a GGUF file. Every count, length and offset is checked against the file's size.

The `gguf` package's own reader trusts the file and takes seconds for a large vocabulary. Nothing here is copied or
allocated before it is known to lie inside the file; the tensors themselves are memory-mapped.
"""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, quants

from semspec.errors import ModelError

LFS = b"version https://git-lfs"  # with which its pointers begin
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
PIECE = 1 << 18  # numbers dequantised at a time: what is computed on the way fits into a core's cache
Kind = GGMLQuantizationType
# What the package can dequantise: each such type is a class of its module.
SUPPORTED = tuple(kind for kind in Kind if kind in (Kind.F32, Kind.F16) or hasattr(quants, kind.name))
SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies and its type."""

    shape: tuple[int, ...]  # as torch counts: the last dimension is contiguous
    kind: Kind
    start: int  # in the file
    size: int  # in bytes


def refuse_placeholder(path: Path) -> None:
    """What is there where a file of weights has not been fetched. Others are what they are; OSError if unreadable."""
    with path.open("rb") as file:
        begins = file.read(len(LFS))
    if not begins:
        raise ModelError(f"{path} is empty, as after a download that failed; fetch it again")
    if begins == LFS:
        raise ModelError(f"{path} is a pointer of Git LFS, not the file itself; git lfs pull in its folder fetches it")


@dataclass(frozen=True, slots=True)
class Header:
    path: Path
    metadata: dict[str, Any]  # arrays of numbers are numpy arrays, arrays of strings lists
    tensors: dict[str, Entry]

    @staticmethod
    def read(path: Path) -> Header:
        try:
            state = path.stat()
            refuse_placeholder(path)
            return _read(path, state.st_mtime_ns, state.st_size)
        except (OSError, ValueError) as error:  # ValueError: it has become empty and cannot be mapped
            raise ModelError(f"{path} cannot be opened: {error}") from error

    def values(self, entry: Entry, rows: slice = slice(None)) -> np.ndarray:
        """A tensor's numbers, or those of some slices along its first dimension; only their pages are read."""
        return dequantised(self.raw(entry, rows), entry.kind)

    def raw(self, entry: Entry, rows: slice = slice(None)) -> np.ndarray:
        """The same as bytes, [..., bytes of a row]."""
        block, width = GGML_QUANT_SIZES[entry.kind]
        shape = (*entry.shape[:-1], entry.shape[-1] // block * width)
        return np.ascontiguousarray(
            np.memmap(self.path, mode="r", dtype=np.uint8, offset=entry.start, shape=shape)[rows]
        )


@lru_cache(maxsize=2)  # a target's and a draft's: config, tokenizer and weights each ask for it
def _read(path: Path, changed: int, size: int) -> Header:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Cursor(path, data).header()


def dequantised(raw: np.ndarray, kind: Kind) -> np.ndarray:
    """A tensor's bytes [..., bytes of a row] as numbers. The package takes sixteen rows at a time, one after the other;
    larger pieces take half the time, and all threads share them."""
    if kind in (Kind.F32, Kind.F16):
        return quants.dequantize(raw, kind)
    block, width = GGML_QUANT_SIZES[kind]
    blocks = raw.reshape(-1, width)
    made = np.empty((len(blocks), block), np.float32)

    def fill(start: int) -> None:
        piece = slice(start, start + PIECE // block)
        made[piece] = quants.dequantize(blocks[piece].reshape(1, -1), kind).reshape(-1, block)

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(fill, range(0, len(blocks), PIECE // block)))
    return made.reshape(*raw.shape[:-1], -1)


class _Cursor:
    """A position in the file; every read is checked."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.end = path, data, 0, len(data)

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is damaged or no GGUF file: {what}; fetch or convert it again")

    def take(self, size: int, what: str) -> bytes:
        if size > self.end - self.at:
            raise self.fail(f"{what} needs {size} bytes at {self.at}, but the file ends at {self.end}")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, width: int, what: str) -> int:
        return int.from_bytes(self.take(width, what), "little")

    def count(self, min_bytes: int, what: str) -> int:
        """A count of items of at least `min_bytes` each, all of which must lie in the file."""
        count = self.number(8, what)
        if count * min_bytes > self.end - self.at:
            raise self.fail(f"{what} is {count}, more than the {self.end - self.at} bytes that follow can hold")
        return count

    def text(self, what: str) -> str:
        try:
            return self.take(self.number(8, what), what).decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error

    def kind(self, what: str) -> GGUFValueType:
        number = self.number(4, what)
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise self.fail(f"{what} has the unknown type {number}") from error

    def value(self, kind: GGUFValueType, what: str) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text(what)
        if kind != GGUFValueType.ARRAY:
            return self.array(kind, 1, what)[0].item()
        items = self.kind(what)
        if items == GGUFValueType.ARRAY:
            raise self.fail(f"{what} is an array of arrays")
        if items == GGUFValueType.STRING:
            return [self.text(what) for _ in range(self.count(8, f"the length of {what}"))]
        return self.array(items, self.count(np.dtype(SCALARS[items]).itemsize, f"the length of {what}"), what)

    def array(self, kind: GGUFValueType, count: int, what: str) -> np.ndarray:
        form = np.dtype(SCALARS[kind])
        return np.frombuffer(self.take(form.itemsize * count, what), form)

    def header(self) -> Header:
        if self.take(4, "the signature") != b"GGUF":
            raise self.fail("it does not begin with GGUF")
        version = self.number(4, "the version")
        if version not in VERSIONS:
            raise self.fail(f"its version is {version}, and versions {VERSIONS[0]} and {VERSIONS[1]} can be read")
        tensors = self.count(24, "the number of tensors")
        fields = self.count(13, "the number of metadata fields")
        metadata: dict[str, Any] = {}
        for _ in range(fields):
            name = self.text("a metadata name")
            if name in metadata:
                raise self.fail(f"the metadata field {name!r} is there twice")
            metadata[name] = self.value(self.kind(name), name)
        found = [self.tensor() for _ in range(tensors)]
        return Header(self.path, metadata, self.locate(found, metadata.get("general.alignment", 32)))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.text("a tensor's name")
        dimensions = self.number(4, f"the dimensions of {name}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self.fail(f"{name} has {dimensions} dimensions")
        shape = tuple(self.number(8, f"the shape of {name}") for _ in range(dimensions))[::-1]
        return name, shape, self.number(4, f"the type of {name}"), self.number(8, f"the offset of {name}")

    def locate(self, found: list[tuple[str, tuple[int, ...], int, int]], alignment: Any) -> dict[str, Entry]:
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.fail(f"its alignment is {alignment!r}, not a power of two")
        begin = -(-self.at // alignment) * alignment
        tensors: dict[str, Entry] = {}
        for name, shape, number, offset in found:
            if name in tensors:
                raise self.fail(f"the tensor {name} is there twice")
            kind = self.supported(name, number)
            block, width = GGML_QUANT_SIZES[kind]
            if 0 in shape or shape[-1] % block:
                raise self.fail(f"{name} has shape {shape}, which {kind.name} cannot have")
            entry = Entry(shape, kind, begin + offset, prod(shape) // block * width)
            if offset % alignment or entry.start + entry.size > self.end:
                raise self.fail(f"{name} should take {entry.size} bytes at {entry.start}, but the file has {self.end}")
            tensors[name] = entry
        return tensors

    def supported(self, name: str, number: int) -> Kind:
        names = {kind.value: kind.name for kind in Kind}
        for kind in SUPPORTED:
            if kind.value == number:
                return kind
        raise ModelError(
            f"{self.path}: {name} is stored as {names.get(number, f'type {number}')}, which is not supported; take a "
            f"file of {', '.join(k.name for k in SUPPORTED)} (Q4_K_M and the like are mixtures of these)"
        )
