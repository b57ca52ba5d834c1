"""Resources to bind rules to, without models."""

from __future__ import annotations

import torch

from semspec.probe import evidence
from semspec.probe.features import Features
from semspec.probe.probe import Probe, head_for

WIDTH = 8

OF_TARGET = tuple(group for group in evidence.GROUPS if group != "draft")


class RuleResources:
    """One token per letter (below 50, a different one for every digit), untrained probes for states of width 8."""

    def __init__(
        self, remark: list[int] | None = None, judge: Features | None = None, target: Features | None = None
    ) -> None:
        self.remark = remark
        self._judge_features = judge or Features((2,), evidence=OF_TARGET)
        torch.manual_seed(0)
        features = (target or Features((2,)), Features((1,)))
        self._probes = tuple(Probe(head_for(some, inputs(some), (4,), 0.0), some, "fake") for some in features)

    def tokens_of(self, text: str) -> list[int]:
        return [ord(letter) % 50 for letter in text] if self.remark is None else list(self.remark)

    def next_turn(self, question: str) -> list[int]:
        return [7, *self.tokens_of(question), 8]

    def tokens_with(self, word: str) -> torch.Tensor:
        return torch.arange(50) == ord(word[0]) % 50

    def probes(self, folder: str) -> tuple[Probe, Probe]:
        target, draft = self._probes
        return target, draft

    def judge_probe(self, folder: str) -> Probe:
        head = head_for(self._judge_features, inputs(self._judge_features), (4,), 0.0)
        return Probe(head, self._judge_features, "fake", data={"threshold": 0.25})

    def numbers(self) -> torch.Tensor:
        return torch.arange(50) >= 48

    def draft_numbers(self) -> None:
        return None


def inputs(features: Features) -> int:
    return WIDTH * len(features.layers) + evidence.width_of(features.evidence)
