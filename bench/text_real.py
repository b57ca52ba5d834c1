"""Real models with different tokenizers over Spec-Bench prompts: is the text the target's, token for token?

    python -m bench.text_real TARGET DRAFT --prompts question.jsonl --out results/text-real.json

Each prompt is answered by the target alone, with the draft, and by n-gram lookup; what one arm has read is not read
again by the next. Prompts are cut to --characters, ten of every task.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import semspec
from semspec.model.prefix_cache import PrefixCache
from semspec.options import Options

WRITING = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")  # of MT-Bench
ARMS = {
    "target alone": {"verifier": "none"},
    "exact": {"verifier": "exact", "num_draft_tokens": 4},
    "exact, n-gram": {"verifier": "exact", "drafter": "ngram"},
    "sampling": {"verifier": "sampling", "num_draft_tokens": 4},
}


def prompts_of(path: Path, count: int, characters: int) -> list[str]:
    """The same number of every task, in the file's order."""
    tasks: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        name = row["category"] if row["category"] not in WRITING else "mt_bench"
        tasks[name].append(row["turns"][0][:characters])
    each = -(-count // len(tasks))
    return [text for texts in tasks.values() for text in texts[:each]][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--characters", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    pair = semspec.load(arguments.target, arguments.draft, dtype="float32", slots=arguments.batch, context=1024)
    assert pair.exchange is not None, "these models have the same tokenizer"
    cached = pair.wrapped(PrefixCache)
    prompts = prompts_of(arguments.prompts, arguments.count, arguments.characters)
    same: dict[str, int] = defaultdict(int)
    drafted, accepted = defaultdict[str, int](int), defaultdict[str, int](int)
    began = time.perf_counter()
    for first in range(0, len(prompts), arguments.batch):
        chats = [[{"role": "user", "content": text}] for text in prompts[first : first + arguments.batch]]
        expected: list[list[int]] = []
        for name, given in ARMS.items():
            options: Any = Options(max_new_tokens=arguments.tokens, **given)
            results = cached.generate(chats, options)
            expected = expected or [r.tokens for r in results]
            same[name] += sum(r.tokens == tokens for r, tokens in zip(results, expected, strict=True))
            drafted[name] += sum(r.stats.drafted for r in results)
            accepted[name] += sum(r.stats.accepted for r in results)
        print(f"{first + len(chats)} prompts, {time.perf_counter() - began:.0f} s: {dict(same)}", flush=True)
    found = {
        "target": Path(arguments.target).name, "draft": Path(arguments.draft).name, "prompts": len(prompts),
        "tokens": arguments.tokens, "exchange": pair.exchange.kind, "shared_tokens": len(pair.exchange.shared[0]),
        "same_text": dict(same), "drafted": dict(drafted), "accepted": dict(accepted),
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
