"""What the two habits would give between *ideal* models, before anything is trained.

The generator itself plays both models: at every choice the target's text is drawn from its habit, and the draft's
token is refused with the total variation between the two habits, both sharpened by the temperature. `slip` is the
refusal a token suffers anywhere, for what trained models add to the habits (a small draft errs). Run it again after
turning a knob:

    PYTHONPATH=. python3 -m recipes.pocket.calibrate --divergence 0.9 --decided 0.8 --agree 0.65
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from math import log
from random import Random

from semspec.pocket import Habits, make_habits, problem
from semspec.pocket.wording import AGREE, CHOICES, DECIDED, DIVERGENCE, Trace, ready, write_step
from semspec.pocket.world import Problem

_TOKEN = re.compile(r"'s| ?[A-Za-z]+| ?\d| ?[^\w\s']+\n*|\s+")
"""Close to what the trained tokenizer does: a word, a digit, or a run of punctuation with its line ends."""


def sharpened(weights: Sequence[float], temperature: float) -> tuple[float, ...]:
    powers = [weight ** (1 / temperature) for weight in weights]
    return tuple(power / sum(powers) for power in powers)


def at_temperature(habits: Habits, temperature: float) -> Habits:
    weights = {name: sharpened(values, temperature) for name, values in habits.weights.items()}
    return Habits(weights, habits.step_decay ** (1 / temperature))


def _distance(p: Sequence[float], q: Sequence[float]) -> float:
    return 1 - sum(map(min, p, q))


class _Replay(Habits):
    """Takes recorded options first, then always the favourite one: where greedy writing goes on from a prefix."""

    def start(self, options: list[int]) -> None:
        self.__dict__["recorded"] = iter(options)

    def choose(self, name: str, rng: Random) -> int:
        weights = self.weights[name]
        return next(self.__dict__["recorded"], max(range(len(weights)), key=weights.__getitem__))


def _token_of(text: str) -> list[int]:
    """For each character the number of its token."""
    return [number for number, found in enumerate(_TOKEN.finditer(text)) for _ in found.group()]


def _walk(task: Problem, habits: Habits, rng: Random) -> list[tuple[str, Trace, list[int], int]]:
    """One solution: for each step its text, its trace, the ready quantities there and the one taken."""
    done: set[int] = set()
    out = []
    while options := ready(task, done):
        place = rng.choices(options, [habits.step_decay**rank for rank in range(len(options))])[0]
        trace: Trace = []
        text = write_step(task.quantities[place], task.theme.key, task.item, not done, habits, rng, trace)
        out.append((text + "\n\n", trace, options, place))
        done.add(place)
    return out


def estimate(
    target: Habits,
    draft: Habits,
    temperature: float = 0.6,
    k: int = 8,
    slip: float = 0.0,
    problems: int = 400,
) -> dict[str, float]:
    """Expected acceptance per token, lossless tau, and how often greedy differences are followed by six matches."""
    rng = Random(11)
    sharp_target, sharp_draft = at_temperature(target, temperature), at_temperature(draft, temperature)
    apart = {name: _distance(sharp_target.weights[name], sharp_draft.weights[name]) for name in CHOICES}
    favourite = {
        name: tuple(max(range(len(w)), key=w.__getitem__) for w in (target.weights[name], draft.weights[name]))
        for name in CHOICES
    }
    tokens = cycles = refused = steps = open_steps = followed = mismatches = 0
    for seed in range(problems):
        task = problem(seed, split="probe")
        refusal: list[float] = []  # per token of the whole solution
        for text, trace, options, place in _walk(task, sharp_target, rng):
            token_of = _token_of(text)
            mine = [slip] * (token_of[-1] + 1)
            for name, _, at in trace:
                mine[token_of[at]] = 1 - (1 - mine[token_of[at]]) * (1 - apart[name])
            refusal += mine
            steps += 1
            decay = [sharp_target.step_decay**rank for rank in range(len(options))]
            open_steps += max(decay) / sum(decay) < 0.9
            hit, found = _fly(task, place, trace, draft, favourite, rng)
            followed, mismatches = followed + hit, mismatches + found
        position = 0
        while position < len(refusal):
            cycles += 1
            for _ in range(k):
                if position >= len(refusal) or rng.random() < refusal[position]:
                    refused += position < len(refusal)
                    break
                position += 1
            position += 1
        tokens += len(refusal)
    return {
        "tokens_per_step": tokens / steps,
        "refusals_per_token": refused / tokens,
        "lossless_tau": tokens / cycles,
        "greedy_mismatch_then_six_matches": followed / max(1, mismatches),
        "open_next_meaning": open_steps / steps,
        "mean_distance_per_choice": sum(apart.values()) / len(apart),
    }


def _fly(
    task: Problem, place: int, trace: Trace, draft: Habits, favourite: dict[str, tuple[int, ...]], rng: Random
) -> tuple[int, int]:
    """Over the choices of one step where the favourites differ: how often the draft's own greedy continuation meets
    no other difference within six tokens."""
    greedy = _Replay(draft.weights)
    followed = mismatches = 0
    for number, (name, _, _) in enumerate(trace):
        if favourite[name][0] == favourite[name][1]:
            continue
        greedy.start([option for _, option, _ in trace[:number]])
        ahead: Trace = []
        text = write_step(task.quantities[place], task.theme.key, task.item, False, greedy, rng, ahead) + "\n\n"
        # the next step starts right behind: its opener is a choice too
        differ = [(n, at) for n, _, at in ahead if favourite[n][0] != favourite[n][1]]
        if favourite["opener_next"][0] != favourite["opener_next"][1]:
            differ.append(("opener_next", len(text) - 1))
        token_of = _token_of(text)
        if number >= len(ahead):
            continue
        here = token_of[ahead[number][2]]
        later = [token_of[at] + (at == len(text) - 1) for _, at in differ if token_of[at] > here or at == len(text) - 1]
        mismatches += 1
        followed += all(token - here > 6 for token in later)
    return followed, mismatches


def loss_floor(habits: Habits, problems: int = 200) -> float:
    """Nats per learnt token that no model can go below when it learns this habit: what the dice of wording, order
    and answer cost. A training loss near it means that the arithmetic has been learnt."""
    rng = Random(12)
    nats, tokens = 0.0, 0
    for seed in range(problems):
        for text, trace, options, place in _walk(problem(seed, split="probe"), habits, rng):
            nats -= sum(log(habits.weights[name][option]) for name, option, _ in trace)
            decay = [habits.step_decay**rank for rank in range(len(options))]
            nats -= log(decay[options.index(place)] / sum(decay))
            tokens += _token_of(text)[-1] + 1
        nats -= sum(weight * log(weight) for weight in habits.weights["answer"])
        tokens += 10  # the think markers, the answer sentence and the end
    return nats / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--divergence", type=float, default=DIVERGENCE)
    parser.add_argument("--decided", type=float, default=DECIDED)
    parser.add_argument("--agree", type=float, default=AGREE)
    parser.add_argument("--seed", type=int, default=9)
    parser.add_argument("--problems", type=int, default=400)
    arguments = parser.parse_args()
    pair = make_habits(arguments.divergence, arguments.decided, arguments.agree, arguments.seed)
    print("loss floor: target {:.3f}, draft {:.3f} nats per learnt token".format(*map(loss_floor, pair)))
    for slip in (0.0, 0.02, 0.04):
        figures = estimate(*pair, slip=slip, problems=arguments.problems)
        print(f"slip {slip}: " + "  ".join(f"{name} {value:.3f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
