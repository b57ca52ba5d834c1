"""Devices, dtypes and context lengths from what a user asks for ("auto", "cuda:1", "int8")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Concatenate, Literal, ParamSpec, Protocol, TypeVar

import torch

from semspec.errors import BadRequest

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTISED = ("fp8", "int8", "int4")
FP8_CARD = (8, 9)  # compute capability from which a GPU converts e4m3
Weights = Literal["plain", "stored", "blocks", "fp8", "int8", "int4"]


@dataclass(frozen=True, slots=True)
class Precision:
    """How a model computes, and how its matrices are stored."""

    dtype: torch.dtype  # of activations, and of everything that is not quantised
    weights: Weights = "plain"  # stored: as the checkpoint has them; blocks: so on a CPU, and others in a byte each
    fp8_cache: bool = False  # how keys and values are stored

    @staticmethod
    def choose(
        dtype: str | torch.dtype, own: torch.dtype, device: torch.device, default: Weights = "plain"
    ) -> Precision:
        """`auto` is the checkpoint's own type on a GPU; on a CPU float32, which is exact and usually no slower.
        `default`: how weights are kept then (weights.default_weights)."""
        gpu = device.type != "cpu"
        if isinstance(dtype, torch.dtype):
            return Precision(dtype)
        if dtype == "auto":
            return Precision(own if gpu else torch.float32, default)
        if dtype in FLOATS:
            return Precision(FLOATS[dtype])
        if dtype in QUANTISED:
            half = own if own.itemsize == 2 else torch.bfloat16
            return Precision(half if gpu else torch.float32, dtype)  # type: ignore[arg-type]
        raise BadRequest(f"dtype {dtype!r} is not known; give auto, {', '.join([*FLOATS, *QUANTISED])}")

    def with_cache(self, kv_dtype: str, device: torch.device) -> Precision:
        """`kv_dtype`: how keys and values are stored, fp8 or, with auto, as they are computed."""
        if kv_dtype == "auto":
            return self
        if kv_dtype != "fp8":
            raise BadRequest(f"kv_dtype {kv_dtype!r} is not known; give auto or fp8")
        if device.type == "cpu":
            raise BadRequest("kv_dtype fp8 is for GPUs, where long texts take the time of reading them; leave it out")
        if torch.version.hip or torch.cuda.get_device_capability(device) < FP8_CARD:
            raise BadRequest(
                f"kv_dtype fp8 needs a newer GPU of NVIDIA's than {torch.cuda.get_device_name(device)}; leave it out"
            )
        return replace(self, fp8_cache=True)

    def attention(self, device: torch.device, mixture: bool) -> torch.dtype:
        """Of keys and values. On a CPU, products with int8 and int4 round their inputs, which can turn a difference in
        a float's last bit into a large one, and the last bits of attention depend on the number of tokens in a pass. In
        double precision a mixture of experts writes the same with and without drafts; other models are computed by
        `NumpyDecoder`, where a row does not depend on the others."""
        doubled = device.type == "cpu" and self.weights in ("int8", "int4", "blocks") and mixture
        return torch.float64 if doubled else self.dtype


Args = ParamSpec("Args")
Result = TypeVar("Result")


class HasDevice(Protocol):
    @property
    def device(self) -> torch.device: ...


Runs = TypeVar("Runs", bound=HasDevice)


def choose_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return numbered(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise BadRequest(f"device {device!r} is not known to torch; give auto, cpu, cuda or cuda:N") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise BadRequest(f"device {device!r} was asked for, but torch finds no CUDA device here; give cpu or auto")
    try:
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:  # torch was built without it, or there are fewer of them
        raise BadRequest(
            f"device {str(device)!r} was asked for, but torch cannot use it here; give auto, cpu, cuda or cuda:N"
        ) from error
    return numbered(chosen)


def numbered(device: torch.device) -> torch.device:
    """With the number of the GPU that is meant, as tensors on it have: "cuda" and "cuda:0" are two devices to `==`."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


def choose_context(context: int | None, longest: int) -> int:
    """The tokens a slot can hold. By default at most 4096, since every slot's memory is taken at once."""
    if context is None:
        return min(longest, 4096)
    if not 1 < context <= longest:
        raise BadRequest(f"context is {context}; this checkpoint takes 2 to {longest} tokens")
    return context


def on_its_device(method: Callable[Concatenate[Runs, Args], Result]) -> Callable[Concatenate[Runs, Args], Result]:
    """A runner's method with its own GPU as the current one: kernels are launched on the current one, wherever their
    tensors are, and a draft may have another than its target."""

    @wraps(method)
    def run(self: Runs, *args: Args.args, **options: Args.kwargs) -> Result:
        if self.device.type != "cuda":
            return method(self, *args, **options)
        with torch.cuda.device(self.device):
            return method(self, *args, **options)

    return run
