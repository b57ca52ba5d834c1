"""The draft lengths of a batch: those with the most tokens per second of the pass that all sequences share.

With lengths n_i the tick makes  sum_i (1 + s_i1 + s_i1 s_i2 + ... )  tokens, s_ij being the chance that token j of the
draft of sequence i is accepted if those before it were, and takes
    check(sum_i (1 + n_i)) + max_i n_i * step + sum_i n_i * row      seconds,
or, if nothing is drafted, those of the target alone. For a given longest draft and a given number of draft tokens the
best ones are those with the highest chances of all being accepted, whosesoever they are; so all numbers are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from semspec.loop.costs import Array

Lengths = NDArray[np.int_]


@dataclass(frozen=True, slots=True)
class BatchCosts:
    """Seconds of a tick."""

    target_only: float  # a token of every sequence, without drafts
    check: Callable[[Array], Array]  # a pass of the target over so many tokens
    step: float = 0.0  # a pass of the draft model,
    row: float = 0.0  # and each sequence in it
    others: int = 0  # sequences that are not asked about; each gets a token,
    other_rows: int = 0  # for which the target's pass has so many


def outcome(survival: Array, drafting: NDArray[np.bool_], lengths: Lengths, costs: BatchCosts) -> tuple[float, float]:
    """Tokens and seconds of a tick. `survival` [S, K]: the chance that draft token j and all before it are accepted;
    `drafting` [S]: whether a draft takes passes of a draft model, as opposed to a lookup."""
    chosen = np.arange(survival.shape[1]) < lengths[:, None]
    tokens = len(survival) + costs.others + float(survival[chosen].sum())
    if not chosen.any():
        return tokens, costs.target_only
    made = lengths * drafting
    rows = len(survival) + costs.other_rows + chosen.sum()
    return tokens, costs.check(np.array(rows, float)).item() + made.max() * costs.step + made.sum() * costs.row


def joint_lengths(survival: Array, drafting: NDArray[np.bool_], costs: BatchCosts) -> tuple[Lengths, float]:
    """The best lengths [S], and their tokens per second. Where the survival is 0, nothing is drafted."""
    count, longest = survival.shape
    base = count + costs.others
    chances = survival.T.ravel()  # by position, then by sequence
    order = np.argsort(-chances, kind="stable")[: np.count_nonzero(chances)]
    lengths: Lengths = np.zeros(count, int)
    if not len(order):
        return lengths, base / costs.target_only
    position, made = order // count + 1, drafting[order % count]
    chosen = position <= np.arange(1, longest + 1)[:, None]  # [longest draft, token]
    tokens = np.cumsum(chosen, axis=1)
    steps = np.maximum.accumulate(chosen * (made * position), axis=1)
    seconds = costs.check(tokens + float(count + costs.other_rows)) + steps * costs.step
    seconds = seconds + np.cumsum(chosen & made, axis=1) * costs.row
    rates = (base + np.cumsum(chosen * chances[order], axis=1)) / seconds
    depth, most = divmod(int(np.argmax(np.where(tokens > 0, rates, 0.0))), len(order))
    if rates[depth, most] <= base / costs.target_only:
        return lengths, base / costs.target_only
    drafted = order[: most + 1][chosen[depth, : most + 1]]
    return np.bincount(drafted % count, minlength=count), float(rates[depth, most])
