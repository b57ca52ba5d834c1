"""Triton's interpreter with what Triton 3.6 lacks: it makes numbers of arrays in a way that numpy 2.4 refuses, and it
rounds to fp8 without a carry into the exponent, which GPUs do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch, _convert = interpreter._patch_lang_tensor, interpreter._convert_float


def _patched(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _converted(numbers: Any, before: Any, after: Any, rounding: Any) -> Any:
    if after == tl.float8e4nv and before == tl.float32:
        found = torch.from_numpy(np.ascontiguousarray(numbers)).to(torch.float8_e4m3fn)
        return found.view(torch.uint8).numpy()
    return _convert(numbers, before, after, rounding)


def allow_new_numpy() -> None:
    interpreter._patch_lang_tensor, interpreter._convert_float = _patched, _converted
