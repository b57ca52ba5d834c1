"""Draft lengths of sequences that run together: what pays for one may not pay for many.

A sequence that runs alone has the lengths of its `AdaptiveLength`. With others beside it, all lengths of a tick are
chosen together (joint_length.py), by what passes of such sizes take (costs.py) and by the acceptance that each rule and
drafter has had. A batch begins without drafts, for a draft model would have to read every prompt too; then a few
sequences draft, and twice as many as long as it seems to pay, so that it costs little to find out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from semspec.loop.costs import Array, PassCosts
from semspec.loop.draft_length import (
    ALLOWANCE,
    DECAY,
    MAX_EXCESS,
    MAX_LEAST,
    AdaptiveLength,
    DraftLengthPolicy,
    RepeatableLength,
    Round,
)
from semspec.loop.joint_length import BatchCosts, Lengths, joint_lengths, outcome

MAX_TOKENS = 8  # of a draft beside others: those of one call, or sequences would not stay together
FEW_TOKENS = 2  # of drafts that are tried
MARGIN = 1.05  # drafts of a model have to promise this much more: before the first it reads all the text
PLAN_TICKS = 4  # ticks between two choices
TRIAL = 8  # of so many sequences one tries drafts that do not seem to pay
TRIAL_SHARE = 0.005  # of the time that trials may cost: all learn from them
RESERVE = 1.0  # tokens of the target alone that drafts may cost each sequence at first,
MAX_RESERVE = 8.0  # and after they have saved as much


class BatchLengths:
    """Of an executor: who runs, and the lengths of this tick."""

    def __init__(self, costs: PassCosts) -> None:
        self.costs = costs
        self.members: dict[Member, None] = {}  # oldest first
        self.lengths: dict[Member, int] = {}  # of this tick; others have 0
        self.rate = 0.0  # tokens per second of the best lengths
        self.reserve = RESERVE  # tokens of the target alone that drafts may still cost each sequence
        self.credit = 0.0  # seconds that trials may cost
        self._tick = -1
        self._best: Lengths = np.zeros(0, int)
        self._planned, self._planned_for = -PLAN_TICKS, list[Member]()
        self._trial: dict[Member, int] = {}  # goes on: the first draft of a sequence also reads, and is not timed
        self._tried = 0
        self._timed = -1  # the last tick whose drafts were timed

    def within(self, length: int | DraftLengthPolicy) -> int | DraftLengthPolicy:
        """The lengths of one more sequence of this batch, if they depend on others."""
        if not isinstance(length, AdaptiveLength) or isinstance(length, RepeatableLength):
            return length
        return Member(self, length)

    def length(self, member: Member) -> int:
        if self._tick != self.costs.tick:
            self._tick = self.costs.tick
            self.lengths = self._plan(list(self.members))
        return self.lengths.get(member, 0)

    def _plan(self, members: list[Member]) -> dict[Member, int]:
        trial, self._trial = self._trial, {}
        if not self.costs.target_only or self.reserve < 0:  # nothing is known yet, or drafts owe too much
            return {}
        if trial:
            return trial
        batch = self._batch(members)
        if self.costs.tick >= self._planned + PLAN_TICKS or members != self._planned_for:
            self._planned, self._planned_for = self.costs.tick, members
            self._best, self.rate = batch.best()
        few = max(2 * self.costs.drafts.largest, ceil(len(members) / TRIAL))
        many = np.cumsum(batch.drafting & (self._best > 0)) > few
        # Drafts of so many have not been timed: a few begin, with short ones.
        lengths = np.where(many, 0, np.minimum(self._best, batch.of(FEW_TOKENS))) if many.any() else self._best
        if not many.any() and (other := self._explore(batch)) is not None:
            lengths = other
        found = dict(zip(members, lengths.tolist(), strict=True))
        if (lengths != self._best).any() and any(n and not member.drafted for member, n in found.items()):
            self._trial = found
        return found

    def _batch(self, members: list[Member]) -> Batch:
        costs, count = self.costs, len(members)
        others = max(costs.sequences - count, 0)
        fed = count + sum(self.lengths.values())  # of the last pass
        one, each = self._step(1), self._step(max(count, 2))
        row = max(each - one, 0.0) / (max(count, 2) - 1)
        rows = max(others, costs.rows - fed) if others else 0
        seconds = BatchCosts(self._target_only(), costs.check, max(one - row, 0.0), row, others, rows)
        return Batch([member.shared for member in members], seconds)

    def _target_only(self) -> float:
        """Seconds of a token of every sequence, without drafts."""
        return self.costs.target_only.at(self.costs.sequences).item()

    def _step(self, sequences: int) -> float:
        """Of a draft token of so many. Before any was timed, by the models' sizes."""
        if self.costs.drafts:
            return self.costs.drafts.at(sequences).item()
        return max(member.shared.draft_cost for member in self.members) * self.costs.target_only.at(sequences).item()

    def _explore(self, batch: Batch) -> Lengths | None:
        """Other lengths, if what they are expected to lose is covered."""
        best = int(self._best.max(initial=0))
        self._tried += 1
        few = np.arange(len(self._best)) < ceil(len(self._best) / TRIAL)
        lengths = batch.of((0, best + 2)[self._tried % 2] if best else FEW_TOKENS) * (few | bool(best))
        tokens, seconds = outcome(batch.survival, batch.drafting, lengths, batch.costs)
        loss = 2 * (seconds - tokens / self.rate)
        if (lengths == self._best).all() or loss > self.credit:
            return None
        self.credit -= max(loss, 0.0)
        return lengths

    def observe(self, member: Member, made: Round) -> None:
        """What came of a length."""
        costs, spent = self.costs, made.draft + made.target
        self.credit += TRIAL_SHARE * spent
        if not costs.target_only or costs.disturbed >= member.asked:  # somebody's prompt was in it
            return
        alone, saved = self._target_only() / max(costs.sequences, 1), 0.0
        if made.requested or any(self.lengths.values()):  # others' drafts cost those who have none, too
            drafting = [m for m in self.members if m.asked == member.asked and m.requested and not m.shared.lookup]
            longest = max((m.requested for m in drafting), default=1)
            steady = all(m.caught_up for m in drafting)
            if made.draft > 0 and self._timed < member.asked and steady:
                self._timed = member.asked
                costs.drafts.add(len(drafting), made.draft * len(drafting) / longest)
            passes = costs.check(costs.rows).item() / max(costs.sequences, 1) * (1 if made.requested else made.tokens)
            drafts = longest * self._step(len(drafting)) / len(drafting) if drafting else 0.0
            charged = min(spent, MAX_EXCESS * (passes + drafts)) if steady else spent
            saved = made.tokens - charged / alone
        self.reserve = min(self.reserve + (saved + ALLOWANCE * spent / alone) / len(self.members), MAX_RESERVE)

    @property
    def threshold(self) -> float:
        """The chance from which a further token of a tree is worth its place in the pass of all."""
        rows = self.costs.rows
        if not self.costs.checks:
            return 0.0
        further = float(np.diff(self.costs.check([rows, 1.25 * rows])).item()) / (0.25 * rows)
        return min(max(further * self.rate, 0.0), MAX_LEAST)


class Batch:
    """What the lengths of a tick are chosen from."""

    def __init__(self, shared: Sequence[AdaptiveLength], costs: BatchCosts) -> None:
        self.costs = costs
        self.min_tokens = np.array([each.min_tokens for each in shared])
        self.drafting = np.array([not each.lookup for each in shared])
        self.survival = np.zeros((len(shared), MAX_TOKENS))
        rows = {each: self._row(each) for each in set(shared)}
        for i, each in enumerate(shared):
            self.survival[i] = rows[each]

    @staticmethod
    def _row(shared: AdaptiveLength) -> Array:
        row, n = np.zeros(MAX_TOKENS), min(shared.max_tokens, MAX_TOKENS)
        if shared.min_tokens <= n:
            row[:n] = np.cumprod(shared.chances()[:n])
            row[: shared.min_tokens] = row[: shared.min_tokens].mean()  # all of them, or none
        return row

    def of(self, n: int) -> Lengths:
        """About n tokens for each, within what it may have."""
        longest = np.count_nonzero(self.survival, axis=1)
        wanted = np.clip(n, self.min_tokens, np.maximum(longest, self.min_tokens))
        return np.where((n > 0) & (longest >= self.min_tokens), wanted, 0)

    def best(self) -> tuple[Lengths, float]:
        lengths, rate = joint_lengths(self.survival, self.drafting, self.costs)
        lengths = np.where(lengths < self.min_tokens, 0, lengths)
        alone = (len(lengths) + self.costs.others) / self.costs.target_only
        pays = lengths.any() and rate > (MARGIN if (lengths * self.drafting).any() else 1.0) * alone
        return (lengths, rate) if pays else (np.zeros_like(lengths), alone)


class Member:
    """The lengths of one sequence."""

    def __init__(self, batch: BatchLengths, shared: AdaptiveLength) -> None:
        self.batch, self.shared = batch, shared
        self.asked = -1  # the tick
        self.requested = 0
        self.together = False  # with others, in the last round
        self.drafted = self.caught_up = False  # in the last round; in the one before

    def length(self) -> int:
        batch = self.batch
        batch.members[self] = None
        self.asked, self.together = batch.costs.tick, batch.costs.sequences > 1
        self.requested = batch.length(self) if self.together else self.shared.length()
        self.caught_up, self.drafted = self.drafted, self.requested > 0
        return self.requested

    def observe(self, made: Round) -> None:
        self.shared.decay = DECAY ** (1 / len(self.batch.members))
        if self.together:
            self.batch.observe(self, made)
            made = replace(made, timed=False, prompt=True)  # its seconds are those of a batch
        self.shared.observe(made)

    @property
    def threshold(self) -> float:
        return self.batch.threshold if self.together else self.shared.threshold

    def rest(self, undrafted_rounds: int) -> int:
        drafting = self.together and any(self.batch.lengths.values())  # then a tick makes one token, and who has none
        return 1 if drafting else self.shared.rest(undrafted_rounds)  # may join the next

    def close(self) -> None:
        self.batch.members.pop(self, None)
