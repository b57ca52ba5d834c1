"""Rules on a GPU: captured into graphs by shape, so that a verification costs its arithmetic and not its launches.

Rules are pure and never ask the host, so what they do depends on sizes alone. A batch is laid into memory at fixed
addresses, rounded up to a few sizes (see `Layout`); decisions come back as one table. A shape is captured when it has
been met a few times, and the graphs of shapes not met for long make room. A rule that cannot be replayed (it waits for
the device, or changes what it was given) is called every time instead, which is logged once; so is one that says so
itself (`Rule.captured`), and all rules on a CPU.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from semspec.loop.replayable import NotReplayable, Watch
from semspec.model.graph_memory import RULE_BUFFERS, RULE_ROWS
from semspec.model.graphs import GraphCache, GraphLauncher
from semspec.types import Verdict, VerifyRequest
from semspec.verify.base import Rule
from semspec.verify.collate import Layout, Packed, Part, assemble, collate, join_segments, tables, tensor_parts
from semspec.verify.decide import decide

log = logging.getLogger(__name__)

SEQUENCES = 32  # at most. They are never padded: a sequence without rows of its own would share another's.
TOKENS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
ROWS = (*range(1, 11), *range(12, 21, 2), *range(24, 41, 4), *range(48, 81, 8), *range(96, RULE_ROWS + 1, 16))
SHAPES = 64  # that are remembered, and graphs at most
PATIENCE = 2  # verifications of a shape before it is captured: a capture takes as long as ten of them
TABLES = 8 * SEQUENCES * (3 * TOKENS[-1] + 9) + 16 * ROWS[-1]  # bytes of numbers and options, at most


def graphs_on(device: torch.device) -> GraphLauncher | None:
    return GraphCache(device, SHAPES) if device.type == "cuda" else None


class RuleGraphs:
    def __init__(self, launcher_on: Callable[[torch.device], GraphLauncher | None] = graphs_on) -> None:
        self._launcher_on = launcher_on
        self._launchers: dict[torch.device, GraphLauncher | None] = {}
        self._buffers: dict[Hashable, Tensor] = {}
        self._seen: OrderedDict[Hashable, int] = OrderedDict()  # how often a shape was met, the latest last
        self._plain: OrderedDict[Hashable, None] = OrderedDict()  # shapes of rules that cannot be replayed
        self._told: set[str] = set()

    def verify(self, rule: Rule, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        """One verdict per draft. The drafts share the rule, and what `collate` wants to be shared."""
        if requests[0].draft.parents:  # too many shapes to capture
            return decide(rule, requests)
        return join_segments(self._decide(rule, requests).verdicts(), requests)

    def _decide(self, rule: Rule, requests: Sequence[VerifyRequest]) -> Packed:
        launcher, parts = self._launcher(requests[0].rows.logits.device), tensor_parts(requests)
        layout = None if launcher is None or not rule.captured else rounded_up(Layout.of(requests))
        if launcher is not None and layout is not None:
            kinds = tuple((name, own[0].shape[1:], _kind(own)) for name, own in parts.items())
            key = (rule, layout, requests[0].protected, kinds)
            if self._often(key):
                try:
                    return self._replay(launcher, key, rule, layout, requests, parts)
                except Exception as error:  # if it is the rule's own, the plain call below raises it again
                    self._give_up(key, rule, error)
        return Packed.of(rule.verify(collate(requests, parts)))

    def _launcher(self, device: torch.device) -> GraphLauncher | None:
        if device not in self._launchers:
            self._launchers[device] = self._launcher_on(device)
        return self._launchers[device]

    def _often(self, key: Hashable) -> bool:
        """Note that a shape is met; whether it is worth a graph."""
        if key in self._plain:
            return False
        self._seen[key] = self._seen.pop(key, 0) + 1
        if len(self._seen) > SHAPES:
            self._seen.popitem(last=False)
        return self._seen[key] > PATIENCE

    def _replay(
        self, launcher: GraphLauncher, key: Hashable, rule: Rule, layout: Layout,
        requests: Sequence[VerifyRequest], parts: dict[Part, list[Tensor]],
    ) -> Packed:  # fmt: skip
        device = requests[0].rows.logits.device
        tensors = {}
        for name, own in parts.items():
            height = layout.sequences if name == "state" else layout.rows
            if name == "draft" or (isinstance(name, tuple) and name[0] == "draft"):
                height = layout.draft_rows
            most = SEQUENCES if name == "state" else next(size for size in RULE_BUFFERS if size >= height)
            buffer = self._buffer(name, (most, *own[0].shape[1:]), _kind(own), device)
            torch.cat(own, out=buffer[: sum(map(len, own))])
            tensors[name] = buffer[:height]
        bytes_, (numbers, columns) = self._buffer("tables", (TABLES,), torch.uint8, device), tables(requests, layout)
        host = torch.cat([numbers.view(torch.uint8).flatten(), columns.view(torch.uint8).flatten()])
        bytes_[: len(host)].copy_(host.pin_memory() if bytes_.is_cuda else host, non_blocking=True)
        end = 8 * numbers.numel()
        numbers = bytes_[:end].view(torch.long).view(numbers.shape)
        columns = bytes_[end : len(host)].view(torch.float32).view(columns.shape)

        @torch.no_grad()
        def work() -> Packed:
            return Packed.of(rule.verify(assemble(layout, numbers, columns, tensors, requests[0].protected)))

        if self._seen[key] == PATIENCE + 1:
            with Watch([numbers, columns, *tensors.values()]):
                work()
        made: Packed = launcher.run(key, work, bytes_[:0])
        drafts = sum(len(r.draft.segments) for r in requests)
        return replace(
            made, table=made.table[:drafts], state=None if made.state is None else made.state[:drafts].clone()
        )

    def _buffer(self, name: Hashable, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        key = (name, size, dtype, device)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(size, dtype=dtype, device=device)
        return self._buffers[key]

    def _give_up(self, key: Hashable, rule: Rule, error: Exception) -> None:
        self._plain[key] = None
        if len(self._plain) > SHAPES:
            self._plain.popitem(last=False)
        if rule.name not in self._told:
            self._told.add(rule.name)
            why = str(error) if isinstance(error, NotReplayable) else f"{type(error).__name__}: {error}"
            log.warning("verifier %r is not captured into a graph, which makes it slower: %s", rule.name, why)


def rounded_up(layout: Layout) -> Layout | None:
    """The same with the next larger sizes that are captured; None: too large."""
    sizes: dict[str, Any] = {
        "sequences": layout.sequences if layout.sequences <= SEQUENCES else None,
        "tokens": bucket(layout.tokens, TOKENS),
        "rows": bucket(layout.rows, ROWS),
        "draft_rows": bucket(max(layout.draft_rows, 1), ROWS),
        "own": -1 if layout.own is None else bucket(layout.own, TOKENS),
    }
    if None in sizes.values():
        return None
    return replace(layout, **sizes | {"own": None if layout.own is None else sizes["own"]})


def bucket(n: int, sizes: tuple[int, ...]) -> int | None:
    return next((size for size in sizes if size >= n), None)


def _kind(parts: Sequence[Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, (part.dtype for part in parts))
