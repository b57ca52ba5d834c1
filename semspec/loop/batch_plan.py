"""The lengths of a tick's drafts: the best ones (joint_length.py), and who has to read its text for them.

Before its first draft a sequence's text is read by the draft model. That is paid once and saves time for as long as the
sequence goes on writing, which nobody knows: at most what it may still write, and probably not much more than it has
written already. So it is spread over that, and has to be earned back with something to spare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from semspec.loop.costs import Array
from semspec.loop.draft_length import AdaptiveLength, Situation
from semspec.loop.joint_length import BatchCosts, Lengths, joint_lengths, outcome

MAX_TOKENS = 8  # of a draft beside others: those of one call, or sequences would not stay together
RETURN = 2.0  # times what reading costs have to be saved,
MARGIN = 1.03  # and drafts that begin with it have to promise so many times the speed of the target alone
EXPECTED_TOKENS = 128  # that a sequence goes on writing, if it may: or as many as it has written
MIN_UNREAD = 32  # tokens: fewer are read on the way
HOPE = 0.95  # the acceptance that drafts may have, before any was checked,
HOPE_TOKENS = 4.0  # and its weight, in tokens


class Batch:
    """What the lengths of a tick are chosen from."""

    def __init__(
        self, sequences: Sequence[tuple[AdaptiveLength, Situation]], costs: BatchCosts, reading: float = 0.0
    ) -> None:
        """`reading`: seconds in which a draft model reads a token of a text."""
        most = (1 + MAX_TOKENS) * len(sequences) + costs.other_rows
        table = costs.check(np.arange(most + 1.0))  # looked up many times
        self.costs = replace(costs, check=lambda rows: table[rows.astype(int)])
        policies = [policy for policy, _ in sequences]
        self.min_tokens = np.array([policy.min_tokens for policy in policies])
        self.drafting = np.array([not policy.lookup for policy in policies])
        self.unread = np.array([at.unread if not policy.lookup else 0 for policy, at in sequences])
        self.reading = reading * np.where(self.unread > MIN_UNREAD, self.unread, 0)
        self.left = np.array([float(expected_tokens(at)) for _, at in sequences])
        rows = {policy: _survival(policy, policy.chances()) for policy in set(policies)}
        self.survival = np.array([rows[policy] for policy in policies])
        self._policies = policies

    def of(self, n: int) -> Lengths:
        """About n tokens for each, within what it may have."""
        longest = np.count_nonzero(self.survival, axis=1)
        wanted = np.clip(n, self.min_tokens, np.maximum(longest, self.min_tokens))
        return np.where((n > 0) & (longest >= self.min_tokens), wanted, 0)

    def cheapest(self, among: NDArray[np.bool_], count: int) -> NDArray[np.bool_]:
        """So many of them, those who have the least to read."""
        order = np.argsort(np.where(among, self.unread, np.inf), kind="stable")[:count]
        chosen = np.zeros_like(among)
        chosen[order] = True
        return chosen & among

    def best(self, begin: bool = True) -> tuple[Lengths, float]:
        """Lengths, and tokens per second. `begin`: also for those who have to read first."""
        return self._best(self.survival, begin)

    def hoped(self) -> NDArray[np.bool_]:
        """Who would draft if drafts turned out as good as they still may be."""
        hopes = {policy: _survival(policy, [_hope(policy)] * policy.max_tokens) for policy in set(self._policies)}
        return self._best(np.array([hopes[policy] for policy in self._policies]), True)[0] > 0

    def _best(self, survival: Array, begin: bool) -> tuple[Lengths, float]:
        alone = (len(survival) + self.costs.others) / self.costs.target_only
        found, best, speed = np.zeros(len(survival), int), alone, alone
        ready = self.reading == 0
        parts = [ready]
        if begin and not ready.all():
            away = ~ready & (survival[:, 0] > 0)
            parts += [ready | self.cheapest(away, int(np.count_nonzero(away)) // 2), ready | away]
        for who in filter(np.any, parts):
            lengths, _ = joint_lengths(survival * who[:, None], self.drafting, self.costs)
            lengths = np.where(lengths < self.min_tokens, 0, lengths)
            if not lengths.any():
                continue
            tokens, seconds = outcome(survival, self.drafting, lengths, self.costs)
            kept = 1 + (survival * (np.arange(survival.shape[1]) < lengths[:, None])).sum(1)
            read = float((self.reading * (lengths > 0) * kept / self.left).sum())  # in every tick until they end
            net = tokens / (seconds + RETURN * read)
            if net > max(best, MARGIN * alone if read else 0.0):
                found, best, speed = lengths, net, tokens / seconds
        return found, speed


def expected_tokens(at: Situation) -> int:
    """That a sequence goes on writing."""
    return max(min(at.left, max(at.written, EXPECTED_TOKENS)), 1)


def _hope(policy: AdaptiveLength) -> float:
    """The acceptance that drafts may have."""
    return (HOPE_TOKENS * HOPE + sum(policy.accepted)) / (HOPE_TOKENS + sum(policy.tested))


def _survival(policy: AdaptiveLength, chances: Sequence[float]) -> Array:
    row, n = np.zeros(MAX_TOKENS), min(policy.max_tokens, MAX_TOKENS)
    if policy.min_tokens <= n:
        row[:n] = np.cumprod(chances[:n])
        row[: policy.min_tokens] = row[: policy.min_tokens].mean()  # all of them, or none
    return row
