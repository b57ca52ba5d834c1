"""A plan at work: how a native runner verifies drafts with parts skipped."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from semspec.errors import ModelError
from semspec.model import ModelRunner
from semspec.model.attention_metadata import SequenceChunk
from semspec.model.experts import Experts, FeedForward, skip
from semspec.model.kernels import BlockMeans, Kernels, SelectedBlocks
from semspec.model.layer_ops import DENSE, Blocks, LayerOps, SparsityInputs, checks
from semspec.model.quantised import QuantisedLinear
from semspec.model.rows import prefill, rest
from semspec.sparse.attention import (
    AttentionPlan,
    SequenceBlocks,
    attention_mask,
    block_lists,
    block_scores,
    gather_blocks,
    select_blocks,
)
from semspec.sparse.block_statistics import BlockStatistics
from semspec.sparse.ffn import sparse_ffn
from semspec.sparse.plan import SparsePlan
from semspec.sparse.refresh import CacheRefresh
from semspec.types import Score


class PlanSparsity:
    """The `Sparsity` (model/layer_ops.py) of a plan, for one runner."""

    def __init__(self, plan: SparsePlan, runner: ModelRunner) -> None:
        self.plan, self.shape, self.cache, self.device = plan, runner.shape, runner.cache, runner.device
        self.refresh = CacheRefresh(runner.cache, plan.refresh)
        self.statistics: BlockStatistics | None = None
        self.anchors = frozenset[int]()  # layers that select blocks
        self.full_layers = frozenset(i for i, spec in enumerate(self.shape.attention_specs) if spec.window is None)
        if plan.attention is not None and self.full_layers:
            self.statistics = BlockStatistics.of(runner.cache, plan.attention)
            anchors = self.full_layers if plan.attention.anchors is None else frozenset(plan.attention.anchors)
            self.anchors = frozenset([min(self.full_layers)]) | (anchors & self.full_layers)  # the first must select
        self.thresholds = plan.ffn.thresholds.tolist() if plan.ffn else []
        self.betas = plan.experts.betas.to(self.device) if plan.experts else None
        # No kernel skips channels of a single token, of an expert, which has few tokens, or of quantised weights.
        quantised = any(_quantised(layer.ffn) for layer in runner.transformer.layers)
        unfused = plan.ffn is not None and (plan.ffn.by == "token" or self.shape.mixture is not None or quantised)
        self.fusible = not (any(self.thresholds) and unfused)
        self.layers = runner.transformer.layers
        if runner.graph_runner is not None and self.fusible:
            _ = self.columns  # takes memory: now, not in the middle of an answer

    def restart(self) -> None:
        """Forget what was known of the cache: passes without this plan have changed it."""
        self.refresh.restart()
        if self.statistics is not None:
            self.statistics.restart()

    def split_prefill(self, requests: Sequence[Score]) -> tuple[list[Score], list[Score]]:
        """A draft after text that has not been prefilled is verified like any other, once that has been prefilled. So
        neither a prefix cache nor the chunks of a prefill change the output."""
        prefills: list[Score] = []
        drafts: list[Score] = []
        for r in requests:
            unread = len(r.tokens) - r.logits_to_keep if r.logits_to_keep > 1 else 0
            if unread and self.is_sparse(self.cache.lengths[r.slot] + unread):
                prefills.append(prefill(r, unread))
                r = rest(r, unread)
            drafts.append(r)
        return prefills, drafts

    def prepare(self, requests: Sequence[Score]) -> list[Score]:
        return self.refresh.prepare(requests)

    def layer_ops(self, requests: Sequence[Score], spans: list[SequenceChunk]) -> LayerOps:
        sparse = [checks(r) and self.is_sparse(span.start) for r, span in zip(requests, spans, strict=True)]
        return SparseLayerOps(self, spans, sparse) if any(sparse) else DENSE

    @cached_property
    def columns(self) -> list[Tensor | None]:
        """Down projections of layers that skip channels, [channels, width]: there a channel is one row."""
        if not any(self.thresholds):
            return []
        networks = [layer.ffn if isinstance(layer.ffn, FeedForward) else None for layer in self.layers]
        try:
            return [n.transposed_down() if n and t else None for n, t in zip(networks, self.thresholds, strict=True)]
        except torch.OutOfMemoryError as error:
            raise ModelError(
                "a sparse plan that skips channels keeps a second, transposed copy of the down projections, and "
                "there is no memory left for that; give less context or fewer slots, or a plan without channels"
            ) from error

    def sparse_flags(self, requests: Sequence[Score], starts: Sequence[int]) -> list[int] | None:
        flags = [int(checks(r) and self.is_sparse(start)) for r, start in zip(requests, starts, strict=True)]
        return flags if any(flags) else None

    def inputs(self, flags: Tensor, pairs: Tensor | None, kernels: Kernels) -> SparsityInputs:
        return SparsityInputs(
            flags,
            None if pairs is None else self.block_selector(pairs, kernels),
            self.betas,
            self.plan.experts.most if self.plan.experts else 0,
            self.thresholds if any(self.thresholds) else (),
            self.columns,
        )

    def pair_budgets(self, requests: Sequence[Score], starts: Sequence[int]) -> list[int] | None:
        sparse = [checks(r) and self.attends_sparsely(start) for r, start in zip(requests, starts, strict=True)]
        if self.statistics is None or not any(sparse):
            return None
        plan, heads = self.attention, self.shape.kv_heads
        found = []
        for r, start, is_sparse in zip(requests, starts, sparse, strict=True):
            if is_sparse:
                self.statistics.update(r.slot, start)
            found.append(plan.pairs(start, heads) if is_sparse else start // plan.block * heads)
        return found

    def block_selector(self, pairs: Tensor, kernels: Kernels) -> Blocks:
        """For one fused pass, called layer after layer. Layers that are not anchors launch nothing."""
        plan, scale, kernel = self.attention, self.shape.attention_scale, kernels.choose_blocks
        last: tuple[Tensor, Tensor, Tensor | None] | None = None  # of the last anchor: lists, counts, selected

        def select(layer: int, q: Tensor, slots: Tensor, starts: Tensor, counts: Tensor) -> SelectedBlocks | None:
            nonlocal last
            if layer not in self.full_layers:
                return None
            assert self.statistics is not None
            keys, values = self.statistics.keys[layer], self.statistics.values
            variances = self.statistics.variances_of(layer)
            if layer in self.anchors:
                if kernel is not None:
                    rule = (plan.block, (plan.sinks, plan.recent), scale, plan.score != "first", plan.spread == "heads")
                    marks = None if values is None else q.new_empty((len(q), *keys.shape[1:3]), dtype=torch.int8)
                    found = kernel(q, keys, slots, starts, counts, pairs, *rule, marks=marks, variances=variances)
                    last = (*found, marks)
                else:
                    full = starts // plan.block
                    own = None if variances is None else variances[slots]
                    scores = block_scores(q, keys[slots], full, plan, scale, counts, own)
                    selected = select_blocks(scores, full, pairs, plan)
                    last = (*block_lists(selected), None if values is None else selected.to(torch.int8))
            assert last is not None, "the first layer with full attention is an anchor"
            lists, numbers, marks = last
            means = None if values is None or marks is None else BlockMeans(marks, keys, values[layer])
            return SelectedBlocks(lists, numbers, plan.block, means)

        return select

    def record(self, slot: int, start: int, tokens: Sequence[int], checked: bool = False) -> None:
        self.refresh.record(slot, start, tokens, checked and self.is_sparse(start))

    def kept(self, slot: int, start: int, rows: Sequence[int]) -> None:
        self.refresh.kept(slot, start, rows)

    def copied(self, source: int, target: int) -> None:
        self.refresh.copied(source, target)

    def is_sparse(self, start: int) -> bool:
        """Whether verifying a draft after `start` tokens skips anything."""
        return bool(
            self.attends_sparsely(start) or any(self.thresholds) or (self.plan.experts and self.plan.experts.most)
        )

    def attends_sparsely(self, start: int) -> bool:
        return self.statistics is not None and self.attention.sparse_at(start, self.shape.kv_heads)

    @property
    def attention(self) -> AttentionPlan:
        assert self.plan.attention is not None
        return self.plan.attention


class SparseLayerOps(LayerOps):
    """One pass. `sparse` marks the sequences that verify drafts sparsely; all others are dense."""

    def __init__(self, sparsity: PlanSparsity, spans: list[SequenceChunk], sparse: list[bool]) -> None:
        self.sparsity, self.spans = sparsity, spans
        self._blocks: dict[int, SequenceBlocks] = {}  # by sequence, of the last anchor
        self._masks: dict[int, Tensor] = {}
        self._attending = {n for n, span in enumerate(spans) if sparse[n] and sparsity.attends_sparsely(span.start)}
        for n in self._attending:
            assert sparsity.statistics is not None
            sparsity.statistics.update(spans[n].slot, spans[n].start)
        owners = [n for n, span in enumerate(spans) for _ in range(span.count)]
        self._owners = torch.tensor(owners, device=sparsity.device)  # [N] the sequence of each token
        self._rows = torch.tensor([sparse[n] for n in owners], device=sparsity.device)  # [N] sparse tokens
        self._all_rows = all(sparse)

    # -- attention

    def attend(
        self, layer: int, place: int, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        if place not in self._attending or layer not in self.sparsity.full_layers:
            return super().attend(layer, place, q, keys, values, mask, scale)
        if layer in self.sparsity.anchors:
            self._blocks[place] = self._select(layer, place, q)
        blocks, block, span = self._blocks[place], self.sparsity.attention.block, self.spans[place]
        tail = span.start // block * block
        statistics = self.sparsity.statistics
        assert statistics is not None
        read = []
        for cached, means in ((keys, statistics.keys), (values, statistics.values)):
            parts = [gather_blocks(cached[:, :tail], blocks.lists, block), cached[:, tail:]]
            if blocks.averaged is not None and means is not None:
                parts.append(means[layer, span.slot, :, : span.start // block])
            read.append(torch.cat(parts, dim=1))
        if place not in self._masks:
            self._masks[place] = attention_mask(blocks, span.start, span.count, block, len(q), q.dtype, span.parents)
        return super().attend(layer, place, q, read[0], read[1], self._masks[place], scale)

    def _select(self, layer: int, place: int, q: Tensor) -> SequenceBlocks:
        plan, span, statistics = self.sparsity.attention, self.spans[place], self.sparsity.statistics
        assert statistics is not None
        kv_heads = statistics.keys.shape[2]
        full, pairs = span.start // plan.block, plan.pairs(span.start, kv_heads)
        sizes = torch.tensor([full, pairs], device=q.device)
        keys = statistics.keys[layer, span.slot, None, :, :full]
        variances = statistics.variances_of(layer)
        variances = None if variances is None else variances[span.slot, None, :, :full]
        scale = self.sparsity.shape.attention_scale
        scores = block_scores(q.transpose(0, 1)[None], keys, sizes[:1], plan, scale, variances=variances)
        selected = select_blocks(scores, sizes[:1], sizes[1:], plan)
        lists, counts = block_lists(selected)
        self._masks.pop(place, None)
        # With every block selected nothing may be added: the output is then the dense one, bit for bit.
        averaged = ~selected[0] if statistics.values is not None and pairs < full * kv_heads else None
        return SequenceBlocks(lists[0, :, : int(counts.max())], counts[0], averaged)

    # -- feed-forward networks and experts

    def feed(self, layer: int, ffn: FeedForward | Experts, x: Tensor) -> Tensor:
        plan = self.sparsity.plan
        if isinstance(ffn, FeedForward):
            return self._run(layer, ffn, x, None)
        if plan.experts is None and plan.ffn is None:
            return ffn(x)
        weights, index = ffn.route(x)
        if plan.experts is not None and self.sparsity.betas is not None:
            betas = self.sparsity.betas[layer]
            weights, index = skip(weights, index, betas, plan.experts.most, self._rows, ffn.renormalise)
        return ffn.combine(x, weights, index, lambda expert, some, rows: self._run(layer, expert, some, rows))

    def _run(self, layer: int, ffn: FeedForward, x: Tensor, rows: Tensor | None) -> Tensor:
        """A network over all tokens of the pass, or over the given rows of them: sparse where they verify a draft."""
        plan = self.sparsity.plan.ffn
        threshold = self.sparsity.thresholds[layer] if plan else 0.0
        if plan is None or not threshold:
            return ffn(x)
        sparse = self._rows if rows is None else self._rows[rows]
        owners = self._owners if rows is None else self._owners[rows]
        union = plan.by == "union"
        if self._all_rows or bool(sparse.all()):
            return sparse_ffn(ffn, x, threshold, owners if union else None)
        out = torch.empty_like(x)
        if bool(sparse.any()):
            out[sparse] = sparse_ffn(ffn, x[sparse], threshold, owners[sparse] if union else None)
        out[~sparse] = ffn(x[~sparse])
        return out


def _quantised(ffn: FeedForward | Experts) -> bool:
    return isinstance(ffn, FeedForward) and any(isinstance(m, QuantisedLinear) for m in (ffn.gate_up, ffn.down))
