"""What draw.py and noise.py do, as Triton kernels. Imported when first used: Triton may not be installed."""

from semspec.sampling.kernels.filter import Filter
from semspec.sampling.kernels.race import choose, draw, keys

__all__ = ["Filter", "choose", "draw", "keys"]
