"""Triton's interpreter with the numpy we have: Triton 3.6 makes numbers of arrays in a way that numpy 2.4 refuses."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patched(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def allow_new_numpy() -> None:
    interpreter._patch_lang_tensor = _patched
