"""A plan at work: how a native runner checks drafts with things left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from semspec.errors import ModelError
from semspec.model import ModelRunner
from semspec.model.attention_metadata import SequenceChunk
from semspec.model.experts import Experts, FeedForward, skip
from semspec.model.kernels import BlockMeans, Kernels, SelectedBlocks
from semspec.model.layer_ops import DENSE, Blocks, LayerOps, SparsityInputs, checks
from semspec.sparse.attention import AttentionPlan, Kept, block_scores, choose, gathered, listed, sight
from semspec.sparse.ffn import thin
from semspec.sparse.guard import Guard
from semspec.sparse.means import Means
from semspec.sparse.plan import SparsePlan
from semspec.types import Score


class Sparse:
    """See model.way.Sparsity. Made for one runner."""

    def __init__(self, plan: SparsePlan, runner: ModelRunner) -> None:
        self.plan, self.shape, self.cache, self.device = plan, runner.shape, runner.cache, runner.device
        self.guard = Guard(runner.cache, plan.refresh)
        self.means: Means | None = None
        self.choosers = frozenset[int]()  # layers that choose blocks
        self.open = frozenset(i for i, sight in enumerate(self.shape.attention_specs) if sight.window is None)
        if plan.attention is not None and self.open:
            self.means = Means.of(runner.cache, plan.attention)
            anchors = self.open if plan.attention.anchors is None else frozenset(plan.attention.anchors)
            self.choosers = frozenset([min(self.open)]) | (anchors & self.open)  # a first choice there must be
        self.thresholds = plan.ffn.thresholds.tolist() if plan.ffn else []
        self.betas = plan.experts.betas.to(self.device) if plan.experts else None
        # What one token leaves out of a network no kernel can, nor what few tokens leave out of an expert.
        plain = plan.ffn is not None and (plan.ffn.by == "token" or self.shape.mixture is not None)
        self.fusible = not (any(self.thresholds) and plain)
        self.layers = runner.transformer.layers
        if runner.graph_runner is not None and self.fusible:
            _ = self.columns  # takes memory: now, not in the middle of an answer

    def apart(self, requests: Sequence[Score]) -> tuple[list[Score], list[Score]]:
        """A draft behind a text that was not read yet is checked as any other, once that has been read: whether a
        runner remembers a prompt, and how prompts are cut into passes, does not change what is written."""
        before: list[Score] = []
        rest: list[Score] = []
        for r in requests:
            unread = len(r.tokens) - r.keep if r.keep > 1 else 0
            if unread and self.thins(self.cache.lengths[r.slot] + unread):
                before.append(replace(r, tokens=r.tokens[:unread], keep=0, layers=()))
                r = replace(r, tokens=r.tokens[unread:])
            rest.append(r)
        return before, rest

    def prepare(self, requests: Sequence[Score]) -> list[Score]:
        return self.guard.prepare(requests)

    def layer_ops(self, requests: Sequence[Score], spans: list[SequenceChunk]) -> LayerOps:
        checked = [checks(r) and self.thins(span.start) for r, span in zip(requests, spans, strict=True)]
        return SparseLayerOps(self, spans, checked) if any(checked) else DENSE

    @cached_property
    def columns(self) -> list[Tensor | None]:
        """Down projections of layers that leave out channels, [channels, width]: there a channel is one row."""
        if not any(self.thresholds):
            return []
        networks = [layer.ffn if isinstance(layer.ffn, FeedForward) else None for layer in self.layers]
        try:
            return [n.transposed_down() if n and t else None for n, t in zip(networks, self.thresholds, strict=True)]
        except torch.OutOfMemoryError as error:
            raise ModelError(
                "a sparse plan that leaves out channels keeps the down projections a second time, transposed, and "
                "there is no memory left for that; give less context or fewer slots, or a plan without channels"
            ) from error

    def marks(self, requests: Sequence[Score], starts: Sequence[int]) -> list[int] | None:
        marks = [int(checks(r) and self.thins(start)) for r, start in zip(requests, starts, strict=True)]
        return marks if any(marks) else None

    def inputs(self, marks: Tensor, pairs: Tensor | None, kernels: Kernels) -> SparsityInputs:
        return SparsityInputs(
            marks,
            None if pairs is None else self.blocks(pairs, kernels),
            self.betas,
            self.plan.experts.most if self.plan.experts else 0,
            self.thresholds if any(self.thresholds) else (),
            self.columns,
        )

    def pairs(self, requests: Sequence[Score], starts: Sequence[int]) -> list[int] | None:
        thin = [checks(r) and self.attends_sparsely(start) for r, start in zip(requests, starts, strict=True)]
        if self.means is None or not any(thin):
            return None
        for r, start, thinly in zip(requests, starts, thin, strict=True):
            if thinly:
                self.means.update(r.slot, start)
        plan, heads = self.attention, self.shape.kv_heads
        return [plan.pairs(s, heads) if t else s // plan.block * heads for s, t in zip(starts, thin, strict=True)]

    def blocks(self, pairs: Tensor, kernels: Kernels) -> Blocks:
        """Who chooses, for one fused pass; asked layer after layer. Layers that do not choose launch nothing."""
        plan, scale, make = self.attention, self.shape.attention_scale, kernels.choose_blocks
        last: tuple[Tensor, Tensor, Tensor | None] | None = None  # by the last layer that chose: lists, counts, marks

        def choice(layer: int, q: Tensor, slots: Tensor, starts: Tensor, counts: Tensor) -> SelectedBlocks | None:
            nonlocal last
            if layer not in self.open:
                return None
            assert self.means is not None
            known, values = self.means.keys[layer], self.means.values
            wide = self.means.variances_of(layer)
            if layer in self.choosers:
                if make is not None:
                    rule = (plan.block, (plan.sinks, plan.recent), scale, plan.score != "first", plan.spread == "heads")
                    marks = None if values is None else q.new_empty((len(q), *known.shape[1:3]), dtype=torch.int8)
                    last = (*make(q, known, slots, starts, counts, pairs, *rule, marks=marks, variances=wide), marks)
                else:
                    full = starts // plan.block
                    own = None if wide is None else wide[slots]
                    scores = block_scores(q, known[slots], full, plan, scale, counts, own)
                    chosen = choose(scores, full, pairs, plan)
                    last = (*listed(chosen), None if values is None else chosen.to(torch.int8))
            assert last is not None, "the first open layer chooses"
            lists, numbers, marks = last
            rest = None if values is None or marks is None else BlockMeans(marks, known, values[layer])
            return SelectedBlocks(lists, numbers, plan.block, rest)

        return choice

    def fed(self, slot: int, start: int, tokens: Sequence[int], checked: bool = False) -> None:
        self.guard.fed(slot, start, tokens, checked and self.thins(start))

    def thins(self, start: int) -> bool:
        """Whether anything is left out when a draft is checked behind so many tokens."""
        return bool(
            self.attends_sparsely(start) or any(self.thresholds) or (self.plan.experts and self.plan.experts.most)
        )

    def attends_sparsely(self, start: int) -> bool:
        return self.means is not None and self.attention.sparse_at(start, self.shape.kv_heads)

    @property
    def attention(self) -> AttentionPlan:
        assert self.plan.attention is not None
        return self.plan.attention


class SparseLayerOps(LayerOps):
    """One pass. `checked` marks the sequences that check drafts; all others get everything."""

    def __init__(self, sparse: Sparse, spans: list[SequenceChunk], checked: list[bool]) -> None:
        self.sparse, self.spans = sparse, spans
        self._chosen: dict[int, Kept] = {}  # sequence -> its blocks, by the last layer that chose
        self._masks: dict[int, Tensor] = {}
        self._thin = {n for n, span in enumerate(spans) if checked[n] and sparse.attends_sparsely(span.start)}
        for n in self._thin:
            assert sparse.means is not None
            sparse.means.update(spans[n].slot, spans[n].start)
        owners = [n for n, span in enumerate(spans) for _ in range(span.count)]
        self._owners = torch.tensor(owners, device=sparse.device)  # [N] the sequence of each token
        self._rows = torch.tensor([checked[n] for n in owners], device=sparse.device)  # [N]
        self._all_rows = all(checked)

    # -- attention

    def attend(
        self, layer: int, place: int, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        if place not in self._thin or layer not in self.sparse.open:
            return super().attend(layer, place, q, keys, values, mask, scale)
        if layer in self.sparse.choosers:
            self._chosen[place] = self._choose(layer, place, q)
        kept, block, span = self._chosen[place], self.sparse.attention.block, self.spans[place]
        tail = span.start // block * block
        means = self.sparse.means
        assert means is not None
        seen = []
        for cached, made in ((keys, means.keys), (values, means.values)):
            parts = [gathered(cached[:, :tail], kept.lists, block), cached[:, tail:]]
            if kept.others is not None and made is not None:
                parts.append(made[layer, span.slot, :, : span.start // block])
            seen.append(torch.cat(parts, dim=1))
        if place not in self._masks:
            self._masks[place] = sight(kept, span.start, span.count, block, len(q), q.dtype)
        return super().attend(layer, place, q, seen[0], seen[1], self._masks[place], scale)

    def _choose(self, layer: int, place: int, q: Tensor) -> Kept:
        plan, span, means = self.sparse.attention, self.spans[place], self.sparse.means
        assert means is not None
        full, pairs = span.start // plan.block, plan.pairs(span.start, means.keys.shape[2])
        one = torch.tensor([full, pairs], device=q.device)
        known = means.keys[layer, span.slot, None, :, :full]
        wide = None if means.variances is None else means.variances[layer, span.slot, None, :, :full]
        scale = self.sparse.shape.attention_scale
        scores = block_scores(q.transpose(0, 1)[None], known, one[:1], plan, scale, variances=wide)
        chosen = choose(scores, one[:1], one[1:], plan)
        lists, counts = listed(chosen)
        self._masks.pop(place, None)
        # Nothing may be added where everything is chosen: then a check is the dense one to the last bit.
        others = ~chosen[0] if means.values is not None and pairs < full * means.keys.shape[2] else None
        return Kept(lists[0, :, : int(counts.max())], counts[0], others)

    # -- feed-forward networks and experts

    def feed(self, layer: int, ffn: FeedForward | Experts, x: Tensor) -> Tensor:
        plan = self.sparse.plan
        if isinstance(ffn, FeedForward):
            return self._run(layer, ffn, x, None)
        if plan.experts is None and plan.ffn is None:
            return ffn(x)
        weights, index = ffn.route(x)
        if plan.experts is not None and self.sparse.betas is not None:
            betas = self.sparse.betas[layer]
            weights, index = skip(weights, index, betas, plan.experts.most, self._rows, ffn.renormalise)
        return ffn.combine(x, weights, index, lambda expert, some, rows: self._run(layer, expert, some, rows))

    def _run(self, layer: int, ffn: FeedForward, x: Tensor, rows: Tensor | None) -> Tensor:
        """A network over tokens of the pass, all or the given rows of them: thin where they check, whole elsewhere."""
        plan = self.sparse.plan.ffn
        threshold = self.sparse.thresholds[layer] if plan else 0.0
        if plan is None or not threshold:
            return ffn(x)
        marked = self._rows if rows is None else self._rows[rows]
        if not self._all_rows and not bool(marked.all()):
            out = torch.empty_like(x)
            for some, part in ((marked, True), (~marked, False)):
                at = some.nonzero()[:, 0]
                if len(at):
                    out[at] = self._thinly(layer, ffn, x[at], at if rows is None else rows[at]) if part else ffn(x[at])
            return out
        return self._thinly(layer, ffn, x, rows)

    def _thinly(self, layer: int, ffn: FeedForward, x: Tensor, rows: Tensor | None) -> Tensor:
        plan = self.sparse.plan.ffn
        assert plan is not None
        owners = self._owners if rows is None else self._owners[rows]
        return thin(ffn, x, self.sparse.thresholds[layer], owners if plan.by == "union" else None)
