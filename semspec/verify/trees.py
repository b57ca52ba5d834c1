"""The tree drafts of a batch: as trees, and as the paths through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from semspec import tree
from semspec.sampling.copies import to_device


@dataclass(frozen=True, slots=True)
class DraftTrees:
    """Trees of B sequences with P paths in all. Places are counted from 0, the context; i + 1 is draft token i."""

    lists: list[tuple[int, ...]]  # of each sequence: the parents of its draft tokens
    before: Tensor  # [B, K] the place of each draft token's parent
    sequence: Tensor  # [P] whose path it is
    counts: Tensor  # [P] tokens of each path
    places: Tensor  # [P, D + 1] places from the context on; after a path's end, its last again

    @staticmethod
    def of(lists: Sequence[tuple[int, ...]], longest: int, device: torch.device) -> DraftTrees:
        paths = [(b, path) for b, parents in enumerate(lists) for path in tree.paths(parents) or [()]]
        deepest = max(len(path) for _, path in paths)
        table = [[b, len(path), 0, *(i + 1 for i in path)] for b, path in paths]
        table = [row + row[-1:] * (deepest + 3 - len(row)) for row in table]
        before = [[parent + 1 for parent in parents] + [0] * (longest - len(parents)) for parents in lists]
        columns = to_device(np.array(table), device)
        parents_of = to_device(np.array(before, np.int64).reshape(len(lists), longest), device)
        return DraftTrees(list(lists), parents_of, columns[:, 0], columns[:, 1], columns[:, 2:])
