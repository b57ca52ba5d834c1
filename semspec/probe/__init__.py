"""Semantic probability, predicted: a small network from a model's hidden states to how likely it says a thing at all.

P_M([s] | c), the probability that model M, after context c, writes a step that means what step s means, is costly to
sample. `collect` samples it, `cluster` and `label` turn samples into shares, `fit` trains a probe on the states that
predicted the steps. At run time only `features` and `head` are needed. Source: arXiv 2602.03708 and its released code.
"""

from semspec.probe.features import Features
from semspec.probe.fingerprint import fingerprint
from semspec.probe.head import Probe

__all__ = ["Features", "Probe", "fingerprint"]
