"""Devices, dtypes and context lengths from what a user asks for ("auto", "cuda:1", "int8")."""

from __future__ import annotations

import torch

from semspec.errors import BadRequest

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,  # weights only; everything else is float32, attention float64
}


def choose_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise BadRequest(f"device {device!r} is not known to torch; give auto, cpu, cuda or cuda:N") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise BadRequest(f"device {device!r} was asked for, but torch finds no CUDA device here; give cpu or auto")
    return chosen


def choose_dtype(dtype: str | torch.dtype, own: torch.dtype, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's own type on a GPU; on a CPU float32, which is exact and usually no slower."""
    if dtype == "auto":
        return own if device.type == "cuda" else torch.float32
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise BadRequest(f"dtype {dtype!r} is not known; give auto, {', '.join(DTYPES)}")
    chosen = DTYPES[dtype] if isinstance(dtype, str) else dtype
    if chosen == torch.int8 and device.type != "cpu":
        raise BadRequest(f"dtype int8 is for CPUs, and the device is {device}; give auto or bfloat16")
    return chosen


def choose_context(context: int | None, longest: int) -> int:
    """The tokens a slot can hold. By default at most 4096, since every slot's memory is taken at once."""
    if context is None:
        return min(longest, 4096)
    if not 1 < context <= longest:
        raise BadRequest(f"context is {context}; this checkpoint takes 2 to {longest} tokens")
    return context
