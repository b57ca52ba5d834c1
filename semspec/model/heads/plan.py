"""What a draft head takes beside its target, known before either is loaded."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from semspec.errors import ModelError
from semspec.model.cache import kv_bytes_per_token
from semspec.model.config import Shape
from semspec.model.heads.config import HeadTensors, head_shape, option_of, read_json
from semspec.model.heads.eagle import head_folder
from semspec.model.memory_plan import MemoryPlan
from semspec.model.weights import Checkpoint

GROWS = 2  # a sequence's buffers are made twice as large when they are full


class HeadPlan(NamedTuple):
    memory: MemoryPlan
    states: int  # bytes of the target's states that a prefix cache remembers for each token


def head_plan(
    path: str | Path, target: MemoryPlan, shape: Shape, dtype: torch.dtype, name: str = ""
) -> HeadPlan | None:
    """Of a head for this target, which has its states in `dtype`; None: it cannot be read, which its loader says in
    words."""
    try:
        with Checkpoint(head_folder(path)) as checkpoint:
            tensors = HeadTensors(checkpoint)
            own = head_shape(partial(option_of, read_json(tensors.folder)), tensors)
            layers = max(1, tensors.size("fc.weight")[-1] // shape.width) if "fc.weight" in tensors else 1
            weights = checkpoint.parameters * dtype.itemsize
    except ModelError:
        return None
    states = layers * shape.width * dtype.itemsize
    buffers = own.width * dtype.itemsize + kv_bytes_per_token(own.num_layers, own.kv_heads, own.head_dim, dtype)
    name, per_token = f"head {name or Path(path).name}", states + GROWS * buffers
    memory = MemoryPlan(name, target.device, weights, per_token, target.slots, target.context, paged=target.paged)
    return HeadPlan(memory, states)
