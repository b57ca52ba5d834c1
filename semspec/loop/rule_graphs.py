"""Rules on a GPU: captured into graphs by shape, so that a verification costs its arithmetic and not its launches.

Rules are pure and never ask the host, so what they do depends on sizes alone. A batch is laid into memory at fixed
addresses, rounded up to a few sizes (see `Layout`); decisions come back as one table. A shape is captured when it has
been met a few times, and the graphs of shapes not met for long make room. Many drafts are decided in parts, so that
graphs and their memory stay small however many sequences run. A rule that cannot be replayed (it waits for the device,
or changes what it was given) is called every time instead, which is logged once; so is one that says so itself
(`Rule.captured`), with all drafts at once, and so are all rules on a CPU.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import accumulate, pairwise
from math import ceil

import torch
from torch import Tensor

from semspec.loop.replayable import NotReplayable, ReplayCheck
from semspec.model.graph_memory import RULE_BUFFERS, RULE_ROWS, TREE_ROWS
from semspec.model.graphs import GraphCache, GraphLauncher
from semspec.types import Verdict, VerifyRequest
from semspec.verify.base import Rule
from semspec.verify.collate import (
    Array,
    Layout,
    Packed,
    Part,
    assemble,
    collate,
    join_segments,
    num_rows,
    tables,
    tensor_parts,
)
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


@dataclass(slots=True, eq=False)
class Shape:
    """Verifications that one graph may serve, and the memory that it reads."""

    times: int = 0  # that it was met
    plain: bool = False  # it cannot be captured
    numbers: Tensor | None = None
    columns: Tensor | None = None
    tensors: dict[Part, Tensor] = field(default_factory=dict)


class RuleGraphs:
    def __init__(self, launcher_on: Callable[[torch.device], GraphLauncher | None] = graphs_on) -> None:
        self._launcher_on = launcher_on
        self._launchers: dict[torch.device, GraphLauncher | None] = {}
        self._tables: dict[torch.device, Tables] = {}
        self._buffers: dict[Hashable, Tensor] = {}
        self._shapes: OrderedDict[Hashable, Shape] = OrderedDict()  # the latest last
        self._told: set[str] = set()

    def verify(self, rule: Rule, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        """One verdict per draft. The drafts share the rule, and what `collate` wants to be shared."""
        if requests[0].draft.parents:  # too many shapes to capture
            return [verdict for some in in_parts(requests, TREE_ROWS, TREE_ROWS) for verdict in decide(rule, some)]
        launcher = self._launcher(requests[0].rows.logits.device)
        if launcher is None or not rule.captured:
            return decide(rule, requests)
        made = list[Packed]()
        for some in (parts := in_parts(requests, RULE_ROWS, SEQUENCES)):
            packed = self._decide(launcher, rule, some)
            if len(parts) > 1:  # the next part may be decided by the same graph, whose table lies at the same place
                packed = replace(packed, table=packed.table.clone())
            made.append(packed)  # and the host waits when all of them are under way
        return join_segments([verdict for packed in made for verdict in packed.verdicts()], requests)

    def _decide(self, launcher: GraphLauncher, rule: Rule, requests: Sequence[VerifyRequest]) -> Packed:
        needed, parts = Layout.of(requests), tensor_parts(requests)
        layout = rounded_up(needed)
        shape = None if layout is None else self._shape(rule, layout, requests[0].protected, parts)
        if layout is not None and shape is not None and not shape.plain and shape.times > PATIENCE:
            try:
                return self._replay(launcher, shape, rule, layout, needed, requests, parts)
            except Exception as error:  # if it is the rule's own, the plain call below raises it again
                self._give_up(shape, rule, error)
        return Packed.of(rule.verify(collate(requests, parts)))

    def _launcher(self, device: torch.device) -> GraphLauncher | None:
        if device not in self._launchers:
            self._launchers[device] = self._launcher_on(device)
        return self._launchers[device]

    def _shape(self, rule: Rule, layout: Layout, protected: Tensor | None, parts: dict[Part, list[Tensor]]) -> Shape:
        """Met once more. The key holds what the graph reads besides our buffers, so that it lives as long."""
        kinds = tuple((name, own[0].shape[1:], _kind(own)) for name, own in parts.items())
        key = (rule, layout, protected, kinds)
        self._shapes[key] = shape = self._shapes.pop(key, None) or Shape()
        if len(self._shapes) > SHAPES:
            self._shapes.popitem(last=False)
        shape.times += 1
        return shape

    def _replay(
        self, launcher: GraphLauncher, shape: Shape, rule: Rule, layout: Layout, needed: Layout,
        requests: Sequence[VerifyRequest], parts: dict[Part, list[Tensor]],
    ) -> Packed:  # fmt: skip
        if fresh := shape.numbers is None:
            self._lay_out(shape, layout, requests[0].rows.logits.device, parts)
        for name, own in parts.items():
            torch.cat(own, out=shape.tensors[name][: _height(name, needed)])
        self._tables[requests[0].rows.logits.device].fill(*tables(requests, layout))
        numbers, columns, tensors, protected = shape.numbers, shape.columns, shape.tensors, requests[0].protected
        assert numbers is not None and columns is not None

        @torch.no_grad()
        def work() -> Packed:
            return Packed.of(rule.verify(assemble(layout, numbers, columns, tensors, protected)))

        if fresh:
            with ReplayCheck([numbers, columns, *tensors.values()]):
                work()
        made: Packed = launcher.run(shape, work, self._tables[requests[0].rows.logits.device].nothing)
        return replace(made, state=None if made.state is None else made.state.clone())

    def _lay_out(self, shape: Shape, layout: Layout, device: torch.device, parts: dict[Part, list[Tensor]]) -> None:
        """Where a shape has its inputs: in buffers that all shapes share."""
        if device not in self._tables:
            self._tables[device] = Tables(device)
        shape.numbers, shape.columns = self._tables[device].views(layout)
        shape.tensors = {}
        for name, own in parts.items():
            height, rest = _height(name, layout), own[0].shape[1:]
            most = SEQUENCES if name == "state" else next(size for size in RULE_BUFFERS if size >= height)
            key = (name, most, rest, _kind(own), device)
            if key not in self._buffers:
                self._buffers[key] = torch.zeros((most, *rest), dtype=_kind(own), device=device)
            shape.tensors[name] = self._buffers[key][:height]

    def _give_up(self, shape: Shape, rule: Rule, error: Exception) -> None:
        shape.plain = True
        if rule.name not in self._told:
            self._told.add(rule.name)
            why = str(error) if isinstance(error, NotReplayable) else f"{type(error).__name__}: {error}"
            log.warning("verifier %r is not captured into a graph, which makes it slower: %s", rule.name, why)


class Tables:
    """Memory for `collate.tables`, on the host and on the device: one copy for both tables."""

    def __init__(self, device: torch.device) -> None:
        self._there = torch.zeros(TABLES, dtype=torch.uint8, device=device)
        self._here = torch.zeros(TABLES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._bytes = self._here.numpy()
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self.nothing = self._there[:0]

    def views(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Numbers and columns on the device, of these sizes."""
        end, rows = 8 * layout.sequences * layout.width, 0 if layout.use.all_greedy else layout.rows
        numbers = self._there[:end].view(torch.long).view(layout.sequences, layout.width)
        return numbers, self._there[end : end + 16 * rows].view(torch.float32).view(rows, 4)

    def fill(self, numbers: Array, columns: Array) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # nobody reads the former ones any more
        end, whole = numbers.nbytes, numbers.nbytes + columns.nbytes
        self._bytes[:end] = numbers.reshape(-1).view("u1")
        self._bytes[end:whole] = columns.reshape(-1).view("u1")
        self._there[:whole].copy_(self._here[:whole], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._there.device))


def in_parts(requests: Sequence[VerifyRequest], rows: int, sequences: int) -> list[Sequence[VerifyRequest]]:
    """In order, each part with at most so many rows of logits and so many sequences (steps of one draft count each), or
    with one request. As few parts as can be, and of about as many requests each if they fit: so they have one shape."""
    sizes = [(num_rows(r), len(r.draft.own_tokens), len(r.draft.segments)) for r in requests]
    sums = [(0, 0, 0), *zip(*(accumulate(each) for each in zip(*sizes, strict=True)), strict=True)]
    most = (rows, rows, sequences)

    def fits(begin: int, end: int) -> bool:
        return end - begin == 1 or all(b - a <= n for a, b, n in zip(sums[begin], sums[end], most, strict=True))

    begins = [0]
    for i in range(1, len(requests)):
        if not fits(begins[-1], i + 1):
            begins.append(i)
    each = ceil(len(requests) / len(begins))
    even = list(range(0, len(requests), each))
    begins = even if all(fits(i, min(i + each, len(requests))) for i in even) else begins
    return [requests[begin:end] for begin, end in pairwise([*begins, len(requests)])]


def rounded_up(layout: Layout) -> Layout | None:
    """The same with the next larger sizes that are captured; None: too large."""
    tokens, rows = bucket(layout.tokens, TOKENS), bucket(layout.rows, ROWS)
    draft_rows = bucket(max(layout.draft_rows, 1), ROWS)
    own = 0 if layout.own is None else bucket(layout.own, TOKENS)
    if layout.sequences > SEQUENCES or tokens is None or rows is None or draft_rows is None or own is None:
        return None
    return Layout(layout.sequences, tokens, rows, draft_rows, None if layout.own is None else own, layout.use)


def bucket(n: int, sizes: tuple[int, ...]) -> int | None:
    at = bisect_left(sizes, n)
    return sizes[at] if at < len(sizes) else None


def _height(name: Part, layout: Layout) -> int:
    """How many rows a tensor of a batch has."""
    if name == "state":
        return layout.sequences
    return layout.draft_rows if name == "draft" or name[0] == "draft" else layout.rows


def _kind(parts: Sequence[Tensor]) -> torch.dtype:
    kinds = {part.dtype for part in parts}
    return kinds.pop() if len(kinds) == 1 else reduce(torch.promote_types, kinds)
