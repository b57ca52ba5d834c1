"""Whether work on tensors may be replayed as a graph: it waits for nothing and changes nothing that it was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Results whose size or value the host would have to know.
ASKS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class NotReplayable(Exception):
    """What it does that a graph cannot."""


class ReplayCheck(TorchDispatchMode):
    """While it is entered, every operation of this thread is looked at before it is done."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.inputs = {t.untyped_storage().data_ptr() for t in inputs if t.numel()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if self._asks(func, name, args):
            raise NotReplayable(f"it waits for the device ({name})")
        if func._schema.is_mutable and self._writes(func, args, kwargs):
            raise NotReplayable(f"it changes what it was given ({name})")
        made = func(*args, **kwargs)
        if name in ("_to_copy", "copy_") and _crosses(name, args, made):
            raise NotReplayable("it copies between the host and the device")
        return made

    @staticmethod
    def _asks(func: Any, name: str, args: Any) -> bool:
        if name in ("index", "index_put", "index_put_"):  # by numbers it does not, by a mask it counts them first
            masks = (i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
            return any(masks) or any(i is not None and i.device != args[0].device for i in args[1])
        return any(tag in func.tags for tag in ASKS)

    def _writes(self, func: Any, args: Any, kwargs: Any) -> bool:
        written = [
            args[i] if i < len(args) else kwargs.get(one.name)
            for i, one in enumerate(func._schema.arguments)
            if one.alias_info is not None and one.alias_info.is_write
        ]
        return any(isinstance(w, Tensor) and w.untyped_storage().data_ptr() in self.inputs for w in written)


def _crosses(name: str, args: Any, made: Any) -> bool:
    source = args[1] if name == "copy_" else args[0]
    return isinstance(source, Tensor) and bool(source.device.type != made.device.type)
