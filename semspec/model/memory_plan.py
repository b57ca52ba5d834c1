"""How much memory a model will take, reported and checked before any of it is taken."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from semspec.errors import ModelError
from semspec.model.cache import kv_bytes_per_token
from semspec.model.config import Shape
from semspec.model.cpu_gemm import GemmPaths
from semspec.model.graph_memory import graph_bytes
from semspec.model.kv_fp8 import FP8
from semspec.model.page_pool import own_window, page_of, pages_of
from semspec.model.placement import Precision
from semspec.model.quantised import group_of

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
POOL = 0.97  # of the memory that is left, where a pool takes all there is: prompts need some while they are read


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one model. All of it is taken when the model is loaded, but for some of `graphs`."""

    name: str
    device: torch.device
    weights: int  # bytes
    per_token: int  # bytes of keys and values
    slots: int
    context: int
    read: int | None = None  # bytes of weights that a pass reads; None: that depends on the text
    graphs: int = 0  # bytes of a GPU's buffers and graphs, at most; see graph_memory.py
    transposed: int = 0  # bytes of the down projections that a sparse plan keeps a second time
    paged: bool = False  # slots take room as they grow, from one pool
    tokens: int | None = None  # of that pool, if not as many as all slots can hold
    windows: tuple[tuple[int, int], ...] = ()  # (tokens, bytes of `per_token`) of layers with a window
    states: int = 0  # bytes of a slot's recurrent states

    @staticmethod
    def of(
        name: str,
        shape: Shape,
        device: torch.device,
        precision: Precision,
        slots: int,
        context: int,
        transposed_layers: int = 0,
        stored: int | None = None,
    ) -> MemoryPlan:
        """Of a model that semspec runs itself; `stored`: bytes of a checkpoint that is kept as it is. A sparse plan
        that leaves out channels in `transposed_layers` layers needs a transposed copy of their down projections, where
        passes are fused."""
        dtype, table = precision.dtype, shape.vocab_size * shape.width
        embedding = table * dtype.itemsize
        each, head = _bytes_per_weight(precision, device)
        # A pass looks up a few rows of the embedding, and reads all of it only where it is also the head.
        read = int((shape.parameters - table * (1 if shape.tied else 2)) * each + table * head)
        weights = read + (0 if shape.tied and precision.weights == "plain" else embedding)
        if stored is not None:
            both = shape.tied and device.type != "cpu"  # there the head is another matrix than the embedding
            weights, read = stored, stored - (0 if both else embedding)
        if precision.weights == "plain" and GemmPaths.of(shape.parameters, device, dtype).packed:
            weights += read  # a second copy of all that a pass reads
        attention = precision.attention(device, shape.mixture is not None)
        stored_as = FP8 if precision.fp8_cache else attention
        per_token = kv_bytes_per_token(shape.num_layers, shape.kv_heads, shape.head_dim, stored_as)
        graphs = graph_bytes(shape, device, dtype.itemsize, slots, context)
        fused = graphs > 0 and shape.mixture is None
        transposed = transposed_layers * shape.width * shape.ffn * dtype.itemsize if fused else 0
        reads = read if shape.mixture is None else None  # experts are read as tokens choose them
        paged = device.type == "cuda"
        counts = Counter(spec.window for spec in shape.attention_specs if spec.window is not None)
        windows = tuple((window, per_token // shape.num_layers * n) for window, n in sorted(counts.items()))
        return MemoryPlan(
            name, device, weights, per_token, slots, context, reads, graphs, transposed, paged, windows=windows
        )

    @property
    def held(self) -> int:
        """Tokens that there is memory for; a pool has a page to spare for each slot."""
        if not self.paged:
            return self.slots * self.context
        page = page_of(self.context)
        return page * pages_of(self.tokens, self.slots, self.context, page)

    @property
    def kv(self) -> int:
        if not self.paged:
            return self.per_token * self.held + self.states * self.slots
        page, whole, kept = page_of(self.context), self.held, self._kept_windows
        return (self.per_token - sum(each for _, each in kept)) * whole + sum(
            each * page * pages_of(self.tokens, self.slots, self.context, page, window) for window, each in kept
        )

    @property
    def _kept_windows(self) -> list[tuple[int, int]]:
        """Those of layers that keep their window only."""
        page = page_of(self.context) if self.paged else self.context
        return [w for w in self.windows if self.paged and own_window(w[0], self.slots, self.context, page) is not None]

    @property
    def total(self) -> int:
        return self.weights + self.transposed + self.kv + self.graphs

    def __str__(self) -> str:
        tokens = f"{self.slots} x {self.context} tokens"
        if self.tokens is not None:
            tokens = f"{self.held} tokens, in {self.slots} slots of at most {self.context},"
        windows = " and ".join(str(window) for window, _ in self._kept_windows)
        tokens += f" (of the last {windows} in layers with a window)" if windows else ""
        if not self.paged and any(window < self.context for window, _ in self.windows):
            tokens += " (all of them in layers with a window, too)"
        tokens += f" and {self.slots} x {size(self.states)} of states" if self.states else ""
        text = f"{self.name} on {self.device}: weights {size(self.weights)} + KV of {tokens} {size(self.kv)}"
        text += f" + transposed projections {size(self.transposed)}" if self.transposed else ""
        return text + (f" + graphs up to {size(self.graphs)}" if self.graphs else "")


def _bytes_per_weight(precision: Precision, device: torch.device) -> tuple[float, float]:
    """(of a layer's matrices, of the head)"""
    if precision.weights in ("plain", "stored"):
        return precision.dtype.itemsize, precision.dtype.itemsize
    if precision.weights == "int4":  # with two bytes for each group's scale and zero
        return 0.5 + 4 / group_of(device), 1.0
    return 1.0, 1.0


def describe(plans: Sequence[MemoryPlan]) -> str:
    """One line about all models."""
    parts = "; ".join(str(plan) for plan in plans)
    frees = {plan.device: available(plan.device) for plan in plans}
    free = ", ".join(f"{size(n)} free on {device}" for device, n in frees.items() if n is not None)
    return f"{parts}; {size(sum(plan.total for plan in plans))} in all" + (f", {free}" if free else "")


def fitted(plans: Sequence[MemoryPlan], tokens: int | None = None) -> list[MemoryPlan]:
    """With as many `tokens` in every pool; None: where slots cannot all be full, as many as there is memory for."""
    if tokens is not None:
        return [replace(plan, tokens=tokens) if plan.paged else plan for plan in plans]
    made = list(plans)
    for device in {plan.device for plan in plans}:
        here, free = [plan for plan in plans if plan.device == device], available(device)
        if free is None or sum(plan.total for plan in here) <= free or not all(plan.paged for plan in here):
            continue
        left = int(POOL * (free - sum(plan.total - plan.kv for plan in here)))
        most = max(plan.slots * (plan.context + page_of(plan.context)) for plan in here)
        # The largest pool that fits: none takes less memory for more tokens.
        pool = bisect_right(range(most), left, key=lambda n: sum(replace(plan, tokens=n).kv for plan in here)) - 1
        if pool > max(plan.context for plan in here):
            made = [replace(plan, tokens=pool) if plan.device == device else plan for plan in made]
    return made


def check(plans: Sequence[MemoryPlan]) -> None:
    """Refuse what cannot fit, saying by how much and what would."""
    for device in {plan.device for plan in plans}:
        here = [plan for plan in plans if plan.device == device]
        free = available(device)
        needed = sum(plan.total for plan in here)
        if free is not None and needed > free:
            raise ModelError(f"{describe(here)}: that is {size(needed - free)} too much; {_what_would_fit(here, free)}")


def _what_would_fit(plans: list[MemoryPlan], free: int) -> str:
    graphs = sum(plan.graphs for plan in plans)  # fewer slots or less context need no more
    left = free - sum(plan.total - plan.kv for plan in plans)
    alone = [replace(plan, slots=1, tokens=None) for plan in plans]
    slots, each = max(plan.slots for plan in plans), max(sum(plan.kv for plan in alone), 1)
    if left >= each:
        return f"slots={min(left // each, slots)} would fit"
    left -= sum(plan.states for plan in plans)
    tokens = left // max(sum(plan.per_token for plan in plans), 1) - max(plan.held - plan.context for plan in alone)
    if tokens >= 256:
        return f"slots=1, context={tokens // 256 * 256} would fit"
    what = "weights and graphs leave" if graphs else "the weights alone leave"
    fewer = "fewer slots, " if graphs and slots > 1 else ""
    narrower = "a narrower dtype (fp8, int8, int4) or "
    return f"{what} no memory for a text; take {fewer}{narrower}a smaller model"


def available(device: torch.device) -> int | None:
    """Bytes that can still be taken; None where that cannot be known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = MEMINFO.read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    try:  # a container may have less than its machine
        limit = int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return max(0, min(free, limit))


def size(count: int) -> str:
    """Bytes, readable."""
    number = float(count)
    for unit in ("bytes", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}"
        number /= 1000
    return f"{number:.2f} GB"
