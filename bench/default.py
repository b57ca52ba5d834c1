"""Is the default ever slower than the target alone? The same answers with `none`, the default and fixed drafts of 8.

    python bench/default.py --target pocket
    python bench/default.py --target pocket --batch 8 32 64 --keep --rounds 6       # that many answers at a time
    python bench/default.py --target .models/SmolLM2-135M-Instruct.Q4_1.gguf
    python bench/default.py --shape 8B/1B --only-draft --tokens 48 --prompts 2      # a 1B model alone, weights of noise
    python bench/default.py --shape 32B/1.5B --device cuda --tokens 256             # on a GPU with 90 GB free

Every answer (or batch of them) begins with nothing learnt, as in a process of its own, or with --keep with what the arm
has learnt before, and is written by all arms in turn, in an order that rotates. Figures are ratios of the seconds of
whole answers, prompt included, to those of `none`: by this process's CPU time on a CPU, which other work on the machine
disturbs less, by the clock on a GPU. Noise draws each token among its 40 likeliest, so that lookups find matches and
nothing they propose is right: the worst case. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.synthetic_e2e_text import make_tokenizer
from semspec.bench.folder import surroundings
from semspec.bench.shapes import SHAPES, random_runner
from semspec.draft import DrafterKind, EarlyExit, NoDrafter, register
from semspec.model.placement import choose_device
from semspec.options import Options
from semspec.pair import Pair
from semspec.pair.loading import load
from semspec.tasks.pocket import Pocket
from semspec.text.tokenizer import encode
from semspec.types import Draft, Drafter, DraftRequest, ProposalGenerator, Runner

QUESTIONS = [
    "What is the capital of France, and what is it known for?",
    "Write a short story about a lighthouse keeper and a storm.",
    "Explain in simple words why the sky is blue.",
    "List five things to pack for a week in the mountains, and say why.",
]


@dataclass(frozen=True)
class Wrong(DrafterKind):
    """Always has a proposal, which is never right: the worst that a lookup can do."""

    name = "wrong"

    def build(self, draft: Runner | None, early_exit: EarlyExit) -> Drafter:
        return WrongDrafter()


class WrongDrafter(NoDrafter):
    def propose(self, context: list[int], request: DraftRequest) -> ProposalGenerator:
        return Draft(context[: request.max_tokens])
        yield


ARMS: dict[str, dict[str, Any]] = {"none": {"verifier": "none"}, "default": {}, "k=8": {"num_draft_tokens": 8}}
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}  # that noise may have
PROMPT_TOKENS = 64  # of a prompt of noise
WARM = 5  # answers of each arm at most, until one has captured nothing


def models(asked: argparse.Namespace, slots: int) -> tuple[Pair, list[list[int]], dict[str, Any]]:
    """The pair, its prompts, and how they are answered."""
    if not asked.shape:
        pair = load(
            asked.target,
            asked.draft,
            device=asked.device,
            dtype=asked.dtype,
            slots=slots,
            context=2048 if slots == 1 else 512,
        )
        problems = [problem.prompt for problem in Pocket().problems(max(asked.prompts, slots), 0)]
        texts = problems if asked.target == "pocket" else [[{"role": "user", "content": q}] for q in QUESTIONS]
        count = max(asked.prompts, slots)
        return pair, [encode(pair.tokenizer, texts[i % len(texts)]) for i in range(count)], {}
    device = choose_device(asked.device)
    usual = "float32" if device.type == "cpu" else "bfloat16"
    dtype = FLOATS[usual if asked.dtype == "auto" else asked.dtype]
    target, draft = SHAPES[asked.shape]
    runners = [random_runner(c, slots, 1024, device, dtype) for c in ([draft] if asked.only_draft else [target, draft])]
    vocab = min(runner.vocab_size for runner in runners)
    for runner in runners:
        runner.vocab_size = vocab
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab) for _ in range(PROMPT_TOKENS)] for _ in range(max(asked.prompts, slots))]
    noisy = {"temperature": 1.0, "ignore_eos": True} | ({"drafter": "wrong"} if asked.only_draft else {})
    return Pair(runners[0], make_tokenizer(vocab), *runners[1:]), prompts, noisy


def fresh(pair: Pair) -> Pair:
    """With nothing learnt, but with what was captured: graphs are those of a process."""
    made = pair.fresh()
    made.executor.rules = pair.executor.rules
    return made


def seconds(
    pair: Pair, prompts: list[list[int]], tokens: int, seed: int, options: dict[str, Any]
) -> tuple[float, list[list[int]], dict[str, Any]]:
    """Of answers written together, the answers, and what was in those seconds. On a CPU the pair, too, reads this
    process's own time."""
    clock = time.process_time if pair.target.device.type == "cpu" else time.perf_counter
    pair.executor.clock = clock
    tickets = pair.submit([(prompt, Options(max_new_tokens=tokens, seed=seed, **options)) for prompt in prompts])
    began = clock()
    pair.executor.run()
    taken = clock() - began
    for ticket in tickets:
        ticket.collect()
        if ticket.task.error is not None:
            raise ticket.task.error
    results = [ticket.result() for ticket in tickets]
    stats = [result.stats for result in results]
    spent = {phase: sum(s.seconds[phase] for s in stats) for phase in stats[0].seconds}
    drafts = sum((s.drafts for s in stats), Counter[int]())
    return taken, [result.tokens for result in results], {"seconds": taken, **spent, "drafts": drafts}


def compare(asked: argparse.Namespace, batch: int) -> dict[str, Any]:
    """All arms with so many answers at a time."""
    pair, prompts, how = models(asked, batch)
    parts = [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]
    names = list(ARMS)
    lengths = (1, 2, 3, 4, 6, 12, 16) if pair.target.device.type == "cuda" else ()
    for arm in (*ARMS.values(), *({"num_draft_tokens": n} for n in lengths)):  # graphs are captured
        seconds(fresh(pair), parts[0], min(24, asked.tokens), 0, arm | how)
    for turn in range(WARM if lengths else 0):  # also those for a draft that has much to catch up with
        part = parts[turn % len(parts)]
        told = [seconds(fresh(pair), part, asked.tokens, 1000 + turn, arm | how)[2] for arm in ARMS.values()]
        if not any(inside["capture"] for inside in told):
            break
    kept = {name: fresh(pair) for name in names}
    taken: dict[str, list[float]] = {name: [] for name in names}
    inside: list[dict[str, Any]] = []
    same = True
    for turn in range(asked.rounds):
        for i, part in enumerate(parts):
            texts = {}
            for name in names[(turn + i) % 3 :] + names[: (turn + i) % 3]:
                own = kept[name] if asked.keep else fresh(pair)
                spent, texts[name], told = seconds(own, part, asked.tokens, i, ARMS[name] | how)
                taken[name].append(spent)
                inside.append({"arm": name, "part": i, **told})
            same = same and texts["none"] == texts["default"]
    report: dict[str, Any] = {
        "batch": batch, "same_text": same, "answers": batch * len(taken["none"]),
        "seconds": {name: sum(values) for name, values in taken.items()}, "inside": inside,
    }  # fmt: skip
    for name in names[1:]:
        ratios = sorted(a / b for a, b in zip(taken[name], taken["none"], strict=True))
        pooled = sum(taken[name]) / sum(taken["none"])
        report[name] = {"pooled": pooled, "median": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}
        print(f"batch {batch:2} {name:8} over none: {pooled:.3f} pooled, median {report[name]['median']:.3f}, "
              f"{ratios[0]:.3f} to {ratios[-1]:.3f}", flush=True)  # fmt: skip
    return report


def main() -> None:
    register(Wrong)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="pocket")
    parser.add_argument("--draft")
    parser.add_argument("--shape", choices=SHAPES, help="weights of noise instead of --target")
    parser.add_argument("--only-draft", action="store_true", help="the shape's smaller model, alone")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="answers at a time")
    parser.add_argument("--keep", action="store_true", help="an arm keeps what it has learnt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.shape and asked.dtype not in ("auto", *FLOATS):
        parser.error(f"--dtype is {asked.dtype}; weights of noise are {', '.join(FLOATS)}")
    report: dict[str, Any] = {
        "model": asked.shape or asked.target, "alone": asked.only_draft, "tokens": asked.tokens,
        "batches": [compare(asked, batch) for batch in asked.batch],
        "settings": {k: str(v) for k, v in vars(asked).items()}, **surroundings(),
    }  # fmt: skip
    if asked.out:
        asked.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
