"""The probe: pooled states -> MLP -> calibrator -> a probability; on disk as safetensors and a card.

The network is that of SemanticSpec's released code: three hidden layers with ReLU, dropout 0.3 after the first two, and
a sigmoid. Ours: features are standardised first (numbers learnt with the weights), since layers of one model differ in
scale by orders of magnitude.
Where pooling is by attention, its queries are the head's as well. They begin at nothing, which makes a plain mean.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from semspec.errors import ModelError
from semspec.probe.calibrate import Calibrator
from semspec.probe.evidence import width_of
from semspec.probe.features import Features
from semspec.probe.former import current

FORMAT = 3
WEIGHTS, CARD = "probe.safetensors", "card.json"


def paper_widths(inputs: int) -> tuple[int, ...]:
    """The hidden layers of the released probes: for a target of width 5120, and for a draft of width 1536."""
    return (2048, 512, 256) if inputs >= 4096 else (1024, 512, 256)


class ProbeNetwork(nn.Module):
    """[B, features] -> logits [B]"""

    def __init__(
        self,
        inputs: int,
        widths: tuple[int, ...] | None = None,
        dropout: float = 0.3,
        queries: tuple[int, int] | None = None,
    ) -> None:
        """`queries`, how many and of what size, pool states by attention; None: pooling is not the head's business."""
        super().__init__()
        self.inputs, self.dropout = inputs, dropout
        self.widths = paper_widths(inputs) if widths is None else tuple(widths)
        self.shift: Tensor
        self.scale: Tensor
        self.register_buffer("shift", torch.zeros(inputs))
        self.register_buffer("scale", torch.ones(inputs))
        self.spread: Tensor | None
        self.asked = nn.Parameter(torch.zeros(queries)) if queries else None  # queries; the name on disk
        self.register_buffer("spread", torch.ones(queries) if queries else None)
        layers: list[nn.Module] = []
        for i, (size, width) in enumerate(zip((inputs, *self.widths), self.widths, strict=False)):
            layers += [nn.Linear(size, width), nn.ReLU()]
            if i < 2:
                layers.append(nn.Dropout(dropout))
        self.layers = nn.Sequential(*layers, nn.Linear((inputs, *self.widths)[-1], 1))

    def standardise(self, features: Tensor) -> None:
        """Take mean and spread from these features [N, inputs]."""
        self.shift = features.mean(0)
        self.scale = features.std(0, correction=0).clamp_min(1e-6)

    def standardise_states(self, states: Tensor) -> None:
        """Take the spread of single tokens' states [T, layers, size], which is what attention picks from."""
        self.spread = states.float().std(0, correction=0).clamp_min(1e-6)
        self.scale[: self.spread.numel()] = self.spread.flatten()

    @property
    def queries(self) -> Tensor | None:
        """[layers, size] for states as they are. A shift of the states would change no weight, a scale would."""
        if self.asked is None or self.spread is None:
            return None
        return self.asked / self.spread / self.asked.shape[1] ** 0.5

    def forward(self, features: Tensor) -> Tensor:
        return self.layers((features - self.shift) / self.scale)[:, 0]


@dataclass(eq=False)
class Probe:
    """Says how probable it is that its model, given the same context, writes a step of this meaning."""

    head: ProbeNetwork
    features: Features
    model: str  # fingerprint of the one model whose states it can read
    calibrator: Calibrator = field(default_factory=Calibrator)
    data: dict[str, Any] = field(default_factory=dict)  # what it was trained on
    metrics: dict[str, Any] = field(default_factory=dict)  # how well it does on problems that it was not trained on

    def __post_init__(self) -> None:
        self.head.eval().requires_grad_(False)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose states it wants."""
        return self.features.layers

    @torch.no_grad()
    def __call__(
        self, states: dict[int, Tensor], first_row: Tensor, counts: Tensor, evidence: Tensor | None = None
    ) -> Tensor:
        """layer -> [R, d], [B], [B] -> [B] in [0, 1]; no host synchronisation. See `features` for which rows."""
        return self.calibrator(self.head(self.features(states, first_row, counts, evidence, self.head.queries)))

    def to(self, device: torch.device | str) -> Probe:
        self.head.to(device)
        self.calibrator.to(device)
        return self

    @cached_property
    def digest(self) -> str:
        """Tells it from others, whatever folder it lies in."""
        digest = hashlib.sha256(repr((self.model, self.features)).encode())
        for tensor in (*self.head.state_dict().values(), *self.calibrator.state_dict().values()):
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    @property
    def card(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": self.model,
            "layers": list(self.layers),
            "pooling": self.features.pooling,
            "evidence": list(self.features.evidence),
            "inputs": self.head.inputs,
            "widths": list(self.head.widths),
            "dropout": self.head.dropout,
            "calibration": {"kind": self.calibrator.kind, "knots": self.calibrator.knots},
            "data": self.data,
            "metrics": self.metrics,
        }

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"head.{k}": v.contiguous() for k, v in self.head.state_dict().items()}
        tensors |= {f"calibrator.{k}": v.contiguous() for k, v in self.calibrator.state_dict().items()}
        save_file(tensors, folder / WEIGHTS)
        (folder / CARD).write_text(json.dumps(self.card, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @staticmethod
    def load(folder: str | Path, model: str | None, device: torch.device | str = "cpu") -> Probe:
        """A probe for the model of this fingerprint (`fingerprint(runner)`); one of another model is refused. None: it
        is not known which model it will be asked about, as behind a server."""
        folder = Path(folder)
        try:
            card = json.loads((folder / CARD).read_text(encoding="utf-8"))
            tensors = load_file(folder / WEIGHTS)
        except FileNotFoundError as error:
            raise ModelError(f"{folder} holds no probe: {error}; make one with `semspec probe fit`") from error
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelError(f"the probe in {folder} is damaged: {error}; make it again") from error
        if not isinstance(card, dict) or card.get("format") != FORMAT:
            raise ModelError(f"the probe in {folder} is not of format {FORMAT}; make it again with this version")
        if model is not None and card["model"] != model:
            raise ModelError(
                f"the probe in {folder} belongs to model {card['model']}, but this is {model}; "
                "a probe reads only the states it was trained on: fit one for this model"
            )
        features = Features(tuple(card["layers"]), card["pooling"], tuple(card["evidence"]))
        head = head_for(features, card["inputs"], tuple(card["widths"]), card["dropout"])
        calibrator = Calibrator(**card["calibration"])
        try:
            head.load_state_dict(_part(tensors, "head."))
            calibrator.load_state_dict(_part(tensors, "calibrator."))
        except RuntimeError as error:
            raise ModelError(f"the weights and the card in {folder} do not fit each other: {error}") from error
        return Probe(head, features, card["model"], calibrator, current(card["data"]), card["metrics"]).to(device)


def head_for(features: Features, inputs: int, widths: tuple[int, ...] | None, dropout: float) -> ProbeNetwork:
    """A head for what these features are, `inputs` numbers in all."""
    if not features.attends:
        return ProbeNetwork(inputs, widths, dropout)
    layers = len(features.layers)
    return ProbeNetwork(inputs, widths, dropout, (layers, (inputs - width_of(features.evidence)) // layers))


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
