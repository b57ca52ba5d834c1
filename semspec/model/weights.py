"""Locating a checkpoint and reading its tensors. Safetensors and GGUF only: a checkpoint holds data, never code."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from semspec.errors import ModelError, cause, did_you_mean
from semspec.model import int4
from semspec.model.config import Shape
from semspec.model.gguf_blocks import keeps_blocks
from semspec.model.gguf_checkpoint import GgufCheckpoint
from semspec.model.gguf_header import Header, refuse_placeholder
from semspec.model.placement import Weights
from semspec.model.quantisation import Quantisation, Scheme
from semspec.model.quantised import QuantisedLinear
from semspec.model.quantised_formats import READERS, Module, codes_of, kept_bytes

log = logging.getLogger(__name__)

HUB_ID = re.compile(r"(?!\.)[\w.-]+(/[\w.-]+)?|(?!\.)[\w.-]+/[\w.-]+/[\w.-]+\.gguf")
FLOATS = ("BF16", "F16", "F32", "F64")
ITEMSIZE = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}
INDEX = "model.safetensors.index.json"
ADAPTER = (
    "has an adapter's weights (adapter_config.json), which are no model by themselves; add them to those of its base "
    "model (peft: merge_and_unload), save that, and give its folder"
)
CONVERT = "convert it where you trust it, with transformers' from_pretrained(FOLDER) and save_pretrained(NEW_FOLDER)"
GGUF_PART = re.compile(r"-of-\d+\.gguf$")
PART = re.compile(r"-of-\d+\.safetensors$")
ROWS = 4096  # of a matrix, compared at a time
TEXT_PARTS = (
    "model.language_model.",
    "language_model.model.",
    "model.text_model.",
)  # of models that also read pictures
# Beside a quantised matrix: of activations and of keys and values, or read elsewhere, or of no meaning by themselves.
UNUSED = (
    "bias", "input_scale", "input_global_scale", "input_zero_point", "output_scale", "output_zero_point", "q_scale",
    "k_scale", "v_scale", "k_zero_point", "v_zero_point", "weight_shape", "activation_scale",
)  # fmt: skip
FILES = [
    "*.json", "*.safetensors", "*.jinja", "*.model", "tokenizer*", "merges.txt", "vocab.*", "mask_embedding.pt",
]  # fmt: skip


def locate(model: str | Path) -> Path:
    """The folder or GGUF file of a checkpoint given as such, or as a hub id (fetched into the hub's cache)."""
    if not str(model).strip():
        raise ModelError("the model's name is empty; give a folder, a .gguf file, or a hub id such as org/name")
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path
    if path.is_dir():
        return path if (path / "config.json").is_file() else _only_file(path)
    name = str(model)
    if path.is_file() and (path.parent / "config.json").is_file():
        raise ModelError(f"{name} is one file of a checkpoint; give the folder it is in: {path.parent}")
    if path.exists() or not HUB_ID.fullmatch(name):
        raise ModelError(
            f"{name} is no folder and no .gguf file; "
            + (_nearby(path) or "give one of these, or a hub id such as org/name or org/name/file.gguf")
        )
    try:
        if name.count("/") == 2:
            owner, repository, file = name.split("/")
            return Path(hf_hub_download(f"{owner}/{repository}", file))
        return Path(snapshot_download(name, allow_patterns=FILES))
    except Exception as error:  # the hub client raises many kinds
        if near := _nearby(path):
            raise ModelError(f"{name} is no folder here and no checkpoint of the hub; {near}") from error
        if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):  # its own words take three lines
            where = "is no folder here, and the hub cannot be asked for it: no network, or HF_HUB_OFFLINE is set"
            raise ModelError(f"{name} {where}; give the folder or .gguf file of a model on this machine") from error
        raise ModelError(f"{name} is neither a folder nor a checkpoint the hub could give: {error}") from error


def _only_file(folder: Path) -> Path:
    """The model in a folder without a config."""
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        raise ModelError(f"{folder} {ADAPTER}")
    files = [p for p in sorted(folder.glob("*.gguf")) if not p.name.startswith("mmproj")]  # that reads pictures
    if files and (len(files) == 1 or all(GGUF_PART.search(p.name) for p in files)):  # parts are told when one is read
        return files[0]
    if files:
        raise ModelError(f"{folder} is a folder with {len(files)} .gguf files; give one of them, such as {files[0]}")
    raise ModelError(f"{folder} is a folder without a config.json; give the folder of a Hugging Face checkpoint")


def _nearby(path: Path) -> str:
    """For a message: whether a model with such a name lies where this one should."""
    try:
        models = [p.name for p in path.parent.iterdir() if p.suffix == ".gguf" or (p / "config.json").is_file()]
    except OSError:  # not even its folder is there
        return ""
    return did_you_mean(path.name, models)


def open_checkpoint(path: Path) -> Checkpoint | GgufCheckpoint:
    return GgufCheckpoint(path) if path.suffix == ".gguf" else Checkpoint(path)


def shape_of(path: Path, config: PreTrainedConfig) -> Shape:
    """What the config and the tensors say together."""
    shape = Shape.of(config, str(path))
    if shape.tied and path.is_dir():
        with suppress(ModelError), Checkpoint(path) as checkpoint:  # weights may come later than a plan
            return replace(shape, tied=not checkpoint.heads)
    return shape


def default_weights(path: Path, device: torch.device) -> Weights:
    """How a checkpoint's weights are kept by default: in fewer bits, as they are stored, where there is a product that
    is made for them."""
    cpu, gguf = device.type == "cpu", path.suffix == ".gguf"
    quantisation = None if gguf else Quantisation.read(path)
    if cpu and int4.fast():
        if gguf and keeps_blocks(Header.read(path)):
            return "blocks"
        return "int4" if quantisation is not None and quantisation.int4 else "plain"
    return "stored" if quantisation is not None and not cpu else "plain"


class Checkpoint:
    """The tensors of a folder by name, read one at a time from memory-mapped files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.quantisation = Quantisation.read(folder)
        self._stack = ExitStack()
        self._where: dict[str, str] = {}
        self._read = set[str]()
        self._files = {}
        for file in _shards(folder):
            try:
                refuse_placeholder(folder / file)
                handle = self._stack.enter_context(safe_open(folder / file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{folder / file} is missing, damaged or cut short: {error}") from error
            except (RuntimeError, MemoryError) as error:  # more than this machine could ever hold
                raise ModelError(f"{folder / file} cannot be mapped into memory: {error}") from error
            self._files[file] = handle
            self._where.update(dict.fromkeys(handle.keys(), file))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if failed is None:
            self._tell_unread()
        # After an error a thread of transformers may still be reading; what has failed says more than that.
        with suppress(*([] if failed is None else [RuntimeError])):
            self._stack.close()

    def _tell_unread(self) -> None:
        """A bias of a matrix that was read changes it; without a word in the config nobody asks for it."""
        beside = (f"{n.removesuffix('.weight')}.bias" for n in sorted(self._read) if n.endswith(".weight"))
        unread = [n for n in beside if n in self._where and n not in self._read and bool(self._tensor(n).any())]
        if unread:
            log.warning(
                "%s: %d biases are not read, such as %s; if answers make no sense, the config is another model's",
                self.folder, len(unread), unread[0],
            )  # fmt: skip

    @property
    def parameters(self) -> int:
        """Of all tensors; only headers are read."""
        return sum(math.prod(self._files[file].get_slice(name).get_shape()) for name, file in self._where.items())

    @property
    def kept_bytes(self) -> int:
        """What all tensors take if they are kept as they are stored; only headers are read."""
        headers = ((name, self._files[file].get_slice(name)) for name, file in self._where.items())
        return sum(
            kept_bytes(name, h.get_dtype(), h.get_shape(), ITEMSIZE.get(h.get_dtype(), 1)) for name, h in headers
        )

    @property
    def names(self) -> list[str]:
        return list(self._where)

    def size(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is there; only its header is read."""
        return tuple(self._header(name).get_shape())

    def kind(self, name: str) -> str:
        """As which it is stored; only its header is read."""
        return str(self._header(name).get_dtype())

    def integers(self, name: str, count: int, device: torch.device) -> Tensor:
        return self._get(name, (count,), ("I64", "I32"), device).long()

    def read(self, name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        module, dot, part = name.rpartition(".")  # a head's may belong to no module
        return self._get(f"{self._stored(module)}{dot}{part}", shape, FLOATS, device).to(dtype)

    def matrix(
        self, name: str, size: tuple[int, int], device: torch.device, dtype: torch.dtype
    ) -> QuantisedLinear | Tensor:
        """A matrix by its module's name."""
        name = self._stored(name)
        scheme = self.scheme_of(name)
        if scheme is None:
            return self.read(f"{name}.weight", size, device, dtype)
        used = set[str]()

        def get(part: str, shape: tuple[int, ...], kinds: Sequence[str]) -> Tensor:
            used.add(part)
            return self._get(part, shape, kinds, device, squeezed=True)

        try:
            made = READERS[scheme.layout](Module(name, size, scheme, get, self._where.__contains__))
            self._refuse_unused(name, used)
        except ModelError as error:
            raise ModelError(f"{self.folder}: {error}" if str(self.folder) not in str(error) else str(error)) from error
        return made.to(dtype) if isinstance(made, Tensor) else made

    def scheme_of(self, name: str) -> Scheme | None:
        """How a matrix is stored, by its module's name; None: as plain floats."""
        scheme = self.quantisation.scheme_of(name) if self.quantisation else None
        return None if scheme is None or self._is_plain(name, scheme) else scheme

    @cached_property
    def heads(self) -> bool:
        """Whether it has an output projection that is not its embedding, as files have that were tuned apart although
        their config still says that both are one."""
        head, embedding = (f"{self._stored(name)}.weight" for name in ("lm_head", "model.embed_tokens"))
        if head not in self._where or embedding not in self._where:
            return self._stored("lm_head") in self.modules
        head, embedding = self._header(head), self._header(embedding)
        rows, others = head.get_shape()[0], embedding.get_shape()
        if head.get_shape() != others or head.get_dtype() != embedding.get_dtype():
            return True
        return any(not torch.equal(head[i : i + ROWS], embedding[i : i + ROWS]) for i in range(0, rows, ROWS))

    def _stored(self, module: str) -> str:
        """The name of a module here, where the text is one part of a model."""
        if module in self.modules:
            return module
        if module.startswith("lm_head"):
            inner = f"language_model.{module}"
            return inner if inner in self.modules else module
        part = next((p for p in TEXT_PARTS if f"{p}embed_tokens" in self.modules), "model.")
        return part + module.removeprefix("model.") if module.startswith("model.") else module

    def stored(self, name: str, shape: tuple[int, ...], kinds: Sequence[str], device: torch.device) -> Tensor:
        """A tensor as it is stored."""
        return self._get(name, shape, kinds, device)

    def _refuse_unused(self, name: str, used: set[str]) -> None:
        """What is stored with a matrix changes it: a variant of a format has more than we read. Zeros that are 0 and
        factors that are 1 change nothing."""
        for part in sorted(self.modules.get(name, set()) - used - {f"{name}.{end}" for end in UNUSED}):
            tensor = self._tensor(part).float()
            if not bool((tensor == (0 if "zero" in part.rsplit(".", 1)[1] else 1)).all()):
                raise ModelError(
                    f"{part} is stored with a quantised matrix and would be ignored, which would give wrong answers; "
                    "the checkpoint is of a variant that is not supported, or its config does not say what it is"
                )

    @cached_property
    def modules(self) -> dict[str, set[str]]:
        """The names of all tensors by their modules' names."""
        found = dict[str, set[str]]()
        for name in self._where:
            found.setdefault(name.rpartition(".")[0], set()).add(name)
        return found

    def _is_plain(self, name: str, scheme: Scheme) -> bool:
        """Formats leave some matrices plain without a word in their config, such as heads."""
        codes, weight = f"{name}.{codes_of(scheme)}", f"{name}.weight"
        if weight not in self._where or (codes != weight and codes in self._where):
            return False
        return f"{name}.{scheme.scale}" not in self._where and self._header(weight).get_dtype() in FLOATS

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._files[self._where[name]].get_tensor(name)
        return tensor

    def _header(self, name: str) -> Any:
        return self._files[self._where[name]].get_slice(name)

    def _get(
        self, name: str, shape: tuple[int, ...], kinds: Sequence[str], device: torch.device, squeezed: bool = False
    ) -> Tensor:
        """A tensor of one of these kinds and of this shape, or, if `squeezed`, of one that differs in dimensions of one
        only; both are checked before it takes memory."""
        if name not in self._where:
            raise ModelError(f"{self.folder}: the checkpoint has no tensor {name}")
        header = self._header(name)
        found, kind = tuple(header.get_shape()), header.get_dtype()
        if kind not in kinds:
            method = self.quantisation.method if self.quantisation else "none"
            raise ModelError(
                f"{self.folder}: {name} is stored as {kind}, where {' or '.join(kinds)} belongs (quantisation by its "
                f"config: {method}); take a checkpoint in {', '.join(FLOATS)}, or a GGUF file"
            )
        if found != shape and not (squeezed and [n for n in found if n != 1] == [n for n in shape if n != 1]):
            raise ModelError(f"{self.folder}: {name} has shape {found}, but config.json asks for {shape}")
        self._read.add(name)
        return self._tensor(name).reshape(shape).to(device)


def _shards(folder: Path) -> list[str]:
    index = folder / INDEX
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # or JSON of another form
            raise ModelError(f"{index} cannot be read: {cause(error)}") from error
        odd = [f for f in files if not isinstance(f, str) or Path(f).is_absolute() or ".." in Path(f).parts]
        if odd:
            raise ModelError(f"{index} cannot be read: it names {odd[0]!r:.80}, which is no file of its folder")
        return files
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    if (folder / "adapter_config.json").is_file():
        raise ModelError(f"{folder} {ADAPTER}")
    pickled, others = (sorted(p.name for p in folder.glob(form)) for form in ("*.bin", "*.safetensors"))
    hint = f"; {pickled[0]} is a pickle, which semspec does not open: {CONVERT}" if pickled else ""
    if others == ["consolidated.safetensors"]:
        hint = "; consolidated.safetensors has other names of tensors: take the files that are for transformers"
    elif others and any(PART.search(name) for name in others):
        hint = f" and no {INDEX}, which names its {len(others)} parts; fetch that file, too"
    elif others:
        hint = f" and no {INDEX}; if {others[0]} is all of the model, rename it"
    raise ModelError(f"{folder} has no model.safetensors{hint}")
