"""The pocket target with a draft that has another tokenizer, beside the shipped pair: equality, tau, quality, speed.

    python -m bench.text_exchange --device cuda --out results/text-exchange.json    # 1,000 problems

Another draft is made by recipes/pocket with `--other-tokenizer`. Everything is greedy and in float32.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import semspec
from recipes.pocket.tokenizer import OTHER
from semspec.options import Options
from semspec.pair import Pair
from semspec.pocket import problem, score
from semspec.pocket.shipped import PROBES
from semspec.statistics import Share, difference

TOKENS = 400
RULES = ("exact:k=8", f"semantic+:probes={PROBES}")


def answers(pair: Pair, problems: list[Any], verifier: str, batch: int) -> list[Any]:
    """All answers, a batch at a time."""
    name, _, k = verifier.partition(":k=")
    options = Options(verifier=name, max_new_tokens=TOKENS, temperature=0.0, num_draft_tokens=int(k) if k else None)
    found = []
    for begin in range(0, len(problems), batch):
        chats = [[{"role": "user", "content": p.text}] for p in problems[begin : begin + batch]]
        found += pair.generate(chats, options)
    return found


def quality(results: list[Any], problems: list[Any], target: list[Any]) -> dict[str, Any]:
    """Beside the target's own answers to the same problems."""
    right, of_target = (
        # the other draft, alone, writes other markers of thinking
        [float(score(OTHER.unspell(r.text), p)) for r, p in zip(some, problems, strict=False)]
        for some in (results, target)
    )
    rounds = sum(sum(r.stats.histogram.values()) for r in results)
    tokens = sum(len(r.tokens) for r in results)
    against = difference(right, of_target[: len(right)])
    return {
        "correct": Share(int(sum(right)), len(right)).as_dict(),
        "against the target": against and against.as_dict(),
        "tau": tokens / max(1, rounds),
    }


def speedups(pairs: dict[str, Pair], problems: list[Any]) -> dict[str, dict[str, float]]:
    """Of answers one by one, in turns; by CPU time of this process on a CPU, which others cannot take."""
    arms = [(name, rule) for name in pairs for rule in ("none", *RULES)]
    clock = time.perf_counter if pairs["shipped"].target.device.type == "cuda" else time.process_time
    spent = dict.fromkeys(arms, 0.0)
    for number, one in enumerate([problems[0], *problems]):
        for name, rule in arms:
            began = clock()
            answers(pairs[name], [one], rule, 1)
            spent[name, rule] += clock() - began if number else 0.0  # the first is for warming up
    return {name: {rule.partition(":")[0]: spent[name, "none"] / spent[name, rule] for rule in RULES} for name in pairs}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    how: dict[str, Any] = {"device": arguments.device, "dtype": "float32", "slots": arguments.batch}
    pairs = {"other": semspec.load("pocket", arguments.draft, **how), "shipped": semspec.load("pocket", **how)}
    problems = [problem(seed, split="test") for seed in range(arguments.problems)]
    few, some = problems[: arguments.equal], problems[: arguments.timed]
    alone = answers(pairs["shipped"], problems, "none", arguments.batch)
    exchange = pairs["other"].exchange
    assert exchange is not None, "the draft has the target's tokenizer"
    found: dict[str, Any] = {
        "exchange": exchange.facts(), "problems": len(problems), "equality over": len(few),
        "target alone": quality(alone, problems, alone),
    }  # fmt: skip
    for name, pair in pairs.items():
        found[name] = row = {}
        exact = answers(pair, few, RULES[0], arguments.batch)
        row["same text as the target"] = sum(a.tokens == b.tokens for a, b in zip(exact, alone, strict=False))
        row["exact:k=8"] = quality(exact, few, alone)
        report(arguments, found)
        row["semantic+"] = quality(answers(pair, problems, RULES[1], arguments.batch), problems, alone)
        report(arguments, found)
        row["draft alone"] = quality(answers(pair.draft_alone(), problems, "none", arguments.batch), problems, alone)
        report(arguments, found)
    for name, times in speedups(pairs, some).items():
        found[name]["speedup"] = times
    report(arguments, found)
    return found


def report(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    """What is known so far: a run that is cut loses nothing of it."""
    print(json.dumps(found, ensure_ascii=False), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draft", default="pocket-other-draft")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--equal", type=int, default=200, help="of these, those whose text is compared token by token")
    parser.add_argument("--timed", type=int, default=20, help="of these, those answered one by one for speed")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    measure(arguments)


if __name__ == "__main__":
    main()
