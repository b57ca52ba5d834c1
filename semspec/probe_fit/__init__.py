"""Fitting probes: sample what both models say next, sort it by meaning, count, train, measure.

P_M([s] | c), the probability that model M, after context c, writes a step that means what step s means, is costly to
sample. `collect` samples it, `cluster` and `label` turn samples into shares, `train` fits a probe to the states that
predicted the steps, `evaluate` and `risk` say how far it may be trusted. Decoding needs none of this: what a finished
probe consists of is in `semspec.probe`. Source: arXiv 2602.03708 and its released code.
"""
