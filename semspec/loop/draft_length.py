"""How many tokens to draft next: a fixed number, or the number with the highest expected speed.

The expected tokens per second of a draft of n tokens are
    rate(n) = (1 + s_1 + s_1 s_2 + ... + s_1 ... s_n) / (draft(n) + target(n)),     rate(0) = 1 / target(0)
s_i is the probability that draft token i is accepted if those before it were, estimated from the text so far; draft(n)
and target(n) are seconds, measured while running. `AdaptiveLength` takes the length with the best rate, which may be 0.
Now and then it tries other lengths, for a small share of the time, so that a wrong estimate is corrected. Whatever it
estimates, it keeps account of what drafts have cost or saved against the target alone, and stops drafting while they
owe more than a small share of the time.
`RepeatableLength` does the same by costs that are known beforehand, so that its lengths do not depend on a clock.
Source of the trade-off: Leviathan et al. 2023 (arXiv 2211.17192), with one acceptance rate for all positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

from semspec.loop.recent import clipped, median, text_class
from semspec.loop.round_seconds import PRIOR_SLOPE, RECENT, Pace, Seconds


class DraftLengthPolicy(Protocol):
    """Decides the length of a sequence's next draft and observes the results."""

    def length(self, at: Situation) -> int:
        """How many tokens to draft; 0: target only for a few tokens."""
        ...

    def observe(self, made: Round) -> None: ...

    def target_only_tokens(self, undrafted_rounds: int) -> int:
        """Tokens of the target's own before a length is asked for again, after so many rounds without a draft."""
        ...

    def close(self) -> None:
        """The sequence has ended."""

    @property
    def threshold(self) -> float:
        """The chance of being accepted from which a further token of a tree is worth its place in the target's pass."""
        ...


@dataclass(frozen=True, slots=True)
class Situation:
    """Where a sequence stands when a length is asked for, in tokens."""

    text: int  # the prompt and what was written
    written: int
    left: int  # that may still be written
    unread: int  # of the text, that a draft model would have to read first


NOWHERE = Situation(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Round:
    """What came of a draft length."""

    requested: int
    drafted: int  # less than requested where the drafter had no more to propose
    tokens: int  # committed, the bonus token included
    draft: float  # seconds
    target: float
    timed: bool = True  # False: the seconds include a prefill, so nothing is learnt from them
    prompt: bool = False  # and that was the prompt's
    scored: int = 0  # draft tokens in the target's pass: more than drafted in a tree


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Always the same length."""

    n: int
    threshold: float = 0.0

    def length(self, at: Situation = NOWHERE) -> int:
        return self.n

    def observe(self, made: Round) -> None:
        pass

    def target_only_tokens(self, undrafted_rounds: int) -> int:
        return TARGET_ONLY_TOKENS

    def close(self) -> None:
        pass


DECAY = 0.95  # of the weight of older rounds, per round
PRIOR_ACCEPTANCE = 0.7  # acceptance rate before any draft of a model,
PRIOR_LOOKUP = 0.4  # and of a lookup in the text
PRIOR_TOKENS = 2.0  # weight of a prior, in tokens
MAX_EXCESS = 1.25  # drafts are charged with this many times the expected seconds: a slow moment is not theirs
DOUBTS = 2  # times that drafts are tried again which seem not to pay only because the first passes were slow
FEW_TIMED = 3  # so many of them
GROWTH = 2  # times as long as any before: what is hoped of a much longer draft by so few tokens is often wrong
EXPLORATION = 0.02  # share of the time that may be lost by trying lengths which seem worse
ALLOWANCE = 0.015  # share of the target's time alone that drafts may cost in the long run,
RESERVE = 2.0  # and at first, in tokens of the target alone,
LOOKUP_RESERVE = 1.0  # of which lookups, that are often wrong, have fewer: short answers must not pay for them
MAX_RESERVE = 12.0  # and after they have saved as much
MAX_DRAFT_TOKENS = 16  # longest draft that is considered
INITIAL_LENGTHS = (4, 2, 0)  # tried first; the first of them reads the prompt and is not timed
INITIAL_LOOKUPS = (0, 2)
TARGET_ONLY_TOKENS = 4  # tokens of a round without a draft,
DECODE_TOKENS = 8  # and after several such rounds: between two checks for stop strings and cancellation
MIN_ROWS = 3  # passes over trees before a further token's seconds count
MAX_TREE_THRESHOLD = 0.5  # so a likely first token of a tree is always drafted
FORGETTING = 0.98  # of that, per round without a tree: what was slow once is tried again
MIN_SECONDS = 1e-9  # against division by zero
# What is learnt for texts of one length:
COSTS = ("draft", "target", "pace", "rates", "best", "credit", "reserve", "planned", "doubts", "next_candidate")
NO_STEPS: Mapping[int, float] = MappingProxyType({})


def rates(chances: Iterable[float], draft: Callable[[int], float], target: Callable[[int], float]) -> list[float]:
    """Tokens per second (or per whatever `draft` and `target` count in) with drafts of 0, 1, ... tokens, of which the
    i-th is accepted with the i-th chance if those before it were."""
    tokens = all_accepted = 1.0
    found = [1.0 / max(target(0), MIN_SECONDS)]
    for n, chance in enumerate(chances, 1):
        all_accepted *= chance
        tokens += all_accepted
        found.append(tokens / max(draft(n) + target(n), MIN_SECONDS))
    return found


class AdaptiveLength:
    """Learns while running. One may serve several sequences, at the same time or one after the other."""

    def __init__(
        self,
        max_tokens: int = MAX_DRAFT_TOKENS,
        min_tokens: int = 1,
        lookup: bool = False,
        draft_cost: float = 0.0,
        row_cost: float | None = None,
        step_costs: Mapping[int, float] = NO_STEPS,
    ) -> None:
        """`lookup`: drafts cost nothing to make, are worth less, and are often empty; `draft_cost`: of a draft token in
        target passes, as far as the models' sizes tell; `row_cost`: of a further token in a target pass, in passes, as
        measured when the model was loaded; `step_costs`: of a draft token of so many sequences, in tokens of the target
        of as many, measured then, too."""
        self.lookup, self.draft_cost, self.row_cost, self.step_costs = lookup, draft_cost, row_cost, step_costs
        self.decay = DECAY
        self.prior = PRIOR_LOOKUP if lookup else PRIOR_ACCEPTANCE
        self.max_tokens, self.min_tokens = max(max_tokens, min_tokens), min_tokens  # of a draft that is not empty
        # By position; older rounds weigh less.
        self.accepted, self.tested = [0.0] * self.max_tokens, [0.0] * self.max_tokens
        self.longest = max(INITIAL_LENGTHS[0], self.min_tokens)  # draft that was asked for
        self.rows = deque[float](maxlen=RECENT)  # seconds of a further token in a pass over a tree,
        self.treeless = 0  # and rounds with drafts since the last such pass
        self._class = 0  # of the texts for which the rest was learnt: what rounds cost depends on it,
        self._other: dict[int, dict[str, Any]] = {}  # and here it is for the others
        self._begin()

    def _begin(self) -> None:
        """Nothing is known of what rounds cost."""
        slope = PRIOR_SLOPE if self.row_cost is None else self.row_cost
        self.draft, self.target = Seconds(through_zero=True), Seconds(prior_slope=slope)
        self.pace = Pace()
        self.rates: list[float] = []  # expected tokens per second with drafts of 0, 1, ... tokens
        self.best = 0
        self.credit = 0.0  # seconds that may be lost by trying other lengths
        # What drafts have saved, in tokens that the target alone could have written in that time.
        self.reserve = LOOKUP_RESERVE if self.lookup else RESERVE
        lookups = INITIAL_LOOKUPS if self.row_cost is None else INITIAL_LOOKUPS[:1]  # what others cost is known
        self.planned = deque(self._clamp(n) for n in (lookups if self.lookup else INITIAL_LENGTHS))
        self.doubts = DOUBTS
        self.next_candidate = 0

    def _enter(self, at: Situation) -> None:
        """Go on with what was learnt for texts of this length."""
        now = text_class(at.text)
        if now != self._class:
            self._other[self._class] = {name: getattr(self, name) for name in COSTS}
            self._begin()
            vars(self).update(self._other.pop(now, {}))
            self._class = now

    def length(self, at: Situation = NOWHERE) -> int:
        self._enter(at)
        if self.planned:
            return self.planned.popleft()
        if not (self.draft.timed or self.lookup):  # sequences that started together may all have been in prefill
            return self._clamp(INITIAL_LENGTHS[0])
        if self.reserve < 0:
            return 0
        other = 0 if self.best and self.pace.ask() else self._again() if self.doubts else None
        other = self._explore() if other is None else other
        if other is None:
            return self.best
        if not self.best and other:  # the drafter has to catch up first, so its first round is not timed
            self.planned.append(other)
        return other

    def observe(self, made: Round) -> None:
        requested = min(made.requested, self.max_tokens)
        self.longest = max(self.longest, requested)
        if made.timed and (usual := self.target.median.get(requested)):
            self.pace.follow(made.target / (1 if requested else max(made.tokens, 1)), usual, alone=not requested)
        made = replace(made, draft=made.draft / self.pace.now, target=made.target / self.pace.now)
        if self.rates and not made.prompt:
            self._keep_account(made, requested)
        if requested and made.timed:
            self.treeless = 0 if made.scored > made.drafted else self.treeless + 1
        if requested and not made.drafted:  # nothing was found, which says nothing about drafts but what they cost
            if made.timed and made.draft > 0:
                self.draft.add(requested, made.draft)
            return
        if requested:
            self._count(requested, made.tokens - 1)
        if made.timed:
            self.draft.add(requested, made.draft)
            self.target.add(requested, made.target if requested else made.target / max(made.tokens, 1))
            if made.scored > made.drafted and 0 in self.target.median:
                row = max(made.target - self.target.of(0), 0.0) / made.scored
                self.rows.append(clipped(row, self.row_seconds))
        if self.target.recent:
            self._update_rates()

    def target_only_tokens(self, undrafted_rounds: int) -> int:
        # Rounds take time of their own: while drafts do not pay, there are no more of them than with `none`.
        return DECODE_TOKENS if undrafted_rounds > 1 else TARGET_ONLY_TOKENS

    def close(self) -> None:
        pass

    @property
    def row_seconds(self) -> float:
        """Of a further token in a pass over a tree; 0 before several were measured."""
        return median(self.rows) if len(self.rows) >= MIN_ROWS else 0.0

    @property
    def threshold(self) -> float:
        if not self.rates:
            return 0.0
        worth = self.row_seconds * self.rates[self.best]  # what else is written in that time
        return min(worth, MAX_TREE_THRESHOLD) * FORGETTING**self.treeless

    def _keep_account(self, made: Round, requested: int) -> None:
        """Of what this round cost against the best length, and against the target alone."""
        spent = made.draft + made.target
        lost = spent - made.tokens / self.rates[self.best]
        self.credit += EXPLORATION * spent - (max(lost, 0.0) if requested != self.best else 0.0)
        most = MAX_EXCESS * (self.draft.of(requested) + self.target.of(requested))
        if requested not in self.target.median:  # a first pass of its size may be slow
            known = self._known(requested) if self.row_cost is not None or self.target.timed else spent
            most = known if self._few_timed() else max(most, known)
        tokens = min(spent, most) * self.rates[0]  # of the target alone, in that time
        saved = made.tokens - tokens if requested else 0.0
        self.reserve = min(self.reserve + saved + ALLOWANCE * tokens, MAX_RESERVE)

    def _count(self, requested: int, accepted: int) -> None:
        """Every position up to the first rejected one was tested; a draft that ended early counts as rejected there."""
        for i in range(self.max_tokens):
            self.accepted[i] *= self.decay
            self.tested[i] *= self.decay
        for i in range(min(requested, accepted + 1)):
            self.accepted[i] += i < accepted
            self.tested[i] += 1

    def chances(self) -> list[float]:
        """Of each position to be accepted, if those before it were."""
        mean = (PRIOR_TOKENS * self.prior + sum(self.accepted)) / (PRIOR_TOKENS + sum(self.tested))
        counts = zip(self.accepted, self.tested, strict=True)
        return [(accepted + PRIOR_TOKENS * mean) / (tested + PRIOR_TOKENS) for accepted, tested in counts]

    def _update_rates(self) -> None:
        estimates = rates(self.chances(), self.draft.of, self.target.of)
        self.rates = [rate if n == 0 or n >= self.min_tokens else 0.0 for n, rate in enumerate(estimates)]
        self.best = self.rates.index(max(self.rates[: GROWTH * self.longest + 1]))

    def _known(self, n: int) -> float:
        """Seconds of a round with a draft of n tokens, by the target alone and by what was known before any draft."""
        row = PRIOR_SLOPE if self.row_cost is None else self.row_cost
        return self.target.of(0) * (1 + n * (row + self.step_costs.get(1, self.draft_cost)))

    def _few_timed(self) -> bool:
        return sum(len(recent) for n, recent in self.target.recent.items() if n) < FEW_TIMED

    def _again(self) -> int | None:
        """A length to time once more, where a single slow moment may have decided that drafts do not pay, or do."""
        drafted = [n for n in self.target.median if n]
        if not drafted or not self._few_timed() or 0 not in self.target.median:
            return None
        if self.best:
            slow = self.target.of(0) > MAX_EXCESS * self.target.of(min(drafted))  # a single token, and slower than more
            again = 0 if slow else None
        elif not (self.draft_cost or self.lookup):  # nothing to compare with
            again = None
        else:
            alone = 1 / max(self.target.of(0), MIN_SECONDS)
            hoped = rates(self.chances(), lambda n: 0.0, self._known)
            again = min(drafted) if max(hoped) > alone else None
        self.doubts -= again is not None
        return again

    def _explore(self) -> int | None:
        """The next other length to try, if the expected loss is covered by the credit."""
        best = self.best
        others = (0, 2 * best, best + 1, best - 1, best // 2) if best else (self.min_tokens + 1, self.min_tokens)
        n = self._clamp(others[self.next_candidate % len(others)])
        if not self.rates or n == best:
            self.next_candidate += 1
            return None
        rounds = 1 if best else 2
        seconds = self.draft.of(n) + self.target.of(n) if n else TARGET_ONLY_TOKENS * self.target.of(0)
        loss = rounds * seconds * (1 - self.rates[n] / self.rates[best])
        if self.credit <= loss:
            return None
        self.next_candidate += 1
        return n

    def _clamp(self, n: int) -> int:
        return min(max(n, self.min_tokens), self.max_tokens) if n > 0 else 0


class RepeatableLength(AdaptiveLength):
    """Lengths from this sequence's tokens alone: with a seed they are the same in every run, whatever else runs.

    `draft_cost` is that of a draft token, `row_cost` that of a further token in a target pass; both in target passes.
    """

    def __init__(
        self, draft_cost: float, row_cost: float, max_tokens: int = MAX_DRAFT_TOKENS, min_tokens: int = 1
    ) -> None:
        super().__init__(max_tokens, min_tokens, draft_cost=draft_cost)
        self.row = row_cost
        self.planned.clear()  # no length has to be tried for its cost
        self.longest = self.max_tokens
        for n in range(self.max_tokens + 1):
            self.draft.add(n, draft_cost * n)
            self.target.add(n, 1 + row_cost * n)
        self.rows.extend([row_cost] * MIN_ROWS)
        self._update_rates()

    def observe(self, made: Round) -> None:
        cost = 1 + self.row * (made.scored or made.drafted) if made.requested else float(made.tokens)
        super().observe(replace(made, draft=self.draft_cost * made.drafted, target=cost, timed=False, prompt=False))

    def _enter(self, at: Situation) -> None:
        """The costs are known, and the same for all texts."""
