"""A pair for rules to be bound to, without models."""

from __future__ import annotations

import torch

from semspec.probe import evidence
from semspec.probe.features import Features
from semspec.probe.head import Head, Probe, head_for

WIDTH = 8


class Binding:
    """Spells by letters (every digit another token below 50) and has untrained probes for states of width 8."""

    def __init__(self, remark: list[int] | None = None, judge: Features | None = None) -> None:
        self.remark = remark
        self._sees = judge or Features((2,), evidence=evidence.OF_TARGET)
        torch.manual_seed(0)
        self._probes = tuple(Probe(Head(WIDTH, (4,)), Features((layer,)), "fake") for layer in (2, 1))

    def tokens_of(self, text: str) -> list[int]:
        return [ord(letter) % 50 for letter in text] if self.remark is None else list(self.remark)

    def probes(self, folder: str) -> tuple[Probe, Probe]:
        target, draft = self._probes
        return target, draft

    def judge(self, folder: str) -> Probe:
        inputs = WIDTH * len(self._sees.layers) + evidence.width_of(self._sees.evidence)
        return Probe(head_for(self._sees, inputs, (4,), 0.0), self._sees, "fake", data={"least": 0.25})

    def numbers(self) -> torch.Tensor:
        return torch.arange(50) >= 48
