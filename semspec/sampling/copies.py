"""Small copies between the host and a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(numbers: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Without waiting for the device: a copy from memory that is not pinned waits for all that is under way."""
    host = torch.from_numpy(numbers)
    if device.type == "cuda":
        host = host.pin_memory()  # torch keeps it until the copy is made
    return host.to(device, non_blocking=True)
