"""The tensors of a GGUF file, one at a time, with the names and layout of a Hugging Face checkpoint: dequantised, or in
their own blocks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map
from torch import Tensor
from tqdm import tqdm

from semspec.errors import ModelError
from semspec.model.gguf_blocks import KEPT, read_blocks
from semspec.model.gguf_config import config_of, dialect_of
from semspec.model.gguf_header import Entry, Header
from semspec.model.int4 import Int4Blocks

FACTORS = {"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}  # read with the config


class GgufCheckpoint:
    """See weights.Checkpoint for the contract."""

    def __init__(self, path: Path) -> None:
        self.header = Header.read(path)
        self._dialect = dialect_of(self.header)
        config = config_of(self.header)
        self._head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        arch = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}[self.header.metadata["general.architecture"]]
        assert isinstance(arch, MODEL_ARCH)
        self._names = get_tensor_name_map(arch, config.num_hidden_layers)
        self._unread = set(self.header.tensors) - FACTORS
        total = sum(e.size for e in self.header.tensors.values())
        # disable=None: only on a terminal
        self._bar = tqdm(desc=f"reading {path.name}", total=total, unit="B", unit_scale=True, disable=None, leave=False)

    def __enter__(self) -> GgufCheckpoint:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        self._bar.close()
        looked_at = len(self._unread) == len(set(self.header.tensors) - FACTORS)  # and nothing was read
        if failed is None and self._unread and not looked_at:
            some = ", ".join(sorted(self._unread)[:3])
            raise ModelError(
                f"{self.header.path} has {len(self._unread)} tensors that its architecture does not use ({some}); "
                "it is a variant that is not supported, and ignoring them would give wrong answers"
            )

    def read(self, name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        entry, rows = self._entry(name, shape)
        array, stem = self.header.values(entry, rows).reshape(shape), name.rsplit(".", 1)[0]
        if self._in_pairs(stem):
            array = array[self._in_halves(shape[0])]
        if self._dialect.norm_offset and "norm" in stem:
            array = array - np.float32(self._dialect.norm_offset)
        if not array.flags.writeable:  # of the file itself
            array = array.copy()
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)

    def blocks(self, names: Sequence[str], sizes: Sequence[tuple[int, int]]) -> Int4Blocks | None:
        """Matrices by their modules' names, one under the other, in the file's own blocks; None: one has other ones."""
        if any(self.header.tensors[self._stored(f"{name}.weight")[0]].kind not in KEPT for name in names):
            return None
        parts = []
        for name, size in zip(names, sizes, strict=True):
            entry, rows = self._entry(f"{name}.weight", size)
            part = read_blocks(self.header.raw(entry, rows).reshape(size[0], -1), entry.kind)
            parts.append(part.rows(torch.from_numpy(self._in_halves(size[0]))) if self._in_pairs(name) else part)
        return Int4Blocks.join(parts)

    def _stored(self, name: str) -> tuple[str, int | None]:
        """A tensor's name in the file, and which expert of it is meant."""
        stem, suffix = name.rsplit(".", 1)
        expert = re.search(r"\.experts\.(\d+)\.", stem)
        stored = f"{self._names.get_name(stem.replace(expert[0], '.experts.') if expert else stem)}.{suffix}"
        if stored not in self.header.tensors:
            raise ModelError(f"{self.header.path}: the file has no tensor {stored} (for {name})")
        return stored, int(expert[1]) if expert else None

    def _entry(self, name: str, shape: tuple[int, ...]) -> tuple[Entry, slice]:
        """Where a tensor of this shape lies, and which slices along its first dimension are it."""
        stored, expert = self._stored(name)
        entry = self.header.tensors[stored]
        self._unread.discard(stored)
        found = entry.shape if expert is None else entry.shape[1:]
        if found != shape or (expert is not None and expert >= entry.shape[0]):
            raise ModelError(f"{self.header.path}: {stored} has shape {entry.shape}, not {shape} as expected")
        self._bar.update(entry.size if expert is None else entry.size // entry.shape[0])
        return entry, slice(None) if expert is None else slice(expert, expert + 1)

    def _in_pairs(self, stem: str) -> bool:
        return self._dialect.interleaved and stem.endswith(("q_proj", "k_proj"))

    def _in_halves(self, rows: int) -> np.ndarray:
        """The rows of rotated pairs in the order of halves."""
        return np.arange(rows).reshape(-1, self._head // 2, 2).swapaxes(1, 2).reshape(-1)
