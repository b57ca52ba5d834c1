"""What the two habits would give between *ideal* models, before anything is trained.

Both sides are `ideal.Ideal`: exact next-token chances, over the tokenizer's own pieces. Text is drawn, proposals are
played and greedy continuations are compared as `measure` does with trained models. `blur` spoils both: every chance is
multiplied by e^(blur * normal noise), since no trained model knows its habit exactly. Run it after turning a knob:

    PYTHONPATH=. python3 -m recipes.pocket.calibrate --decided 0.8 --level 1.6
"""

from __future__ import annotations

import argparse
from collections import Counter
from math import exp, log
from random import Random

from recipes.pocket.ideal import Ideal, draw, favourite, sharpen
from recipes.pocket.statistics import AHEAD, Cycles, six_follow
from recipes.pocket.tokenizer import PIECES
from semspec.pocket import Habits, Problem, make_habits, problem
from semspec.pocket.chat import END
from semspec.pocket.wording import CHOICES, DECIDED, HABIT_SEED, LEVEL, Trace, example
from semspec.pocket.world import FUNCTIONS


class Blurred(Ideal):
    """An ideal model with errors: the same ones whenever it comes to the same position."""

    def __init__(self, task: Problem, habits: Habits, role: str, blur: float) -> None:
        self.role, self.blur, self.tail = role, blur, ""
        super().__init__(task, habits)

    def read(self, token: str) -> None:
        self.tail = (self.tail + token)[-24:]
        super().read(token)

    def chances(self) -> dict[str, float]:
        found = super().chances()
        if not self.blur or len(found) == 1:
            return found
        rng = Random(f"{self.role} {self.task.answer} {self.tail}")
        found = {token: found[token] * exp(self.blur * rng.gauss(0, 1)) for token in sorted(found)}
        total = sum(found.values())
        return {token: chance / total for token, chance in found.items()}


def _write_step(model: Ideal, temperature: float, rng: Random) -> str:
    text = ""
    while not text.endswith("\n\n"):
        text += (token := draw(sharpen(model.chances(), temperature), rng))
        model.read(token)
    return text


def estimate(
    target: Habits, draft: Habits, temperature: float = 0.6, k: int = 8, blur: float = 0.0, problems: int = 200
) -> dict[str, float]:
    """The figures of `measure` that depend only on habits."""
    rng = Random(11)
    cycles = Cycles()
    verdicts: list[bool] = []
    steps = open_steps = positions = other_words = 0
    for seed in range(problems):
        task = problem(seed, split="probe")
        mine, theirs = Blurred(task, target, "target", blur), Blurred(task, draft, "draft", blur)
        chances: list[float] = []
        states: list[tuple[Ideal, Ideal]] = []
        while not mine.finished:
            states.append((mine.copy(), theirs.copy()))
            p, q = sharpen(mine.chances(), temperature), sharpen(theirs.chances(), temperature)
            token = draw(p, rng)
            chances.append(min(1.0, q[token] / p[token]))
            mine.read(token)
            theirs.read(token)
        cycles.play(chances, k, rng)
        steps += task.steps
        for _ in range(3):
            ahead_target, ahead_draft = (one.copy() for one in states[rng.randrange(1, max(2, len(states) - AHEAD))])
            match: list[bool] = []
            while len(match) < AHEAD and not ahead_draft.finished:
                token = favourite(ahead_draft.chances())
                match.append(token == favourite(ahead_target.chances()))
                ahead_target.read(token)
                ahead_draft.read(token)
            verdict = six_follow(match)
            if verdict is not None:
                verdicts.append(verdict)
        starts = [pair for pair in states if pair[0].starting]
        here, there = starts[rng.randrange(len(starts))]
        texts, meant = [], Counter[frozenset[int]]()
        for _ in range(20):
            texts.append(_write_step(one := here.copy(), temperature, rng))
            meant[one.done] += 1
        positions += 1
        open_steps += max(meant.values()) < 18
        other_words += _write_step(there.copy(), temperature, rng) not in texts
    return {
        "tokens_per_step": cycles.tokens / steps,
        **cycles.figures(),
        "six_after_mismatch": sum(verdicts) / max(1, len(verdicts)),
        "mismatches_seen": float(len(verdicts)),
        "open_meaning": open_steps / positions,
        "worded_differently": other_words / positions,
    }


def loss_floors(habits: Habits, problems: int = 200) -> tuple[float, float]:
    """Nats per token that no model can go below when it learns this habit: over all learnt tokens, and over those that
    are no choice of words (`content` in the training log), where only the order of steps is left to chance."""
    nats = {True: 0.0, False: 0.0}
    tokens = {True: 0, False: 0}
    for seed in range(problems):
        trace: Trace = []
        task, text = example(seed, habits, split="probe", trace=trace)
        shows = {position for name, _, position in trace if name not in FUNCTIONS}
        model = Ideal(task, habits)
        for found in PIECES.finditer(text + END):
            dice = not shows.isdisjoint(range(found.start(), found.end()))
            nats[dice] -= log(model.chances()[found.group()])
            tokens[dice] += 1
            model.read(found.group())
    return sum(nats.values()) / sum(tokens.values()), nats[False] / tokens[False]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decided", type=float, default=DECIDED)
    parser.add_argument("--level", type=float, default=LEVEL)
    parser.add_argument("--seed", type=int, default=HABIT_SEED)
    parser.add_argument("--problems", type=int, default=400)
    arguments = parser.parse_args()
    pair = make_habits(arguments.decided, arguments.level, arguments.seed)
    for name, options in CHOICES.items():
        best = [max(range(len(options)), key=side.weights[name].__getitem__) for side in pair]
        likes = [f"{options[at]!r:28} {side.weights[name][at]:.2f}" for side, at in zip(pair, best, strict=True)]
        print(f"{name:14}" + "  ".join(likes))
    for role, side in zip(("target", "draft"), pair, strict=True):
        print("{}: no loss below {:.3f}, no content below {:.3f} nats a token".format(role, *loss_floors(side)))
    for blur in (0.0, 0.15, 0.3):
        figures = estimate(*pair, blur=blur, problems=arguments.problems)
        print(f"blur {blur}: " + "  ".join(f"{name} {value:.3f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
