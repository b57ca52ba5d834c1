"""The memory a server will need, added up before anything is loaded: a plan that load cannot exceed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from semspec.errors import BadRequest
from semspec.execute import Executor
from semspec.model.config import Shape
from semspec.model.runner import choose_context, choose_device, choose_dtype
from semspec.model.weights import locate
from semspec.pocket.shipped import SHIPPED

WORK = 4  # tensors of logits that are alive at once: the model's own, processed ones, probabilities, spare


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes on one device."""

    device: torch.device
    weights: int
    cache: int
    work: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.work

    def __str__(self) -> str:
        parts = f"weights {gib(self.weights)}, cache {gib(self.cache)}, work {gib(self.work)}"
        return f"{gib(self.total)} on {self.device} ({parts})"


def plan(
    target: str, draft: str | None, device: str, dtype: str, slots: int, context: int | None, draft_tokens: int
) -> Plan:
    """For a pair on one device, from its shapes and the size of its files."""
    place = choose_device(device)
    if target == "pocket" and draft is None:
        draft = "pocket-draft"
    weights = cache = work = longest = 0
    for name in filter(None, (target, draft)):
        folder = locate(SHIPPED.get(name, name))
        shape = Shape.read(folder)
        kind = choose_dtype(dtype, shape, place)
        longest = min(longest, shape.context) if longest else choose_context(context, shape)
        weights += stored(folder) * kind.itemsize // shape.dtype.itemsize
        cache += 2 * shape.depth * slots * shape.kv_heads * longest * shape.head_dim * kind.itemsize
        rows = max(Executor().budget, slots * (draft_tokens + 1))
        work += WORK * rows * shape.vocab * 4
    return Plan(place, weights, cache, work)


def check(planned: Plan) -> None:
    """Refuse to start what would run out of memory later."""
    there = available(planned.device)
    if there is not None and planned.total > there:
        raise BadRequest(
            f"this needs {planned}, and {gib(there)} are free; take fewer --slots, a smaller --context, "
            "or a smaller --max-draft-tokens"
        )


def stored(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def available(device: torch.device) -> int | None:
    """Free bytes, or None where nobody can say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
