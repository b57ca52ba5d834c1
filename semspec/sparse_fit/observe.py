"""Dense verification that records what a sparse one would have selected: the data of calibration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from semspec.model import ModelRunner
from semspec.model.attention_metadata import SequenceChunk
from semspec.model.experts import Experts, FeedForward, num_skipped_by, ratios
from semspec.model.kernels import Kernels
from semspec.model.layer_ops import DENSE, LayerOps, SparsityInputs, checks
from semspec.sparse.attention import AttentionPlan, block_scores, select_blocks
from semspec.sparse.block_statistics import BlockStatistics
from semspec.sparse.ffn import union_by_sequence
from semspec.types import Score

GATES = 32  # passes per layer whose gate activations are stored; one has millions of them in a large model


class Observations:
    """Figures of all passes. Block selections are compared without the blocks that are always read."""

    def __init__(self, depth: int) -> None:
        self.layers = torch.zeros(depth, depth)  # sums of overlaps between layers
        self.rounds = 0  # in these sums
        self.tokens: dict[int, list[Tensor]] = defaultdict(list)  # overlaps of later tokens with the first, by layer
        self.gates: dict[int, list[Tensor]] = defaultdict(list)  # |activations| [tokens, channels], by layer
        self.ratios: dict[int, list[Tensor]] = defaultdict(list)  # [tokens, k - 1], by layer
        self.routes: dict[int, list[Tensor]] = defaultdict(list)  # the experts of each token [tokens, k], by layer

    def layer_overlap(self) -> Tensor:
        """[depth, depth] mean Jaccard overlap; nan if there was no round."""
        return self.layers / self.rounds if self.rounds else torch.full_like(self.layers, float("nan"))

    def token_overlap(self) -> Tensor:
        """[depth, K] mean overlap of the first token's blocks with those of later tokens."""
        longest = max((len(row) for rows in self.tokens.values() for row in rows), default=0)
        found = torch.full((len(self.layers), longest), float("nan"))
        for layer, rows in self.tokens.items():
            for t in range(longest):
                seen = [row[t] for row in rows if len(row) > t]
                found[layer, t] = torch.stack(seen).mean()
        return found

    def token_share(self, thresholds: Tensor) -> Tensor:
        """[depth] share of a token's channels below the threshold; nan for layers that no pass has seen."""
        shares = torch.full((len(self.layers),), float("nan"))
        for layer, passes in self.gates.items():
            below = [(int((g < thresholds[layer]).sum()), g.numel()) for g in passes]
            shares[layer] = sum(b for b, _ in below) / max(sum(n for _, n in below), 1)
        return shares

    def experts_used(self, betas: Tensor) -> tuple[Tensor, Tensor]:
        """With at most 0, 1, .. k - 1 experts skipped: the mean number of experts of a token, and of different experts
        of a pass, both [depth, k]; nan for layers without experts."""
        depth, width = betas.shape
        tokens, passes = torch.full((2, depth, width + 1), float("nan"))
        for layer, routes in self.routes.items():
            for most in range(width + 1):
                kept = [
                    torch.arange(width + 1) < width + 1 - num_skipped_by(r, betas[layer].to(r), most)[:, None]
                    for r in self.ratios[layer]
                ]
                tokens[layer, most] = sum(int(k.sum()) for k in kept) / sum(len(k) for k in kept)
                used = [len(index[k].unique()) for index, k in zip(routes, kept, strict=True)]
                passes[layer, most] = sum(used) / len(used)
        return tokens, passes

    def union_share(self, thresholds: Tensor) -> Tensor:
        """[depth] share of channels that no token of a pass needs; nan for layers with experts."""
        shares = torch.full((len(self.layers),), float("nan"))
        for layer, passes in self.gates.items():
            one = [union_by_sequence(g >= thresholds[layer], torch.zeros(len(g), dtype=torch.long))[0] for g in passes]
            if len({len(row) for row in one}) == 1 and len(self.ratios[layer]) == 0:
                shares[layer] = 1 - torch.stack(one).float().mean()
        return shares


class Observer:
    """A `Sparsity` (model/layer_ops.py) that skips nothing and records."""

    fusible = False

    def __init__(self, runner: ModelRunner, plan: AttentionPlan) -> None:
        self.shape, self.plan, self.statistics = runner.shape, plan, BlockStatistics.of(runner.cache, plan)
        self.full_layers = [i for i, spec in enumerate(self.shape.attention_specs) if spec.window is None]
        self.observations = Observations(self.shape.num_layers)

    def split_prefill(self, requests: Sequence[Score]) -> tuple[list[Score], list[Score]]:
        return [], list(requests)

    def prepare(self, requests: Sequence[Score]) -> list[Score]:
        return list(requests)

    def layer_ops(self, requests: Sequence[Score], spans: list[SequenceChunk]) -> LayerOps:
        if len(requests) == 1 and checks(requests[0]):
            return ObservingLayerOps(self, spans[0])
        return DENSE

    def sparse_flags(self, requests: Sequence[Score], starts: Sequence[int]) -> None:
        return None

    def pair_budgets(self, requests: Sequence[Score], starts: Sequence[int]) -> None:
        return None

    def inputs(self, flags: Tensor, pairs: Tensor | None, kernels: Kernels) -> SparsityInputs:
        return SparsityInputs(flags)

    def record(self, slot: int, start: int, tokens: Sequence[int], checked: bool = False) -> None:
        pass

    def kept(self, slot: int, start: int, rows: Sequence[int]) -> None:
        pass

    def copied(self, source: int, target: int) -> None:
        pass


class ObservingLayerOps(LayerOps):
    def __init__(self, observer: Observer, span: SequenceChunk) -> None:
        self.observer, self.span, self.observations = observer, span, observer.observations
        self._sets: dict[int, Tensor] = {}  # by layer: the draft's selection, [kv heads, blocks]
        self._sparse = observer.plan.sparse_at(span.start, observer.shape.kv_heads)
        if self._sparse:
            observer.statistics.update(span.slot, span.start)

    def attend(
        self, layer: int, place: int, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        if self._sparse and layer in self.observer.full_layers:
            each = q.transpose(0, 1)[:, None]  # [n, 1, heads, d]
            sets = self._select(layer, each)
            self._sets[layer] = self._select(layer, each.transpose(0, 1))[0]
            self.observations.tokens[layer].append(torch.stack([overlap(sets[0], later) for later in sets[1:]]))
            if layer == self.observer.full_layers[-1]:
                self._compare()
        return super().attend(layer, place, q, keys, values, mask, scale)

    def _select(self, layer: int, q: Tensor) -> Tensor:
        """What drafts [n, tokens, heads, d] would select, [n, kv heads, blocks], without those always read."""
        plan, start, shape = self.observer.plan, self.span.start, self.observer.shape
        full, n = start // plan.block, len(q)
        statistics, slot = self.observer.statistics, self.span.slot
        keys = statistics.keys[layer, slot, :, :full].expand(n, -1, -1, -1)
        variances = statistics.variances_of(layer)
        variances = None if variances is None else variances[slot, :, :full].expand(n, -1, -1, -1)
        sizes = torch.tensor([[full], [plan.pairs(start, shape.kv_heads)]], device=q.device).expand(2, n)
        scores = block_scores(q, keys, sizes[0], plan, shape.attention_scale, variances=variances)
        selected = select_blocks(scores, sizes[0], sizes[1], plan)
        selected[..., : plan.sinks] = False
        selected[..., max(full - plan.recent, 0) :] = False
        return selected

    def _compare(self) -> None:
        self.observations.rounds += 1
        for i, one in self._sets.items():
            for j, other in self._sets.items():
                self.observations.layers[i, j] += float(overlap(one, other))

    def feed(self, layer: int, ffn: FeedForward | Experts, x: Tensor) -> Tensor:
        if isinstance(ffn, FeedForward):
            self._gate(layer, ffn, x)
            return ffn(x)
        weights, index = ffn.route(x)
        self.observations.ratios[layer].append(ratios(weights).float().cpu())
        self.observations.routes[layer].append(index.cpu())

        def run(expert: FeedForward, some: Tensor, rows: Tensor) -> Tensor:
            self._gate(layer, expert, some)
            return expert(some)

        return ffn.combine(x, weights, index, run)

    def _gate(self, layer: int, ffn: FeedForward, x: Tensor) -> None:
        if len(self.observations.gates[layer]) < GATES:
            gate, _ = ffn.gate_up(x).chunk(2, dim=-1)
            self.observations.gates[layer].append(ffn.activate(gate).abs().cpu())


def overlap(one: Tensor, other: Tensor) -> Tensor:
    """Jaccard index; 1 for two empty sets."""
    either = (one | other).sum()
    return torch.where(either > 0, (one & other).sum() / either.clamp_min(1), 1.0).float().cpu()
