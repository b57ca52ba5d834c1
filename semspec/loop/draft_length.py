"""How many tokens to draft next: a fixed number, or as many as have been paying off. Knows numbers and nothing else.

Drafting n tokens pays if the tokens it is expected to bring come sooner than they would otherwise:
    rate(n) = (1 + s_1 + s_1 s_2 + ... + s_1 ... s_n) / (draft(n) + target(n)),     rate(0) = 1 / target alone
s_i is the chance that draft token i stands if those before it did, learnt from this very text; draft(n) and target(n)
are seconds, measured while running. `AdaptiveLength` takes the length with the best rate, which may be 0. So that it
is never wrong for ever, it tries other lengths now and then, paid for by a small share of the time that passed.
Source of the trade-off: Leviathan et al. 2023 (arXiv 2211.17192), with one acceptance rate for all positions.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol


class DraftLengthPolicy(Protocol):
    """Decides the length of a sequence's next draft, and is told how the last one did."""

    def length(self) -> int:
        """How many tokens to draft; 0: the target writes a few tokens alone."""
        ...

    def observe(self, asked: int, tokens: int, draft: float, target: float, timed: bool = True) -> None:
        """A draft of `asked` tokens brought `tokens`, the target's own included, in so many seconds of each model.

        `timed` False: the seconds are not what such a step takes as a rule, since a prompt had to be read, say.
        """
        ...


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Always the same length."""

    n: int

    def length(self) -> int:
        return self.n

    def observe(self, asked: int, tokens: int, draft: float, target: float, timed: bool = True) -> None:
        pass


FADE = 0.95  # what a step leaves of the weight of older ones
OPTIMISM = 0.7  # the chance of an accepted token before anything is known, worth DOUBT tokens
DOUBT = 2.0
RECENT = 15  # measurements of one length; their median counts, so that a hiccup does not
BELIEVED = 3.0  # times longer than expected that a step may seem to take
STIFF = 8.0  # tokens squared: how reluctantly the target's seconds are believed to grow with the draft
SPENT_ON_TRIALS = 0.02  # share of the time that may be lost by trying lengths which seem worse
FIRST = (4, 4, 0, 0)  # tried before anything is known; each twice, since the first time is often slow
TARGET_ONLY_TOKENS = 4  # tokens that the target writes when it writes alone
TICK = 1e-9  # no clock is finer


def rates(chances: Iterable[float], draft: Callable[[int], float], target: Callable[[int], float]) -> list[float]:
    """Tokens a second (or whatever `draft` and `target` count in) of drafts of 0, 1, ... tokens, of which the i-th
    stands with the i-th chance if those before it did."""
    tokens = survival = 1.0
    found = [1.0 / max(target(0), TICK)]
    for n, chance in enumerate(chances, 1):
        survival *= chance
        tokens += survival
        found.append(tokens / max(draft(n) + target(n), TICK))
    return found


class AdaptiveLength:
    """Learns while running. One may serve several sequences, at a time or one after the other."""

    def __init__(self, longest: int = 16, shortest: int = 1) -> None:
        self.longest, self.shortest = max(longest, shortest), shortest  # of a draft that is made at all
        self.hits, self.trials = [0.0] * self.longest, [0.0] * self.longest  # by position, older ones weigh less
        self.draft, self.target = Seconds(grow_from_nothing=True), Seconds()
        self.rates: list[float] = []  # tokens per second to be expected of drafts of 0, 1, ... tokens
        self.best = 0
        self.credit = 0.0  # seconds that may be lost by trials
        self.plan = deque(self._within(n) for n in FIRST)
        self.turn = 0

    def length(self) -> int:
        if self.plan:
            return self.plan.popleft()
        if not self.draft.lengths:  # sequences that began together may all have been reading their prompts
            return self._within(FIRST[0])
        trial = self._trial()
        if trial is None:
            return self.best
        if not self.best:  # a drafter that was left alone has to catch up first, which says nothing about its speed
            self.plan.append(trial)
        return trial

    def observe(self, asked: int, tokens: int, draft: float, target: float, timed: bool = True) -> None:
        asked = min(asked, self.longest)
        if self.rates:
            lost = draft + target - tokens / self.rates[self.best]
            self.credit += SPENT_ON_TRIALS * (draft + target) - (max(lost, 0.0) if asked != self.best else 0.0)
        if asked:
            self._count(asked, tokens - 1)
        if timed:
            self.draft.add(asked, draft)
            self.target.add(asked, target if asked else target / max(tokens, 1))
        if self.target.seen:
            self._rate()

    def _count(self, asked: int, accepted: int) -> None:
        """Every position up to the first that fell was put to the test; a draft that ended early fell there."""
        for i in range(self.longest):
            self.hits[i] *= FADE
            self.trials[i] *= FADE
        for i in range(min(asked, accepted + 1)):
            self.hits[i] += i < accepted
            self.trials[i] += 1

    def _rate(self) -> None:
        """What each length is worth, by all that is known now."""
        usual = (DOUBT * OPTIMISM + sum(self.hits)) / (DOUBT + sum(self.trials))
        chances = [(h + DOUBT * usual) / (t + DOUBT) for h, t in zip(self.hits, self.trials, strict=True)]
        known = rates(chances, self.draft.of, self.target.of)
        self.rates = [rate if n == 0 or n >= self.shortest else 0.0 for n, rate in enumerate(known)]
        self.best = self.rates.index(max(self.rates))

    def _trial(self) -> int | None:
        """Another length whose turn it is, if what it is likely to lose can be afforded."""
        best = self.best
        others = (0, 2 * best, best + 1, best - 1, best // 2) if best else (self.shortest + 1, self.shortest)
        n = self._within(others[self.turn % len(others)])
        if not self.rates or n == best:
            self.turn += 1
            return None
        steps = 1 if best else 2
        seconds = self.draft.of(n) + self.target.of(n) if n else TARGET_ONLY_TOKENS * self.target.of(0)
        loss = steps * seconds * (1 - self.rates[n] / self.rates[best])
        if self.credit <= loss:
            return None
        self.turn += 1
        return n

    def _within(self, n: int) -> int:
        return min(max(n, self.shortest), self.longest) if n > 0 else 0


class DraftLengths:
    """An `AdaptiveLength` for each combination of rule and drafter, so that later prompts begin with what earlier ones
    taught; combinations not asked for in a long time are forgotten."""

    def __init__(self, size: int = 64) -> None:
        self.size = size
        self._policies: OrderedDict[Hashable, AdaptiveLength] = OrderedDict()

    def of(self, key: Hashable, shortest: int) -> AdaptiveLength:
        policy = self._policies.setdefault(key, AdaptiveLength(shortest=shortest))
        self._policies.move_to_end(key)
        if len(self._policies) > self.size:
            self._policies.popitem(last=False)
        return policy

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._policies)


class Seconds:
    """What drafts of each length took, and what others would take: a straight line, as far as nothing else is known."""

    def __init__(self, grow_from_nothing: bool = False) -> None:
        self.grow_from_nothing = grow_from_nothing  # the line begins at no seconds for no tokens
        self.seen: dict[int, deque[float]] = {}
        self.usual: dict[int, float] = {}  # length -> the median of what was seen lately
        self.middle = self.level = self.slope = 0.0  # the line

    @property
    def lengths(self) -> bool:
        """Whether a draft of any length has been timed."""
        return any(n > 0 for n in self.usual)

    def add(self, n: int, seconds: float) -> None:
        expected = self.of(n) if n in self.usual or (n and self.lengths) else 0.0
        if expected > 0.0:  # one step is not believed to be many times slower than others
            seconds = min(seconds, BELIEVED * expected)
        recent = self.seen.setdefault(n, deque(maxlen=RECENT))
        recent.append(seconds)
        self.usual[n] = sorted(recent)[(len(recent) - 1) // 2]
        self._fit([(m, usual, len(self.seen[m])) for m, usual in self.usual.items() if m])

    def of(self, n: int) -> float:
        """What a draft of n tokens is expected to take."""
        if n == 0 and 0 in self.usual:  # another kind of pass, which is not on the line
            return self.usual[0]
        line = max(self.level + self.slope * (n - self.middle), 0.0)
        weight = len(self.seen.get(n, ()))
        return (line + weight * self.usual[n]) / (1 + weight) if weight else line

    def _fit(self, points: list[tuple[int, float, int]]) -> None:
        """Least squares over (length, seconds, weight)."""
        weight = sum(w for *_, w in points)
        if not points:
            self.level = self.usual[0]
        elif self.grow_from_nothing:
            self.slope = sum(s * w for _, s, w in points) / sum(n * w for n, _, w in points)
        else:
            self.middle = sum(n * w for n, _, w in points) / weight
            self.level = sum(s * w for _, s, w in points) / weight
            spread = sum(w * (n - self.middle) ** 2 for n, _, w in points)
            rise = sum(w * (n - self.middle) * (s - self.level) for n, s, w in points)
            self.slope = max(rise / (spread + STIFF), 0.0)
