"""The verifications of a run, made again with the vocabulary and the states of models of another size.

Rules are bound to random probes of the kind that the run had: a probe that sees hidden states gets those of the other
model, and hidden layers as the paper has for that size; one that sees logits only stays as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from semspec import verify
from semspec.errors import BadRequest
from semspec.model import ModelRunner
from semspec.probe.calibrate import Calibrator
from semspec.probe.evidence import width_of
from semspec.probe.features import Features
from semspec.probe.probe import Probe, head_for, paper_widths
from semspec.types import Draft, DraftSteps, Sampling, Score, ScoreOutput, VerifyRequest
from semspec.verify.base import Rule
from semspec.verify.decide import decide
from semspec.verify.step_rule import StepRule

Cards = dict[str, dict[str, Any]]  # field of a rule -> the card of its probe, without weights


def probe_cards(rule: Rule) -> Cards:
    """The kinds of probe that a bound rule has."""
    probes = {f.name: getattr(rule, f.name) for f in fields(rule) if isinstance(getattr(rule, f.name), Probe)}  # type: ignore[arg-type]
    keys = ("layers", "pooling", "evidence", "inputs", "widths", "calibration")
    return {name: {key: probe.card[key] for key in keys} for name, probe in probes.items()}


@dataclass
class Resources:
    """What rules ask of a pair (verify.RuleResources), made up for two models of noise."""

    runners: dict[str, ModelRunner]
    cards: Cards
    question_tokens: int = 0

    @property
    def vocab_size(self) -> int:
        return min(runner.vocab_size for runner in self.runners.values())

    def tokens_of(self, text: str) -> list[int]:
        return [int(text)] if text.isdigit() else [0] * self.question_tokens

    def next_turn(self, question: str) -> list[int]:
        return []  # `tokens_of` has all the words of a question

    def tokens_with(self, word: str) -> Tensor:
        return self.numbers()

    def numbers(self) -> Tensor:
        return torch.arange(self.vocab_size, device=self.runners["target"].device) < 10

    def draft_numbers(self) -> Tensor | None:
        return None

    def probes(self, folder: str) -> tuple[Probe, Probe]:
        return self._probe("target_probe"), self._probe("draft_probe")

    def judge_probe(self, folder: str) -> Probe:
        return self._probe("judge_probe")

    def _probe(self, name: str) -> Probe:
        if name not in self.cards:
            raise BadRequest("run.json does not say what probes the run had; run it again with this version")
        card, runner = self.cards[name], self.runners["draft" if name == "draft_probe" else "target"]
        n, evidence = len(card["layers"]), tuple(card["evidence"])
        layers = tuple(range(runner.num_layers - n + 1, runner.num_layers + 1))
        as_paper = tuple(card["widths"]) == paper_widths(card["inputs"])
        features = Features(layers, card["pooling"], evidence)
        inputs = n * runner.shape.width + width_of(evidence)
        head = head_for(features, inputs, None if as_paper else tuple(card["widths"]), 0.0)
        return Probe(head, features, "noise", Calibrator(**card["calibration"])).to(runner.device)


def _ends_of_chains(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Where candidates for a step end, by the parents of their tokens."""
    return (*(i for i, parent in enumerate(parents) if i and parent == -1), len(parents))


class Verification:
    """Verifies drafts of recorded sizes. What is decided does not matter, only what is computed."""

    def __init__(self, runners: dict[str, ModelRunner], sampling: Sampling, cards: dict[str, Cards]) -> None:
        self.runners, self.sampling, self.cards = runners, sampling, cards
        self.device, self.vocab_size = runners["target"].device, Resources(runners, {}).vocab_size
        (output,) = runners["target"].score([Score(runners["target"], 0, [1], 1)])
        self.dtype = output.logits.dtype
        self.protected = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
        self.noise: dict[tuple[int, torch.dtype], Tensor] = {}
        self.rules: dict[tuple[str, str], Rule] = {}  # by arm and name

    def verify(self, arm: dict[str, Any], name: str, rows: list[list[int]]) -> None:
        """One call of a rule of an arm, with its copy to the host."""
        rule = self._rule(arm, name, *rows[0][:2])
        requests = [self._request(rule, *row) for row in rows]
        decide(rule, requests)

    def _request(self, rule: Rule, drafted: int, scored: int, has_logits: int, *ends: int) -> VerifyRequest:
        """`ends`: of steps, or the parents of a tree draft."""
        tree = ends[:1] == (-1,)
        kinds = {model: runner.transformer.dtype for model, runner in self.runners.items()}
        widths = {model: runner.shape.width for model, runner in self.runners.items()}
        draft = Draft(
            [1] * drafted,
            self._noise(self.vocab_size, torch.float32, drafted) if has_logits else None,
            {layer: self._noise(widths["draft"], kinds["draft"], drafted) for layer in rule.draft_layers},
            DraftSteps(ends if not tree else _ends_of_chains(ends) if rule.unit == "step" else ()),
            parents=ends if tree else (),
        )
        states = {layer: self._noise(widths["target"], kinds["target"], scored) for layer in rule.layers}
        logits = self._noise(self.vocab_size, self.dtype, scored)
        return VerifyRequest(rule, draft, ScoreOutput(logits, states), self.sampling, 0, 0, protected=self.protected)

    def _noise(self, width: int, dtype: torch.dtype, rows: int) -> Tensor:
        """[rows, width] always of the same memory, which grows as needed"""
        known = self.noise.get((width, dtype))
        if known is None or len(known) < rows:
            known = self.noise[width, dtype] = torch.randn(rows, width, device=self.device).to(dtype)
        return known[:rows]

    def _rule(self, arm: dict[str, Any], name: str, drafted: int, scored: int) -> Rule:
        """The arm's own rule, the one by which it rewrites, or `exact`, which others fall back on."""
        if (arm["name"], name) not in self.rules:
            rule = verify.make(arm["verifier"])
            if name != rule.name:
                rewrite = rule.rewrite if isinstance(rule, StepRule) else ""
                rule = verify.make(rewrite if rewrite.partition(":")[0] == name else name)
            # Some rules have the target read words of theirs after the draft, one of them the draft once more.
            extra = scored - 1 - drafted
            bound = [rule.bind(self._resources(arm, words)) for words in {extra, max(0, extra - drafted)}]
            fitting = [r for r in bound if len(r.layout([1] * drafted)) == scored - 1]
            self.rules[arm["name"], name] = (fitting or bound)[0]
        return self.rules[arm["name"], name]

    def _resources(self, arm: dict[str, Any], words: int) -> Resources:
        return Resources(self.runners, self.cards.get(arm["name"], {}), words)
