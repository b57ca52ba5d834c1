"""Semantic probability, predicted: a small network from a model's hidden states to how likely it says a thing at all.

Here is what decoding needs of it: what a probe sees of a step (`features`, `evidence`), the network (`head`), its
calibration, and which model it belongs to (`identity`). How one is made is `semspec.probe_fit`.
"""

from semspec.probe.features import Features
from semspec.probe.identity import fingerprint, precision
from semspec.probe.probe import Probe

__all__ = ["Features", "Probe", "fingerprint", "precision"]
