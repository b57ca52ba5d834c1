"""What draw.py and noise.py do, as Triton kernels. Imported when first used: Triton may not be installed."""

from semspec.sampling.kernels.filter import Filter, softmax
from semspec.sampling.kernels.race import choose, draw, keys
from semspec.sampling.kernels.top import MOST, largest

__all__ = ["MOST", "Filter", "choose", "draw", "keys", "largest", "softmax"]
