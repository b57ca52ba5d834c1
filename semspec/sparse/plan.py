"""What verification may skip, for one model: a folder with plan.json and plan.safetensors."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from semspec.errors import BadRequest, cause
from semspec.sparse.attention import AttentionPlan
from semspec.sparse.experts import ExpertsPlan
from semspec.sparse.ffn import FfnPlan

VERSION = 1
NUMBERS, TENSORS = "plan.json", "plan.safetensors"


@dataclass(frozen=True)
class SparsePlan:
    """Each part is off where it is None."""

    model: str = ""  # fingerprint of the model it was calibrated for; empty: any with the right sizes
    attention: AttentionPlan | None = None
    ffn: FfnPlan | None = None
    experts: ExpertsPlan | None = None
    refresh: int = 0  # sparse passes of a sequence before a dense one recomputes them; 0: never
    made: dict[str, Any] = field(default_factory=dict)  # how it was calibrated, for information
    seen: dict[str, Tensor] = field(default_factory=dict)  # what calibration measured, for plots

    def __post_init__(self) -> None:
        if self.refresh < 0:
            raise BadRequest(f"refresh is {self.refresh}; give a number of passes, or 0 for never")

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"seen.{name}": tensor for name, tensor in self.seen.items()}
        numbers: dict[str, Any] = {"version": VERSION, "model": self.model, "refresh": self.refresh, "made": self.made}
        numbers["attention"] = asdict(self.attention) if self.attention else None
        numbers["ffn"] = numbers["experts"] = None
        if self.ffn:
            numbers["ffn"] = {"by": self.ffn.by, "sparsity": self.ffn.sparsity, "absolute": self.ffn.absolute}
            tensors["ffn.thresholds"] = self.ffn.thresholds
        if self.experts:
            numbers["experts"] = {"most": self.experts.most}
            tensors["experts.betas"] = self.experts.betas
        (folder / NUMBERS).write_text(json.dumps(numbers, indent=2) + "\n")
        save_file({name: tensor.float().contiguous().cpu() for name, tensor in tensors.items()}, folder / TENSORS)

    @staticmethod
    def load(folder: Path) -> SparsePlan:
        if not (folder / NUMBERS).is_file():
            raise BadRequest(f"{folder} has no {NUMBERS}; make a plan with `semspec sparse calibrate --out {folder}`")
        try:
            numbers = json.loads((folder / NUMBERS).read_text())
            if numbers["version"] != VERSION:
                raise BadRequest(f"{folder} is a sparse plan of version {numbers['version']}; make it again")
            tensors = load_file(folder / TENSORS)
            attention, ffn, experts = numbers["attention"], numbers["ffn"], numbers["experts"]
            if attention and attention["anchors"] is not None:
                attention["anchors"] = tuple(attention["anchors"])
            return SparsePlan(
                model=numbers["model"],
                attention=AttentionPlan(**attention) if attention else None,
                ffn=FfnPlan(tensors["ffn.thresholds"], **ffn) if ffn else None,
                experts=ExpertsPlan(tensors["experts.betas"], **experts) if experts else None,
                refresh=numbers["refresh"],
                made=numbers["made"],
                seen={name.removeprefix("seen."): t for name, t in tensors.items() if name.startswith("seen.")},
            )
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise BadRequest(f"the sparse plan in {folder} is damaged: {cause(error)}; make it again") from error

    def __str__(self) -> str:
        parts = []
        if self.attention:
            a = self.attention
            anchors = "" if a.anchors is None else f", {len(a.anchors)} anchors"
            above = max(a.dense_below, a.pays_from)
            means = "" if a.rest == "nothing" else f", others by their {a.rest}"
            parts.append(f"attention rho {a.rho:g} above {above}, blocks of {a.block}{anchors}{means}")
        if self.ffn:
            parts.append(str(self.ffn))
        if self.experts:
            parts.append(f"up to {self.experts.most} experts fewer")
        if self.refresh:
            parts.append(f"refreshed after {self.refresh}")
        return "; ".join(parts) or "nothing left out"
