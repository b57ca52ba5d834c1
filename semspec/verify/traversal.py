"""`traversal`: traversal verification, which keeps the target's distribution and verifies trees from their leaves.

`sampling` walks down a tree and is lost with the first token that it rejects. Here a whole path is tested first: with
p = 1 at the context and p(x) = min(1, p(parent) * M(x) / m(x)) below, M the target's and m the draft's probability, the
first leaf is accepted, with all before it, with probability p(leaf). If it is rejected, it is taken from the tree, and
its parent goes on with
    M' = norm(max(p * M - m, 0)),   p' = Z / (Z + 1 - p),   Z = sum over x of max(p * M(x) - m(x), 0)
and m without that token; then its next child is tested, and when none is left the parent itself, with p'. The token
after the accepted path is drawn from the M that is left there. On a chain this is `block`.
Source: Weng et al. 2025 (arXiv 2505.12398).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semspec import tree
from semspec.sampling.draw import choose
from semspec.sampling.noise import ACCEPT, RESIDUAL
from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.block import Block
from semspec.verify.sampling import normalised, without


@dataclass(frozen=True)
class Traversal(Rule):
    name = "traversal"
    title = "Traversal verification"
    lossless = True
    needs_draft_logits = True
    supports_trees = True

    def verify(self, drafts: DraftBatch) -> Decisions:
        return Block().verify(drafts)

    def verify_tree(self, drafts: DraftBatch) -> Decisions:
        assert drafts.trees is not None
        tours = _tours(drafts.trees.lists).to(drafts.ids.device, non_blocking=True)  # [B, steps, 4]
        walk = _Walk(drafts, levels=int(drafts.trees.places.shape[1]))
        for entered, entered_level, left, left_level in tours.permute(1, 2, 0):
            walk.enter(entered, entered_level)
            walk.leave(left, left_level)
        return walk.decisions()


class _Walk:
    """Through all trees at once, each at its own token. Of every token on the way down: p, M and what m has lost."""

    def __init__(self, drafts: DraftBatch, levels: int) -> None:
        self.drafts, self.rows = drafts, torch.arange(len(drafts.counts), device=drafts.ids.device)
        root = drafts.target_distribution(torch.zeros_like(drafts.counts))
        self.p = torch.ones(len(root), levels, device=root.device)  # [B, levels]
        self.target = root[:, None].repeat(1, levels, 1)  # [B, levels, V]
        self.lost = torch.zeros_like(self.target, dtype=torch.bool)
        self.u = drafts.uniform(ACCEPT)
        self.place, self.level = torch.zeros_like(drafts.counts), torch.zeros_like(drafts.counts)  # accepted, 0: none

    def enter(self, place: Tensor, level: Tensor) -> None:
        """Tokens [B] by their places, at these levels; place 0: none here."""
        on, above = (place > 0) & (self.place == 0), (level - 1).clamp_min(0)
        token, m = self._token(place, above)
        own, drawn = self.target[self.rows, above, token], m[self.rows, token]
        ratio = torch.where(drawn > 0, own / drawn, 0.0)  # 0: it could not be drawn, with its siblings gone
        p = (self.p[self.rows, above] * ratio).clamp_max(1)
        self.p[self.rows, level] = torch.where(on, p, self.p[self.rows, level])
        target = self.drafts.target_distribution(place)
        self.target[self.rows, level] = torch.where(on[:, None], target, self.target[self.rows, level])
        self.lost[self.rows, level] &= ~on[:, None]

    def leave(self, place: Tensor, level: Tensor) -> None:
        """All children of these are rejected: test them, or take them from their parents."""
        on, above = (place > 0) & (self.place == 0), (level - 1).clamp_min(0)
        token, m = self._token(place, above)
        passes = self.u.gather(1, (place - 1).clamp_min(0)[:, None])[:, 0] <= self.p[self.rows, level]
        self.place = torch.where(on & passes, place, self.place)
        self.level = torch.where(on & passes, level, self.level)
        on = on & ~passes
        p, before = self.p[self.rows, above], self.target[self.rows, above]
        rest = (p[:, None] * before - m).clamp_min(0)
        excess = rest.sum(-1)
        share = torch.where((excess == 0) & (p == 1), 1.0, excess / (excess + 1 - p))  # 0/0: M equals m
        self.p[self.rows, above] = torch.where(on, share, p)
        self.target[self.rows, above] = torch.where(on[:, None], normalised(rest, before), before)
        self.lost[self.rows, above, token] |= on

    def _token(self, place: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
        """[B] which token, and [B, V] what it was drawn from after its siblings before it"""
        at = (place - 1).clamp_min(0)
        token = self.drafts.safe_ids.gather(1, at[:, None])[:, 0]
        return token, without(self.drafts.draft_distribution(at), self.lost[self.rows, above])

    def decisions(self) -> Decisions:
        left = self.target[self.rows, self.level]
        key = self.drafts.key(RESIDUAL).gather(1, self.place[:, None])[:, 0]
        return Decisions(self.level, choose(left.log(), key), last=self.place - 1)


def _tours(lists: Sequence[tuple[int, ...]]) -> Tensor:
    """For each tree, which tokens to enter and which to leave, step by step: [place, level, place, level], place 0
    being none. A token is left after its children; one without any is left as it is entered."""
    number = {parents: i for i, parents in enumerate(dict.fromkeys(lists))}
    tours = [_tour(parents) for parents in number]
    longest = max(map(len, tours))
    table = torch.tensor([tour + [[0, 0, 0, 0]] * (longest - len(tour)) for tour in tours])
    return table[[number[parents] for parents in lists]]


def _tour(parents: tuple[int, ...]) -> list[list[int]]:
    levels = [depth + 1 for depth in tree.depths(parents)]
    children = [[i for i, parent in enumerate(parents) if parent == p] for p in range(-1, len(parents))]
    steps = list[list[int]]()
    waiting = [(i, True) for i in reversed(children[0])]  # tokens, and whether they are still to be entered
    while waiting:
        i, enters = waiting.pop()
        entered, left = [i + 1, levels[i]] if enters else [0, 0], [i + 1, levels[i]]
        if enters and children[i + 1]:
            left = [0, 0]
            waiting += [(i, False), *((child, True) for child in reversed(children[i + 1]))]
        steps.append(entered + left)
    return steps
