"""Dense checks that note what sparse ones would have chosen: what a plan is calibrated from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from semspec.model import ModelRunner
from semspec.model.attention_metadata import SequenceChunk
from semspec.model.experts import Experts, FeedForward, ratios
from semspec.model.kernels import Kernels
from semspec.model.layer_ops import DENSE, LayerOps, SparsityInputs, checks
from semspec.sparse.attention import AttentionPlan, block_scores, choose
from semspec.sparse.ffn import unions
from semspec.sparse.means import Means
from semspec.types import Score

GATES = 32  # passes of a layer whose gate activations are kept; a pass has millions of them in a large model


class Notes:
    """What was seen in all passes. Sets of blocks are compared without those that are always kept."""

    def __init__(self, depth: int) -> None:
        self.layers = torch.zeros(depth, depth)  # sums of overlaps between layers
        self.rounds = 0  # that went into them
        self.tokens: dict[int, list[Tensor]] = defaultdict(list)  # overlaps of later tokens with the first, by layer
        self.gates: dict[int, list[Tensor]] = defaultdict(list)  # |activations| [tokens, channels], by layer
        self.ratios: dict[int, list[Tensor]] = defaultdict(list)  # [tokens, k - 1], by layer

    def layer_overlap(self) -> Tensor:
        """[depth, depth] mean Jaccard overlap; nan where nothing was seen."""
        return self.layers / self.rounds if self.rounds else torch.full_like(self.layers, float("nan"))

    def token_overlap(self) -> Tensor:
        """[depth, K] mean overlap of the first token's blocks with those of the tokens after it."""
        longest = max((len(row) for rows in self.tokens.values() for row in rows), default=0)
        found = torch.full((len(self.layers), longest), float("nan"))
        for layer, rows in self.tokens.items():
            for t in range(longest):
                seen = [row[t] for row in rows if len(row) > t]
                found[layer, t] = torch.stack(seen).mean()
        return found

    def union_share(self, thresholds: Tensor) -> Tensor:
        """[depth] channels that no token of a pass needs, as a share; nan where layers have experts."""
        shares = torch.full((len(self.layers),), float("nan"))
        for layer, passes in self.gates.items():
            one = [unions(g >= thresholds[layer], torch.zeros(len(g), dtype=torch.long))[0] for g in passes]
            if len({len(row) for row in one}) == 1 and len(self.ratios[layer]) == 0:
                shares[layer] = 1 - torch.stack(one).float().mean()
        return shares


class Watching:
    """See model.way.Sparsity: leaves nothing out."""

    fusible = False

    def __init__(self, runner: ModelRunner, plan: AttentionPlan) -> None:
        self.shape, self.plan, self.means = runner.shape, plan, Means.of(runner.cache, plan)
        self.open = [i for i, sight in enumerate(self.shape.attention_specs) if sight.window is None]
        self.notes = Notes(self.shape.depth)

    def apart(self, requests: Sequence[Score]) -> tuple[list[Score], list[Score]]:
        return [], list(requests)

    def prepare(self, requests: Sequence[Score]) -> list[Score]:
        return list(requests)

    def layer_ops(self, requests: Sequence[Score], spans: list[SequenceChunk]) -> LayerOps:
        if len(requests) == 1 and checks(requests[0]):
            return ObservingLayerOps(self, spans[0])
        return DENSE

    def marks(self, requests: Sequence[Score], starts: Sequence[int]) -> None:
        return None

    def pairs(self, requests: Sequence[Score], starts: Sequence[int]) -> None:
        return None

    def inputs(self, marks: Tensor, pairs: Tensor | None, kernels: Kernels) -> SparsityInputs:
        return SparsityInputs(marks)

    def fed(self, slot: int, start: int, tokens: Sequence[int], checked: bool = False) -> None:
        pass


class ObservingLayerOps(LayerOps):
    def __init__(self, watching: Watching, span: SequenceChunk) -> None:
        self.watching, self.span, self.notes = watching, span, watching.notes
        self._sets: dict[int, Tensor] = {}  # by layer: the draft's, [kv heads, blocks]
        self._sparse = watching.plan.sparse_at(span.start, watching.shape.kv_heads)
        if self._sparse:
            watching.means.update(span.slot, span.start)

    def attend(
        self, layer: int, place: int, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        if self._sparse and layer in self.watching.open:
            each = q.transpose(0, 1)[:, None]  # [n, 1, heads, d]
            sets = self._choices(layer, each)
            self._sets[layer] = self._choices(layer, each.transpose(0, 1))[0]
            self.notes.tokens[layer].append(torch.stack([overlap(sets[0], later) for later in sets[1:]]))
            if layer == self.watching.open[-1]:
                self._compare()
        return super().attend(layer, place, q, keys, values, mask, scale)

    def _choices(self, layer: int, q: Tensor) -> Tensor:
        """What drafts [n, tokens, heads, d] would choose, [n, kv heads, blocks], without what is always kept."""
        plan, start, shape = self.watching.plan, self.span.start, self.watching.shape
        full, n = start // plan.block, len(q)
        known = self.watching.means
        means = known.keys[layer, self.span.slot, :, :full].expand(n, -1, -1, -1)
        wide = known.variances_of(layer)
        wide = None if wide is None else wide[self.span.slot, :, :full].expand(n, -1, -1, -1)
        whole = torch.tensor([[full], [plan.pairs(start, shape.kv_heads)]], device=q.device).expand(2, n)
        scores = block_scores(q, means, whole[0], plan, shape.attention_scale, variances=wide)
        chosen = choose(scores, whole[0], whole[1], plan)
        chosen[..., : plan.sinks] = False
        chosen[..., max(full - plan.recent, 0) :] = False
        return chosen

    def _compare(self) -> None:
        self.notes.rounds += 1
        for i, one in self._sets.items():
            for j, other in self._sets.items():
                self.notes.layers[i, j] += float(overlap(one, other))

    def feed(self, layer: int, ffn: FeedForward | Experts, x: Tensor) -> Tensor:
        if isinstance(ffn, FeedForward):
            self._gate(layer, ffn, x)
            return ffn(x)
        weights, index = ffn.route(x)
        self.notes.ratios[layer].append(ratios(weights).cpu())

        def run(expert: FeedForward, some: Tensor, rows: Tensor) -> Tensor:
            self._gate(layer, expert, some)
            return expert(some)

        return ffn.combine(x, weights, index, run)

    def _gate(self, layer: int, ffn: FeedForward, x: Tensor) -> None:
        if len(self.notes.gates[layer]) < GATES:
            gate, _ = ffn.gate_up(x).chunk(2, dim=-1)
            self.notes.gates[layer].append(ffn.activate(gate).abs().cpu())


def overlap(one: Tensor, other: Tensor) -> Tensor:
    """Jaccard: what both have of what either has; two empty sets are alike."""
    either = (one | other).sum()
    return torch.where(either > 0, (one & other).sum() / either.clamp_min(1), 1.0).float().cpu()
