"""Probes from weights that others trained: a PyTorch state dict of linear layers fc1, fc2, ..., as the released code of
SemanticSpec saves them.

Such a file is a pickle. It is read with `weights_only=True`, which builds tensors and plain containers and runs no code
of the file's; then names and shapes are checked against the model that the probe is said to belong to.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import torch
from torch import Tensor, nn

from semspec.errors import ModelError
from semspec.probe import Features, Probe, fingerprint
from semspec.probe.probe import ProbeNetwork
from semspec.types import Runner, Score

NAME = re.compile(r"fc([1-9][0-9]{0,3})\.(weight|bias)\Z")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def import_probe(file: Path, runner: Runner, pooling: str = "mean") -> Probe:
    """The probe in this file, as one of this model's last states."""
    features = Features((runner.num_layers,), pooling)
    tensors = _read(file)
    layers = _layers(file, tensors)
    inputs, widths = layers[0][0].shape[1], tuple(len(bias) for _, bias in layers[:-1])
    if inputs != (width := _width(runner)):
        raise ModelError(
            f"{file} reads states of width {inputs}, but this model's have {width}; give the files in the order "
            "target, draft, and the models that they were trained for"
        )
    head = ProbeNetwork(inputs, widths)
    linear = [layer for layer in head.layers if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for own, (weight, bias) in zip(linear, layers, strict=True):
            own.weight.copy_(weight)
            own.bias.copy_(bias)
    data = {"imported": {"file": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}}
    return Probe(head, features, fingerprint(runner), data=data)


def _width(runner: Runner) -> int:
    """Of its last states."""
    slot = runner.acquire()
    try:
        (rows,) = runner.score([Score(runner, slot, [0], logits_to_keep=1, layers=(runner.num_layers,))])
        return rows.hidden[runner.num_layers].shape[-1]
    finally:
        runner.release(slot)


def _read(file: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ModelError(f"{file} does not exist; give a file of weights") from None
    except Exception as error:  # a damaged pickle may fail in any way
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ModelError(
            f"{file} cannot be read as plain weights, and nothing else is read from such a file: {why}"
        ) from error
    if not isinstance(found, dict) or not found:
        raise ModelError(f"{file} holds a {type(found).__name__}; give a state dict, as torch.save(model.state_dict())")
    return found


def _plain(tensor: Tensor) -> bool:
    """Whether it is floats in memory. One that is expanded from fewer than it has may be larger than any memory."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type != "cpu" or tensor.dtype not in DTYPES:
        return False
    return 0 < tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _layers(file: Path, tensors: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of each layer, in order; refused unless they make a chain that ends in one number."""
    numbers = set()
    for name, tensor in tensors.items():
        match = NAME.match(name) if isinstance(name, str) else None
        if match is None or not isinstance(tensor, Tensor):
            raise ModelError(
                f"{file} has an entry {str(name)[:60]!r}; a probe has fc1.weight, fc1.bias, fc2.weight, ..."
            )
        if not _plain(tensor):
            raise ModelError(f"{name} of {file} is no plain tensor of floats; save the probe's layers as they are")
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{name} of {file} has entries that are no finite numbers")
        numbers.add(int(match[1]))
    depth = len(numbers)
    if numbers != set(range(1, depth + 1)) or len(tensors) != 2 * depth:
        raise ModelError(f"{file} lacks some of its layers: it has {', '.join(sorted(tensors))}")
    layers = [(tensors[f"fc{i}.weight"], tensors[f"fc{i}.bias"]) for i in range(1, depth + 1)]
    size = layers[0][0].shape[-1] if layers[0][0].dim() == 2 else 0
    for i, (weight, bias) in enumerate(layers, 1):
        if weight.dim() != 2 or weight.shape[1] != size or bias.shape != weight.shape[:1]:
            shapes = f"{list(weight.shape)} and {list(bias.shape)}"
            raise ModelError(f"fc{i} of {file} has shapes {shapes}, which do not follow from {size} inputs")
        size = weight.shape[0]
    if size != 1:
        raise ModelError(f"{file} ends in {size} numbers; a probe gives one")
    return layers
