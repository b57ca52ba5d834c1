"""What draw.py does, as Triton kernels. Imported when first used: Triton may not be installed."""

from semspec.sampling.kernels.filter import process
from semspec.sampling.kernels.race import choose

__all__ = ["choose", "process"]
