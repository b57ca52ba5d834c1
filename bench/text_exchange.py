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
from semspec.statistics import Share

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


def quality(results: list[Any], problems: list[Any]) -> dict[str, Any]:
    texts = [OTHER.unspell(r.text) for r in results]  # the other draft, alone, writes other markers of thinking
    right = sum(score(text, p) for text, p in zip(texts, problems, strict=True))
    rounds = sum(sum(r.stats.histogram.values()) for r in results)
    tokens = sum(len(r.tokens) for r in results)
    return {"correct": Share(right, len(problems)).as_dict(), "tau": tokens / max(1, rounds)}


def seconds(pair: Pair, problems: list[Any], verifier: str) -> float:
    """Of the answers one by one; the first is not counted."""
    answers(pair, problems[:1], verifier, 1)
    began = time.perf_counter()
    answers(pair, problems, verifier, 1)
    return time.perf_counter() - began


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
        "target alone": quality(alone, problems),
    }  # fmt: skip
    for name, pair in pairs.items():
        found[name] = row = {}
        exact = answers(pair, few, RULES[0], arguments.batch)
        row["same text as the target"] = sum(a.tokens == b.tokens for a, b in zip(exact, alone, strict=False))
        row["exact:k=8"] = quality(exact, few)
        report(arguments, found)
        row["semantic+"] = quality(answers(pair, problems, RULES[1], arguments.batch), problems)
        report(arguments, found)
        row["draft alone"] = quality(answers(pair.draft_alone(), problems, "none", arguments.batch), problems)
        times = {rule.partition(":")[0]: seconds(pair, some, rule) for rule in ("none", *RULES)}
        row["speedup"] = {rule: times["none"] / spent for rule, spent in times.items() if rule != "none"}
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
