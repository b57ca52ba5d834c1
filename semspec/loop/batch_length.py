"""Draft lengths of sequences that run together: what pays for one may not pay for many.

A sequence that runs alone has the lengths of its `AdaptiveLength`. With others beside it, all lengths of a tick are
chosen together (batch_plan.py), by what passes of such sizes take with so much text before them (costs.py) and by the
acceptance that each rule and drafter has had. A batch begins without drafts, for a draft model has to read every text
first, and that has to pay, too. Where drafts do not seem to pay, a few sequences try some now and then, for a small
share of the time, if they would pay with a better acceptance. What drafts cost or save against the target alone is kept
account of, for each situation: about so many sequences, texts of about such a length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from semspec.loop.batch_plan import MIN_UNREAD, RETURN, Batch, expected_tokens
from semspec.loop.costs import PassCosts
from semspec.loop.draft_length import (
    ALLOWANCE,
    DECAY,
    DECODE_TOKENS,
    MAX_EXCESS,
    MAX_TREE_THRESHOLD,
    NOWHERE,
    AdaptiveLength,
    DraftLengthPolicy,
    RepeatableLength,
    Round,
    Situation,
)
from semspec.loop.joint_length import BatchCosts, Lengths, outcome
from semspec.loop.recent import text_class

FEW_TOKENS = 3  # of drafts that are tried
PLAN_TICKS = 4  # ticks between two choices
TRIAL = 8  # of so many sequences one tries drafts of which nothing is known, or which do not seem to pay
GROWTH = 4  # times as many sequences draft as were timed: a draft model's passes may be dearer than they seem
LOADING = 3  # timed drafts that a measurement at loading counts as
TRIAL_SHARE = 0.005  # of the time that trials may cost: all learn from them
MAX_SAVED = 0.5  # of the time that a sequence alone takes: more is not hoped for
MAX_CREDIT = 16.0  # tokens of every sequence that may be saved up for them
RESERVE = 1.0  # tokens of the target alone that rounds with drafts may cost each sequence at first,
READING = 4.0  # with what draft models read,
MAX_RESERVE = 8.0  # and after they have saved as much


@dataclass
class Account:
    """Tokens of the target alone that drafts may still cost each sequence in some situation. What has been read is
    spent whatever follows, so it keeps others from beginning, and nobody from going on."""

    rounds: float = RESERVE
    whole: float = READING  # with what was read

    def add(self, rounds: float, whole: float) -> None:
        self.rounds = min(self.rounds + rounds, MAX_RESERVE)
        self.whole = min(self.whole + whole, MAX_RESERVE)


@dataclass(frozen=True, slots=True)
class Drafted:
    """A tick with drafts."""

    ticks: tuple[int, int]  # in which lengths were asked for, and in which the verdicts came
    steady: bool  # no draft model had to read a text first,
    reading: bool  # but perhaps one of somebody else's, or still has to
    check: float  # expected seconds of the target's pass for each sequence,
    drafts: float  # and for each that drafts, of its drafts


class BatchLengths:
    """Of an executor: who runs, and the lengths of this tick."""

    def __init__(self, costs: PassCosts) -> None:
        self.costs = costs
        self.members: dict[Member, None] = {}  # oldest first
        self.lengths: dict[Member, int] = {}  # of this tick; others have 0
        self.rate = 0.0  # tokens per second of the best lengths
        self.accounts: dict[tuple[int, int], Account] = {}
        self.credit = 0.0  # seconds that trials may cost
        self.drafting = False  # somebody does, or has in the last tick and may have its verdict in this one
        self._tick = -1
        self._account = Account()
        self._text = 0.0  # tokens of all sequences' texts
        self._alone = (-1, 0, 0.0), 0.0
        self._best: Lengths = np.zeros(0, int)
        self._planned, self._planned_for = -PLAN_TICKS, list[Member]()
        self._trial: dict[Member, int] = {}  # goes on: the first draft of a sequence also reads, and is not timed
        self._tried = 0
        self._begun = set[int]()  # numbers of sequences for which what was measured at loading counts
        self._timed = -1  # the last tick whose drafts were timed
        self._drafted = Drafted((-1, -1), True, False, 0.0, 0.0)
        self._threshold = -1, 0.0  # of this tick

    def within(self, length: int | DraftLengthPolicy) -> int | DraftLengthPolicy:
        """The lengths of one more sequence of this batch, if they depend on others."""
        if not isinstance(length, AdaptiveLength) or isinstance(length, RepeatableLength):
            return length
        return Member(self, length)

    def length(self, member: Member) -> int:
        if self._tick != self.costs.tick:
            self._tick = self.costs.tick
            before = any(self.lengths.values())
            self.lengths = self._plan([each for each in self.members if each.joined < self._tick])
            self.drafting = before or any(self.lengths.values()) or bool(self._best.any())
        return self.lengths.get(member, 0)

    def _plan(self, members: list[Member]) -> dict[Member, int]:
        trial, self._trial = self._trial, {}
        count = self.costs.sequences
        self._text = count * sum(member.at.text for member in members) / max(len(members), 1)
        situation = count.bit_length(), text_class(self._text / max(count, 1))
        self._account = self.accounts.setdefault(situation, Account())
        if not members or not self.costs.target_only or self._account.rounds < 0:  # nothing known, or too much owed
            self._best = np.zeros(len(members), int)
            self._planned = -PLAN_TICKS
            return {}
        if trial:
            return trial
        if self.costs.tick < self._planned + PLAN_TICKS and members == self._planned_for:
            return dict(zip(members, self._best.tolist(), strict=True))
        self._planned, self._planned_for = self.costs.tick, members
        batch = self._batch(members)
        self._best, self.rate = batch.best(self._account.whole >= 0)
        lengths = self._cautious(batch)
        found = dict(zip(members, lengths.tolist(), strict=True))
        if (lengths != self._best).any():  # what comes of it counts at once
            self._planned = -PLAN_TICKS
            self._trial = found if any(n and member.at.unread for member, n in found.items()) else {}
        return found

    def _cautious(self, batch: Batch) -> Lengths:
        """The best lengths, or what has to be found out first."""
        best, few = self._best, ceil(len(self._best) / TRIAL)
        many = max(GROWTH * self.costs.drafts.largest, few)
        beginning = batch.drafting & (best > 0)
        if np.count_nonzero(beginning) > many:
            cut = beginning & ~batch.cheapest(beginning, int(many))
            return np.where(cut, 0, np.minimum(best, batch.of(FEW_TOKENS)))
        other = self._explore(batch, few)
        return best if other is None else other

    def _batch(self, members: list[Member]) -> Batch:
        costs, count, text = self.costs, len(members), self._text
        others = max(costs.sequences - count, 0)
        fed = count + sum(self.lengths.values())  # of the last pass
        one, each = self._step(1), self._step(max(count, 2))
        row = max(each - one, 0.0) / (max(count, 2) - 1)
        rows = max(others, costs.rows - fed) if others else 0
        row_cost = members[0].shared.row_cost

        def check(rows: np.ndarray) -> np.ndarray:
            return costs.check(rows, text, row_cost)

        seconds = BatchCosts(self._target_only(), check, max(one - row, 0.0), row, others, rows)
        reading = costs.read(text / max(costs.sequences, 1), max(member.shared.draft_cost for member in members))
        return Batch([(member.shared, member.at) for member in members], seconds, reading)

    def _target_only(self) -> float:
        """Seconds of a token of every sequence, without drafts."""
        now = self.costs.tick, self.costs.sequences, self._text
        if now != self._alone[0]:
            self._alone = now, self.costs.target_only.at(self.costs.sequences, self._text).item()
        return self._alone[1]

    def _step(self, sequences: int) -> float:
        """Of a draft token of so many. Before any was timed, by what was measured at loading, or the models' sizes."""
        text, timed = self._text * sequences / max(self.costs.sequences, 1), self.costs.drafts
        if sequences not in self._begun:
            self._begun.add(sequences)
            known = next((m.shared.step_costs for m in self.members if m.shared.step_costs), None)
            if known:
                share = float(np.interp(sequences, list(known), list(known.values())))
                for _ in range(LOADING):
                    timed.add(sequences, share * self.costs.target_only.at(sequences, text).item(), text)
        if timed:
            return timed.at(sequences, text).item()
        largest = max(member.shared.draft_cost for member in self.members)
        return largest * self.costs.target_only.at(sequences, text).item()

    def _explore(self, batch: Batch, few: int) -> Lengths | None:
        """Other lengths, if what they are expected to lose is covered."""
        best = int(self._best.max(initial=0))
        self._tried += 1
        who = self._best > 0 if best else batch.cheapest(np.ones(len(self._best), bool), few)
        lengths = np.where(who, batch.of((0, best + 2)[self._tried % 2] if best else FEW_TOKENS), 0)
        tokens, seconds = outcome(batch.survival, batch.drafting, lengths, batch.costs)
        loss = 2 * (seconds - tokens / self.rate) + float(batch.reading[lengths > 0].sum())
        if (lengths == self._best).all() or loss > self.credit or not (best or (who & batch.hoped()).any()):
            return None
        self.credit -= max(loss, 0.0)
        return lengths

    def observe(self, member: Member, made: Round) -> None:
        """What came of a length."""
        costs, spent = self.costs, made.draft + made.target
        if not costs.target_only or costs.disturbed >= member.asked:  # somebody's prompt was in it
            return
        target_only = self._target_only()
        self.credit = min(self.credit + TRIAL_SHARE * spent, MAX_CREDIT * target_only)
        alone = target_only / max(costs.sequences, 1)
        rounds = whole = 0.0
        if made.requested or any(self.lengths.values()):  # others' drafts cost those who have none, too
            tick = self._drafted_with(member, made)
            passes = tick.check * (1 if made.requested else made.tokens)
            charged = min(spent, MAX_EXCESS * (passes + tick.drafts))
            rounds = made.tokens - charged / alone
            whole = rounds if tick.steady else made.tokens - spent / alone
            if tick.reading:  # who reads is in none of the target's passes, so the others' shares are larger
                rounds = 0.0
        allowed = ALLOWANCE * spent / alone
        self._account.add((rounds + allowed) / len(self.members), (whole + allowed) / len(self.members))

    def _drafted_with(self, member: Member, made: Round) -> Drafted:
        """The tick of this round: the same for all who asked with it and are answered now, and looked at once."""
        costs, now = self.costs, (member.asked, self.costs.tick)
        new = self._timed < member.asked
        timed = new and made.timed and made.draft > 0  # the first to tell may have looked its draft up
        if now == self._drafted.ticks and not (timed and self._drafted.steady):
            return self._drafted
        drafting = [m for m in self.members if m.asked == member.asked and m.requested and not m.shared.lookup]
        longest = max((m.requested for m in drafting), default=1)
        steady = not any(m.at.unread for m in drafting)
        reading = any(m.requested and m.at.unread > MIN_UNREAD for m in self.members)
        if timed and steady and not reading:  # a draft model's passes are shared by all that it served
            self._timed = member.asked
            text = sum(m.at.text for m in drafting)
            costs.drafts.add(len(drafting), made.draft * len(drafting) / longest, text)
        check = costs.check(costs.rows, self._text, member.shared.row_cost).item() / max(costs.sequences, 1)
        drafts = longest * self._step(len(drafting)) / len(drafting) if drafting else 0.0
        self._drafted = Drafted(now, steady, reading, check, drafts)
        return self._drafted

    def too_late(self, shared: AdaptiveLength, at: Situation) -> bool:
        """Whether a sequence that is alone had better not read its text for drafts: little is left to write."""
        if shared.lookup or at.unread <= MIN_UNREAD or not self.costs.target_only:
            return False
        saved = MAX_SAVED * expected_tokens(at) * self.costs.target_only.at(1, at.text).item()
        return RETURN * at.unread * self.costs.read(at.text, shared.draft_cost) > saved

    @property
    def threshold(self) -> float:
        """The chance from which a further token of a tree is worth its place in the pass of all."""
        costs = self.costs
        if costs.tick != self._threshold[0]:  # the same for all who ask in a tick
            worth = 0.0
            if costs.checks:
                further = float(np.diff(costs.check([costs.rows, 1.25 * costs.rows], self._text)).item())
                worth = further / (0.25 * costs.rows) * self.rate
            self._threshold = costs.tick, min(max(worth, 0.0), MAX_TREE_THRESHOLD)
        return self._threshold[1]


class Member:
    """The lengths of one sequence."""

    def __init__(self, batch: BatchLengths, shared: AdaptiveLength) -> None:
        self.batch, self.shared = batch, shared
        self.at = NOWHERE
        self.joined = self.asked = -1  # ticks: of the first length and of the last
        self.requested = 0
        self.together = False  # with others, in the last round

    def length(self, at: Situation) -> int:
        batch = self.batch
        self.at, self.asked, self.together = at, batch.costs.tick, batch.costs.sequences > 1
        if self not in batch.members:  # those who come together do not know of each other yet
            batch.members[self] = None
            self.joined = self.asked
        if self.together:
            self.requested = batch.length(self)
        else:
            self.requested = 0 if batch.too_late(self.shared, at) else self.shared.length(at)
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

    def target_only_tokens(self, undrafted_rounds: int) -> int:
        if not self.together:
            return self.shared.target_only_tokens(undrafted_rounds)
        if self.batch.drafting:  # then a tick makes one token, and who has none may join the next
            return 1
        # As many for all, or those who have written theirs would wait for the others.
        return DECODE_TOKENS if self.batch.costs.target_only else self.shared.target_only_tokens(0)

    def close(self) -> None:
        self.batch.members.pop(self, None)
