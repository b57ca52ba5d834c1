"""What a pass on a GPU is made of besides matrix products. `Kernels` is Triton's, `References` the same in PyTorch.

Triton is imported only when its kernels are asked for: there is none on machines without a GPU.
"""

from __future__ import annotations

from typing import Any


def triton_kernels() -> Any:
    """A namespace of attend, add_norm, turn_and_keep and gated, on a GPU."""
    from types import SimpleNamespace

    from semspec.model.kernels import attention, small

    return SimpleNamespace(
        attend=attention.attend, add_norm=small.add_norm, turn_and_keep=small.turn_and_keep, gated=small.gated
    )
