"""Tree drafts, grown by a draft model or a head: level by level, one pass for each, over all tokens of a level.

Where the rule needs the draft's tokens only, the likeliest tokens are taken: each level goes on from the `top` tokens
with the highest joint probability (fewer where paths are long), each with its `top` likeliest successors, and of all of
these the best `size` are the draft. Which tokens these are depends on the context alone.
Where the rule needs to know what tokens were drawn from, siblings are drawn without replacement, into a shape that is
fixed beforehand: to choose branches by what was drawn would bias a lossless rule.
Source: EAGLE-2 (Li et al. 2024, arXiv 2406.16858); fixed shapes as in Sequoia (Chen et al. 2024, arXiv 2402.12374).
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Generator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semspec import tree
from semspec.errors import BadRequest
from semspec.sampling import noise
from semspec.sampling.draw import SamplingRows, likeliest_of, process
from semspec.sampling.processors import History
from semspec.types import Beam, Draft, DraftRequest, Grow, Request, Runner, Score, ScoreOutput

Numbers = np.ndarray[Any, Any]
RANKS = (0.65, 0.13, 0.06, 0.035)  # how often the first, second ... sibling is accepted, about; later ones as the last


TOP = 4  # branches of a token, if nobody says how many


@dataclass(frozen=True, slots=True)
class TreeOptions:
    size: int = 0  # tokens of a draft; 0: drafts are chains
    depth: int = 0  # tokens on a path; 0: the draft length of the request
    top: int = TOP  # branches of a token

    def __post_init__(self) -> None:
        if not self.size and (self.depth or self.top != TOP):
            raise BadRequest("depth and top are for tree drafts; give tree=... too, the tokens of a draft")

    def levels(self, most: int) -> int:
        return min(most, self.depth or most, self.size)


CHAIN = TreeOptions()


def grow(
    runner: Runner, slot: int, context: list[int], request: DraftRequest, options: TreeOptions
) -> Generator[Request, Any, Draft]:
    """A draft after this context; afterwards the slot holds the context and nothing else."""
    kind: type[_Likeliest | _Drawn] = _Likeliest if request.sampling.greedy else _Drawn
    levels = options.levels(request.max_tokens)
    space = runner.max_seq_len - len(context)
    while (growth := kind(context, request, options, levels)).most_fed > space and levels > 1:
        levels -= 1
    feed = context[runner.length(slot) :]
    rows: ScoreOutput = yield Score(runner, slot, feed, 1, drafting=True, best=growth.best)
    tokens, _ = growth.add(rows)
    if tokens:
        yield Grow(runner, slot, growth, tokens)
    runner.truncate(slot, len(context))
    return growth.draft()


Fed = tuple[list[int], list[int]]  # tokens to feed, and the indices of their parents among all that were fed before


def processed(history: History, logits: Tensor, paths: list[list[int]]) -> Tensor:
    """Rows as the options of a request change them, each after a path of its own."""
    each = (History(history.processors, history.tokens + path) for path in paths)
    return torch.cat([own.apply(logits[i : i + 1], drafting=True) for i, own in enumerate(each)])


class _Likeliest:
    """Of all tokens met, level by level: ids, the indices of their parents, and their joint log-probabilities."""

    def __init__(self, context: list[int], request: DraftRequest, options: TreeOptions, levels: int) -> None:
        self.options, self.stop, self.left = options, request.stop, levels
        self.history = None if request.processors is None else request.processors.after(context)
        self.best = options.top if self.history is None else 0  # which are best shows in processed rows
        # At least finite: a token that cannot follow is none, nor is NaN.
        self.threshold = math.log(request.threshold) if request.threshold > 0 else -sys.float_info.max
        self.width = min(options.top, tree.MAX_TREE // max(levels - 1, 1))
        self.most_fed = self.width * (levels - 1)  # all levels but the last
        self.tokens, self.parents, self.joint = list[Numbers](), list[Numbers](), list[Numbers]()
        self.met = self.fed = 0
        self.frontier, self.chances = np.array([-1]), np.zeros(1)  # tokens whose successors come next, and their joint
        self.first = -1  # where the first of them lies among those that were fed; the others follow it

    @property
    def beam(self) -> Beam | None:
        if self.history is not None:
            return None
        return Beam(self.chances.tolist(), self.width, self.best, self.left, self.threshold, self.stop)

    def add(self, rows: ScoreOutput) -> Fed:
        """The successors of the frontier, from its rows. Returns what to feed next."""
        best = rows.best
        if self.history is not None:
            best = likeliest_of(processed(self.history, rows.logits, self._paths()), self.options.top)
        assert best is not None
        values, ids = best
        each = values.shape[1]
        joint, tokens = (self.chances[:, None] + values).ravel(), ids.ravel()
        self.tokens.append(tokens)
        self.parents.append(self.frontier.repeat(each))
        self.joint.append(joint)
        self.left -= 1
        if not self.left:
            return [], []
        chosen = likeliest(joint, self.threshold)
        if self.stop:
            chosen = chosen[[token not in self.stop for token in tokens[chosen].tolist()]]
        chosen = chosen[: self.width]
        parents = (self.first + chosen // each).tolist()
        self.frontier, self.chances, self.first = self.met + chosen, joint[chosen], self.fed
        self.met, self.fed = self.met + len(joint), self.fed + len(chosen)
        return tokens[chosen].astype(int).tolist(), parents

    def _paths(self) -> list[list[int]]:
        """The tokens up to each of the frontier."""
        tokens, parents = ([int(n) for each in own for n in each] for own in (self.tokens, self.parents))
        return [[tokens[i] for i in tree.path(parents, last)] for last in self.frontier.tolist()]

    def draft(self) -> Draft:
        tokens, parents, joint = (np.concatenate(each) for each in (self.tokens, self.parents, self.joint))
        best = likeliest(joint, self.threshold)[: self.options.size]
        return in_order(Draft(tokens.astype(int).tolist(), parents=tuple(parents.tolist())).only(best.tolist()))


def likeliest(joint: Numbers, least: float) -> Numbers:
    """The places of those with this chance at least, the likeliest first; of equally likely ones the first."""
    order = np.argsort(-joint, kind="stable")
    return order[: np.count_nonzero(joint >= least)]  # NaN comes last


class _Drawn:
    beam = None  # what is drawn decides

    def __init__(self, context: list[int], request: DraftRequest, options: TreeOptions, levels: int) -> None:
        self.request, self.start = request, len(context)
        self.best = 0  # every token is drawn from a whole row
        self.shape = fixed_shape(options.size, levels, options.top, round(request.threshold, 3))
        self.children = [[i for i, parent in enumerate(self.shape) if parent == p] for p in range(-1, len(self.shape))]
        self.most_fed = sum(map(bool, self.children[1:]))  # whatever is followed by others
        self.tokens: dict[int, int] = {}  # of those that could be drawn
        self.rows: dict[int, Tensor] = {}  # what each was drawn from
        self.frontier, self.level = [-1], 0
        self.history = None if request.processors is None else request.processors.after(context)
        self.place, self.fed = {-1: -1}, 0

    def add(self, rows: ScoreOutput) -> Fed:
        logits, sampling, stream = rows.logits, self.request.sampling, self.request.stream
        if self.history is not None:
            paths = [[self.tokens[i] for i in tree.path(self.shape, last)] for last in self.frontier]
            logits = processed(self.history, logits, paths)
        drawn = process(logits, SamplingRows.of([sampling], [len(logits)], logits.device))
        # The target's noise belongs to positions; any other is drawn for each token by itself.
        at = [self.start + (self.level if stream == noise.TARGET else parent + 1) for parent in self.frontier]
        keys = torch.tensor([noise.signed(noise.key_of(sampling.seed, p, stream)) for p in at], device=logits.device)
        race = drawn - noise.exponential(keys, logits.shape[-1]).log()
        most = max(len(self.children[parent + 1]) for parent in self.frontier)
        best = race.topk(min(most, logits.shape[-1]), dim=-1)
        ranked = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        for parent, row, (values, ids) in zip(self.frontier, drawn, ranked, strict=True):
            for child, value, token in zip(self.children[parent + 1], values, ids, strict=False):
                if value > -torch.inf:
                    self.tokens[child], self.rows[child] = token, row
        level = [c for parent in self.frontier for c in self.children[parent + 1] if c in self.tokens]
        self.frontier, self.level = [c for c in level if self.children[c + 1]], self.level + 1
        found = [self.tokens[c] for c in self.frontier], [self.place[self.shape[c]] for c in self.frontier]
        for c in self.frontier:
            self.place[c], self.fed = self.fed, self.fed + 1
        return found

    def draft(self) -> Draft:
        left, parents = tree.pruned(self.shape, self.tokens)
        logits = torch.stack([self.rows[i] for i in left]) if self.request.keep_logits and left else None
        return in_order(Draft([self.tokens[i] for i in left], logits, parents=parents))


def in_order(draft: Draft) -> Draft:
    """The same draft, each token followed by its first child."""
    if not draft.parents:
        return draft
    order, parents = tree.preorder(draft.parents)
    logits = None if draft.logits is None else draft.logits[order]
    return Draft([draft.tokens[i] for i in order], logits, parents=parents)


@lru_cache(maxsize=256)
def fixed_shape(size: int, levels: int, top: int, threshold: float = 0.0) -> tuple[int, ...]:
    """Parents of the `size` tokens that are likeliest to be accepted if siblings are accepted as `RANKS` says; none
    with less than the least chance."""
    parents = list[int]()
    waiting = [(-RANKS[0], 0, -1, 0, 0)]  # minus the chance, number, parent, rank among its siblings, level
    for number in range(1, 2 * size, 2):
        if not waiting:
            break
        chance, _, parent, rank, level = heapq.heappop(waiting)
        if -chance < threshold:
            break
        parents.append(parent)
        before = chance / RANKS[min(rank, len(RANKS) - 1)]
        if rank + 1 < top:
            sibling = before * RANKS[min(rank + 1, len(RANKS) - 1)]
            heapq.heappush(waiting, (sibling, number, parent, rank + 1, level))
        if level + 1 < levels:
            heapq.heappush(waiting, (chance * RANKS[0], number + 1, len(parents) - 1, 0, level + 1))
    return tuple(parents)
