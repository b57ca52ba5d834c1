"""The tensors of a GGUF file, dequantised one at a time, with the names and layout of a Hugging Face checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map
from torch import Tensor
from tqdm import tqdm

from semspec.errors import ModelError
from semspec.model.gguf_config import config_of, dialect_of
from semspec.model.gguf_header import Header

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
        if failed is None and self._unread:
            some = ", ".join(sorted(self._unread)[:3])
            raise ModelError(
                f"{self.header.path} has {len(self._unread)} tensors that its architecture does not use ({some}); "
                "it is a variant that is not supported, and ignoring them would give wrong answers"
            )

    def read(self, name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        stem, suffix = name.rsplit(".", 1)
        expert = re.search(r"\.experts\.(\d+)\.", stem)
        stored = self._names.get_name(stem.replace(expert[0], ".experts.") if expert else stem)
        entry = self.header.tensors.get(f"{stored}.{suffix}")
        if entry is None:
            raise ModelError(f"{self.header.path}: the file has no tensor {stored}.{suffix} (for {name})")
        self._unread.discard(f"{stored}.{suffix}")
        found = entry.shape[1:] if expert else entry.shape
        if found != shape or (expert and int(expert[1]) >= entry.shape[0]):
            raise ModelError(f"{self.header.path}: {stored}.{suffix} has shape {entry.shape}, not {shape} as expected")
        rows = slice(int(expert[1]), int(expert[1]) + 1) if expert else slice(None)
        self._bar.update(entry.size // entry.shape[0] if expert else entry.size)
        array = self.header.values(entry, rows).reshape(shape)
        if self._dialect.interleaved and stem.endswith(("q_proj", "k_proj")):
            pairs = array.reshape(-1, self._head // 2, 2, *shape[1:])
            array = pairs.swapaxes(1, 2).reshape(shape)
        if self._dialect.norm_offset and "norm" in stem:
            array = array - np.float32(self._dialect.norm_offset)
        if not array.flags.writeable:  # of the file itself
            array = array.copy()
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)
