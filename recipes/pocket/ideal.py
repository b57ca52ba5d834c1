"""The model a habit would become if it learnt without error: the exact chance of every next token.

The generator decides a step choice by choice. `Ideal` keeps every way of having decided so far that spells the text
so far, with its probability, and adds up what each would write next. So it knows what any trained model can at best
know, token by token, also on text that the other model wrote.
"""

from __future__ import annotations

from random import Random

from recipes.pocket.tokenizer import PIECES
from semspec.pocket import Habits, Problem
from semspec.pocket.wording import CHOICES, Script, decide, ready, script

Way = tuple[str, int, Script]
"""Text decided but not yet read, the quantity the step derives, and what is still to be decided."""


class Ideal:
    """A writer of solutions with this habit. Tokens are the tokenizer's pieces (which are words, or one digit)."""

    def __init__(self, task: Problem, habits: Habits) -> None:
        self.task, self.habits = task, habits
        self.done: frozenset[int] = frozenset()
        self.finished = self.starting = False  # the text is complete; a step starts here
        self.ways: dict[Way, float] = {("<think>\n", -1, ()): 1.0}
        self._settle()

    def copy(self) -> Ideal:
        other = object.__new__(Ideal)
        other.__dict__.update(self.__dict__)
        return other

    def _step(self) -> dict[Way, float]:
        """The ways to start the next step, or to end the thoughts where nothing is left to derive."""
        options = ready(self.task, set(self.done))
        if not options:
            return {("</think>\n\n", -1, ("?answer", "<|end|>")): 1.0}
        weights = [self.habits.step_decay**rank for rank in range(len(options))]
        start = script(not self.done)
        return {("", index, start): weight / sum(weights) for index, weight in zip(options, weights, strict=True)}

    def _settle(self) -> None:
        """Decide, in all ways, until each knows its next token."""
        waiting, settled = list(self.ways.items()), dict[Way, float]()
        while waiting:
            (text, index, rest), chance = waiting.pop()
            found = PIECES.match(text)
            if not rest and index >= 0 and not text.endswith("\n\n"):
                waiting.append(((text + "\n\n", index, ()), chance))
            elif not rest or (found is not None and found.end() < len(text)):
                settled[text, index, rest] = settled.get((text, index, rest), 0.0) + chance
            elif rest[0][:1] != "?":
                waiting.append(((text + rest[0], index, rest[1:]), chance))
            elif rest[0] == "?answer":
                for option, weight in enumerate(self.habits.weights["answer"]):
                    words = CHOICES["answer"][option].replace("{v}", str(self.task.answer))
                    waiting.append(((text + words, index, rest[1:]), chance * weight))
            else:
                name = rest[0][1:]
                quantity, key, item = self.task.quantities[index], self.task.theme.key, self.task.item
                for option, weight in enumerate(self.habits.weights[name]):
                    more = decide(name, option, quantity, key, item) + rest[1:]
                    waiting.append(((text, index, more), chance * weight))
        self.ways = settled

    def chances(self) -> dict[str, float]:
        """The next token: each that can come, with its probability."""
        out: dict[str, float] = {}
        total = sum(self.ways.values())
        for (text, _, _), chance in self.ways.items():
            found = PIECES.match(text)
            assert found is not None
            out[found.group()] = out.get(found.group(), 0.0) + chance / total
        return out

    def read(self, token: str) -> None:
        """Advance past this token, whichever model wrote it."""
        left: dict[Way, float] = {}
        for (text, index, rest), chance in self.ways.items():
            found = PIECES.match(text)
            if found is not None and found.group() == token:
                left[text[len(token) :], index, rest] = left.get((text[len(token) :], index, rest), 0.0) + chance
        if not left:
            raise ValueError(f"the world never writes {token!r} here")
        self.ways, self.starting = left, False
        if all(not text and not rest for text, _, rest in left):
            index = next(iter(left))[1]
            self.finished = token == "<|end|>"
            self.done |= {index} - {-1}
            self.ways = self._step()
            self.starting = bool(ready(self.task, set(self.done)))
        self._settle()


def sharpen(chances: dict[str, float], temperature: float) -> dict[str, float]:
    powers = {token: chance ** (1 / temperature) for token, chance in chances.items()}
    total = sum(powers.values())
    return {token: power / total for token, power in powers.items()}


def draw(chances: dict[str, float], rng: Random) -> str:
    return rng.choices(list(chances), list(chances.values()))[0]


def favourite(chances: dict[str, float]) -> str:
    return max(chances, key=chances.__getitem__)
