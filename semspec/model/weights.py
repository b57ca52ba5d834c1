"""Locating a checkpoint and reading its tensors. Safetensors and GGUF only: a checkpoint holds data, never code."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

from semspec.errors import ModelError, did_you_mean
from semspec.model.gguf_checkpoint import GgufCheckpoint

FLOATS = ("BF16", "F16", "F32", "F64")
INDEX = "model.safetensors.index.json"
FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "tokenizer*", "merges.txt", "vocab.*"]


def locate(model: str | Path) -> Path:
    """The folder or GGUF file of a checkpoint given as such, or as a hub id (fetched into the hub's cache)."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1 and not (path / "config.json").is_file():
            return files[0]
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} is a folder without a config.json; give the folder of a Hugging Face checkpoint")
        return path
    name = str(model)
    in_hub = name.count("/") == 2 and path.suffix == ".gguf"
    if path.exists() or name.startswith((".", "/", "~")) or (name.count("/") > 1 and not in_hub):
        raise ModelError(
            f"{name} is no folder and no .gguf file; "
            + (_nearby(path) or "give one of these, or a hub id such as org/name or org/name/file.gguf")
        )
    try:
        if in_hub:
            owner, repository, file = name.split("/")
            return Path(hf_hub_download(f"{owner}/{repository}", file))
        return Path(snapshot_download(name, allow_patterns=FILES))
    except Exception as error:  # the hub client raises many kinds
        if near := _nearby(path):
            raise ModelError(f"{name} is no folder here and no checkpoint of the hub; {near}") from error
        raise ModelError(f"{name} is neither a folder nor a checkpoint the hub could give: {error}") from error


def _nearby(path: Path) -> str:
    """For a message: whether a model with such a name lies where this one should."""
    try:
        models = [p.name for p in path.parent.iterdir() if p.suffix == ".gguf" or (p / "config.json").is_file()]
    except OSError:  # not even its folder is there
        return ""
    return did_you_mean(path.name, models)


def open_checkpoint(path: Path) -> Checkpoint | GgufCheckpoint:
    return GgufCheckpoint(path) if path.suffix == ".gguf" else Checkpoint(path)


class Checkpoint:
    """The tensors of a folder by name, read one at a time from memory-mapped files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._where: dict[str, str] = {}
        self._files = {}
        for file in _shards(folder):
            try:
                handle = self._stack.enter_context(safe_open(folder / file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{folder / file} is missing, damaged or cut short: {error}") from error
            except (RuntimeError, MemoryError) as error:  # more than this machine could ever hold
                raise ModelError(f"{folder / file} cannot be mapped into memory: {error}") from error
            self._files[file] = handle
            self._where.update(dict.fromkeys(handle.keys(), file))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def parameters(self) -> int:
        """Of all tensors; only headers are read."""
        return sum(math.prod(self._files[file].get_slice(name).get_shape()) for name, file in self._where.items())

    def read(self, name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        if name not in self._where:
            raise ModelError(f"{self.folder}: the checkpoint has no tensor {name}")
        file = self._files[self._where[name]]
        header = file.get_slice(name)
        found = tuple(header.get_shape())  # checked before the tensor takes memory
        if header.get_dtype() not in FLOATS:
            raise ModelError(
                f"{self.folder}: {name} is stored as {header.get_dtype()}, which only makes sense with scales that are "
                f"not known; take a checkpoint in {', '.join(FLOATS)}, or a GGUF file"
            )
        if found != shape:
            raise ModelError(f"{self.folder}: {name} has shape {found}, but config.json asks for {shape}")
        return file.get_tensor(name).to(device=device, dtype=dtype)


def _shards(folder: Path) -> list[str]:
    index = folder / INDEX
    if index.is_file():
        try:
            return sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # no JSON, or JSON of another form
            raise ModelError(f"{index} cannot be read: {error!r}") from error
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    pickled = [p.name for p in folder.glob("*.bin")]
    hint = f" ({pickled[0]} is a pickle, which semspec does not open: convert it)" if pickled else ""
    raise ModelError(f"{folder} has no model.safetensors{hint}")
