"""Is the pair an instrument? Measures every bar it must meet, with intervals, on problems never trained on.

    PYTHONPATH=. python3 -m recipes.pocket.measure --target T --draft D --problems 1000 --out measures.json

Lossless tau needs no speculative decoder: its output is distributed as the target's text, and given a target token x
the draft's token is accepted with probability min(1, q(x)/p(x)), independently at each position. So both models
score the target's own samples once, and the cycles of K proposals are played on those numbers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, defaultdict
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoTokenizer

from recipes.pocket import export, sampler
from recipes.pocket.model import Decoder
from recipes.pocket.statistics import AHEAD, Cycles, Share, bars, six_follow, table
from recipes.pocket.tokenizer import style_of
from semspec.pocket import Problem, judge_steps, meaning, problem, prompt, score, steps_of, valid
from semspec.pocket.chat import END_THINK

MOST_TOKENS, STEP_TOKENS = 400, 56
TEMPERATURE = 0.6


class Bench:
    """Two models, their tokenizer and the problems they are measured on."""

    def __init__(self, target: Decoder, draft: Decoder, tokenizer: Any, seed: int = 0) -> None:
        self.models = {"target": target, "draft": draft}
        self.tokenizer, self.style, self.seed = tokenizer, style_of(tokenizer), seed
        entries = tokenizer.get_vocab()
        self.end = {tokenizer.eos_token_id}
        # Any token whose text ends a paragraph ends a step.
        self.step_end = {number for token, number in entries.items() if tokenizer.decode([number]).endswith("\n\n")}
        self.step_end |= self.end | {entries[self.style.spell(END_THINK)]}

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(self.style.spell(text), add_special_tokens=False))

    def decode(self, tokens: list[int]) -> str:
        return self.style.unspell(str(self.tokenizer.decode(tokens, skip_special_tokens=True)))

    def solve(self, role: str, tasks: list[Problem], temperature: float) -> list[list[int]]:
        prompts = [self.encode(prompt(task.text)) for task in tasks]
        return sampler.write(self.models[role], prompts, MOST_TOKENS, temperature, self.end, self.seed)

    def quality(self, tasks: list[Problem], solutions: list[list[int]]) -> dict[str, Any]:
        """Right answers, invalid steps, and right answers by number of steps.

        An invalid step is counted where everything before it was valid: what follows a wrong step is wrong by
        inheritance and says nothing new (`invalid_all` counts that too)."""
        right, by_steps = 0, defaultdict(list)
        fresh = wrong = every = every_wrong = 0
        for task, tokens in zip(tasks, solutions, strict=True):
            text = self.decode(tokens)
            good = score(text, task)
            right += good
            by_steps[task.steps].append(good)
            for verdict in (verdicts := judge_steps(text, task)):
                fresh += 1
                wrong += not verdict
                if not verdict:
                    break
            every += len(verdicts)
            every_wrong += len(verdicts) - sum(verdicts)
        return {
            "correct": Share(right, len(tasks)),
            "invalid": Share(wrong, fresh),
            "invalid_all": Share(every_wrong, every),
            "by_steps": {steps: Share(sum(hits), len(hits)) for steps, hits in sorted(by_steps.items())},
        }

    def tau(self, tasks: list[Problem], solutions: list[list[int]], k: int = 8) -> dict[str, float]:
        """Tokens per target pass of lossless speculative sampling, and acceptance per proposed token."""
        rng = Random(self.seed)
        heads = [self.encode(prompt(task.text)) for task in tasks]
        texts = [head + tail for head, tail in zip(heads, solutions, strict=True)]
        p = sampler.score(self.models["target"], texts, "chance", TEMPERATURE)
        q = sampler.score(self.models["draft"], texts, "chance", TEMPERATURE)
        cycles = Cycles()
        for head, mine, theirs in zip(heads, p, q, strict=True):
            start = len(head) - 1
            cycles.play((theirs[start:] / mine[start:].clamp(min=1e-9)).clamp(max=1).tolist(), k, rng)
        return cycles.figures()

    def matches_after_mismatch(self, tasks: list[Problem], solutions: list[list[int]], cuts: int = 3) -> Share:
        """From positions in the target's text the draft writes greedily. Of the first tokens that are not the target's
        favourite there, how many are followed by six that are?"""
        rng = Random(self.seed + 1)
        prefixes = []
        for task, tokens in zip(tasks, solutions, strict=True):
            head = self.encode(prompt(task.text))
            reach = max(2, len(tokens) - AHEAD)
            prefixes += [head + tokens[: rng.randrange(1, reach)] for _ in range(cuts)]
        drafts = sampler.write(self.models["draft"], prefixes, AHEAD, 0, self.end, self.seed)
        texts = [prefix + tail for prefix, tail in zip(prefixes, drafts, strict=True)]
        favourites = sampler.score(self.models["target"], texts, "favourite")
        hits = total = 0
        for prefix, tail, favourite in zip(prefixes, drafts, favourites, strict=True):
            match = [int(favourite[len(prefix) - 1 + index]) == token for index, token in enumerate(tail)]
            if (verdict := six_follow(match)) is not None:
                total += 1
                hits += verdict
        return Share(hits, total)

    def next_steps(self, tasks: list[Problem], solutions: list[list[int]], samples: int = 20) -> dict[str, Share]:
        """At one prefix a problem (before a step the target wrote, all valid before it): how spread the target's
        next meanings are, and whether a valid draft step is worded as the target words any of its samples."""
        rng = Random(self.seed + 2)
        chosen: list[tuple[Problem, list[str], list[int]]] = []
        for task, tokens in zip(tasks, solutions, strict=True):
            steps = steps_of(self.decode(tokens))
            index = rng.randrange(len(steps)) if steps else 0
            if steps and all(judge_steps(steps[:index], task)):
                text = "<think>\n" + "".join(step + "\n\n" for step in steps[:index])
                chosen.append((task, steps[:index], self.encode(prompt(task.text) + text)))
        many = [prefix for _, _, prefix in chosen for _ in range(samples)]
        written = sampler.write(self.models["target"], many, STEP_TOKENS, TEMPERATURE, self.step_end, self.seed)
        drafted = sampler.write(
            self.models["draft"],
            [prefix for _, _, prefix in chosen],
            STEP_TOKENS,
            TEMPERATURE,
            self.step_end,
            self.seed,
        )
        spread = valid_steps = other_words = draft_valid = 0
        for row, (task, history, _) in enumerate(chosen):
            texts = [self.decode(one).strip() for one in written[row * samples : (row + 1) * samples]]
            common = Counter(meaning(text) for text in texts).most_common(1)[0][1]
            spread += common < 0.9 * samples
            mine = self.decode(drafted[row]).strip()
            if valid(mine, task, history):
                draft_valid += 1
                valid_steps += 1
                other_words += mine not in texts
        return {
            "open_meaning": Share(spread, len(chosen)),
            "worded_differently": Share(other_words, valid_steps),
            "draft_valid_after_target": Share(draft_valid, len(chosen)),
        }


def measure(bench: Bench, problems: int, samples: int = 20) -> dict[str, Any]:
    """All figures, as a dictionary of numbers and Shares."""
    figures: dict[str, Any] = {}
    test = [problem(seed, split="test") for seed in range(problems)]
    plots = [problem(seed, split="templates") for seed in range(problems)]
    solved: list[list[int]] = []
    for role in ("target", "draft"):
        for temperature in (TEMPERATURE, 0.0):
            name = f"{role} T {temperature:g}"
            solutions = bench.solve(role, test, temperature)
            figures[name] = bench.quality(test, solutions)
            if role == "target" and temperature:
                solved = solutions
        figures[f"{role} T {TEMPERATURE:g} new templates"] = bench.quality(plots, bench.solve(role, plots, TEMPERATURE))
    figures["lossless"] = bench.tau(test, solved)
    figures["six_after_mismatch"] = bench.matches_after_mismatch(test, solved)
    figures |= bench.next_steps(test, solved, samples)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    bench = Bench(
        export.load(arguments.target, device, dtype),
        export.load(arguments.draft, device, dtype),
        AutoTokenizer.from_pretrained(str(arguments.target)),
        arguments.seed,
    )
    start = time.perf_counter()
    figures = measure(bench, arguments.problems, arguments.samples)
    print(table(figures))
    print(f"{time.perf_counter() - start:.0f} s on {device}, {arguments.problems} problems")
    if arguments.out:
        record = {
            "problems": arguments.problems,
            "seed": arguments.seed,
            "where": f"{device}, torch {torch.__version__}, {date.today().isoformat()}",
            "figures": figures,
            "bars": bars(figures),
        }
        arguments.out.write_text(json.dumps(record, indent=1, default=lambda share: share.as_dict()) + "\n")


if __name__ == "__main__":
    main()
