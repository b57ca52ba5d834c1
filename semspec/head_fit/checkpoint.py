"""A training on the disk, and what may be different when it goes on: more steps and other numbers of texts, no more.

The rows of a head's output matrix belong to tokens that were chosen from the texts of the first run. Chosen anew, from
more texts, they would be others, and a trained head would say nothing but nonsense. So they are kept here.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semspec.errors import BadRequest
from semspec.head_fit.module import HeadSize
from semspec.head_fit.texts import Text

AGAIN = "give the same, or another --out"


@dataclass(frozen=True)
class Training:
    layers: tuple[int, ...]  # of the target
    steps: int = 2000
    batch: int = 8  # texts
    length: int = 512  # tokens of a text that are used at a time
    depth: int = 5  # draft steps
    rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "depth"):
            if getattr(self, name) < 1:
                raise BadRequest(f"{name} is {getattr(self, name)}; give 1 or more")
        if self.length < self.depth + 3 or not self.rate > 0:
            raise BadRequest(
                f"length {self.length}, rate {self.rate}: give some tokens more than depth, a rate above 0"
            )


@dataclass(slots=True)
class Checkpoint:
    how: Training
    size: HeadSize
    ids: Tensor  # the target's tokens that the head can draft
    target: str  # its fingerprint
    vocab: int  # of the target
    texts: Tensor  # [N] a digest of each that was used so far, those held out included
    done: int  # steps
    losses: list[float]
    module: dict[str, Any]
    optimiser: dict[str, Any]

    def save(self, folder: Path) -> None:
        whole = {f.name: getattr(self, f.name) for f in fields(self)}
        new = folder / "training.new"
        torch.save(whole | {"how": asdict(self.how), "size": asdict(self.size)}, new)
        new.replace(_file(folder))

    @staticmethod
    def read(folder: Path, device: torch.device | str = "cpu") -> Checkpoint | None:
        """None: nothing has begun."""
        file = _file(folder)
        if not file.exists():
            return None
        try:
            whole = torch.load(file, map_location=device, weights_only=True)
        except Exception as error:  # torch raises many kinds here
            raise BadRequest(f"{file} cannot be read: {error}; delete it to begin again") from error
        if not isinstance(whole, dict) or (missing := [f.name for f in fields(Checkpoint) if f.name not in whole]):
            what = f"has no {', '.join(missing)}" if isinstance(whole, dict) else "is something else"
            raise BadRequest(f"{file} {what}: it is no training of this version; delete it to begin again")
        whole |= {"how": Training(**whole["how"]), "size": HeadSize(**whole["size"])}
        return Checkpoint(**{f.name: whole[f.name] for f in fields(Checkpoint)})

    def refuse_options(self, how: Training, vocab: int | None, ffn: int | None, folder: Path) -> None:
        """Other options than it began with. No layers and None mean those that it has."""
        begun = asdict(self.how) | {"draft-vocab": len(self.ids), "ffn": self.size.ffn}
        given = asdict(how) | {"draft-vocab": vocab and min(vocab, self.vocab), "ffn": ffn}
        changed = [k for k in begun if k != "steps" and given[k] not in (None, (), begun[k])]
        if changed:
            was = ", ".join(f"{k} {begun[k]}" for k in changed)
            raise BadRequest(f"{_file(folder)} is of a training with {was}; {AGAIN}")
        if how.steps < self.done:
            raise BadRequest(
                f"{_file(folder)} has {self.done} steps behind it and {how.steps} are asked for; give {self.done} or "
                "more, or another --out"
            )

    def refuse_target(self, target: str, folder: Path) -> None:
        if target != self.target:
            raise BadRequest(f"{_file(folder)} is of a training for another target ({self.target}); {AGAIN}")

    def refuse_others(self, size: HeadSize, ids: Tensor, texts: Tensor, folder: Path) -> None:
        """What would make its weights mean something else, or its held-out texts be known to it."""
        if size != self.size or not torch.equal(ids.cpu(), self.ids.cpu()):
            raise BadRequest(f"{_file(folder)} is of a head of another size or with other tokens; {AGAIN}")
        both = min(len(texts), len(self.texts))
        if not torch.equal(texts[:both], self.texts[:both].cpu()):
            raise BadRequest(
                f"{_file(folder)} is of a training with other texts than those in the folder now; put texts.jsonl "
                "back, or give another --out"
            )


def digests(texts: Sequence[Text]) -> Tensor:
    """[N] a number for each text"""
    return torch.tensor([_digest(text) for text in texts], dtype=torch.int64)


def _digest(text: Text) -> int:
    whole = array("q", [text.prompt, *text.tokens]).tobytes()
    return int.from_bytes(hashlib.blake2b(whole, digest_size=8).digest(), "big", signed=True)


def _file(folder: Path) -> Path:
    return folder / "training.pt"
